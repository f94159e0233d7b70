"""Numbers that a step takes, such as the weight of a loss that grows from step to step.

While a step is recorded, a `Number` stands for each of them. An operator that has the same bits
with a tensor without dimensions takes that, of an input of the step; arithmetic is done before each
step, in Python. A comparison has the outcome that it has for the numbers of the recording, and the
step is for numbers of the same outcome. Whatever else code does with a Number, such as taking it
for an index, is a CaptureError: then the number itself is a part of the step. But of a count that
forward keeps, such as `step % 3`, that may be one of few values: then it is known, and the step is
for that value. One that forward leaves in Python is calculated again after each step
(modules/left.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from fsdp_mlir.modules.left import Calculated
from fsdp_mlir.step.draws import Draw, DrawsOfModes
from fsdp_mlir.step.held import Held
from fsdp_mlir.step.operands import Operand
from fsdp_mlir.support.errors import CaptureError, SourceMap, model_frame, prefixed
from fsdp_mlir.support.formulas import (
    Formula,
    Symbol,
    is_symbol,
    math_of_symbols,
    may_raise,
    names_in,
    value_of,
)
from fsdp_mlir.support.generators import undone

# Of the input that the numbers come in.
INPUT = "(numbers)"
_SLOTS = 31

# A float64 has these integers.
_MOST = 1 << 53

# Known values of counts: of so many steps to come, and at most so many, as one form has plans.
_STEPS = 256
_FEW = 5


class Refused(CaptureError):
    """Of numbers, by their names."""

    def __init__(self, message: str, names: Sequence[str]) -> None:
        super().__init__(message)
        self.names = names


class Number(Operand, Calculated):
    """A number of each step: `formula` over the numbers that the step is given. `tensors`: after a
    forward that has left it in Python, the one that has it."""

    rank = 0

    def __init__(self, formula: Formula, of: Numbers) -> None:
        """Raises what the calculation does."""
        self.formula, self.of, self._run = formula, of, of.run
        self.number = of.calculated(formula)
        self.tensors = []
        of.made.append(ref(self))
        if type(self.number) not in (int, float, bool):
            raise self.refused()

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self.number)

    @property
    def form(self) -> str:
        return repr(self.formula)

    def calculated(self, elements: Sequence[Any]) -> Any:
        return elements[0]

    def keep(self) -> None:
        """At the end of the forward that leaves it in Python."""
        self.tensors = [self.tensor()]

    def of_now(self) -> Number:
        """The same of the present run, which is not recorded."""
        made, number = object.__new__(Number), value_of(self.formula, self.of.now)
        tensors = [torch.tensor(number, dtype=self.tensors[0].dtype)]
        vars(made).update(vars(self), number=number, tensors=tensors)
        return made

    def refused(self) -> Refused:
        return self.of.refused(self.formula)

    def combined(self, name: str, values: Sequence[Any]) -> Any:
        terms = [_term(value) for value in values]
        return NotImplemented if None in terms else Number((name, *terms), self.of)

    def __bool__(self) -> bool:
        self.check()
        return self.of.decided(("truth", self.formula))

    def check(self) -> None:
        """Refused after the forward that it is of."""
        if self.of.run is None or self._run is not self.of.run:
            raise self.refused()

    def tensor(self) -> Tensor:
        """Without dimensions, of float64 or int64."""
        self.check()
        return self.of.tensor(self)

    def kind(self) -> type:
        return type(self.number)

    def known(self) -> Any:
        self.check()
        return self.of.known(self)

    __index__ = known

    def chosen(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What `torch.where` of a tensor of floats and this number gives. It is an error for a
        number that the tensor's dtype does not have."""
        choices = [*args[1:], *kwargs.values()] if func is torch.where else [args[0], *args[2:]]
        tensors = [each for each in choices if isinstance(each, Tensor)]
        if func not in (torch.where, Tensor.where) or len(choices) != 2 or len(tensors) != 1:
            raise self.refused()
        self.check()
        dtype = torch.result_type(tensors[0], self.number)
        if not dtype.is_floating_point:
            raise self.refused()
        number = self.of.tensor(self, torch.finfo(dtype).max).to(dtype)

        def given(each: Any) -> Any:
            return number if each is self else each

        return func(*map(given, args), **{key: given(each) for key, each in kwargs.items()})


