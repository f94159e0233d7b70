"""fsdp_mlir in the loops of other libraries, which only these modules import: docs/adapters.md.

May include: fsdp_mlir, modules, step.
"""
