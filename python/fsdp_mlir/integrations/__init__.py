"""fsdp_mlir in the loops of other libraries; only these modules import them: docs/adapters.md.

May include: fsdp_mlir, modules, step.
"""
