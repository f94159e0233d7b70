"""Numbers that a step draws from the generators of Python and NumPy, such as the weight of a mixup
or what decides whether a layer is dropped.

A `Draw` is a call, such as random.random() or np.random.beta(a, a), that gives one number. While a
step is recorded for the first time its draws are noted. It is then recorded with a number of each
step (step/numbers.py) in place of what each of them gives. Before each step the same calls are made
in the same order, and their numbers are given to the plan.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from fsdp_mlir.support.errors import CaptureError, Location, SourceMap, located, model_frame
from fsdp_mlir.support.formulas import Symbol, is_symbol
from fsdp_mlir.support.generators import states

# That give one number of so many arguments at most; a further one is for the shape of several.
_OF_PYTHON = {
    **dict.fromkeys(("random",), 0),
    **dict.fromkeys(("getrandbits", "expovariate", "paretovariate"), 1),
    **dict.fromkeys(("uniform", "randint", "gauss", "normalvariate", "lognormvariate"), 2),
    **dict.fromkeys(("betavariate", "gammavariate", "weibullvariate", "vonmisesvariate"), 2),
    **dict.fromkeys(("triangular", "randrange"), 3),
}
_OF_NUMPY = {
    **dict.fromkeys(("random", "random_sample", "rand", "randn", "standard_normal"), 0),
    **dict.fromkeys(("standard_exponential",), 0),
    **dict.fromkeys(("exponential", "standard_gamma", "poisson", "geometric", "chisquare"), 1),
    **dict.fromkeys(("weibull", "pareto", "power", "rayleigh"), 1),
    **dict.fromkeys(("uniform", "randint", "normal", "beta", "gamma", "binomial"), 2),
    **dict.fromkeys(("laplace", "lognormal", "logistic", "vonmises", "gumbel"), 2),
    **dict.fromkeys(("triangular",), 3),
}


def _place_of(choices: Callable[..., Any], count: int, *weights: float) -> Any:
    return choices(range(count), weights)[0]


def _place_in_array(choice: Callable[..., Any], count: int, *weights: float) -> int:
    return int(choice(count, p=weights))


# Of the place of a choice with weights.
_WEIGHTED: dict[str, Callable[..., int]] = {
    "random.choices": partial(_place_of, random.choices),
    "np.random.choice": partial(_place_in_array, np.random.choice),
}
_FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    **{f"random.{name}": (getattr(random, name), most) for name, most in _OF_PYTHON.items()},
    **{f"np.random.{name}": (getattr(np.random, name), most) for name, most in _OF_NUMPY.items()},
}

# Of one step.
_MOST = 64

# Uniform ones between 0 and 1, or between two numbers.
_LIMITS = {
    *("random.random", "np.random.random", "np.random.random_sample", "np.random.rand"),
    *("random.uniform", "np.random.uniform"),
}


@dataclass(frozen=True)
class Draw:
    """A call of one of the functions, which draws the number `name` of each step. `is_fixed`: each
    number is another step."""

    name: str
    function: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    is_fixed: bool = False
    location: Location | None = field(default=None, compare=False)

    def __call__(self) -> Any:
        """Draws one."""
        weighted = _WEIGHTED.get(self.function)
        function = _FUNCTIONS[self.function][0] if weighted is None else weighted
        return function(*self.args, **dict(self.kwargs))

    @property
    def limits(self) -> tuple[float, float] | None:
        """The least and the most that it may give, if that is known."""
        if self.kwargs or self.function not in _LIMITS:
            return None
        low, high = self.args if len(self.args) == 2 else (0.0, 1.0)
        return min(low, high), max(low, high) if self.args else math.nextafter(high, low)

    def record(self) -> list[Any]:
        """The same as JSON."""
        return [self.name, self.function, self.args, self.kwargs, self.is_fixed]

    @staticmethod
    def recorded(record: Sequence[Any]) -> Draw:
        """What `record` gave."""
        name, function, args, kwargs, is_fixed = record
        return Draw(name, function, tuple(args), tuple(map(tuple, kwargs)), is_fixed)

    def is_of(self, other: Draw) -> bool:
        """Whether the same call would have been made."""
        mine, others = ((x.function, x.args, x.kwargs) for x in (self, other))
        return repr(mine) == repr(others)


# Those of a step, and of its evaluation, in the order in which they are made.
DrawsOfModes = tuple[tuple[Draw, ...], tuple[Draw, ...]]


class DrawsError(CaptureError):
    """The step draws `found`, which are to be numbers of each step."""

    def __init__(self, found: Mapping[Draw, Any], *, evaluating: bool) -> None:
        super().__init__("forward draws from Python's or NumPy's generator of random numbers")
        self.found, self.evaluating = found, evaluating


@dataclass
class Drawing:
    """The draws of one step that is captured: those that are `known`; None if they are no numbers
    of each step. `users`: modules of code that may have imported a function by its name."""

    known: DrawsOfModes | None
    users: Sequence[Any] = ()
    _found: dict[Draw, Any] = field(default_factory=dict, init=False)
    _last: Any = field(default=None, init=False)  # the generators' state after the last draw
    _alone: bool = field(default=True, init=False)  # nothing else has drawn

    @contextmanager
    def given(
        self, numbers: Mapping[str, Any], *, evaluating: bool, recording: bool
    ) -> Iterator[None]:
        """In the body, which is forward, each draw gives one of `numbers`, by its name. DrawsError
        after a body that is recorded and whose draws are not known. CaptureError if it draws
        otherwise than those that are."""
        if self.known is None or not (recording or self.known[evaluating]):
            yield
            return
        known = iter(self.known[evaluating])
        notes = recording and not self.known[evaluating]
        self._found, self._alone, self._last = {}, True, states() if notes else None

        def give(draw: Draw) -> Any:
            if notes:
                return self._noted(draw)
            expected = next(known, None)
            if expected is None or not expected.is_of(draw):
                raise _otherwise(draw.function)
            number = numbers[expected.name]
            # Only numbers of a recording are not what they seem; they are then compared.
            return _plain(number) if expected.is_fixed else number

        with _patched(give, self.users):
            yield
        if notes and self._found:
            if self._alone and states() == self._last and len(self._found) <= _MOST:
                raise DrawsError(self._found, evaluating=evaluating)
        elif (missing := next(known, None)) is not None:
            raise _otherwise(missing.function)

    def _noted(self, draw: Draw) -> Any:
        self._alone &= states() == self._last
        number = draw()
        self._last = states()
        place = 1 + len(self._found)
        name = draw.function if place == 1 else f"{draw.function} ({place})"
        location = SourceMap().frame(model_frame())
        self._found[replace(draw, name=name, location=location)] = number
        return number


def _plain(number: Any) -> Any:
    if not is_symbol(number):
        return number
    value = number.number
    return value if number == value else number


def _otherwise(function: str) -> CaptureError:
    return located(
        SourceMap().frame(model_frame()),
        f"'{function}' is called in one run of the step and not in another",
    )


@contextmanager
def _patched(give: Callable[[Draw], Any], users: Iterable[Any]) -> Iterator[None]:
    """In the body, the functions give what `give` does of their calls, if these give one number."""
    patches = {name: _drawing(name, give) for name in _FUNCTIONS}
    made = {id(f): (f, patches[name]) for name, (f, _) in _FUNCTIONS.items()}
    made[id(random.choice)] = random.choice, _choosing(patches["random.randrange"])
    chooses = _choosing_array(patches["np.random.randint"], give)
    made[id(np.random.choice)] = np.random.choice, chooses
    made[id(random.choices)] = random.choices, _choosing_some(give)
    with ExitStack() as stack:
        for module in (random, np.random, *users):
            for name, value in [*vars(module).items()]:
                original, patch = made.get(id(value), (None, None))
                if patch is not None and original is value:
                    patch = _on_this_thread(original, patch)
                    stack.enter_context(mock.patch.object(module, name, patch))
        yield


def _on_this_thread(original: Callable[..., Any], patch: Callable[..., Any]) -> Callable[..., Any]:
    thread = threading.get_ident()

    def called(*args: Any, **kwargs: Any) -> Any:
        is_this = threading.get_ident() == thread
        return patch(*args, **kwargs) if is_this else original(*args, **kwargs)

    return called


def _drawing(name: str, give: Callable[[Draw], Any]) -> Callable[..., Any]:
    function, most = _FUNCTIONS[name]

    def draws(*args: Any, **kwargs: Any) -> Any:
        symbols: list[Symbol] = list(filter(is_symbol, (*args, *kwargs.values())))
        if symbols:
            raise symbols[0].refused()
        in_array = name.startswith("np.") and _is_one(args[most:], kwargs)
        own = args[:most] if in_array else args
        named = {key: each for key, each in kwargs.items() if key != "size" or not in_array}
        given = [each for each in (*own, *named.values()) if each is not None]  # no size
        is_one = len(given) <= most and all(isinstance(each, (int, float)) for each in given)
        if not is_one or "dtype" in kwargs:
            return function(*args, **kwargs)
        drawn = give(Draw("", name, own, tuple(named.items())))
        return _array_of(drawn) if in_array else drawn

    return draws


class _OfOne(np.ndarray):  # type: ignore[type-arg]
    """An array of one drawn number, while a step is recorded. Tensors compute with such an array in
    its own dtype, and not with this."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if kwargs or any(isinstance(each, Tensor) for each in inputs):
            raise self[0].refused()
        plain = [np.asarray(x) if isinstance(x, np.ndarray) else x for x in inputs]
        result = getattr(ufunc, method)(*plain)
        is_drawn = isinstance(result, np.ndarray) and result.dtype == object
        return result.view(_OfOne) if is_drawn else result


