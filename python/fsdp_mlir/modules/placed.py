"""Parameters that are DTensors without FSDP2, as tensor parallelism makes them.

A rank's program works on their local parts. FSDP2 shards these parts like any other tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

_WRAPPERS = (DTensor, AsyncCollectiveTensor)


def has_wrapper(types: Sequence[type]) -> bool:
    """Whether a call has arguments that stand for tensors of other ranks too. It becomes calls on
    this rank's tensors."""
    return any(issubclass(each, _WRAPPERS) for each in types)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def placed(part: Tensor, spec: DTensorSpec) -> DTensor:
    """The DTensor whose local part is `part`, of any dtype."""
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != part.dtype:
        meta = TensorMeta(meta.shape, meta.stride, part.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)


def local_gradient(gradient: Tensor, spec: DTensorSpec) -> Tensor:
    """The part that FSDP2 reduces (FSDPParam._get_grad_inner_tensor): of a parameter's gradient,
    placed as the parameter is."""
    if isinstance(gradient, AsyncCollectiveTensor):
        gradient = gradient.wait()
    assert isinstance(gradient, DTensor)
    if gradient.placements != spec.placements:
        gradient = gradient.redistribute(placements=spec.placements)
    return gradient._local_tensor


# What computes by calls on tensors that are not the step's: shapes of whole results, on fake
# tensors, and the places of ranks in a mesh.
_APART: tuple[tuple[type, str], ...] = (
    (ShardingPropagator, "_propagate_tensor_meta_non_cached"),
    *(
        (DeviceMesh, name)
        for name in ("__getitem__", "get_group", "get_local_rank", "get_coordinate", "_flatten")
    ),
)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Within the body, DTensor and meshes compute for themselves outside of all dispatch modes."""
    with ExitStack() as stack:
        for owner, name in _APART:
            stack.enter_context(mock.patch.object(owner, name, _apart(getattr(owner, name))))
        yield


def _apart(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return method(*args, **kwargs)

    return called
