"""Objects that lead to many others, or lie behind a view: a step sees what changes in them."""

from __future__ import annotations

import gc
import types
from collections import OrderedDict
from typing import Any

import fsdp_mlir
import numpy as np
import pytest
import torch
from fsdp_mlir.modules import outside, search
from test_held_state import SGD, Holding, X, assert_changes_are_seen
from torch import Tensor, nn
from twins import Twins


class Node:
    def __init__(self, gain: float, *nodes: Node) -> None:
        self.gain, self.nodes = gain, [*nodes]


def behind(view: Any) -> Any:
    return gc.get_referents(view)[0]


# What makes an attribute, what forward reads of it, and how it is changed.
HELD: dict[str, tuple[Any, Any, Any]] = {
    "a read-only mapping": (
        lambda: types.MappingProxyType({"a": 1.0}),
        lambda held: held["a"],
        lambda held, value: behind(held).update(a=value),
    ),
    "one in a list": (
        lambda: [types.MappingProxyType({"a": [1.0]})],
        lambda held: held[0]["a"][0],
        lambda held, value: held[0]["a"].__setitem__(0, value),
    ),
    "the values of a dict": (
        lambda: {"a": 1.0}.values(),
        lambda held: next(iter(held)),
        lambda held, value: behind(held).update(a=value),
    ),
    "the keys of a dict": (
        lambda: OrderedDict({1.0: "a"}).keys(),
        lambda held: next(iter(held)),
        lambda held, value: (behind(held).clear(), behind(held).update({value: "a"})),
    ),
    "an object in an array": (
        lambda: np.array([Node(1.0)], dtype=object),
        lambda held: held[0].gain,
        lambda held, value: setattr(held[0], "gain", value),
    ),
    "the last of a tree": (
        lambda: Node(1.0, *(Node(1.0, *(Node(1.0) for _ in range(8))) for _ in range(8))),
        lambda held: held.nodes[-1].nodes[-1].gain,
        lambda held, value: setattr(held.nodes[-1].nodes[-1], "gain", value),
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_a_change_is_seen(name: str) -> None:
    assert_changes_are_seen(*HELD[name])


class TwoNames(Holding):
    """Nobody reads the first name of what it holds, which a method writes."""

    def __init__(self, gains: dict[str, list[Any]], whole: bool) -> None:
        super().__init__(gains, None)
        self.keep({"gains": gains} if whole else gains)
        self.gains = gains
        del self.held

    def keep(self, spare: Any) -> None:
        self.spare = spare

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.gains["a"][0][0]).square().mean()


@pytest.mark.parametrize("whole", [True, False], ids=["in_another", "the_same"])
def test_what_also_has_a_name_that_nobody_reads(whole: bool) -> None:
    pair = Twins(lambda: TwoNames({"a": [[1.0]]}, whole), X, SGD, fallback="error")
    pair.assert_equal_steps(1)
    pair.change(lambda model: model.gains["a"][0].__setitem__(0, 2.0))
    pair.assert_equal_steps(1)


def test_a_search_without_an_end_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_MOST_ROUNDS", 0)
    model = fsdp_mlir.fully_shard(Holding(1.0, lambda held: held))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fsdp_mlir.compile(model, optimizer=optimizer)
    with pytest.warns(UserWarning, match="reaches other objects at each look, without an end"):
        assert step(X).item() > 0


def test_what_a_class_is_views_as_well() -> None:
    """Nothing but Python itself writes in the dict of a class."""

    class Settings:
        gain = 1.0

    pair = Twins(lambda: Holding(vars(Settings), lambda held: held["gain"]), X, SGD)
    pair.assert_equal_steps()


def test_an_operator_that_a_class_gets_later() -> None:
    class Gain:
        def value(self) -> float:
            return 2.0 if self else 1.0

    pair = Twins(lambda: Holding(Gain(), lambda held: held.value()), X, SGD, fallback="error")
    pair.assert_equal_steps(1)
    Gain.__bool__ = lambda self: False  # type: ignore[attr-defined]
    pair.assert_equal_steps(1)
    del Gain.__bool__  # type: ignore[attr-defined]
    pair.assert_equal_steps(1)


def test_a_call_that_a_class_gets_later() -> None:
    class Linear(nn.Linear):
        pass

    def make() -> nn.Module:
        model = Holding(1.0, lambda held: held)
        model.linear = Linear(8, 8)
        return model

    pair = Twins(make, X, SGD, fallback="error")
    pair.assert_equal_steps(1)
    Linear.__call__ = lambda self, x: 2 * nn.Linear.__call__(self, x)  # type: ignore[method-assign]
    pair.assert_equal_steps(1)


def test_a_long_chain_of_objects() -> None:
    first = Node(2.0)
    for _ in range(1100):
        first = Node(1.0, first)
    model = fsdp_mlir.fully_shard(Holding(first, lambda held: held.gain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fsdp_mlir.compile(model, optimizer=optimizer, example=X, fallback="error")
    before = step(X).item()
    first.gain = 0.0
    assert before > 0 and step(X).item() == 0


def test_an_object_whose_attributes_are_made_at_each_look() -> None:
    class Proxy:
        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            return {"gain": 1.0}

        def watch(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output * vars(self)["gain"]

    teacher = nn.Linear(2, 2)
    teacher.register_forward_hook(Proxy().watch)
    found = outside.reached(nn.Linear(2, 2), lambda model, x: model(x) - teacher(x))
    assert [module for _, module in found.modules] == [teacher]
