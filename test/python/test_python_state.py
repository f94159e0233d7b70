"""Whether what a value holds has changed is found out at a glance where nothing has."""

from __future__ import annotations

import collections
import contextvars
import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_mlir.modules.python_state import PythonState


class Plain:
    pass


class Other:
    pass


class Slotted:
    __slots__ = ("held", "value")

    def __init__(self) -> None:
        self.value = 1.0
        self.held: list[int] = []


class Named(dict):
    """With attributes beside its items."""


class Color(enum.Enum):
    RED = 1


def made() -> dict[str, Any]:
    named = Named(a=[1])
    named.extra = [2]
    return {
        "list": [1, [2.0, "x"], (3, [4])],
        "dict": {"a": {"b": [1]}, "c": 2},
        "order": collections.OrderedDict(a=1, b=[2]),
        "set": {1, 2},
        "deque": collections.deque([1, [2]], maxlen=3),
        "object": SimpleNamespace(x=1, inner=SimpleNamespace(y=[1])),
        "empty": Plain(),
        "named": named,
        "color": Color.RED,
        "tensor": [torch.ones(2)],
        "slots": Slotted(),
    }


def assign(value: Any, name: str, other: Any) -> None:
    setattr(value, name, other)


CHANGES: list[tuple[str, Callable[[Any], Any]]] = [
    ("list", lambda v: v[1].__setitem__(0, 3.0)),
    ("list", lambda v: v.append(1)),
    ("list", lambda v: v[2][1].pop()),
    ("list", lambda v: v.__setitem__(0, True)),
    ("list", lambda v: v.__setitem__(2, (3, [5]))),
    ("dict", lambda v: v["a"]["b"].append(2)),
    ("dict", lambda v: v.update(d=1)),
    ("dict", lambda v: v.update(c=v.pop("c") + 1)),
    ("dict", lambda v: v.update(a=v.pop("a"))),  # in another order
    ("order", lambda v: v.move_to_end("a")),
    ("order", lambda v: v["b"].append(1)),
    ("set", lambda v: v.add(3)),
    ("set", lambda v: (v.remove(1), v.add(1.5))),
    ("deque", lambda v: v.rotate()),
    ("deque", lambda v: v[1].append(3)),
    ("object", lambda v: assign(v, "x", 2)),
    ("object", lambda v: assign(v, "z", 2)),
    ("object", lambda v: v.inner.y.append(2)),
    ("empty", lambda v: assign(v, "x", 1)),
    ("empty", lambda v: assign(v, "__class__", Other)),
    ("empty", lambda v: assign(v, "__dict__", {"x": 1})),
    ("named", lambda v: assign(v, "__dict__", {"extra": [2, 3]})),
    ("named", lambda v: v.extra.append(1)),
    ("named", lambda v: assign(v, "more", 1)),
    ("named", lambda v: v["a"].append(1)),
    ("slots", lambda v: assign(v, "value", 2.0)),
    ("slots", lambda v: v.held.append(1)),
    ("tensor", lambda v: v.__setitem__(0, torch.ones(2))),
]


def state(value: Any) -> PythonState:
    found = PythonState.inside("value", value, 2000, whole=True)
    assert found is not None
    return found


@pytest.mark.parametrize("name", made())
def test_what_is_unchanged(name: str) -> None:
    value = made()[name]
    assert state(value).surely_is_of(value)


@pytest.mark.parametrize("change", range(len(CHANGES)))
def test_what_has_changed(change: int) -> None:
    name, make = CHANGES[change]
    value = made()[name]
    before = state(value)
    make(value)
    assert not before.surely_is_of(value)
    assert not state(value).is_as(before)


def test_another_object_is_looked_into() -> None:
    value = made()["dict"]
    before = state(value)
    other = made()["dict"]
    assert not before.surely_is_of(other)
    assert state(other).is_as(before)


@pytest.mark.parametrize(
    "value",
    [
        [np.zeros(3)],
        [bytearray(b"abc")],
        [contextvars.ContextVar("V", default=1)],
    ],
    ids=lambda value: type(value[0]).__name__,
)
def test_what_a_glance_does_not_tell(value: Any) -> None:
    """The contents of memory, and what a context holds, are compared each time."""
    assert not state(value).surely_is_of(value)


def table() -> dict[str, Any]:
    return {
        "ids": {f"token {i}": i for i in range(2000)},
        "names": [f"name {i}" for i in range(2000)],
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held["ids"].update({"token 7": 8}),
        lambda held: held["ids"].update({"token 1": True}),
        lambda held: held["ids"].update({"more": 0}),
        lambda held: held["ids"].update({"token 0": held["ids"].pop("token 0")}),
        lambda held: held["names"].append("name"),
        lambda held: held["names"].reverse(),
        lambda held: held["names"].__setitem__(3, [3]),
    ],
)
def test_a_long_table_is_compared_and_put_back_as_one(change: Callable[[Any], Any]) -> None:
    net = torch.nn.Linear(1, 1)
    vars(net).update(table())
    before = PythonState.of(net)
    assert len(before.leaves) < 1000
    assert before.is_as(PythonState.of(net))
    change(vars(net))
    changed = before.changes(PythonState.of(net))
    assert {path.partition("[")[0] for path in changed} in ({"ids"}, {"names"})
    before.restore()
    assert before.is_as(PythonState.of(net))
    kept = {name: getattr(net, name) for name in table()}
    assert repr(kept) == repr(table())
