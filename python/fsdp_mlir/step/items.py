"""Numbers that a step reads, as `loss.item()` among its metrics.

While a step is recorded, `Tensor.item` gives an `Item`, and `tolist` a list of them, where the
number depends on what the step computes or is given: it stands for a number of each step.
Arithmetic with it is repeated after each step, and an operator that has the same bits with a tensor
takes that (operands.py). Its truth value, such as that of a comparison, is what the step relies on,
if it follows from what the step is given, or else what it assumes (assumed.py), if it may assume
something. Whatever else code does with it, such as taking it for a size, is the error of `item`:
the CaptureError that this would have been, or the NumberError because of which the number itself is
a part of the step. So is an Item that is kept when the step has ended, but where a step may leave
tensors (modules/left.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from types import FrameType, FunctionType, ModuleType
from typing import Any, Protocol
from unittest import mock
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fsdp_mlir.modules.left import Calculated
from fsdp_mlir.step.casts import casts_of_numbers
from fsdp_mlir.step.numbers import Number, Numbers
from fsdp_mlir.step.operands import Operand, tensors_of_operands
from fsdp_mlir.step.slices import assigning
from fsdp_mlir.support.errors import (
    CaptureError,
    DrawnError,
    NumberError,
    Where,
    expects_errors,
    is_ours,
    located,
    source_of,
)
from fsdp_mlir.support.formulas import (
    Formula,
    combined,
    math_of_symbols,
    may_raise,
    moved,
    names_in,
    value_of,
)


class Decides(Protocol):
    """What gives truth values that a step assumes, in the order of its code."""

    def begin(self, *, records: bool) -> None:
        """Before each run, which records the step or replays it."""
        raise NotImplementedError

    def relied(self, item: Item, outcome: bool) -> None:
        """While the step is recorded, which relies on that truth value."""
        raise NotImplementedError

    def recorded(self, item: Item) -> bool:
        """While the step is recorded."""
        raise NotImplementedError

    def replayed(self, item: Item) -> bool:
        """While the same step runs eagerly."""
        raise NotImplementedError

    def failed(self, *, of_capture: bool = False) -> None:
        """After an error of the model, while the step is recorded, or of what records it."""
        raise NotImplementedError


@dataclass
class _Run:
    """A run of forward: the Items that it has made, and what gives their truth values. One that
    `records` notes the first error of a number that follows from what the step is given."""

    decides: Decides | None
    records: bool
    made: list[ref[Item]] = field(default_factory=list)
    ended: bool = False
    error: NumberError | None = None


class Item(Operand, Calculated):
    """A number of each step: `formula` over the numbers of `tensors`. `errors`: for each of them
    that of the number."""

    rank = 1

    def __init__(
        self,
        formula: Formula,
        tensors: Sequence[Tensor],
        errors: Sequence[CaptureError],
        run: _Run,
        of: Numbers | None = None,
    ) -> None:
        """`of`: the numbers that the formula names."""
        self.formula, self.tensors, self.errors = formula, list(tensors), list(errors)
        self.of = of
        self.run = run
        run.made.append(ref(self))

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return self.kind()

    @property
    def given(self) -> Mapping[str, Any]:
        return self.of.given if self.of else {}

    def kind(self) -> type:
        for number in (1, 2, 3, 7):
            with suppress(ArithmeticError, ValueError):
                return type(self.likely(number, for_bool=True))
        raise self.refused()

    def likely(self, number: int = 1, *, for_bool: bool) -> Any:
        """What it is for tensors of that number, and of `for_bool`."""
        all_of = {
            index: for_bool if x.dtype == torch.bool else _as(x.dtype, number)
            for index, x in enumerate(self.tensors)
        }
        return value_of(self.formula, all_of | dict(self.given))

    @property
    def form(self) -> str:
        return "" if self.given else repr(self.formula)

    def calculated(self, elements: Sequence[Any]) -> Any:
        return value_of(self.formula, dict(enumerate(elements)))

    @property
    def error(self) -> CaptureError:
        """Of a number that it has. A number that is refused because it follows from what the step
        is given is none."""
        others = [error for error in self.errors if type(error) is not NumberError]
        return next(iter(others), self.errors[0])

    def refused(self) -> CaptureError:
        error = self.error
        if isinstance(error, NumberError) and self.run.records:
            self.run.error = self.run.error or error
        return error

    def __bool__(self) -> bool:
        decides, error = self.run.decides, self.error
        if not self._decides or self.run.ended:
            raise self.refused()
        if decides is not None and not isinstance(error, NumberError):
            return decides.recorded(self) if self.run.records else decides.replayed(self)
        if not self.run.records:
            return bool(self.now())
        names = [each.name for each in self.errors if isinstance(each, NumberError)]
        outcome = None if self.given else error.truth(names, self.formula)
        if outcome is None:
            raise self.refused()
        if decides is not None:
            decides.relied(self, outcome)
        return outcome

    def now(self) -> Any:
        """The number, where the tensors have data. Raises what the calculation does."""
        read = torch.ops.aten._local_scalar_dense.default  # the methods give Items
        numbers = {place: read(x) for place, x in enumerate(self.tensors)}
        return value_of(self.formula, numbers | dict(self.given))

    def tensor(self) -> Any:
        for divisor in _divisors(self.formula):
            if not self._made(("ne", divisor, ("number", 0))):
                raise ZeroDivisionError("division by zero")  # a tensor would have a value
        # A lone integer is converted as a number is.
        for place in self._unbounded() if self.formula[0] != "item" else ():
            if not self._made(("le", ("abs", ("item", place)), ("number", _FEW))):
                raise self.refused()
        if not self.run.records:
            return self.now()
        # An operator of a GPU may have other bits with a number.
        fits = self.kind() in (int, float) and all(x.is_cpu for x in self.tensors)
        tensor = self.computed() if fits else None
        if tensor is None:
            raise self.refused()
        return tensor

    def _unbounded(self) -> Iterator[int]:
        """The places of integers whose size is not known."""
        for place, (x, error) in enumerate(zip(self.tensors, self.errors, strict=True)):
            if error.most is None and not x.is_floating_point():
                yield place

    def computed(self) -> Tensor | None:
        """The number by operators: of float64 or int64, or a bool; None if they may give another
        one, if integers of unknown size are at most _FEW."""
        named = {
            name: Number(("item", name), self.of) for name in names_in(self.formula) if self.of
        }
        is_float = any(type(each.number) is float for each in named.values()) or _is_float(
            self.formula, self.tensors
        )
        is_complex = any(x.is_complex() for x in self.tensors)
        if is_complex or not _is_computed(self.formula, is_float=is_float):
            return None
        most: dict[int | str, int] = {
            place: 0 if x.is_floating_point() else _FEW if error.most is None else error.most
            for place, (x, error) in enumerate(zip(self.tensors, self.errors, strict=True))
        }
        most |= {x: 0 if type(each.number) is float else _FEW for x, each in named.items()}
        # Python's integers neither overflow nor are rounded.
        bits = 63 if self.formula[0] == "item" else 53 if is_float else 62
        if max(_sizes(self.formula, most)) > 1 << bits:
            return None
        numbers: dict[int | str, Tensor] = {
            place: x.reshape(()) for place, x in enumerate(self.tensors)
        }
        for name, each in named.items():
            assert self.of is not None
            numbers[name] = self.of.tensor(each, most[name] or math.inf)
        if self.formula[0] != "item" or numbers[self.formula[1]].dtype != torch.bool:
            dtype = torch.float64 if is_float else torch.int64
            numbers = {place: x.to(dtype) for place, x in numbers.items()}
        return _computed(self.formula, numbers)

    def combined(self, name: str, values: Sequence[Any]) -> Any:
        tensors: list[Tensor] = []
        errors: list[CaptureError] = []
        terms: list[Any] = []
        of: Numbers | None = None
        for value in values:
            if type(value) is Item:
                terms.append(moved(value.formula, len(tensors)))
                tensors += value.tensors
                errors += value.errors
                of = of or value.of
            elif type(value) is Number:
                value.check()
                terms.append(value.formula)
                of = value.of
            elif type(value) in (int, float, bool):
                terms.append(("number", value))
            elif isinstance(value, Tensor):
                return NotImplemented
            else:
                raise self.refused()
        item = Item((name, *terms), tensors, errors, self.run, of)
        if self._decides and may_raise(item.formula) and expects_errors():
            # That it is no error is what the step assumes.
            bool(item._made(("computes", item.formula)))
        return item

    @property
    def _decides(self) -> bool:
        """Whether it has truth values."""
        error = self.error
        if isinstance(error, DrawnError):
            return False
        return self.run.decides is not None or isinstance(error, NumberError)

    def _made(self, formula: Formula) -> Item:
        """That of another formula over the same numbers."""
        return Item(formula, self.tensors, self.errors, self.run, self.of)


def _compared(name: str) -> Any:
    def function(self: Item, other: Any) -> Any:
        if not self._decides:
            raise self.refused()
        return combined(name, self, other)

    return function


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Item, f"__{_name}__", _compared(_name))


def _as(dtype: torch.dtype, number: int) -> Any:
    """The number in the class of those of a tensor."""
    if dtype.is_complex:
        return number * 1j
    return float(number) if dtype.is_floating_point else number


# Functions of formulas that tensors have too; and those that give Python's numbers the bits of a
# float64 only.
_ON_TENSORS = {"add", "sub", "mul", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge"}
_OF_FLOATS = {"truediv"}
_OF_INTEGERS = {"mod", "int"}

# Numbers of one list.
_MOST_LISTED = 64

# A bound for integers of unknown size.
_FEW = 1 << 31


def _is_float(formula: Formula, tensors: Sequence[Tensor]) -> bool:
    """Whether a calculation has floats."""
    name, *rest = formula
    if name == "item":
        return not isinstance(rest[0], str) and tensors[rest[0]].is_floating_point()
    if name == "number":
        return type(rest[0]) is float
    if name in ("float", "int"):
        return name == "float"
    return name in _OF_FLOATS or any(_is_float(each, tensors) for each in rest)


def _is_computed(formula: Formula, *, is_float: bool) -> bool:
    """Whether operators give what a calculation does."""
    name, *rest = formula
    if name == "item":
        return True
    if name == "number":
        return is_float or type(rest[0]) is not float
    of_kind = _OF_FLOATS if is_float else _OF_INTEGERS
    known = name in _ON_TENSORS or name in of_kind or name == "float"
    return known and all(_is_computed(each, is_float=is_float) for each in rest)


def _sizes(formula: Formula, most: Mapping[int | str, int]) -> Iterator[int]:
    """Bounds of the magnitudes of a calculation's integers, its own first; 0 for floats."""
    name, *rest = formula
    if name == "item":
        yield most[rest[0]]
        return
    if name == "number":
        yield 0 if type(rest[0]) is float else abs(rest[0])
        return
    sizes = [list(_sizes(each, most)) for each in rest]
    own = [each[0] for each in sizes]
    if name == "mul":
        yield own[0] * own[1]
    elif name == "mod":
        yield own[1]
    else:
        yield 0 if name == "truediv" else sum(own)
    for each in sizes:
        yield from each


