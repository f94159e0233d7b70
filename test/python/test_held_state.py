"""What models keep in Python, where a capture must leave nothing and a step must see changes."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import ctypes
import functools
import io
import itertools
import os
import random
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import fsdp_mlir
import numpy as np
import pytest
import torch
from fsdp_mlir.modules.python_state import PythonState
from torch import Tensor, nn
from transformers.pytorch_utils import compile_compatible_method_lru_cache
from twins import Twins

SGD = (torch.optim.SGD, {"lr": 0.1})
X = {"x": torch.linspace(-1, 1, 32).reshape(4, 8)}
FACTOR: contextvars.ContextVar[float] = contextvars.ContextVar("FACTOR", default=1.0)


class Node(dict):
    __getattr__ = dict.__getitem__


class Items(list):
    pass


class Slots:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class Hooked(nn.Module):
    """Its forward replaces an OrderedDict of its own by what it changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.order = collections.OrderedDict.fromkeys("abc", 1.0)

    def forward(self, x: Tensor) -> Tensor:
        self.order.move_to_end("a")
        self.order["d"] = 2.0
        for key in list(self.order):
            x = x * self.order[key]
        del self.order["d"]
        self.order.move_to_end("a", last=False)
        return self.linear(x).square().mean()


def test_an_ordered_dict_keeps_its_order() -> None:
    """It has an order beside that of dict."""
    pair = Twins(Hooked, X, SGD, fallback="error")
    pair.assert_equal_steps()
    assert list(pair.ours.order) == ["a", "b", "c"]
    state = PythonState.of(pair.ours)
    pair.ours.order.move_to_end("a")
    pair.ours.order["e"] = 3.0
    state.restore()
    assert list(pair.ours.order.items()) == [("a", 1.0), ("b", 1.0), ("c", 1.0)]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def outputs(self, x: Tensor) -> Tensor:
        return self.linear(x).square()


class Holding(Base):
    def __init__(self, held: Any, get: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held, self.get = held, get

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x).mean() * float(self.get(self.held))


def set_item(held: Any, value: Any) -> None:
    held[0] = value


