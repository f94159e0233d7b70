"""Capture sees state that a model's code reads outside of the model."""

from __future__ import annotations

import functools
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsdp_mlir
import numpy as np
import pytest
import stateful
import torch
from fsdp_mlir.modules import memos, outside
from fsdp_mlir.modules.names import names_in, passes_on
from fsdp_mlir.modules.place import Place, is_part_of
from test_proof import Net, captured
from torch import Tensor, nn


class HelperCounter(Net):
    def step(self, x: Tensor) -> Tensor:
        return stateful.counted(x)


class ClosureCounter(Net):
    def step(self, x: Tensor) -> Tensor:
        return stateful.NESTED(x)


class FunctionCounter(Net):
    def step(self, x: Tensor) -> Tensor:
        return stateful.tallied(x)


class PartialCounter(Net):
    def step(self, x: Tensor) -> Tensor:
        return stateful.LISTED(x)


class ObjectCounter(Net):
    def step(self, x: Tensor) -> Tensor:
        return stateful.TALLY(x)


class HelperCache(Net):
    def step(self, x: Tensor) -> Tensor:
        return stateful.masked(x)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (HelperCounter, "attribute 'stateful.CALLS' changes in each step"),
        (ClosureCounter, "attribute 'nested.<locals>.count.calls' changes in each step"),
        (FunctionCounter, "attribute 'tallied.calls' changes in each step"),
        (PartialCounter, r"attribute 'stateful.LISTED.args\[0\]\[0\]' changes in each step"),
        (ObjectCounter, "attribute 'stateful.TALLY.calls' changes in each step"),
    ],
)
def test_refused(model: type[nn.Module], expected: str, tmp_path: Path) -> None:
    with pytest.raises(fsdp_mlir.CaptureError, match=expected):
        captured(model(), tmp_path)
    assert not any(stateful.counts())


def test_a_cache_is_captured(tmp_path: Path) -> None:
    assert captured(HelperCache(), tmp_path).checked
    assert not stateful.MASKS


def test_loss_that_counts_is_refused(tmp_path: Path) -> None:
    """What a loss function keeps in Python is as lost as what a module keeps."""

    class Warmed:
        def __init__(self) -> None:
            self.steps = 0

        def __call__(self, output: Tensor) -> Tensor:
            self.steps += 1
            return output * (0.1 if self.steps > 100 else 1.0)

    steps = [0]

    def closed(output: Tensor) -> Tensor:
        steps[0] += 1
        return output * (0.1 if steps[0] > 100 else 1.0)

    for loss, name in ((Warmed(), r"\(loss\).steps"), (closed, r"\S*.closed.steps\[0\]")):
        with pytest.raises(fsdp_mlir.CaptureError, match=f"attribute '{name}' changes in each"):
            captured(Net(), tmp_path, loss=loss)
    assert steps == [0]


class _Matched:
    __match_args__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


def test_patterns_read_attributes_whose_names_no_code_has() -> None:
    matched = _Matched()

    def by_name(model: nn.Module, x: Tensor) -> Tensor:
        match matched:
            case _Matched(gain=gain):
                return model(x) * gain

    def by_position(model: nn.Module, x: Tensor) -> Tensor:
        match matched:
            case _Matched(gain):
                return model(x) * gain

    for loss in (by_name, by_position):
        assert outside.attributes_read(nn.Linear(2, 2), loss) is None


def test_parts_of_a_librarys_object() -> None:
    """A nested configuration is one; what leads into the library is not."""
    one, other = pytest.mark.skip, pytest.mark.xfail
    assert is_part_of(type(one), other)
    assert not is_part_of(type(one), one.mark)
    assert not is_part_of(type(one), Path())
    assert is_part_of(type(one), SimpleNamespace())
    assert is_part_of(Namespace, _Matched())


