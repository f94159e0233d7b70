"""Numbers that a step only returns, as `loss.item()` among its metrics.

While a step is recorded, `Tensor.item` gives an `Item` where the number depends on what the step
computes: it stands for a number of each step. Arithmetic with it is repeated after each step.
Whatever else code does with it, such as a comparison, is the CaptureError that `item` would have
been. So is an Item that is still kept when forward has ended.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest import mock
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fsdp_mlir.support.errors import CaptureError

# A number in terms of those of tensors: the index of one, or a function's name and its arguments.
Formula = tuple[Any, ...]

_OF_MATH = ("exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "isnan", "isinf", "isfinite")
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*_BINARY, "neg", "pos")},
    "abs": abs,
    "round": round,
    **{name: getattr(math, name) for name in _OF_MATH},
}


class Item:
    """A number of each step: `formula` over the numbers of `tensors`."""

    def __init__(
        self,
        formula: Formula,
        tensors: Sequence[Tensor],
        error: CaptureError,
        made: list[ref[Item]],
    ) -> None:
        """`made` notes that it exists."""
        self.formula, self.tensors, self.error = formula, list(tensors), error
        self.made = made
        made.append(ref(self))

    @property
    def __class__(self) -> type:  # type: ignore[override]
        try:
            return type(value_of(self.formula, [_one(each.dtype) for each in self.tensors]))
        except (ArithmeticError, ValueError):
            raise self.error from None

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise self.error

    __bool__ = __float__ = __int__ = __index__ = __complex__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = __str__ = __repr__ = __format__ = _refuse  # type: ignore[assignment]
    __trunc__ = __floor__ = __ceil__ = __divmod__ = __rdivmod__ = _refuse
    __reduce_ex__ = __getattr__ = _refuse  # type: ignore[assignment]


def _one(dtype: torch.dtype) -> Any:
    """A number of the class of those of a tensor."""
    if dtype.is_floating_point or dtype.is_complex:
        return 1.0 if dtype.is_floating_point else 1j
    return True if dtype == torch.bool else 1


def is_item(value: Any) -> bool:
    return type(value) is Item


def _combined(name: str, *values: Any) -> Item:
    """The Item of a function of numbers, of which some are Items."""
    error = next(value.error for value in values if type(value) is Item)
    tensors: list[Tensor] = []
    terms: list[Any] = []
    for value in values:
        if type(value) is Item:
            terms.append(moved(value.formula, len(tensors)))
            tensors += value.tensors
        elif type(value) in (int, float, bool):
            terms.append(("number", value))
        else:
            raise error
    made = next(value.made for value in values if type(value) is Item)
    return Item((name, *terms), tensors, error, made)


def _define(name: str) -> None:
    def function(self: Item, *others: Any) -> Any:
        return _combined(name, self, *others)

    def reflected(self: Item, other: Any) -> Any:
        return _combined(name, other, self)

    setattr(Item, f"__{name}__", function)
    if name in _BINARY:
        setattr(Item, f"__r{name}__", reflected)


for _name in _FUNCTIONS.keys() - set(_OF_MATH):
    _define(_name)


def _of_math(name: str) -> Callable[..., Any]:
    def function(*values: Any) -> Any:
        combines = any(type(value) is Item for value in values)
        return _combined(name, *values) if combines else _FUNCTIONS[name](*values)

    return function


@contextmanager
def _giving(give: Callable[[Tensor], Any]) -> Iterator[None]:
    """In the body, `Tensor.item` is `give`, and functions of `math` take Items."""
    with (
        mock.patch.object(Tensor, "item", give),
        mock.patch.multiple(math, **{name: _of_math(name) for name in _OF_MATH}),
    ):
        yield


def moved(formula: Formula, by: int) -> Formula:
    """The same of tensors that come `by` places later."""
    if formula[0] == "item":
        return ("item", formula[1] + by)
    if formula[0] == "number":
        return formula
    return (formula[0], *(moved(each, by) for each in formula[1:]))


def value_of(formula: Sequence[Any], numbers: Sequence[Any]) -> Any:
    """The number that a formula gives for those of its tensors."""
    name, *rest = formula
    if name == "item":
        return numbers[rest[0]]
    if name == "number":
        return rest[0]
    return _FUNCTIONS[name](*(value_of(each, numbers) for each in rest))


def _check_gone(made: list[ref[Item]]) -> None:
    for each in made:
        if (kept := each()) is not None:
            raise kept.error


class Items:
    """Those of one step: which of its calls of `Tensor.item` give one."""

    def __init__(self) -> None:
        self._gives: list[bool] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """In the body, which records the step. The error of an Item that is still there at its
        end."""
        item, self._gives = Tensor.item, []
        made: list[ref[Item]] = []

        def give(tensor: Tensor) -> Any:
            try:
                number = item(tensor)
            except CaptureError as error:
                if not isinstance(tensor, FakeTensor):
                    raise
                self._gives.append(True)
                # Without the frames, which hold what they have made.
                error.__cause__ = error.__context__ = None
                return Item(("item", 0), [tensor.detach()], error.with_traceback(None), made)
            self._gives.append(False)
            return number

        with _giving(give):
            try:
                yield
            except TypeError as error:  # of what takes numbers only
                if Item.__name__ in str(error):
                    _check_gone(made)
                raise
        _check_gone(made)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """In the body, which runs the same step eagerly, the same calls give one."""
        item, gives = Tensor.item, iter(self._gives)

        def give(tensor: Tensor) -> Any:
            if not next(gives, False):
                return item(tensor)
            return Item(("item", 0), [tensor.detach()], CaptureError("a number is used"), [])

        with _giving(give):
            yield
