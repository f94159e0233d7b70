"""Calls whose result's shape depends on values that are the same in every step, such as a mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_mlir.record.graph import split_arguments
from fsdp_mlir.record.known import flat_tensors, result_device

aten = torch.ops.aten

_MASKS = (torch.bool, torch.uint8)

# For a bool tensor only the number of non-zero elements decides the shape of the result.
BY_COUNT = {
    aten.masked_select.default,
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.nonzero.default,
    aten.nonzero_numpy.default,
}


def shaped_by_values(
    func: OpOverload,
    fakes: list[Any],
    known: Sequence[Tensor | None],
    value: Callable[[Tensor], Tensor | None],
) -> Any:
    """The fake result of a call on `fakes`, all schema arguments, with the shape that values give.

    `known` has the data of the tensors in `fakes` that are known; `value` finds that of others.
    None if a value is not available. Call inside the fake mode.
    """
    data = dict(zip(map(id, flat_tensors(fakes)), known, strict=True))

    def found(tensor: Tensor) -> Tensor | None:
        real = data.get(id(tensor))
        return value(tensor) if real is None else real

    if func is aten.masked_select.default:
        mask = found(fakes[1])
        if mask is None:
            return None
        shape = torch.broadcast_shapes(fakes[0].shape, fakes[1].shape)
        with _disable_current_modes():
            count = int(mask.expand(shape).sum())
        return torch.empty(count, dtype=fakes[0].dtype, device=fakes[0].device)
    if func in (aten.index.Tensor, aten._unsafe_index.Tensor):
        indices = _integers(fakes[1], found)
        return indices and func(fakes[0], indices)
    reals = {id(tensor): found(tensor) for tensor in flat_tensors(fakes)}
    if any(real is None for real in reals.values()):
        return _counts(fakes) if func is aten.bincount.default else None
    args, kwargs = split_arguments(func, _replaced(fakes, reals))
    with _disable_current_modes():
        result = func(*args, **kwargs)
    if not flat_tensors(result):
        return None
    return _like(result, result_device(fakes))


def _counts(fakes: list[Any]) -> Tensor | None:
    """The result of bincount, assuming that no value is above `minlength`, which holds for numbers
    of experts or classes: a run refuses a longer result."""
    values, weights, minlength = fakes
    if minlength == 0:
        return None
    if weights is None:
        return torch.empty(minlength, dtype=torch.int64, device=values.device)
    kept = weights.dtype == torch.float32
    dtype = weights.dtype if kept else torch.float64
    return torch.empty(minlength, dtype=dtype, device=values.device)


def _integers(
    indices: Sequence[Tensor | None], found: Callable[[Tensor], Tensor | None]
) -> list[Tensor | None] | None:
    """The indices, with each mask replaced by as many integer tensors as it has dimensions."""
    expanded: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            expanded.append(index)
            continue
        mask = found(index)
        if mask is None:
            return None
        with _disable_current_modes():
            places = mask.nonzero().unbind(1)
        expanded += [_like(place, index.device) for place in places]
    return expanded


def _like(result: Any, device: torch.device) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)(_like(item, device) for item in result)
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=device)


def _replaced(value: Any, reals: dict[int, Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_replaced(item, reals) for item in value]
    return reals[id(value)] if isinstance(value, Tensor) else value