def test_methods_that_are_hooks_of_a_module_beside_the_model() -> None:
    """Each is followed once: the search for what the code reaches ends."""

    class Watcher:
        scale = torch.ones(())

        def watch(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output * self.scale

    teacher, watcher = nn.Linear(2, 2), Watcher()
    teacher.register_forward_hook(watcher.watch)
    watcher.scale = torch.zeros(())
    found = outside.reached(nn.Linear(2, 2), lambda model, x: model(x) - teacher(x))
    assert [module for _, module in found.modules] == [teacher]
    assert any(place.holds(watcher.scale) for place in found.places)


def test_numbers_that_are_made_at_each_look() -> None:
    """Such as a part of NumPy's functions, which is read-only. A zero's sign counts."""
    place = Place(np.random.seed, "__vectorcalloffset__", "seed.__vectorcalloffset__")
    before = place.value()
    assert before is not place.value() and place.holds(before)
    zero = Place({"x": -0.0}, "x", "x")
    assert zero.holds(-0.0) and not zero.holds(0.0) and not zero.holds(0)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: getattr(x.part, "gain", x.other * 2), {"part", "gain", "other"}),
        (lambda x: getattr(max(x, 2), "gain", min(1, 2)), {"max", "min", "gain"}),
        (
            lambda x: hasattr(x, "gain") and getattr(getattr(x, "part", 0), "of", 0),
            {"gain", "part", "of"},
        ),
    ],
)
def test_constant_names_of_attributes(function: Any, expected: set[str]) -> None:
    assert names_in(function.__code__) == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda x, name: getattr(x, name),
        lambda x, name: getattr(x, "of_" + name, 1),
        lambda x, name: getattr(x, "of_a" if name else "of_b"),
        lambda x, name: getattr(x, f"of_{name}"),
        lambda x, name: getattr(x, "OF".lower(), 1),
        lambda x, name: getattr(*x),
        lambda x, name: hasattr(x, name),
        lambda x, name: map(getattr, x, name),
    ],
)
def test_computed_names_of_attributes(function: Any) -> None:
    assert "__getattribute__" in names_in(function.__code__)


def test_methods_that_pass_their_object_on() -> None:
    class Owner:
        def names(self) -> Any:
            self.part.of = [self.item for _ in self.items]
            return lambda: self.get(self.item) + super().get()

        def gives(self) -> Any:
            return len(self)

        def keeps(self) -> Any:
            same = self
            return same.item

        def gives_later(self) -> Any:
            return lambda: len(self)

        def has_no_name_for_it(*all: Any) -> Any:
            return all

    passing = [
        name for name, value in vars(Owner).items() if callable(value) and passes_on(value.__code__)
    ]
    assert passing == ["gives", "keeps", "gives_later", "has_no_name_for_it"]


@pytest.mark.parametrize(
    "options", [{}, {"maxsize": None}, {"typed": True}, {"maxsize": 3}, {"maxsize": 0}]
)
def test_a_memo_is_put_back(options: dict[str, Any]) -> None:
    added: list[Any] = [1]

    @functools.lru_cache(**options)
    def memo(*args: Any, **kwargs: Any) -> list[Any]:
        return [args, kwargs, *added]

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        *(((), {}), ((2,), {}), ((2.0,), {}), (((1, 2),), {}), (("x", "y"), {})),
        *((("x",), {"a": 4, "b": 2}), ((1, 2), {"c": 3.0}), ((2,), {})),
    ]
    for args, kwargs in calls:
        memo(*args, **kwargs)
    before = memos.held(memo)
    assert before is not None and len(before) == memo.cache_info().currsize
    added.append(2)
    memo(2)
    memo("new")
    memos.hold(memo, before)
    assert memos.is_same(memos.held(memo) or {}, before)
    found = [memo(*args, **kwargs) for args, kwargs in reversed(calls[-len(before) :])]
    assert not before or all(any(each is x for x in before.values()) for each in found[:3])
    if before and not options.get("typed"):
        memos.put(memo, (7, 8), "given")
        assert memo(7, 8) == memos.get(memo, (7, 8)) == "given"
    assert memo("later") == [("later",), {}, 1, 2]


def test_no_memo_of_an_object_that_is_called(tmp_path: Path) -> None:
    memo = functools.lru_cache(functools.partial(torch.add, 1))
    assert memos.held(memo) is None

    class Calling(Net):
        def step(self, x: Tensor) -> Tensor:
            return x * memo(2)

    with pytest.raises(fsdp_mlir.CaptureError, match="which a capture cannot put back"):
        captured(Calling(), tmp_path)


def test_a_capture_leaves_memos_and_objects_as_they_were(tmp_path: Path) -> None:
    held = SimpleNamespace()

    @functools.lru_cache
    def scale(of: int) -> Tensor:
        return torch.full((1,), float(of))

    def note(owner: Any, x: Tensor) -> None:
        owner.seen = True

    class Noting(Net):
        def step(self, x: Tensor) -> Tensor:
            note(held, x)
            return x * scale(1) * scale(2)

    known = scale(1)
    assert captured(Noting(), tmp_path).checked
    assert memos.held(scale) == {1: known} and scale(1) is known
    assert vars(held) == {}
