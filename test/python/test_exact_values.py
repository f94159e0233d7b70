"""Values that are equal, or look alike, and are not the same: a kept plan has another name, and a
compiled step is not taken, wherever they lie."""

from __future__ import annotations

import array
import collections
import ctypes
import enum
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp_mlir.frontdoor.identity import identity
from fsdp_mlir.frontdoor.telling import Untold
from fsdp_mlir.frontdoor.unchanged import Unchanged
from torch import Tensor, nn

HELD: Any = None
NAMED = 2.0
LONG = "model.layers.0.self_attention.query_projection."


class Node(dict):
    """As those of configurations."""

    __getattr__ = dict.__getitem__


class Items(list):
    """Shows nothing of what it holds, and has methods of its own."""

    def __iter__(self) -> Any:
        return iter(())

    def scale(self) -> float:
        return NAMED


class Mode(enum.Enum):
    A = 2.0


class Meta(type):
    factor = 2.0


class OfMeta(metaclass=Meta):
    pass


class Key:
    def __init__(self, value: float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Key"


Pair = collections.namedtuple("Pair", "first second")


def deep(value: float, depth: int) -> Any:
    return {"value": value} if depth == 0 else {"inner": deep(value, depth - 1)}


def at_depth(held: Any, depth: int) -> Any:
    for _ in range(depth):
        held = held["inner"]
    return held


def put(*path: Any) -> Callable[[Any], None]:
    """Replaces an item of an item by the last one."""
    *owners, key, value = path

    def change(held: Any) -> None:
        for each in owners:
            held = held[each]
        held[key] = value

    return change


def reorder(held: Any) -> None:
    key = next(iter(held))
    held[key] = held.pop(key)


# What is held, and a change in place.
IN_PLACE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "dict_subclass": (lambda: Node(a=2.0), put("a", 3.0)),
    "dict_subclass_deep": (lambda: Node(a=Node(b=2.0)), put("a", "b", 3.0)),
    "list_subclass": (lambda: Items([2.0]), put(0, 3.0)),
    "list_subclass_deep": (lambda: {"a": Items([2.0])}, put("a", 0, 3.0)),
    "attribute_of_a_list": (lambda: Items([2.0]), lambda held: setattr(held, "by", 3.0)),
    "named_tuple": (lambda: Pair(2.0, [2.0]), put(1, 0, 3.0)),
    "order": (lambda: {"a": 2.0, "b": 3.0}, reorder),
    "order_deep": (lambda: [{"a": 2.0, "b": 3.0}], lambda held: reorder(held[0])),
    "ordered_dict": (
        lambda: collections.OrderedDict(a=2.0, b=3.0),
        lambda held: held.move_to_end("a"),
    ),
    "long_keys": (lambda: {LONG + "a": 2.0, LONG + "b": 3.0}, put(LONG + "a", 3.0)),
    "long_keys_deep": (lambda: {LONG + "a": [2.0], LONG + "b": [3.0]}, put(LONG + "a", 0, 3.0)),
    "long_members": (lambda: {LONG + "a", LONG + "b"}, lambda held: held.discard(LONG + "a")),
    "keys_of_one_text": (
        lambda: {Key(1.0): 2.0, Key(2.0): 3.0},
        lambda held: held.update({next(iter(held)): 3.0}),
    ),
    "what_a_key_holds": (
        lambda: {Key(1.0): 2.0},
        lambda held: setattr(next(iter(held)), "value", 2.0),
    ),
    "bool": (lambda: [1, 2], put(0, True)),
    "float": (lambda: {"a": 3}, put("a", 3.0)),
    "zero": (lambda: {"a": 0.0}, put("a", -0.0)),
    "bool_deep": (lambda: [[1, 2]], put(0, 0, True)),
    "bool_in_a_set": (lambda: {1}, lambda held: (held.clear(), held.add(True))),
    "deep": (lambda: deep(2.0, 8), lambda held: at_depth(held, 8).update(value=3.0)),
    "long": (lambda: [2.0] * 1500, put(7, 3.0)),
    "bytearray": (lambda: bytearray([2]), put(0, 3)),
    "array": (lambda: array.array("f", [2.0]), put(0, 3.0)),
    "memoryview": (lambda: memoryview(bytearray([2])), put(0, 3)),
    "ctypes": (lambda: ctypes.c_float(2.0), lambda held: setattr(held, "value", 3.0)),
}