def _computed(formula: Formula, tensors: Mapping[int | str, Tensor]) -> Any:
    """What a formula gives for tensors: a bool among the operands is a number, as in Python, where
    two of them add up to 2."""
    name, *rest = formula
    if name in ("item", "number"):
        return value_of(formula, tensors)
    terms = [_computed(each, tensors) for each in rest]
    if name in ("float", "int"):
        return terms[0]  # all of them are
    dtype = next(iter(tensors.values())).dtype
    terms = [term.to(dtype) if isinstance(term, Tensor) else term for term in terms]
    return value_of(
        (name, *(("item", place) for place in range(len(terms)))), dict(enumerate(terms))
    )


def _divisors(formula: Formula) -> Iterator[Formula]:
    name, *rest = formula
    if name in ("item", "number"):
        return
    if name in (*_OF_FLOATS, "mod"):
        yield rest[1]
    for each in rest:
        yield from _divisors(each)


def is_item(value: Any) -> bool:
    return type(value) is Item


@contextmanager
def _giving(methods: Mapping[str, Callable[[Tensor], Any]]) -> Iterator[None]:
    """In the body, Tensor has these methods, and functions of `math` take Items."""
    with ExitStack() as stack:
        for owner in (Tensor, FakeTensor):
            for name in methods if owner is Tensor else methods.keys() & vars(owner).keys():
                stack.enter_context(mock.patch.object(owner, name, methods[name]))
        stack.enter_context(math_of_symbols())
        yield


