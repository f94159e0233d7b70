"""The form of an optimizer's state on this rank, which the whole tensor of a checkpoint does not
tell: a plain tensor, or a DTensor with its placements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

# As JSON: a placement for each axis of the parameter's mesh, or the type of a plain tensor's
# device.
Form = list[str] | str

_REPLICATE, _SHARD, _STRIDED = "R", "S", "_S"
_PLAIN = (Tensor, nn.Parameter, AsyncCollectiveTensor)


@dataclass(frozen=True)
class Layout:
    """What a DTensor to be made is like."""

    shape: torch.Size
    device: torch.device
    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]


def form_of(name: str, value: Tensor, param: Tensor) -> Form | None:
    """None if it is as nearly all are: a number on the CPU, or sharded as the parameter is.
    ValueError if `layout_of` could not make it."""
    local = value.to_local() if isinstance(value, DTensor) else value
    if type(local) not in _PLAIN:
        raise ValueError(
            f"{name}: expected a torch.Tensor or a DTensor, got '{type(local).__name__}'"
        )
    form: Form = value.device.type
    if isinstance(value, DTensor):
        if not isinstance(param, DTensor) or value.device_mesh != param.device_mesh:
            raise ValueError(f"{name}: expected a DTensor of the parameter's mesh, got another")
        form = _texts(value.placements)
    return None if form == _usual(param, value.shape) else form


def layout_of(
    name: str, form: Form | None, param: Tensor, shape: Sequence[int]
) -> Layout | torch.device:
    """Of the form that `form_of` gave, for the mesh that the parameter has now; a device for a
    plain tensor."""
    if form is None and len(shape) > 0 and isinstance(param, DTensor):
        mesh, placements = param.device_mesh, param.placements
    else:
        form = form or _usual(param, shape)
        if isinstance(form, str):
            return torch.device("cpu") if form == "cpu" else param.device
        if not isinstance(param, DTensor):
            raise ValueError(f"'{name}': expected a sharded parameter, as in the checkpoint")
        mesh = param.device_mesh
        if set(form) == {_REPLICATE}:
            form = [_REPLICATE] * mesh.ndim
        if len(form) != mesh.ndim:
            raise ValueError(
                f"'{name}': expected a mesh of {len(form)} axes, as in the checkpoint, got "
                f"{mesh.ndim}"
            )
        placements = _placements(form, mesh)
    if any(isinstance(p, (Shard, _StridedShard)) and p.dim >= len(shape) for p in placements):
        raise ValueError(f"'{name}': no placements {placements} of the shape {list(shape)}")
    return Layout(torch.Size(shape), param.device, mesh, placements)


def layout_like(like: Tensor | None, param: Tensor, shape: Sequence[int]) -> Layout | torch.device:
    """Of a checkpoint without forms: as what the optimizer has, or as a parameter of this shape."""
    if not isinstance(like, Tensor) and list(param.shape) == list(shape) and shape:
        like = param
    if like is None or list(like.shape) != list(shape):
        return torch.device("cpu")
    if not isinstance(like, DTensor):
        return like.device
    return Layout(like.shape, like.device, like.device_mesh, like.placements)


def _usual(param: Tensor, shape: Sequence[int]) -> Form:
    if len(shape) == 0:
        return "cpu"
    return _texts(param.placements) if isinstance(param, DTensor) else param.device.type


def _texts(placements: Sequence[Placement]) -> list[str]:
    return [
        f"{_STRIDED}{p.dim}"
        if isinstance(p, _StridedShard)
        else f"{_SHARD}{p.dim}"
        if isinstance(p, Shard)
        else _REPLICATE
        for p in placements
    ]


def _placements(form: Sequence[str], mesh: DeviceMesh) -> tuple[Placement, ...]:
    made: list[Placement] = []
    for axis, text in enumerate(form):
        if text == _REPLICATE:
            made.append(Replicate())
            continue
        dim = int(text.lstrip(_STRIDED))
        behind = (mesh.size(a) for a in range(axis + 1, mesh.ndim) if form[a] == f"{_SHARD}{dim}")
        strided = text.startswith(_STRIDED)
        made.append(_StridedShard(dim, split_factor=math.prod(behind)) if strided else Shard(dim))
    return tuple(made)
