"""Numbers of each step as operands of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from fsdp_mlir.support.errors import CaptureError
from fsdp_mlir.support.formulas import Symbol

# Operators of a tensor and a number, or of two numbers, that compute with it in the tensor's dtype
# whether it is a Python number or a tensor without dimensions; and how many operands they have.
_SAME_BITS = {
    **dict.fromkeys(("add", "sub", "mul", "div", "truediv", "true_divide"), 2),
    **dict.fromkeys(("radd", "rsub", "rmul", "rdiv", "rtruediv"), 2),
    **dict.fromkeys(("iadd", "isub", "imul", "idiv", "itruediv"), 2),
    **dict.fromkeys(("subtract", "multiply", "divide"), 2),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), 2),
    "where": 3,
}


class Operand(Symbol):
    """A Symbol that operators take as a tensor without dimensions, if that gives the bits that the
    number gives; else as the number itself, if that is known."""

    def kind(self) -> type:
        """The number's class."""
        raise NotImplementedError

    def tensor(self) -> Any:
        """Without dimensions, of float64 or int64; or the number itself, where it is known."""
        raise NotImplementedError

    def known(self) -> Any:
        """The number itself; it is an error if the step may not be for that alone."""
        raise self.refused()

    def chosen(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an operator that chooses between a tensor and this number gives."""
        raise self.refused()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = str(getattr(func, "__name__", ""))
        operands = [*args, *(kwargs or {}).values()]
        numbers: list[Operand] = [each for each in operands if _is_operand(each)]
        if not numbers:
            if any(map(_is_operand, tree_leaves(operands))):
                return _with_known(func, args, kwargs)
            raise CaptureError(f"'{name}' takes a number among others")
        plain = name.strip("_")
        in_place = plain.startswith("i") if name.startswith("__") else name.endswith("_")
        if len(operands) != _SAME_BITS.get(plain) or set(kwargs or {}) - {"input", "other"}:
            return _with_known(func, args, kwargs)
        if plain == "where":
            return numbers[0].chosen(func, args, kwargs or {})
        tensors = [each for each in operands if isinstance(each, Tensor)]
        are_float = any(each.is_floating_point() or each.is_complex() for each in tensors)
        is_float = any(each.kind() is float for each in numbers)
        # With integers Python's numbers are of the default dtype.
        dtype = torch.get_default_dtype() if is_float and not are_float else None
        # Beside a tensor without dimensions another one would decide the result's dtype.
        flat = all(each.dim() == 0 for each in tensors)
        if not tensors or (flat and in_place):
            return _with_known(func, args, kwargs)

        def given(each: Any) -> Any:
            if _is_operand(each):
                tensor = each.tensor()
                return tensor.to(dtype) if dtype and isinstance(tensor, Tensor) else tensor
            return each.reshape(1) if flat and isinstance(each, Tensor) else each

        keywords = {key: given(value) for key, value in (kwargs or {}).items()}
        result = func(*map(given, args), **keywords)
        return result.reshape(()) if flat else result


def _with_known(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    def known(value: Any) -> Any:
        return value.known() if _is_operand(value) else value

    args, kwargs = tree_map(known, (tuple(args), dict(kwargs or {})))
    return func(*args, **kwargs)


def _is_operand(value: Any) -> bool:
    return issubclass(type(value), Operand)


@contextmanager
def tensors_of_operands() -> Iterator[None]:
    """In the body, `torch.tensor` and the like make a tensor of a number of each step, or of some
    of them in a list, and of recorded tensors without dimensions in a list."""
    with ExitStack() as stack:
        for name in ("tensor", "as_tensor"):
            make = _making(getattr(torch, name))
            stack.enter_context(mock.patch.object(torch, name, make))
        yield


def _making(function: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        data = args[0] if args else None
        items = _leaves(data)
        operands: list[Operand] = [each for each in items if _is_operand(each)]
        in_a_list = type(data) in (list, tuple)
        if not operands and not (in_a_list and any(map(_is_recorded, items))):
            return function(*args, **kwargs)
        dtype = kwargs.get("dtype") or reduce(torch.promote_types, map(_dtype, items))
        if len(args) > 1 or kwargs.keys() - {"dtype", "device"} or not _can_be(items, dtype):
            if operands:
                raise operands[0].refused()
            return function(*args, **kwargs)

        tensor = _made(data, partial(function, dtype=dtype), dtype)
        return tensor.to(kwargs["device"]) if kwargs.get("device") is not None else tensor

    return make


def _made(data: Any, function: Callable[[Any], Any], dtype: torch.dtype) -> Any:
    """`function` of a number. No closure: that would keep an operand."""
    if type(data) in (list, tuple):
        return torch.stack([_made(each, function, dtype) for each in data])
    value = data.tensor() if _is_operand(data) else data
    if not issubclass(type(value), Tensor):
        return function(value)
    if not value.is_cpu:  # of an operand
        raise data.refused()
    # A number becomes a float64 first.
    value = value.detach().double() if dtype.is_floating_point else value.detach()
    return value.to(dtype, copy=True)


def _leaves(data: Any) -> list[Any]:
    """What is in lists and tuples in each other; the data itself, if they are not of one shape."""
    if type(data) not in (list, tuple):
        return [data]
    nested = [type(each) in (list, tuple) for each in data]
    if any(nested) and not (all(nested) and len({len(each) for each in data}) == 1):
        return [data]
    return [leaf for each in data for leaf in _leaves(each)]


def _is_recorded(value: Any) -> bool:
    return type(value) is FakeTensor and value.dim() == 0 and value.is_cpu


def _dtype(item: Any) -> torch.dtype:
    """As torch infers it."""
    if issubclass(type(item), Tensor):
        return item.dtype  # type: ignore[no-any-return]
    kind = item.kind() if _is_operand(item) else type(item)
    return torch.get_default_dtype() if kind is float else torch.int64


def _can_be(items: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether each may be an element of that dtype, without an error for its value."""

    def can(item: Any) -> bool:
        is_one = issubclass(type(item), Tensor) and item.dim() == 0 and item.is_cpu
        if not (is_one or _is_operand(item) or type(item) in (int, float)):
            return False
        own = _dtype(item)
        if dtype.is_floating_point:
            return not own.is_complex
        # Integers have a range, of which the number's own conversion makes an error.
        return own == dtype or (dtype == torch.int64 and not own.is_floating_point)

    return not dtype.is_complex and all(map(can, items))