def _check_gone(made: list[ref[Item]], but: Collection[int] = ()) -> None:
    for each in made:
        if (kept := each()) is not None and id(kept) not in but:
            raise kept.refused()


_Give = Callable[[Callable[[Tensor], Any], Tensor, Where], Any]

# Places where code needs numbers; None for all.
Relied = Set[Where] | None


class Items:
    """Those of one step: which of its calls of `Tensor.item` and `tolist`, and of its reads of
    truth values, give some. Without `decides` the latter give none. At the places of `relied` a
    number that follows from what the step is given is one. `asks`: the function that asks for the
    classes of numbers, which no Item can answer; then there are none. `casts`: modules in whose
    code `float` and `int` give some."""

    def __init__(
        self,
        decides: Decides | None = None,
        relied: Relied = frozenset(),
        asks: Callable[[], FunctionType | None] = lambda: None,
        casts: Sequence[ModuleType] = (),
    ) -> None:
        self._decides = decides
        self._casts = casts
        self._relied = relied
        self._asks = cache(asks)
        self.defers = False  # a number that the step may rely on can be an Item
        self.has_cast = False  # a call of `float` or `int` has read a number, which cannot be one
        # By the places of reads, in the order of the reads there: what calls without data make is
        # read elsewhere. None for a number, or the error of an Item.
        self._gives: dict[Where, list[CaptureError | None]] = {}
        self._kept: list[ref[Item]] = []

    @contextmanager
    def recorded(self, *, may_keep: bool) -> Iterator[None]:
        """In the body, which records the step. The error of an Item that is still there at its end,
        unless one `may_keep` it until `ended`."""
        run = self._begin(records=True)
        self._gives = {}
        read_truth = Tensor.__bool__  # whose Item code does not see

        def give(read: Callable[[Tensor], Any], tensor: Tensor, where: Where) -> Any:
            gives = self._gives.setdefault(where, [])
            self.defers = self._relied is not None and where not in self._relied
            try:
                number = read(tensor)
            except CaptureError as error:
                if not isinstance(tensor, FakeTensor):
                    raise
                if read is not read_truth and (function := self._asks()) is not None:
                    if isinstance(error, NumberError):
                        self._relied = None
                        return give(read, tensor, where)
                    text = f"'{function.__qualname__}' asks for the class of a number"
                    raise located(source_of(function), text) from None
                if isinstance(error, NumberError):
                    error.where = where
                gives.append(error)
                # Without the frames, which hold what they have made.
                error.__cause__ = error.__context__ = None
                return _item(tensor, error.with_traceback(None), run)
            finally:
                self.defers = False
            gives.append(None)
            return number

        def is_read(tensor: Tensor, where: Where) -> bool:
            few = isinstance(tensor, FakeTensor) and tensor.numel() <= _MOST_LISTED
            return not few or self._relied is None or where in self._relied

        with self._given_by(give, is_read):
            try:
                yield
            except CaptureError as error:
                if self._decides is not None and type(error) is CaptureError:
                    self._decides.failed(of_capture=True)
                raise
            except Exception as error:
                if isinstance(error, TypeError) and Item.__name__ in str(error):
                    _check_gone(run.made)  # of what takes numbers only
                if run.error is not None:
                    raise run.error from None
                if self._decides is not None:
                    self._decides.failed()
                raise
        if run.error is not None:
            raise run.error
        run.ended = True
        for error in chain.from_iterable(self._gives.values()):
            if isinstance(error, NumberError):
                error.forget()
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

        def give(read: Callable[[Tensor], Any], tensor: Tensor, where: Where) -> Any:
            error = next(gives.get(where, iter(())), None)
            if error is None:
                return read(tensor)
            return _item(tensor, error, run)

        with self._given_by(give, lambda _, where: where not in gives):
            yield
        run.ended = True

    def _noting(self, read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def cast(tensor: Tensor) -> Any:
            self.has_cast |= isinstance(tensor, FakeTensor)
            try:
                return read(tensor)
            except CaptureError as error:
                error.casts = True
                raise

        return cast

    def _begin(self, *, records: bool) -> _Run:
        if self._decides is not None:
            self._decides.begin(records=records)
        return _Run(self._decides, records)

    @contextmanager
    def _given_by(self, give: _Give, is_read: Callable[[Tensor, Where], bool]) -> Iterator[None]:
        """In the body, `give` gives what code reads, but the lists of those that are `is_read`."""
        read_number, read_truth, read_list = Tensor.item, Tensor.__bool__, Tensor.tolist

        def item(tensor: Tensor) -> Any:
            return give(read_number, tensor, _reader(sys._getframe(1)))

        def truth(tensor: Tensor) -> bool:
            return bool(give(read_truth, tensor, _reader(sys._getframe(1))))

        def to_list(tensor: Tensor) -> Any:
            where = _reader(sys._getframe(1))

            plainly = is_read(tensor, where)
            if plainly and not isinstance(tensor, FakeTensor):
                return read_list(tensor)

            def listed(part: Tensor) -> Any:
                if part.dim() == 0:
                    return read_number(part) if plainly else give(read_number, part, where)
                return [listed(each) for each in part.unbind()]

            return listed(tensor.detach())

        truths = {"__bool__": truth} if self._decides else {}
        casts = {name: self._noting(getattr(Tensor, name)) for name in ("__float__", "__int__")}
        assigns = {"__setitem__": assigning(Tensor.__setitem__)}
        methods = {"item": item, "tolist": to_list, **truths, **casts, **assigns}
        with _giving(methods), casts_of_numbers(self._casts), tensors_of_operands():
            yield


def _reader(frame: FrameType) -> Where:
    """Where code reads by a method that the recorder may have wrapped."""
    while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def _item(tensor: Tensor, error: CaptureError, run: _Run) -> Item:
    """That of a tensor, which may be written after it was read."""
    return Item(("item", 0), [tensor.detach().clone()], [error], run)