class Holding(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.held


class Global(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * HELD


def assert_seen(model: nn.Module, change: Callable[[], Any], *, is_kept: bool = True) -> None:
    """Also that a plan has the same name as long as nothing changes."""
    before = identity(model, None, {}) if is_kept else ""
    unchanged = Unchanged(model, None)
    assert unchanged.holds()
    if is_kept:
        assert identity(model, None, {}) == before
    change()
    assert not unchanged.holds() and not unchanged.holds_what_matters(training=True)
    if is_kept:
        assert identity(model, None, {}) != before
    unchanged.renew()
    assert unchanged.holds()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("is_global", [False, True], ids=["attribute", "global"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_change_in_place(name: str, is_global: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make, change = IN_PLACE[name]
    held = make()
    monkeypatch.setattr(sys.modules[__name__], "HELD", held)
    assert_seen(Global() if is_global else Holding(held), lambda: change(held))


@pytest.mark.parametrize("is_global", [False, True], ids=["attribute", "global"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (1, True),
        (3, 3.0),
        (0.0, -0.0),
        ((1, 2), (True, 2)),
        ([0.0], [-0.0]),
        ({"a": 1}, {"a": True}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ((1, 2), Pair(1, 2)),
        ({1}, frozenset({1})),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
    ],
    ids=str,
)
def test_an_equal_value(
    old: Any, new: Any, is_global: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "HELD", old)
    model = Global() if is_global else Holding(old)
    owner, name = (here, "HELD") if is_global else (model, "held")
    assert_seen(model, lambda: monkeypatch.setattr(owner, name, new))


def test_an_equal_tensor() -> None:
    """A later write to the new one is not one to the old one."""
    model = Holding(torch.tensor(2.0))
    unchanged = Unchanged(model, None)
    model.held = torch.tensor(2.0)
    assert not unchanged.holds()


def test_modules_in_another_order() -> None:
    model = Holding(nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Tanh()}))
    assert_seen(model, lambda: reorder(model.held._modules))


def test_what_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made anew in each step, as loops do."""
    for old, new in ((float("1.5"), float("1.5")), ([1.5, "a"], [1.5, "a"]), ({"a": 1}, {"a": 1})):
        model = Holding(old)
        unchanged = Unchanged(model, None)
        model.held = new
        assert unchanged.holds()


def scaled(scale: Callable[[Tensor], Any]) -> nn.Module:
    model = nn.Linear(4, 4)
    model.forward = lambda x: x * scale(x)  # type: ignore[method-assign]
    return model


@functools.singledispatch
def dispatched(number: float) -> float:
    return number


def test_what_code_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    here = sys.modules[__name__]
    model = scaled(lambda x: Mode.A.value)
    assert_seen(model, lambda: monkeypatch.setattr(Mode.A, "_value_", 3.0))
    assert_seen(scaled(lambda x: OfMeta.factor), lambda: monkeypatch.setattr(Meta, "factor", 3.0))
    items = Items()
    model = scaled(lambda x: items.scale())
    assert_seen(model, lambda: monkeypatch.setattr(here, "NAMED", 3.0))
    model = scaled(lambda x: dispatched(3))
    assert_seen(model, lambda: dispatched.register(int, lambda number: number * 2))


# Names that the code does not have.
READ: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "globals": (lambda x: globals()["NAMED"], "globals"),
    "eval": (lambda x: eval("NAMED"), "eval"),
    "import_module": (
        lambda x: importlib.import_module("test_exact_values").NAMED,
        "import_module",
    ),
    "sys.modules": (lambda x: sys.modules["test_exact_values"].NAMED, "sys.modules"),
    "attribute": (lambda x: READ["eval"][0].__globals__["NAMED"], "__globals__"),
}


@pytest.mark.parametrize("name", READ)
def test_names_that_code_makes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is not kept; in a compiled step those are seen that are in the code as they are."""
    read, by = READ[name]
    model = scaled(read)
    with pytest.raises(Untold, match=f"may read any name by '{by}'"):
        identity(model, None, {})
    here = sys.modules[__name__]
    assert_seen(model, lambda: monkeypatch.setattr(here, "NAMED", 3.0), is_kept=False)


def test_a_method_with_such_a_name() -> None:
    class Evaluated(Holding):
        def forward(self, x: Tensor) -> Tensor:
            self.linear.eval()
            return self.linear(x) * len(list(self.modules()))

    assert identity(Evaluated(None), None, {})


def test_a_pointer() -> None:
    number = ctypes.c_float(2.0)
    pointer = ctypes.pointer(number)
    with pytest.raises(Untold, match="is a pointer"):
        identity(Holding(pointer), None, {})