class _Sealed(Symbol):
    """Where a number was that is held, after forward."""

    rank = 0

    def __init__(self, formula: Formula, of: Numbers) -> None:
        self.formula, self.of = formula, of
        of.made.append(ref(self))

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise self.refused()

    def refused(self) -> Refused:
        return self.of.refused(self.formula)

    def combined(self, name: str, values: Sequence[Any]) -> Any:
        raise self.refused()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        for each in (*args, *(kwargs or {}).values()):
            if type(each) is _Sealed:
                raise each.refused()
        raise CaptureError("a number is read in backward")


class Unread(Symbol):
    """A string, or a number in a container, that nothing in the step reads."""

    rank = 0

    def __init__(self, name: str, value: Any, of: Numbers) -> None:
        self.formula, self.of = ("item", name), of
        self._kind = type(value)
        of.made.append(ref(self))

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return self._kind

    def refused(self) -> Refused:
        return self.of.refused(self.formula)

    def combined(self, name: str, values: Sequence[Any]) -> Any:
        raise self.refused()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self.refused()

    __len__ = __iter__ = __getitem__ = __contains__ = __fspath__ = _refuse

    def __copy__(self) -> Unread:
        return self

    def __deepcopy__(self, _: Any) -> Unread:
        return self

    def __getattr__(self, name: str) -> Any:
        """Code may ask whether it is a tensor, by hasattr(value, "to")."""
        if hasattr(self._kind, name):
            raise self.refused()
        raise AttributeError(f"'{self._kind.__name__}' object has no attribute '{name}'")


def _compared(name: str) -> Any:
    def function(self: Number, other: Any) -> Any:
        term = _term(other)
        if term is None:
            return NotImplemented
        self.check()
        return self.of.decided((name, self.formula, term))

    return function


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", _compared(_name))


def _term(value: Any) -> Formula | None:
    """None for what is no number."""
    if type(value) is Number:
        value.check()
        return value.formula
    return ("number", value) if type(value) in (int, float, bool) else None


def _plain(assigned: Mapping[str, Any]) -> dict[str, Any]:
    """Without what follows from what the step computes, which is among its counts."""
    return {x: each for x, each in assigned.items() if type(each) is Number or not is_symbol(each)}


def _moved(number: Any, by: float) -> Any:
    return number + round(by) if type(number) is int else number * (1 + by / 16) + by / 32


def _told_of(formula: Formula) -> str:
    where = SourceMap().frame(model_frame())
    return prefixed(where, f"{_told(names_in(formula))} is used as more than a tensor may be")


