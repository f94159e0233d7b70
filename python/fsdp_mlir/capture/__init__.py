"""The trip of a model through the stages, and its command line.

`python -m fsdp_mlir.capture` runs it. Of the package this name is the function: its modules are
imported as `from fsdp_mlir.capture.cli import main`.

May include: support, step, view, record, check, archive.
"""
