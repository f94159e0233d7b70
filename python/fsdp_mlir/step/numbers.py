"""Numbers that a step takes, such as the weight of a loss that grows from step to step.

While a step is recorded, a `Number` stands for each of them. An operator that has the same bits
with a tensor without dimensions takes that, of an input of the step; arithmetic is done before each
step, in Python. A comparison has the outcome that it has for the numbers of the recording, and the
step is for numbers of the same outcome. Whatever else code does with a Number, such as taking it
for a size, is a CaptureError: then the number itself is a part of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from fsdp_mlir.step.formulas import Formula, Symbol, math_of_symbols, value_of
from fsdp_mlir.support.errors import CaptureError, SourceMap, model_frame, prefixed

# Of the input that the numbers come in.
INPUT = "(numbers)"
_SLOTS = 32

# A float64 has these integers.
_MOST = 1 << 53

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


class Refused(CaptureError):
    """Of numbers, by their names."""

    def __init__(self, message: str, names: Sequence[str]) -> None:
        super().__init__(message)
        self.names = names


class Number(Symbol):
    """A number of each step: `formula` over the numbers that the step is given."""

    rank = 0

    def __init__(self, formula: Formula, of: Numbers) -> None:
        """Raises what the calculation does."""
        self.formula, self.of = formula, of
        self.number = value_of(formula, of.given)
        of.made.append(ref(self))
        if type(self.number) not in (int, float, bool):
            raise self.refused()

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self.number)

    def refused(self) -> Refused:
        names = _names(self.formula)
        told = ", ".join(f"'{name}'" for name in names)
        where = SourceMap().frame(model_frame())
        return Refused(prefixed(where, f"{told} is used as more than a tensor may be"), names)

    def combined(self, name: str, values: Sequence[Any]) -> Any:
        terms = [_term(value) for value in values]
        return NotImplemented if None in terms else Number((name, *terms), self.of)

    def __bool__(self) -> bool:
        return self.of.decided(("truth", self.formula))

    def tensor(self) -> Tensor:
        """Without dimensions, of float64 or int64."""
        return self.of.tensor(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = str(getattr(func, "__name__", ""))
        operands = [*args, *(kwargs or {}).values()]
        number = next((each for each in operands if type(each) is Number), None)
        if number is None:  # in a list
            raise CaptureError(f"'{name}' takes a number among others")
        plain = name.strip("_")
        in_place = plain.startswith("i") if name.startswith("__") else name.endswith("_")
        if len(operands) != _SAME_BITS.get(plain) or set(kwargs or {}) - {"input", "other"}:
            raise number.refused()
        values = operands[1:] if plain == "where" else operands
        tensors = [each for each in values if isinstance(each, Tensor)]
        dtype = _dtype(plain, tensors, [each for each in values if type(each) is Number])
        # Beside a tensor without dimensions another one would decide the result's dtype.
        flat = plain != "where" and all(each.dim() == 0 for each in tensors)
        if not (tensors or plain == "where") or (flat and in_place):
            raise number.refused()

        def given(each: Any) -> Any:
            if type(each) is Number:
                tensor = each.tensor()
                return tensor if dtype is None else tensor.to(dtype)
            return each.reshape(1) if flat and isinstance(each, Tensor) else each

        keywords = {key: given(value) for key, value in (kwargs or {}).items()}
        result = func(*map(given, args), **keywords)
        return result.reshape(()) if flat else result


def _dtype(operator: str, tensors: list[Tensor], numbers: list[Number]) -> torch.dtype | None:
    """Of the tensor that a number is taken as, where it is not that of Python's numbers."""
    are_float = any(each.is_floating_point() or each.is_complex() for each in tensors)
    is_float = any(type(each.number) is float for each in numbers)
    if operator == "where" and all(each.dim() == 0 for each in tensors):
        if tensors:
            return torch.result_type(tensors[0], numbers[0].number)
        return torch.get_default_dtype()
    return torch.get_default_dtype() if is_float and not are_float else None


def _compared(name: str) -> Any:
    def function(self: Number, other: Any) -> Any:
        term = _term(other)
        if term is None:
            return NotImplemented
        return self.of.decided((name, self.formula, term))

    return function


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", _compared(_name))