def _array_of(drawn: Any) -> Any:
    if not is_symbol(drawn):
        return np.array([drawn])
    array = np.empty(1, dtype=object).view(_OfOne)
    array[0] = drawn
    return array


def _choosing(draw_place: Callable[..., Any]) -> Callable[..., Any]:
    """That of random.choice."""
    choose_one = random.choice

    def choose(seq: Any) -> Any:
        return _element(seq, draw_place(len(seq))) if len(seq) else choose_one(seq)

    return choose


def _is_one(sizes: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of NumPy is asked for an array of one number."""
    sizes = [*sizes, *(each for key, each in kwargs.items() if key == "size")]
    return len(sizes) == 1 and type(sizes[0]) in (int, tuple, list) and sizes[0] in (1, (1,), [1])


def _weights(given: Any, count: int) -> tuple[float, ...] | None:
    found = tuple(given) if isinstance(given, (list, tuple, np.ndarray)) else ()
    return (
        found if len(found) == count and all(isinstance(x, (int, float)) for x in found) else None
    )


def _choosing_some(give: Callable[[Draw], Any]) -> Callable[..., Any]:
    """That of random.choices."""
    choose_some = random.choices

    def choose(population: Any, weights: Any = None, **kwargs: Any) -> Any:
        found = _weights(weights, len(population))
        if found is None or kwargs.get("k", 1) != 1 or kwargs.keys() - {"k"}:
            return choose_some(population, weights, **kwargs)
        place = give(Draw("", "random.choices", (len(population), *found), ()))
        return [_element(population, place)]

    return choose


def _choosing_array(
    draw_place: Callable[..., Any], give: Callable[[Draw], Any]
) -> Callable[..., Any]:
    """That of np.random.choice."""
    choose_some = np.random.choice

    def choose(a: Any, *args: Any, **kwargs: Any) -> Any:
        is_count = isinstance(a, int) and a > 0
        is_list = isinstance(a, (list, tuple)) and bool(a) and np.ndim(a) == 1
        weights = _weights(kwargs["p"], len(a)) if is_list and {*kwargs} == {"p"} else None
        if weights is not None and not args:
            return _element(np.array(a), give(Draw("", "np.random.choice", (len(a), *weights), ())))
        if args or kwargs or not (is_count or is_list):
            return choose_some(a, *args, **kwargs)
        if is_count:
            return draw_place(0, a)
        return _element(np.array(a), draw_place(0, len(a)))

    return choose


def _element(choices: Any, drawn: Any) -> Any:
    """Each place is another step."""
    return choices[next(place for place in range(len(choices)) if drawn == place)]
