"""fsdp-mlir: captures a PyTorch training step for `fsdp-opt`.

`capture` is the Python interface; `python -m fsdp_mlir.capture` is the same on the command line.
"""

from importlib.metadata import PackageNotFoundError, version

from fsdp_mlir.errors import CaptureError
from fsdp_mlir.step import CaptureSummary, capture

try:
    __version__ = version("fsdp-mlir")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.1.0"

__all__ = ["CaptureError", "CaptureSummary", "__version__", "capture"]
