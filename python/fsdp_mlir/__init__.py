"""fsdp-mlir: FSDP2 training, compiled.

`fully_shard` is PyTorch's. `compile` makes a training step from the sharded model; the step runs in
this process and trains the model's own parameters. `capture` writes the captured step for
`fsdp-opt`; `python -m fsdp_mlir.capture` does the same on the command line.

May include: support, modules, capture, frontdoor.
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from fsdp_mlir.capture.capture import CaptureSummary, capture
from fsdp_mlir.capture.planned_mesh import planned_mesh
from fsdp_mlir.frontdoor.compiled import compile
from fsdp_mlir.frontdoor.step import Step
from fsdp_mlir.modules.sharding import fully_shard
from fsdp_mlir.support.errors import CaptureError, CompileError
from fsdp_mlir.support.version import __version__

__all__ = [
    "CPUOffloadPolicy",
    "CaptureError",
    "CaptureSummary",
    "CompileError",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Step",
    "__version__",
    "capture",
    "compile",
    "fully_shard",
    "init_device_mesh",
    "planned_mesh",
]
