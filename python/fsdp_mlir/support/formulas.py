"""Numbers that a recording knows by name only. Arithmetic with them is calculated at each step."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn
from unittest import mock

# A number in terms of others: ("item", what one is called), ("number", value), or a function's name
# and its arguments. Those of tensors are called by their places, those given by their names.
Formula = tuple[Any, ...]

_OF_MATH = (
    *("exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "isnan", "isinf", "isfinite"),
    *("sin", "cos", "tan", "tanh", "atan", "erf", "fabs", "floor", "ceil"),
)
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*_BINARY, *_COMPARISONS, "neg", "pos", "truth")},
    "abs": abs,
    "round": round,
    "float": float,
    "int": int,
    "computes": lambda _: True,
    **{name: getattr(math, name) for name in _OF_MATH},
}


class Symbol:
    """A number of each step. Arithmetic gives the Symbol that `combined` of the class makes; what
    else code does with it, such as taking it for an index, is the error of `refused`."""

    formula: Formula
    rank: ClassVar[int]  # of two classes, the one with the higher rank combines

    def combined(self, name: str, values: Sequence[Any]) -> Any:
        """The function `name` of `values`, which may be Symbols of a lower rank."""
        raise NotImplementedError

    def refused(self) -> Exception:
        raise NotImplementedError

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise self.refused()

    def _refuse_cast(self) -> NoReturn:
        error = self.refused()
        error.casts = True  # type: ignore[attr-defined]
        raise error

    __float__ = __int__ = _refuse_cast
    __bool__ = __index__ = __complex__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = __str__ = __repr__ = __format__ = _refuse  # type: ignore[assignment]
    __trunc__ = __floor__ = __ceil__ = __divmod__ = __rdivmod__ = _refuse
    __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = __invert__ = _refuse
    __rand__ = __ror__ = __rxor__ = __rlshift__ = __rrshift__ = _refuse
    __reduce_ex__ = __getattr__ = _refuse  # type: ignore[assignment]


def may_raise(formula: Formula) -> bool:
    """Whether the last operation of a formula has no result for some numbers."""
    return formula[0] in (*_OF_MATH, "truediv", "floordiv", "mod", "pow", "round", "int")


def is_symbol(value: Any) -> bool:
    """As a Symbol says that it is of the number's class."""
    return issubclass(type(value), Symbol)


def combined(name: str, *values: Any) -> Any:
    symbols = [value for value in values if is_symbol(value)]
    return max(symbols, key=lambda each: type(each).rank).combined(name, values)


def _define(name: str) -> None:
    def function(self: Symbol, *others: Any) -> Any:
        if len(others) > 1:  # a modulus of pow
            raise self.refused()
        return combined(name, self, *others)

    def reflected(self: Symbol, other: Any) -> Any:
        return combined(name, other, self)

    setattr(Symbol, f"__{name}__", function)
    if name in _BINARY:
        setattr(Symbol, f"__r{name}__", reflected)


for _name in (*_BINARY, "neg", "pos", "abs", "round"):
    _define(_name)


def _of_math(name: str) -> Callable[..., Any]:
    def function(*values: Any) -> Any:
        combines = any(map(is_symbol, values))
        return combined(name, *values) if combines else _FUNCTIONS[name](*values)

    return function


@contextmanager
def math_of_symbols() -> Iterator[None]:
    """In the body, functions of `math` take Symbols."""
    with mock.patch.multiple(math, **{name: _of_math(name) for name in _OF_MATH}):
        yield


def moved(formula: Formula, by: int) -> Formula:
    """The same of tensors that come `by` places later."""
    if formula[0] == "item":
        return formula if isinstance(formula[1], str) else ("item", formula[1] + by)
    if formula[0] == "number":
        return formula
    return (formula[0], *(moved(each, by) for each in formula[1:]))


def names_in(formula: Formula) -> list[str]:
    """Of the given numbers in it."""
    if formula[0] == "item":
        return [formula[1]] if isinstance(formula[1], str) else []
    if formula[0] == "number":
        return []
    return list(dict.fromkeys(name for each in formula[1:] for name in names_in(each)))


def settled(formula: Formula, given: Mapping[str, Any]) -> Formula:
    """With the given numbers in place of their names."""
    name, *rest = formula
    if name == "item":
        return ("number", given[rest[0]]) if rest[0] in given else formula
    if name == "number":
        return formula
    terms = [settled(each, given) for each in rest]
    if all(term[0] == "number" for term in terms):
        return ("number", value_of((name, *terms), {}))
    return (name, *terms)


def value_of(formula: Sequence[Any], numbers: Mapping[Any, Any]) -> Any:
    """What a formula gives for those numbers, by what it calls them."""
    name, *rest = formula
    if name == "item":
        return numbers[rest[0]]
    if name == "number":
        return rest[0]
    return _FUNCTIONS[name](*(value_of(each, numbers) for each in rest))
