"""Numbers that a step only returns, as `loss.item()` among its metrics.

While a step is recorded, `Tensor.item` gives an `Item` where the number depends on what the step
computes: it stands for a number of each step. Arithmetic with it is repeated after each step.
Whatever else code does with it, such as a comparison, is the CaptureError that `item` would have
been. So is an Item that is still kept when forward has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fsdp_mlir.step.formulas import Formula, Symbol, math_of_symbols, moved, value_of
from fsdp_mlir.step.numbers import Number
from fsdp_mlir.support.errors import CaptureError


class Item(Symbol):
    """A number of each step: `formula` over the numbers of `tensors`."""

    rank = 1

    def __init__(
        self,
        formula: Formula,
        tensors: Sequence[Tensor],
        error: CaptureError,
        made: list[ref[Item]],
        given: Mapping[str, Any] | None = None,
    ) -> None:
        """`made` notes that it exists. `given`: numbers that the formula names."""
        self.formula, self.tensors, self.error = formula, list(tensors), error
        self.given = given or {}
        self.made = made
        made.append(ref(self))

    @property
    def __class__(self) -> type:  # type: ignore[override]
        try:
            ones = {index: _one(each.dtype) for index, each in enumerate(self.tensors)}
            return type(value_of(self.formula, ones | self.given))
        except (ArithmeticError, ValueError):
            raise self.error from None

    def refused(self) -> CaptureError:
        return self.error

    def combined(self, name: str, values: Sequence[Any]) -> Item:
        tensors: list[Tensor] = []
        terms: list[Any] = []
        given: Mapping[str, Any] = {}
        for value in values:
            if type(value) is Item:
                terms.append(moved(value.formula, len(tensors)))
                tensors += value.tensors
                given = given or value.given
            elif type(value) is Number:
                terms.append(value.formula)
                given = value.of.given
            elif type(value) in (int, float, bool):
                terms.append(("number", value))
            else:
                raise self.error
        return Item((name, *terms), tensors, self.error, self.made, given)


def _one(dtype: torch.dtype) -> Any:
    """A number of the class of those of a tensor."""
    if dtype.is_floating_point or dtype.is_complex:
        return 1.0 if dtype.is_floating_point else 1j
    return True if dtype == torch.bool else 1


def is_item(value: Any) -> bool:
    return type(value) is Item


@contextmanager
def _giving(give: Callable[[Tensor], Any]) -> Iterator[None]:
    """In the body, `Tensor.item` is `give`."""
    with mock.patch.object(Tensor, "item", give), math_of_symbols():
        yield


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
