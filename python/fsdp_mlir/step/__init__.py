"""The training step as a function of its inputs.

Forward and loss of a model, the batches that they take, what they return besides the loss, and the
step as FSDP2 makes it.

May include: support, modules.
"""
