"""What PyTorch's modules hold.

Parameters in FSDP2's order, buffers and ties; hooks; what fully_shard made of a model; the Python
state of the modules, and data that their code reads from outside. It only reads these, except where
it restores them.

May include: support.
"""