# What a model holds, what its forward reads of it, and what changes that.
Held = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, float], Any]]
HELD: dict[str, Held] = {
    "a list in a list": (lambda: [[1.0]], lambda h: h[0][0], lambda h, v: set_item(h[0], v)),
    "a list in a tuple": (lambda: ([1.0],), lambda h: h[0][0], lambda h, v: set_item(h[0], v)),
    "a dict in a dict": (
        lambda: {"a": {"b": 1.0}},
        lambda h: h["a"]["b"],
        lambda h, v: h["a"].update(b=v),
    ),
    "a dict with attributes in a dict": (
        lambda: {"a": Node(b=1.0)},
        lambda h: h["a"].b,
        lambda h, v: h["a"].update(b=v),
    ),
    "a list of a class in a tuple": (
        lambda: (Items([1.0]),),
        lambda h: h[0][0],
        lambda h, v: set_item(h[0], v),
    ),
    "the order of a dict": (
        lambda: {2.0: "a", 3.0: "b"},
        lambda h: next(iter(h)),
        lambda h, v: h.update({next(iter(h)): h.pop(next(iter(h)))}),
    ),
    "a byte": (lambda: bytearray(1), lambda h: h[0], lambda h, v: set_item(h, int(v))),
    "an array": (lambda: np.ones(3), lambda h: h[0], set_item),
    "a long list": (lambda: [1.0] * 500, lambda h: h[0], set_item),
    "a deque": (lambda: collections.deque([1.0]), lambda h: h[0], set_item),
    "a counter": (
        lambda: collections.Counter(a=1),
        lambda h: h["a"],
        lambda h, v: h.update(a=int(v)),
    ),
    "namespaces": (
        lambda: types.SimpleNamespace(a=types.SimpleNamespace(b=types.SimpleNamespace(c=1.0))),
        lambda h: h.a.b.c,
        lambda h, v: setattr(h.a.b, "c", v),
    ),
    "slots": (Slots, lambda h: h.value, lambda h, v: setattr(h, "value", v)),
    # The new object may have the address of the old one.
    "a function in a dict": (
        lambda: {"a": [functools.partial(float, 1.0)]},
        lambda h: h["a"][0](),
        lambda h, v: (set_item(h["a"], None), set_item(h["a"], functools.partial(float, v))),
    ),
    "a very long list": (lambda: [1.0] * 5000, lambda h: h[0], set_item),
    "a context variable": (lambda: FACTOR, lambda h: h.get(), lambda h, v: h.set(v)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", HELD)
def test_a_change_inside_is_seen(name: str) -> None:
    assert_changes_are_seen(*HELD[name])
    FACTOR.set(1.0)


def assert_changes_are_seen(make: Any, get: Any, put: Any) -> None:
    """Of what `make` gives as an attribute, of which forward reads what `get` gives."""
    pair = Twins(lambda: Holding(make(), get), X, SGD, fallback="error")
    pair.assert_equal_steps(1)
    for value in (2.0, 3.0):
        pair.change(lambda model, value=value: put(model.held, value))
        pair.assert_equal_steps(1)


class Own:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Schedule:
    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def gain(self) -> float:
        return self.settings.a.b.gain


# What makes the two outer objects, and the innermost one.
NAMESPACES: dict[str, tuple[Any, Any, Any]] = {
    "of types": (types.SimpleNamespace,) * 3,
    "of argparse": (argparse.Namespace,) * 3,
    "in an object": (Own, types.SimpleNamespace, argparse.Namespace),
    "with objects": (argparse.Namespace, Own, types.SimpleNamespace),
}


@pytest.mark.parametrize("by", ["a closure", "a method", "getattr"])
@pytest.mark.parametrize("name", NAMESPACES)
def test_a_change_in_a_namespace_outside_is_seen(name: str, by: str) -> None:
    outer, middle, inner = NAMESPACES[name]
    # The optimizer, whose settings the loop changes, is not part of the configuration.
    settings = outer(a=middle(b=inner(gain=1.0)), optimizer=torch.optim.SGD([torch.ones(1)], 0.1))
    gets = {
        "a closure": lambda: settings.a.b.gain,
        "a method": Schedule(settings).gain,
        "getattr": lambda: functools.reduce(getattr, ["a", "b", "gain"], settings),
    }
    pair = Twins(lambda: Holding(None, lambda _: gets[by]()), X, SGD, fallback="error")
    pair.assert_equal_steps(1)
    for value in (2.0, 3.0):
        settings.a.b.gain = value
        pair.assert_equal_steps(1)


class OfTaken(Base):
    """Computes with what `take` gives, another number in each step."""

    def __init__(self, take: Callable[[], float]) -> None:
        super().__init__()
        self.take = take

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x).mean() * self.take()


def numbers() -> Iterator[float]:
    yield from (1.0, 2.0, 3.0, 4.0, 5.0)


def of_closure(iterator: Iterator[float]) -> Callable[[], float]:
    return lambda: next(iterator)


class OfIterator:
    def __init__(self) -> None:
        self.iterator = numbers()

    def step(self) -> float:
        return next(self.iterator)


def of_object() -> Callable[[], float]:
    held = OfIterator()
    return lambda: held.step()


GLOBAL_ITERATOR: Iterator[float] = iter(())


def of_global() -> Callable[[], float]:
    global GLOBAL_ITERATOR
    GLOBAL_ITERATOR = itertools.count(1.0)  # for both models
    return lambda: next(GLOBAL_ITERATOR)


def of_default(iterator: Iterator[float]) -> Callable[[], float]:
    def take(one: float = 1.0, held: Iterator[float] = iterator) -> float:
        return one * next(held)

    return take


def of_keyword(iterator: Iterator[float]) -> Callable[[], float]:
    def take(*, held: Iterator[float] = iterator) -> float:
        return next(held)

    return take


def nested(iterator: Iterator[float]) -> Callable[[], float]:
    held = ((functools.partial(next, iterator),), 0)
    return lambda: held[0][0]()


TAKERS: dict[str, Callable[[], Callable[[], float]]] = {
    "a cycle": lambda: of_closure(itertools.cycle([1.0, 2.0, 3.0])),
    "a count": lambda: of_closure(itertools.count(1)),
    "items of a list": lambda: of_closure(iter([1.0, 2.0, 3.0, 4.0])),
    "a generator": lambda: of_closure(numbers()),
    "an object's": of_object,
    "a method": lambda: itertools.count(1.0).__next__,
    "a generator's method": lambda: functools.partial(numbers().send, None),
    "a partial": lambda: functools.partial(next, numbers()),
    "a partial in tuples": lambda: nested(numbers()),
    "a default": lambda: of_default(numbers()),
    "a keyword's default": lambda: of_keyword(numbers()),
    "a method in a closure": lambda: (lambda get: lambda: get())(numbers().__next__),
}


@pytest.mark.parametrize("name", TAKERS)
def test_a_capture_takes_nothing(name: str) -> None:
    with pytest.warns(UserWarning, match="takes an item|uses no iterators"):
        pair = Twins(lambda: OfTaken(TAKERS[name]()), X, SGD)
    pair.assert_equal_steps(3)


def test_a_capture_takes_nothing_of_a_global() -> None:
    with pytest.warns(UserWarning, match="takes an item from 'test_held_state.GLOBAL_ITERATOR'"):
        Twins(lambda: OfTaken(of_global()), X, SGD)
    assert next(GLOBAL_ITERATOR) == 1.0


def counting(held: Any) -> Callable[[], float]:
    def take() -> float:
        held[0] += 1
        return float(held[0])

    return take


def reading() -> Callable[[], float]:
    lines = io.StringIO("1\n2\n3\n4\n5\n")
    return lambda: float(lines.readline())


WRITERS: dict[str, Callable[[], Callable[[], float]]] = {
    "an array": lambda: counting(np.zeros(2)),
    "an array of a tensor": lambda: counting(torch.zeros(1).numpy()),
    "bytes": lambda: counting(bytearray(1)),
    "Python's array": lambda: counting(array.array("l", [0])),
    "a view": lambda: counting(memoryview(bytearray(1))),
    "a C array": lambda: counting((ctypes.c_int * 2)()),
    "a file": reading,
    "a list's method": lambda: [5.0, 4.0, 3.0, 2.0, 1.0].pop,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_capture_writes_nothing(name: str) -> None:
    with pytest.warns(UserWarning, match="changes in each step"):
        pair = Twins(lambda: OfTaken(WRITERS[name]()), X, SGD)
    pair.assert_equal_steps(3)


def of_context() -> float:
    FACTOR.set(FACTOR.get() + 1)
    return FACTOR.get()


def of_environment() -> float:
    os.environ["FACTOR"] = str(int(os.environ["FACTOR"]) + 1)
    os.environ["OTHER_FACTOR"] = "1"
    return float(os.environ["FACTOR"])


def test_a_capture_writes_no_settings_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FACTOR", "1")
    FACTOR.set(1.0)
    for take in (of_context, of_environment):
        with pytest.warns(UserWarning, match="changes in each step"):
            Twins(lambda take=take: OfTaken(take), X, SGD)
    assert FACTOR.get() == 1.0
    assert os.environ["FACTOR"] == os.getenv("FACTOR") == "1"
    assert "OTHER_FACTOR" not in os.environ


class Filling(Base):
    """Writes a table in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.is_filled = np.zeros(1), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_filled:
            self.table[0], self.is_filled = 3.0, True
        return self.outputs(x).mean() * float(self.table[0])


def test_what_every_step_writes_is_left() -> None:
    pair = Twins(Filling, X, SGD, fallback="error")
    assert not pair.ours.is_filled and pair.ours.table[0] == 0.0
    pair.assert_equal_steps()
    assert pair.ours.is_filled and pair.ours.table[0] == 3.0


def triangle() -> Tensor:
    return torch.ones(4, 4).tril()


@functools.lru_cache(None)
def memo() -> Tensor:
    return triangle()


@compile_compatible_method_lru_cache(maxsize=8)
def librarys_memo() -> Tensor:
    return triangle()


def default(known: dict[str, Tensor] = {}) -> Tensor:  # noqa: B006
    return known.setdefault("", triangle()) if not known else known[""]


def attribute() -> Tensor:
    if not hasattr(attribute, "known"):
        attribute.known = triangle()
    return attribute.known


class Helper:
    known: dict[str, Tensor] = {}  # noqa: RUF012

    def get(self) -> Tensor:
        if not self.known:
            self.known[""] = triangle()
        return self.known[""]


class Kept:
    __slots__ = ("known",)

    def __call__(self) -> Tensor:
        if not hasattr(self, "known"):
            self.known = triangle()
        return self.known


KEEPERS: dict[str, Callable[[], Callable[[], Tensor]]] = {
    "a memo": lambda: lambda: memo(),
    "a memo of a library's decorator": lambda: lambda: librarys_memo(),
    "a default argument": lambda: lambda: default(),
    "a function's attribute": lambda: lambda: attribute(),
    "a class's dict": lambda: Helper().get,
    "slots": Kept,
}


class Masking(Base):
    """Makes a tensor in its first forward, which is kept outside of it."""

    def __init__(self, keeper: Callable[[], Tensor], asks: bool) -> None:
        super().__init__()
        self.keeper, self.asks = keeper, asks

    def forward(self, x: Tensor) -> Tensor:
        loss = (self.keeper() @ self.outputs(x)).mean()
        return loss * 2 if self.asks and f"{loss.item():.0f}" == "9" else loss


@pytest.fixture
def _nothing_kept() -> Iterator[None]:
    yield
    memo.cache_clear()
    for cell in librarys_memo.__closure__:
        if isinstance(cell.cell_contents, functools._lru_cache_wrapper):
            cell.cell_contents.cache_clear()
    default.__defaults__[0].clear()
    vars(attribute).clear()
    Helper.known.clear()


@pytest.mark.usefixtures("_nothing_kept")
@pytest.mark.parametrize("asks", [False, True], ids=["plan", "no plan"])
@pytest.mark.parametrize("name", KEEPERS)
def test_a_capture_leaves_nothing(name: str, asks: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair = Twins(lambda: Masking(KEEPERS[name](), asks), X, SGD, example=None)
        pair.assert_equal_steps(3)
    assert any("without a plan" in str(each.message) for each in caught) or not asks


class Drawing(Base):
    def __init__(self, draw: Callable[[Any], Any], generator: Any) -> None:
        super().__init__()
        self.draw, self.generator = draw, generator

    def forward(self, x: Tensor) -> Tensor:
        return (self.outputs(x) * self.draw(self.generator)).mean()


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (
        lambda: torch.Generator().manual_seed(3),
        lambda generator: torch.rand(8, generator=generator),
    ),
    "numpy": (lambda: np.random.default_rng(3), lambda generator: float(generator.random())),
    "numpy's older": (lambda: np.random.RandomState(3), lambda generator: float(generator.rand())),
    "python": (lambda: random.Random(3), lambda generator: generator.random()),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_capture_draws_nothing(name: str) -> None:
    make, draw = GENERATORS[name]
    with pytest.warns(UserWarning, match="without a plan"):
        pair = Twins(lambda: Drawing(draw, make()), X, SGD, example=None)
        pair.assert_equal_steps(3)


class Plain(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x).mean()


def test_batches_of_other_strides() -> None:
    """Matrix products of transposed batches have other bits."""
    torch.manual_seed(0)
    values = torch.randn(64, 8), torch.randn(8, 64).t()
    pair = Twins(Plain, {"x": values[0]}, SGD, fallback="error")
    for value in (*values, *values):
        pair.batch = {"x": value}
        pair.assert_equal_steps(1)
    assert len(pair.step._cache) == 2


def test_a_conjugated_batch() -> None:
    class Imaginary(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.outputs(x.imag).mean()

    batch = {"x": torch.complex(X["x"], X["x"] + 1).conj()}
    Twins(Imaginary, batch, SGD, fallback="error").assert_equal_steps()


def test_a_loss_of_negative_zero() -> None:
    class Zero(Base):
        def forward(self, x: Tensor) -> Tensor:
            return -(self.outputs(x).mean() * 0)

    step = Twins(Zero, X, SGD, fallback="error").step
    assert repr(step(X).item()) == "-0.0"


def test_a_criterion() -> None:
    """A module with targets as the loss."""
    model = Base().linear
    torch.distributed.fsdp.fully_shard(model)
    targets = torch.arange(4)
    with torch.no_grad():
        want = nn.CrossEntropyLoss(label_smoothing=0.1)(model(X["x"]), targets)
    model.reshard()
    step = fsdp_mlir.compile(
        model,
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        fallback="error",
    )
    assert torch.equal(step(X["x"], targets), want)
    assert step(X["x"], target=targets) < want


@pytest.mark.parametrize(
    ("max_norm", "norm_type"), [(float("inf"), 2.0), (0.5, 3.0), (0.5, 0.5), (0.0, 2.0)]
)
def test_norms_that_no_plan_has(max_norm: float, norm_type: float) -> None:
    results = []
    for compiled in (False, True):
        model = torch.distributed.fsdp.fully_shard(Plain())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = None
        if compiled:
            step = fsdp_mlir.compile(
                model, optimizer=optimizer, max_norm=max_norm, norm_type=norm_type, fallback="error"
            )
        for _ in range(2):
            if step is not None:
                step(X)
                norm = step.grad_norm
                continue
            model(**X).backward()
            total = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
            norm = total.full_tensor().item()
            optimizer.step()
            optimizer.zero_grad()
        results.append((norm, model.linear.weight.full_tensor().tolist()))
    assert results[0] == results[1]
