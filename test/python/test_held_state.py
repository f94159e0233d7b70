"""What models keep in Python, where a capture must leave nothing and a step must see changes."""

from __future__ import annotations

import collections
import contextvars
import functools
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
from twins import Twins

SGD = (torch.optim.SGD, {"lr": 0.1})
X = {"x": torch.linspace(-1, 1, 32).reshape(4, 8)}
FACTOR: contextvars.ContextVar[float] = contextvars.ContextVar("FACTOR", default=1.0)


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


@pytest.mark.parametrize("name", HELD)
def test_a_change_inside_is_seen(name: str) -> None:
    make, get, put = HELD[name]
    pair = Twins(lambda: Holding(make(), get), X, SGD, fallback="error")
    pair.assert_equal_steps(1)
    for value in (2.0, 3.0):
        pair.change(lambda model, value=value: put(model.held, value))
        pair.assert_equal_steps(1)
    FACTOR.set(1.0)


class OfEnvironment(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x).mean() * float(os.environ["FACTOR"])


def test_a_change_of_the_environment_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FACTOR", "1.0")
    pair = Twins(OfEnvironment, X, SGD, fallback="error")
    pair.assert_equal_steps(1)
    monkeypatch.setenv("FACTOR", "2.0")
    pair.assert_equal_steps(1)


def triangle() -> Tensor:
    return torch.ones(4, 4).tril()


@functools.lru_cache(None)
def memo() -> Tensor:
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
        return loss * 2 if self.asks and loss.item() > 1e9 else loss


@pytest.fixture
def _nothing_kept() -> Iterator[None]:
    yield
    memo.cache_clear()
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
    values = torch.randn(64, 8), torch.randn(8, 64).t(), torch.randn(64, 16)[:, ::2]
    pair = Twins(Plain, {"x": values[0]}, SGD, fallback="error")
    for value in (*values, *values):
        pair.batch = {"x": value}
        pair.assert_equal_steps(1)
    assert len(pair.step._cache) == 2  # a plan has no gaps in its inputs


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
