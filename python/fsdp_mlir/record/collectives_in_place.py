"""Collectives of torch.distributed that write in place, for a recording: a graph has functional
ones only. Each is recorded as that and copies, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ReduceOp
from torch.distributed.nn import functional as differentiable

from fsdp_mlir.support.threads import while_recorded

_functions = torch.ops._c10d_functional
_REDUCTIONS = {"sum", "avg", "min", "max", "product"}


class _Done:
    """The handle of a call with `async_op`, which a recording waits for at once."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def reduction(op: Any) -> str:
    """Its name in a call of the graph."""
    return str(op).rpartition(".")[2].lower()


@contextmanager
def as_functional() -> Iterator[None]:
    """In the body, these functions of torch.distributed, and torch.distributed.nn's by them, are
    recorded; of tensors that no functional collective takes, they are what they were."""
    with ExitStack() as stack:
        for name, recorded in _RECORDED.items():
            if not hasattr(dist, name):  # in this version
                continue
            function = while_recorded(getattr(dist, name), recorded)
            for module in (dist, distributed_c10d):
                stack.enter_context(mock.patch.object(module, name, function))
        # Over Gloo it scatters from each rank in turn, which is another program on each.
        owner = differentiable._AlltoAll
        forward = staticmethod(while_recorded(owner.forward, _all_to_all_of_tensors))
        stack.enter_context(mock.patch.object(owner, "forward", forward))
        yield


def _finished(async_op: bool) -> Any:
    return _Done() if async_op else None


def _name(group: Any) -> str:
    return str((group or dist.group.WORLD).group_name)


def _all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    if tensor.requires_grad or reduction(op) not in _REDUCTIONS:
        return NotImplemented
    reduced = functional.all_reduce(tensor, reduction(op), group or dist.group.WORLD)
    tensor.copy_(functional.wait_tensor(reduced))
    return _finished(async_op)


def _broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    if tensor.requires_grad:
        return NotImplemented
    group = group or dist.group.WORLD
    root = group_src if src is None else dist.get_group_rank(group, src)
    sent = _functions.broadcast(tensor.contiguous(), root, _name(group))
    tensor.copy_(_functions.wait_tensor(sent))
    return _finished(async_op)


def _gathered(tensor: Tensor, group: Any) -> Tensor:
    """Those of all ranks, in a dimension of their own."""
    ranks = dist.get_world_size(group)
    part = tensor.detach().contiguous().reshape(1, *tensor.shape)
    gathered = _functions.all_gather_into_tensor(part, ranks, _name(group))
    return _functions.wait_tensor(gathered)


def _all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    forms = {(each.shape, each.dtype, each.requires_grad) for each in tensor_list}
    if forms != {(tensor.shape, tensor.dtype, False)}:
        return NotImplemented
    for each, part in zip(tensor_list, _gathered(tensor, group).unbind(0), strict=True):
        each.copy_(part)
    return _finished(async_op)


def _all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    ranks = dist.get_world_size(group)
    fits = output_tensor.numel() == ranks * input_tensor.numel()
    if output_tensor.requires_grad or output_tensor.dtype != input_tensor.dtype or not fits:
        return NotImplemented
    output_tensor.copy_(_gathered(input_tensor, group).view(output_tensor.shape))
    return _finished(async_op)


def _reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    ranks = dist.get_world_size(group)
    fits = input.numel() == ranks * output.numel() and output.dtype == input.dtype
    if output.requires_grad or reduction(op) not in _REDUCTIONS or not fits:
        return NotImplemented
    whole = input.detach().contiguous().view(ranks, *output.shape)
    part = _functions.reduce_scatter_tensor(whole, reduction(op), ranks, _name(group))
    output.copy_(_functions.wait_tensor(part).view(output.shape))
    return _finished(async_op)


def _all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    if output.requires_grad or output.dtype != input.dtype:
        return NotImplemented
    ranks = dist.get_world_size(group)
    splits = [
        given or [tensor.shape[0] // ranks] * ranks
        for given, tensor in ((output_split_sizes, output), (input_split_sizes, input))
    ]
    sent = _functions.all_to_all_single(input.detach().contiguous(), *splits, _name(group))
    output.copy_(_functions.wait_tensor(sent))
    return _finished(async_op)


def _all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    tensors = (*output_tensor_list, *input_tensor_list)
    if any(each.requires_grad for each in output_tensor_list) or (
        len({each.dtype for each in tensors}) != 1
    ):
        return NotImplemented
    given = torch.cat([each.detach().reshape(-1) for each in input_tensor_list])
    splits = [[each.numel() for each in part] for part in (output_tensor_list, input_tensor_list)]
    sent = _functions.wait_tensor(_functions.all_to_all_single(given, *splits, _name(group)))
    for each, part in zip(output_tensor_list, sent.split(splits[0]), strict=True):
        each.copy_(part.view(each.shape))
    return _finished(async_op)


def _all_to_all_of_tensors(
    ctx: Any, group: Any, out_tensor_list: Sequence[Tensor], *tensors: Tensor
) -> Any:
    """torch.distributed.nn.functional._AlltoAll.forward."""
    if _all_to_all(out_tensor_list, tensors, group) is NotImplemented:
        return NotImplemented
    ctx.group = group
    ctx.input_tensor_size_list = [each.size() for each in tensors]
    return tuple(out_tensor_list)


_RECORDED: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_single": _all_gather_into_tensor,
    "_all_gather_base": _all_gather_into_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter_single": _reduce_scatter_tensor,
    "_reduce_scatter_base": _reduce_scatter_tensor,
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
}
