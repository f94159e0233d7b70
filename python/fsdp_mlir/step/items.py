"""Numbers that a step only returns, as `loss.item()` among its metrics.

While a step is recorded, `Tensor.item` gives an `Item` where the number depends on what the step
computes: it stands for a number of each step. Arithmetic with it is repeated after each step. Its
truth value, such as that of a comparison, is what the step assumes (assumed.py), if it may assume
something. Whatever else code does with it is the CaptureError that `item` would have been. So is an
Item that is kept when the step has ended, but where a step may leave tensors (modules/left.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Protocol
from unittest import mock
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fsdp_mlir.modules.left import Calculated
from fsdp_mlir.step.formulas import (
    Formula,
    Symbol,
    combined,
    math_of_symbols,
    may_raise,
    moved,
    value_of,
)
from fsdp_mlir.step.numbers import Number
from fsdp_mlir.support.errors import CaptureError, DrawnError, expects_errors


class Decides(Protocol):
    """What gives truth values that a step assumes, in the order of its code."""

    def begin(self, *, records: bool) -> None:
        """Before each run, which records the step or replays it."""
        raise NotImplementedError

    def recorded(self, item: Item) -> bool:
        """While the step is recorded."""
        raise NotImplementedError

    def replayed(self, item: Item) -> bool:
        """While the same step runs eagerly."""
        raise NotImplementedError

    def failed(self) -> None:
        """After an error of the model, while the step is recorded."""
        raise NotImplementedError


@dataclass
class _Run:
    """A run of forward: the Items that it has made, and what gives their truth values."""

    decide: Callable[[Item], bool] | None
    made: list[ref[Item]] = field(default_factory=list)


class Item(Symbol, Calculated):
    """A number of each step: `formula` over the numbers of `tensors`."""

    rank = 1

    def __init__(
        self,
        formula: Formula,
        tensors: Sequence[Tensor],
        error: CaptureError,
        run: _Run,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        """`given`: numbers that the formula names."""
        self.formula, self.tensors, self.error = formula, list(tensors), error
        self.given = given or {}
        self.run = run
        run.made.append(ref(self))

    @property
    def __class__(self) -> type:  # type: ignore[override]
        try:
            return type(self.likely(for_bool=True))
        except (ArithmeticError, ValueError):
            raise self.error from None

    def likely(self, *, for_bool: bool) -> Any:
        """What it is for tensors of one, and of `for_bool`."""
        ones = {index: _one(x.dtype, for_bool) for index, x in enumerate(self.tensors)}
        return value_of(self.formula, ones | self.given)

    @property
    def form(self) -> str:
        return "" if self.given else repr(self.formula)

    def calculated(self, elements: Sequence[Any]) -> Any:
        return value_of(self.formula, dict(enumerate(elements)))

    def refused(self) -> CaptureError:
        return self.error

    def __bool__(self) -> bool:
        if self.run.decide is None or isinstance(self.error, DrawnError):
            raise self.error
        return self.run.decide(self)

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
        item = Item((name, *terms), tensors, self.error, self.run, given)
        decides = self.run.decide is not None and not isinstance(self.error, DrawnError)
        if decides and may_raise(item.formula) and expects_errors():
            # That it is no error is what the step assumes.
            bool(Item(("computes", item.formula), tensors, self.error, self.run, given))
        return item


def _compared(name: str) -> Any:
    def function(self: Item, other: Any) -> Any:
        if self.run.decide is None:
            raise self.error
        return combined(name, self, other)

    return function


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Item, f"__{_name}__", _compared(_name))


def _one(dtype: torch.dtype, for_bool: bool) -> Any:
    """A number of the class of those of a tensor."""
    if dtype.is_floating_point or dtype.is_complex:
        return 1.0 if dtype.is_floating_point else 1j
    return for_bool if dtype == torch.bool else 1


_USED = "a number that is computed in one step is used in the next, or in backward"


def is_item(value: Any) -> bool:
    return type(value) is Item


@contextmanager
def _giving(
    item: Callable[[Tensor], Any], truth: Callable[[Tensor], bool] | None
) -> Iterator[None]:
    """In the body, `Tensor.item` is `item`, and `Tensor.__bool__` is `truth`."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "item", item))
        if truth is not None:
            stack.enter_context(mock.patch.object(Tensor, "__bool__", truth))
        stack.enter_context(math_of_symbols())
        yield