def _term(value: Any) -> Formula | None:
    """None for what is no number."""
    if type(value) is Number:
        return value.formula
    return ("number", value) if type(value) in (int, float, bool) else None


def _names(formula: Formula) -> list[str]:
    if formula[0] == "item":
        return [formula[1]]
    if formula[0] == "number":
        return []
    return list(dict.fromkeys(name for each in formula[1:] for name in _names(each)))


@dataclass(frozen=True)
class Taken:
    """What a recorded step takes of the numbers that it is given, by their names: the formulas of
    its input's elements with the numbers' classes, and comparisons with their outcome."""

    names: tuple[str, ...] = ()
    slots: tuple[tuple[Formula, type], ...] = ()
    outcomes: tuple[tuple[Formula, bool], ...] = ()

    def record(self) -> dict[str, Any]:
        """The same as JSON."""
        slots = [[formula, kind.__name__] for formula, kind in self.slots]
        return {"names": self.names, "slots": slots, "outcomes": self.outcomes}

    @staticmethod
    def recorded(record: Mapping[str, Any]) -> Taken:
        """What `record` gave."""
        kinds = {kind.__name__: kind for kind in (int, float)}
        return Taken(
            tuple(record["names"]),
            tuple((formula, kinds[kind]) for formula, kind in record["slots"]),
            tuple((formula, outcome) for formula, outcome in record["outcomes"]),
        )

    def of(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers in what the step is given."""
        return {name: batch[name] for name in self.names}

    def holds(self, numbers: Mapping[str, Any]) -> bool:
        """Whether the step is for these numbers."""
        try:
            return all(
                bool(value_of(formula, numbers)) == outcome for formula, outcome in self.outcomes
            ) and all(_is_of(value_of(formula, numbers), kind) for formula, kind in self.slots)
        except (ArithmeticError, ValueError, TypeError, KeyError):  # the recording had none
            return False

    def input(self, numbers: Mapping[str, Any]) -> Tensor:
        """The step's input for numbers that it is for."""
        values = [float(value_of(formula, numbers)) for formula, _ in self.slots]
        return torch.tensor(values + [0.0] * (_SLOTS - len(values)), dtype=torch.float64)


def _is_of(value: Any, kind: type) -> bool:
    return type(value) is kind and (kind is float or abs(value) <= _MOST)


@dataclass
class Numbers:
    """Those of one step that is recorded: `given` by their names."""

    given: Mapping[str, Any]
    made: list[ref[Number]] = field(default_factory=list)
    _slots: dict[str, tuple[Formula, type]] = field(default_factory=dict)
    _outcomes: dict[str, tuple[Formula, bool]] = field(default_factory=dict)
    _records: bool = False
    _source: Tensor | None = None

    def values(self, source: Tensor) -> dict[str, Any]:
        """What the step gets for them; `source` is its input."""
        if not self._records:
            return dict(self.given)
        self._source = source
        return {name: Number(("item", name), self) for name in self.given}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """In the body, which records the step, they are Numbers. CaptureError for one that is still
        there at its end."""
        self.made, self._records = [], bool(self.given)
        try:
            with math_of_symbols():
                yield
        finally:
            self._records, self._source = False, None
        for each in self.made:
            if (kept := each()) is not None:
                raise kept.refused()

    @property
    def taken(self) -> Taken:
        outcomes = tuple(self._outcomes.values())
        return Taken(tuple(self.given), tuple(self._slots.values()), outcomes)

    def input(self) -> Tensor:
        """The step's input for the numbers of the recording."""
        return self.taken.input(self.given)

    def decided(self, formula: Formula) -> bool:
        outcome = bool(value_of(formula, self.given))
        self._outcomes[repr(formula)] = formula, outcome
        return outcome

    def tensor(self, number: Number) -> Tensor:
        kind = type(number.number)
        key = repr((number.formula, kind))
        self._slots.setdefault(key, (number.formula, kind))
        if kind is bool or not _is_of(number.number, kind) or len(self._slots) > _SLOTS:
            raise number.refused()
        assert self._source is not None
        element = self._source[list(self._slots).index(key)]
        return element.to(torch.int64) if kind is int else element
