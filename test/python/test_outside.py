"""Capture sees state that a model's code reads outside of the model."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import fsdp_mlir
import numpy as np
import pytest
import stateful
from fsdp_mlir.modules import outside
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


def test_numbers_that_are_made_at_each_look() -> None:
    """Such as a part of NumPy's functions, which is read-only. A zero's sign counts."""
    place = Place(np.random.seed, "__vectorcalloffset__", "seed.__vectorcalloffset__")
    before = place.value()
    assert before is not place.value() and place.holds(before)
    zero = Place({"x": -0.0}, "x", "x")
    assert zero.holds(-0.0) and not zero.holds(0.0) and not zero.holds(0)