def _check_gone(made: list[ref[Item]], but: Collection[int] = ()) -> None:
    for each in made:
        if (kept := each()) is not None and id(kept) not in but:
            raise kept.error


# Where a number is read: the code, and the place in it.
_Where = tuple[CodeType, int]

_Give = Callable[[Callable[[Tensor], Any], Tensor, _Where], Any]


class Items:
    """Those of one step: which of its calls of `Tensor.item`, and of its reads of truth values,
    give one. Without `decides` the latter give none."""

    def __init__(self, decides: Decides | None = None) -> None:
        self._decides = decides
        # By the places of reads, in the order of the reads there: what calls without data make is
        # read elsewhere.
        self._gives: dict[_Where, list[bool]] = {}
        self._kept: list[ref[Item]] = []

    @contextmanager
    def recorded(self, *, may_keep: bool) -> Iterator[None]:
        """In the body, which records the step. The error of an Item that is still there at its end,
        unless one `may_keep` it until `ended`."""
        run = self._begin(records=True)
        self._gives = {}

        def give(read: Callable[[Tensor], Any], tensor: Tensor, where: _Where) -> Any:
            gives = self._gives.setdefault(where, [])
            try:
                number = read(tensor)
            except CaptureError as error:
                if not isinstance(tensor, FakeTensor):
                    raise
                gives.append(True)
                # Without the frames, which hold what they have made.
                error.__cause__ = error.__context__ = None
                return _item(tensor, error.with_traceback(None), run)
            gives.append(False)
            return number

        with self._given_by(give):
            try:
                yield
            except TypeError as error:  # of what takes numbers only
                if Item.__name__ in str(error):
                    _check_gone(run.made)
                self._failed()
                raise
            except CaptureError:
                raise
            except Exception:
                self._failed()
                raise
        run.decide = None
        self._kept = run.made
        if not may_keep:
            self.ended([])

    def ended(self, left: Sequence[Any]) -> None:
        """The step has ended. The error of an Item that is still there and not among what it has
        `left` in Python."""
        kept, self._kept = self._kept, []
        _check_gone(kept, set(map(id, left)))

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """In the body, which runs the same step eagerly, the same calls give one."""
        run = self._begin(records=False)
        gives = {where: iter(each) for where, each in self._gives.items()}

        def give(read: Callable[[Tensor], Any], tensor: Tensor, where: _Where) -> Any:
            if not next(gives.get(where, iter(())), False):
                return read(tensor)
            return _item(tensor, CaptureError(_USED), run)

        with self._given_by(give):
            yield
        run.decide = None

    def _failed(self) -> None:
        if self._decides is not None:
            self._decides.failed()

    def _begin(self, *, records: bool) -> _Run:
        if self._decides is None:
            return _Run(None)
        self._decides.begin(records=records)
        return _Run(self._decides.recorded if records else self._decides.replayed)

    @contextmanager
    def _given_by(self, give: _Give) -> Iterator[None]:
        read_number, read_truth = Tensor.item, Tensor.__bool__

        def item(tensor: Tensor) -> Any:
            frame = sys._getframe(1)
            return give(read_number, tensor, (frame.f_code, frame.f_lasti))

        def truth(tensor: Tensor) -> bool:
            frame = sys._getframe(1)
            return bool(give(read_truth, tensor, (frame.f_code, frame.f_lasti)))

        with _giving(item, truth if self._decides else None):
            yield


def _item(tensor: Tensor, error: CaptureError, run: _Run) -> Item:
    """That of a tensor, which may be written after it was read."""
    return Item(("item", 0), [tensor.detach().clone()], error, run)
