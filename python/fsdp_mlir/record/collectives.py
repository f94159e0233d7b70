"""Collectives that a step itself calls, such as those of tensor parallelism.

A group of ranks has another name on each rank, and a plan serves several ranks. So a call names its
group by the axis of the mesh that it is, and each process registers its own group under that name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.distributed_c10d import (
    ProcessGroup,
    ReduceOp,
    _register_process_group,
    _resolve_process_group,
)

from fsdp_mlir.record.collectives_in_place import reduction
from fsdp_mlir.record.graph import Node

NAMESPACE = "_c10d_functional"
WAIT_FOR_ALL = f"{NAMESPACE}::wait_tensors"  # newer than wait_tensor; returns what it takes

# The names of the groups of this process, by their own names.
_axes: dict[str, str] = {}


def named(func: OpOverload, values: list[Any]) -> list[Any]:
    """The arguments of a collective, with texts in place of groups and reductions."""
    if func.namespace != NAMESPACE:
        return values
    formals = [formal.name for formal in func._schema.arguments]
    return [_text(name, value) for name, value in zip(formals, values, strict=True)]


def model_parallel(nodes: Iterable[Node], data_ranks: Sequence[int]) -> dict[str, Any] | None:
    """How the step of `nodes` is parallel besides FSDP, whose ranks `data_ranks` are; None if it
    has no collectives of its own. `ranks` is the number of ranks that share one copy of the model;
    `axes` has each group that a call names."""
    names = [node.args[-1] for node in nodes if node.func.namespace == NAMESPACE]
    groups = {name: ranks_of(name) for name in dict.fromkeys(names)}
    if not groups:
        return None
    # A group within another has no further ranks; of one that spans FSDP's too, such as all ranks
    # of the job, as many share a copy as there are for each of FSDP's.
    sets = {frozenset(ranks) for ranks in groups.values()}
    data = frozenset(data_ranks)
    largest = [ranks for ranks in sets if not any(ranks < other for other in sets)]
    sharing = math.prod(len(ranks) // max(1, len(ranks & data)) for ranks in largest)
    return {
        "ranks": sharing,
        "data_stride": _stride(data_ranks) if len(data_ranks) > 1 else sharing,
        "axes": [
            {"name": name, "ranks": len(ranks), "stride": _stride(ranks)}
            for name, ranks in groups.items()
        ],
    }


def _stride(ranks: Sequence[int]) -> int:
    """Between neighbours; of ranks that are not evenly apart, the mean."""
    return max(1, (ranks[-1] - ranks[0]) // max(1, len(ranks) - 1))


def ranks_of(axis: str) -> list[int]:
    """The ranks of a group that a call names."""
    return list(dist.get_process_group_ranks(_resolve_process_group(axis)))


def limit(axis: str, seconds: float) -> None:
    """Lowers the time that collectives of a group may take, as `seconds` is what a step may."""
    group = _resolve_process_group(axis)
    backend = group._get_backend(torch.device("cpu"))
    if (timeout := timedelta(seconds=seconds)) < backend.options._timeout:
        backend._set_default_timeout(timeout)


def _text(formal: str, value: Any) -> Any:
    if formal == "group_name":
        return _axis(value if isinstance(value, ProcessGroup) else _resolve_process_group(value))
    if formal == "reduce_op" and isinstance(value, (ReduceOp, ReduceOp.RedOpType)):
        return reduction(value)
    return value


def _axis(group: ProcessGroup) -> str:
    """The same on all ranks, as they meet their groups in the same order."""
    own = group.group_name
    if own in _axes and _is_registered(_axes[own]):  # until destroy_process_group
        return _axes[own]
    described = group.group_desc
    axis = described.removeprefix("mesh_") if described not in ("", "undefined") else "group"
    names = itertools.chain([axis], (f"{axis}#{number}" for number in itertools.count(2)))
    _axes[own] = next(name for name in names if not _is_registered(name))
    _register_process_group(_axes[own], group)
    return _axes[own]


def _is_registered(name: str) -> bool:
    try:
        _resolve_process_group(name)
    except RuntimeError:
        return False
    return True
