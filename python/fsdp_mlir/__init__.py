"""fsdp-mlir: captures a PyTorch training step for `fsdp-opt`.

`capture` is the Python interface; `python -m fsdp_mlir.capture` is the same on the command line.
"""

from fsdp_mlir.errors import CaptureError
from fsdp_mlir.step import CaptureSummary, capture
from fsdp_mlir.version import __version__

__all__ = ["CaptureError", "CaptureSummary", "__version__", "capture"]
