"""The units of a policy file and their mixed precision.

What capture needs of the file, and what FSDP2's hooks do at the boundaries of units. The rest of
the file is fsdp-opt's.

May include: support, modules.
"""
