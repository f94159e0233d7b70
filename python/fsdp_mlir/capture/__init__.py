"""The path of a model through the stages, and the command line.

`python -m fsdp_mlir.capture` runs it. As an attribute of the package, this name is the function, so
the modules are imported as `from fsdp_mlir.capture.cli import main`.

May include: support, modules, step, view, record, check, archive.
"""
