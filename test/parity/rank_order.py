"""Reductions of torch.distributed that add in ascending rank order: that of shared memory.

From three ranks on, Gloo's order of additions depends on the size of a message, so no other
transport has its bits. Here every rank gets the terms of what it reduces and adds them one by one,
rank 0's first, in their own dtype; an average divides the sum, as Gloo's does. FSDP2 and DTensor
know nothing of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# What FSDP2 and DTensor call; the maximum has no order.
_functional_all_reduce = functional.all_reduce


def install() -> None:
    """Replaces the reductions of this process: FSDP2's reduce-scatter, the all-reduce of HSDP, and
    that of a DTensor's norm."""
    dist.reduce_scatter_single = reduce_scatter
    dist.all_reduce = all_reduce
    functional.all_reduce = all_reduce_of_dtensor


def combine(terms: list[Tensor], op: Any) -> Tensor:
    """The sum or the average of tensors of one shape, term after term."""
    if op != dist.ReduceOp.SUM and op != dist.ReduceOp.AVG:
        raise ValueError(f"expected a sum or an average, got {op}")
    result = terms[0].clone()
    for term in terms[1:]:
        result += term
    return result.div_(len(terms)) if op == dist.ReduceOp.AVG else result


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> None:
    """Done when it returns, `async_op` or not."""
    received = torch.empty_like(input)
    dist.all_to_all_single(received, input, group=group)
    terms = received.view(dist.get_world_size(group), *output.shape)
    output.copy_(combine(list(terms.unbind()), op))


def all_reduce(
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> None:
    """Done when it returns, `async_op` or not."""
    terms = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(terms, tensor, group=group)
    tensor.copy_(combine(terms, op))


def all_reduce_of_dtensor(
    tensor: Tensor, reduceOp: str, group: tuple[DeviceMesh, int], tag: str = ""
) -> Tensor:
    if reduceOp != "sum":
        return _functional_all_reduce(tensor, reduceOp, group, tag)
    result = tensor.clone()
    mesh, dim = group
    all_reduce(result, dist.ReduceOp.SUM, mesh.get_group(dim))
    return result
