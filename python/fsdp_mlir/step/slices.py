"""Assignments with numbers of each step, to a part of a tensor that they bound or of one as the
value, as the queues of contrastive losses have them:

    self.queue[pointer : pointer + len(keys)] = keys
    self.pointer[0] = (pointer + len(keys)) % len(self.queue)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_mlir.step.operands import Operand

# To which a number is converted as a tensor of it is.
_DTYPES = {torch.float32, torch.float64, torch.int64}

_ALL = slice(None)


def assigning(assign: Callable[[Tensor, Any, Any], None]) -> Callable[[Tensor, Any, Any], None]:
    """`Tensor.__setitem__` that takes them."""

    def set_item(tensor: Tensor, index: Any, value: Any) -> None:
        parts = index if type(index) is tuple else (index,)
        numbers = [x for part in parts if type(part) is slice for x in _bounds(part)]
        if numbers:
            _assign_part(assign, tensor, parts, value, numbers[0])
        elif _is_operand(value):
            assign(tensor, index, _value(value, tensor))
        else:
            assign(tensor, index, value)

    return set_item


def _is_operand(value: Any) -> bool:
    return issubclass(type(value), Operand)


def _bounds(part: slice) -> list[Operand]:
    return [each for each in (part.start, part.stop, part.step) if _is_operand(each)]


def _value(number: Operand, tensor: Tensor) -> Any:
    if tensor.dtype not in _DTYPES or (number.kind() is float and not tensor.is_floating_point()):
        raise number.refused()
    value = number.tensor()
    return value.to(tensor.dtype) if isinstance(value, Tensor) else value


def _assign_part(
    assign: Callable[[Tensor, Any, Any], None],
    tensor: Tensor,
    parts: Sequence[Any],
    value: Any,
    number: Operand,
) -> None:
    """To neighbours along one dimension whose count is the same in each step, and that are all
    there."""
    dim = next(at for at, part in enumerate(parts) if type(part) is slice and _bounds(part))
    part, others = parts[dim], (*parts[:dim], *parts[dim + 1 :])
    count = _length(part.start, part.stop) if part.step is None else None
    if count is None or any(type(each) is not slice or each != _ALL for each in others):
        raise number.refused()
    is_tensor = isinstance(value, Tensor)
    if not is_tensor and type(value) not in (int, float):
        raise number.refused()
    reaches = tensor.requires_grad or (is_tensor and value.requires_grad)
    if torch.is_grad_enabled() and reaches:
        raise number.refused()
    if not (part.start >= 0 and part.stop <= tensor.shape[dim]):
        raise number.refused()
    start = part.start.tensor()
    if not isinstance(start, Tensor):
        assign(tensor, (*parts[:dim], slice(start, start + count), *parts[dim + 1 :]), value)
        return
    shape = [*tensor.shape[:dim], count, *tensor.shape[dim + 1 :]]
    source = value.to(tensor.dtype) if is_tensor else torch.tensor(value, dtype=tensor.dtype)
    tensor.index_copy_(dim, torch.arange(count) + start, source.expand(shape))


def _length(start: Any, stop: Any) -> int | None:
    """How many there are between two numbers; None if that may vary."""
    if not _is_operand(start) or not _is_operand(stop):
        return None
    for name, *terms in [stop.formula] if _same_numbers(start, stop) else []:
        counts = [term[1] for term in terms if term[0] == "number"]
        if name == "add" and start.formula in terms and len(counts) == 1:
            return counts[0] if type(counts[0]) is int and counts[0] > 0 else None
    return None


def _same_numbers(start: Any, stop: Any) -> bool:
    mine, others = (getattr(each, "tensors", []) for each in (start, stop))
    return len(mine) == len(others) and all(a is b for a, b in zip(mine, others, strict=True))