def _told(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


@dataclass(frozen=True)
class Taken:
    """What a recorded step takes of the numbers that it is given, by their names: the formulas of
    its input's elements with the numbers' classes and the most that they may be; and in the order
    of the step, comparisons with their outcome, and formulas that may raise, with None. `set`: what
    forward leaves of numbers that are held, in a step and in an evaluation. `draws`: the numbers
    that each of them draws; those of the other one are not there, nor are any until it begins."""

    names: tuple[str, ...] = ()
    slots: tuple[tuple[Formula, type, float], ...] = ()
    course: tuple[tuple[Formula, bool | None], ...] = ()
    set: tuple[Mapping[str, Formula], Mapping[str, Formula]] = ({}, {})
    draws: DrawsOfModes = ((), ())

    def record(self) -> dict[str, Any]:
        """The same as JSON."""
        slots = [[formula, kind.__name__, most] for formula, kind, most in self.slots]
        record = {"names": self.names, "slots": slots, "course": self.course, "set": self.set}
        draws = [[draw.record() for draw in each] for each in self.draws]
        return record | ({"draws": draws} if any(draws) else {})

    @staticmethod
    def recorded(record: Mapping[str, Any]) -> Taken:
        """What `record` gave."""
        kinds = {kind.__name__: kind for kind in (int, float)}
        training, evaluation = record.get("draws", ((), ()))
        return Taken(
            tuple(record["names"]),
            tuple((formula, kinds[kind], most) for formula, kind, most in record["slots"]),
            tuple((formula, outcome) for formula, outcome in record["course"]),
            tuple(record["set"]),
            (tuple(map(Draw.recorded, training)), tuple(map(Draw.recorded, evaluation))),
        )

    def after(self, numbers: Mapping[str, Any], *, evaluation: bool = False) -> dict[str, Any]:
        """Those that forward sets, as it leaves them."""
        formulas = self.set[evaluation]
        return {name: value_of(formula, numbers) for name, formula in formulas.items()}

    def of(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers in what the step is given."""
        return {x: batch[x] for x in self.names if x in batch or not self._is_drawn(x)}

    def _is_settled(self, formula: Formula, outcome: bool | None) -> bool:
        """Whether a comparison has that outcome for all of these."""
        name, *terms = formula
        items = [term for term in terms if term[0] == "item"]
        numbers = [term for term in terms if term[0] == "number"]
        draws = [x for each in self.draws for x in each if items and x.name == items[0][1]]
        is_one = name in ("lt", "le", "gt", "ge") and len(items) == len(numbers) == 1
        if not any(map(self._is_drawn, names_in(formula))):
            return True
        if not is_one or not draws or (limits := draws[0].limits) is None:
            return False
        ends = ({draws[0].name: limit} for limit in limits)
        return all(bool(value_of(formula, end)) == outcome for end in ends)

    def drawn(self, *, evaluation: bool) -> dict[str, Any]:
        """Draws those of the next step, or of an evaluation."""
        return {draw.name: draw() for draw in self.draws[evaluation]}

    def draws_decide(self) -> bool:
        """Whether the step is another one for other numbers that it may draw."""
        operands = [name for formula, _, _ in self.slots for name in names_in(formula)]
        return any(map(self._is_drawn, operands)) or not all(
            self._is_settled(*decided) for decided in self.course
        )

    def _is_drawn(self, name: str) -> bool:
        return any(name == draw.name for draws in self.draws for draw in draws)

    def _has(self, formula: Formula, numbers: Mapping[str, Any]) -> bool:
        """Whether all that it is of has been drawn."""
        return not any(self.draws) or all(
            name in numbers or not self._is_drawn(name) for name in names_in(formula)
        )

    def holds(self, numbers: Mapping[str, Any]) -> bool:
        """Whether the step is for these numbers, as far as they have been drawn. Raises what the
        step does in calculating."""
        for formula, outcome in self.course:
            if not self._has(formula, numbers):
                continue
            value = value_of(formula, numbers)
            if outcome is not None and bool(value) != outcome:
                return False
        return all(
            _is_of(value_of(formula, numbers), *most)
            for formula, *most in self.slots
            if self._has(formula, numbers)
        )

    def serves(self, numbers: Mapping[str, Any]) -> bool:
        """Whether it is for them and does not raise."""
        try:
            return self.holds(numbers)
        except Exception:  # of the step
            return False

    def serves_next(self, numbers: Mapping[str, Any]) -> bool:
        """Whether it is for them and what the next step draws."""
        with undone():
            return self.serves({**numbers, **self.drawn(evaluation=False)})

    def input(self, numbers: Mapping[str, Any], mark: float = 0.0) -> Tensor:
        """The step's input for numbers that it is for; `mark` is its last element."""
        values = [
            float(value_of(formula, numbers)) if self._has(formula, numbers) else 0.0
            for formula, _, _ in self.slots
        ]
        values += [0.0] * (_SLOTS - len(values))
        return torch.tensor([*values, mark], dtype=torch.float64)


def _is_of(value: Any, kind: type, most: float) -> bool:
    if type(value) is not kind:
        return False
    return abs(value) <= most or (kind is float and not math.isfinite(value))


@dataclass
class Numbers:
    """Those of one step that is recorded: `given` by their names. Those of its present run, which
    may be `others`, are `now`."""

    given: Mapping[str, Any]
    draws: DrawsOfModes = ((), ())
    alone: bool = False  # the step has one microbatch, and so one value of each count
    made: list[ref[Symbol]] = field(default_factory=list)
    now: Mapping[str, Any] = field(init=False)
    recording: bool = field(default=False, init=False)
    run: object = field(default=None, init=False)  # of forward, while it is recorded
    _slots: dict[str, tuple[Formula, type, float]] = field(default_factory=dict)
    _course: dict[str, tuple[Formula, bool | None]] = field(default_factory=dict)
    _records: bool = False
    _refusal: tuple[str, list[str]] | None = None
    _source: Tensor | None = None
    _set: list[dict[str, Formula] | None] = field(default_factory=lambda: [None, None])
    _counts: frozenset[str] = frozenset()  # those that are held
    # Formulas of counts whose values have been asked for, with what is said if they are not few.
    _known: dict[str, tuple[Formula, str]] = field(default_factory=dict)
    _kept: list[ref[Symbol]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = self.given

    def values(self, source: Tensor) -> dict[str, Any]:
        """What the step gets for them; `source` is its input."""
        if not self._records:
            self.now, self._refusal = self.others() if source[-1] else self.given, None
            return dict(self.now)
        self.now, self._source = self.given, source
        return {name: Number(("item", name), self) for name in self.given}

    @contextmanager
    def recorded(
        self, held: Held, *, evaluating: bool = False, may_keep: bool = False
    ) -> Iterator[None]:
        """In the body, which records the step, they are Numbers. Refused for one that is still
        there at its end, unless it is where `held` has put one or one `may_keep` it until `ended`,
        and if the step goes on after it was refused one. Whoever asks what is in these places then,
        as backward may do, gets Refused, until `ended`."""
        self.made, self._records, self._refusal = [], bool(self.given), None
        self._counts, self._known = frozenset(held.values if self.alone else ()), {}
        self.recording, self.run = True, object()
        try:
            with math_of_symbols():
                yield
            self._end(held, evaluating=evaluating, may_keep=may_keep)
        except Exception as error:
            if self._refusal is not None and not isinstance(error, Refused):
                raise Refused(*self._refusal) from error
            if self._known and not isinstance(error, CaptureError):
                formula, text = next(iter(self._known.values()))
                raise Refused(text, names_in(formula)) from error
            raise
        finally:
            self._records, self._source, self.recording, self.run = False, None, False, None
        if self._refusal is not None:
            raise Refused(*self._refusal)

    def _end(self, held: Held, *, evaluating: bool, may_keep: bool) -> None:
        made, self.made = self.made, []
        self._note_set(held.assigned(), evaluating)
        self._check_known()
        if self.given:
            held.seal(lambda name: _Sealed(("item", name), self))
        if not may_keep:
            self._check(made)
        self._kept = made
        for each in made:
            number = each()
            if type(number) is Number:
                number.keep()
            elif number is not None:
                raise number.refused()

    def _note_set(self, assigned: Mapping[str, Any], evaluating: bool) -> None:
        """What forward has left in places that are held."""
        found = {}
        for name, value in _plain(assigned).items():
            number = value.number if type(value) is Number else value
            formula = _term(value)
            if formula is None or type(number) not in (int, float):
                raise self.refused(("item", name))
            found[name] = formula
        before = self._set[evaluating]
        if before is not None and repr(before) != repr(found):
            raise CaptureError(f"what forward leaves in {_told(before | found)} varies")
        self._set[evaluating] = found

    def _check_known(self) -> None:
        """Refused for counts whose values are not few in the steps to come, as long as comparisons
        have their outcomes."""
        after = {**(self._set[1] or {}), **(self._set[0] or {})}
        course = [each for key, each in self._course.items() if key not in self._known]
        numbers, found = dict(self.given), set()
        for _ in range(_STEPS if self._known else 0):
            found.add(repr([value_of(formula, numbers) for formula, _ in self._known.values()]))
            numbers |= {name: value_of(formula, numbers) for name, formula in after.items()}
            if len(found) > _FEW or not replace(self.taken, course=course).serves(numbers):
                break
        for formula, text in self._known.values():
            if len(found) > _FEW or not after.keys() >= {*names_in(formula)}:
                raise Refused(text, names_in(formula))

    def ended(self, held: Held, *, evaluating: bool = False) -> None:
        """At the end of a step: puts the numbers back in their places. Refused for one that
        backward has set or kept, and CaptureError for one that a step which is not recorded has
        left as another one than the recorded step."""
        made, self.made, assigned = self.made, [], held.assigned()
        held.restore()
        if made:
            for name in assigned:
                raise self.refused(("item", name))
        else:
            wanted = self.taken.after(self.now, evaluation=evaluating)
            found = {name: self.now[name] for name in wanted} | _plain(assigned)
            if repr(sorted(found.items())) != repr(sorted(wanted.items())):
                raise CaptureError(
                    f"forward leaves other numbers in {_told(found | wanted)} than while it is "
                    "recorded"
                )
        self._check(made)

    def check_left(self, left: Sequence[Any]) -> None:
        """The step has ended. Refused for one that it keeps and that is not among what it has
        `left` in Python."""
        kept, self._kept = self._kept, []
        self._check(kept, set(map(id, left)))
        if self._refusal is not None:
            raise Refused(*self._refusal)

    def _check(self, made: Sequence[ref[Symbol]], but: Collection[int] = ()) -> None:
        for each in made:
            if (kept := each()) is not None and id(kept) not in but:
                raise kept.refused()

    def refused(self, formula: Formula) -> Refused:
        names, text = names_in(formula), _told_of(formula)
        self._refusal = self._refusal or (text, names)
        return Refused(text, names)

    @property
    def taken(self) -> Taken:
        course = tuple(self._course.values())
        after = self._set[0] or {}, self._set[1] or {}
        slots = tuple(self._slots.values())
        return Taken(tuple(self.given), slots, course, after, self.draws)

    def others(self) -> Mapping[str, Any]:
        """Other numbers that the recorded step is for, as far as it has compared them. Those that
        are given, if none are found."""
        for shift in (1, 2, 3, 5, 7, -1, -2, -3, 0.125, -0.125):
            moved = {name: _moved(number, shift) for name, number in self.given.items()}
            if moved != self.given and self.taken.serves(moved):
                return moved
        return self.given

    def input(self, *, others: bool = False) -> Tensor:
        """The step's input for the numbers of the recording, or for `others`."""
        return self.taken.input(self.others() if others else self.given, float(others))

    def calculated(self, formula: Formula) -> Any:
        """What it gives for the numbers of the recording."""
        if may_raise(formula):
            self._course.setdefault(repr(formula), (formula, None))
        try:
            return value_of(formula, self.given)
        except Exception:  # which the step may expect
            self.refused(formula)
            raise

    def known(self, number: Number) -> Any:
        """The number itself. Refused, here or at the end of forward, if it may have more than a few
        values."""
        names, value = names_in(number.formula), number.number
        # Equal numbers may not be the same: those of zero, and NaN equals none.
        is_told = type(value) is not float or (value != 0 and not math.isnan(value))
        if not self._counts >= {*names} or not is_told:
            raise number.refused()
        equal = ("eq", number.formula, ("number", value))
        if repr(equal) not in self._course:
            self._known[repr(equal)] = number.formula, _told_of(number.formula)
        self.decided(equal)
        return value

    def decided(self, formula: Formula) -> bool:
        outcome = bool(value_of(formula, self.given))
        self._course.setdefault(repr(formula), (formula, outcome))
        return outcome

    def tensor(self, number: Number, most: float = math.inf) -> Tensor:
        """Without dimensions. The step is for numbers up to `most`, if they are finite."""
        kind = type(number.number)
        if kind is int:
            most = min(most, _MOST)
        key = repr((number.formula, kind, most))
        self._slots.setdefault(key, (number.formula, kind, most))
        if kind is bool or not _is_of(number.number, kind, most) or len(self._slots) > _SLOTS:
            raise number.refused()
        assert self._source is not None
        element = self._source[list(self._slots).index(key)]
        return element.to(torch.int64) if kind is int else element
