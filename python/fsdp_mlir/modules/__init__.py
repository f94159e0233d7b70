"""What PyTorch's modules hold.

Parameters in FSDP2's order, buffers and ties; hooks; what fully_shard made of a model; the Python
state of the modules, and data that their code reads from outside. Only reads, but for what it puts
back.

May include: support.
"""
