"""A mesh of ranks that do not exist yet, to capture a model for it in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_mlir.support.errors import CaptureError


@contextmanager
def planned_mesh(axes: Mapping[str, int]) -> Iterator[DeviceMesh]:
    """Within the body, this process is rank 0 of a mesh with these axes, outermost first, and
    collectives do nothing. So the model must be on 'meta':

        with planned_mesh({"data": 256, "tensor": 8}) as mesh, torch.device("meta"):
            model = parallelize_module(Model(), mesh["tensor"], ...)
            capture(model, kwargs=..., data_ranks=mesh["data"].mesh.tolist(), path="model.pt")

    fsdp-opt then plans and simulates the step for `--world-size 256`. CaptureError if the axes are
    none, or the process has a process group already.
    """
    for name, size in axes.items():
        if size < 1:
            raise CaptureError(f"axis '{name}': expected at least 1 rank, got {size}")
    if not axes:
        raise CaptureError("expected at least one axis of a mesh, got none")
    if dist.is_initialized():
        raise CaptureError("expected a process without a process group, got one that has one")
    dist.init_process_group("fake", rank=0, world_size=math.prod(axes.values()), store=FakeStore())
    try:
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()
