"""Buffers that forward assigns: a step changes them in place, in a tensor that is new each time."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from fsdp_mlir import capture
from fsdp_mlir.support.errors import CaptureError
from leaving import SGD, Averaging, Net, X, assert_alike, assert_steps
from torch import Tensor
from twins import Twins


def test_assigned_buffers() -> None:
    pair = Twins(Averaging, X, SGD, fallback="error")
    for number in range(1, 4):
        before = pair.ours.mean, pair.theirs.mean
        pair.assert_equal_steps(1)
        assert_alike(pair)
        assert torch.equal(*before)  # who holds the tensor from before keeps its values
        assert int(pair.ours.steps) == number
    state = {name: tensor.clone() for name, tensor in pair.ours.state_dict().items()}
    assert torch.equal(state["mean"], pair.theirs.mean)


class Sharing(Averaging):
    """Which another module still has."""

    def __init__(self) -> None:
        super().__init__()
        self.a.register_buffer("mean", self.mean)


class Attached(Averaging):
    """The next backward reaches this one's."""

    def between(self, x: Tensor) -> Tensor:
        self.mean = x.mean(0)
        return x


class Reshaped(Averaging):
    def between(self, x: Tensor) -> Tensor:
        self.mean = x.detach().reshape(-1)
        return x


class Table(Averaging):
    """It grows with the batches."""

    def between(self, x: Tensor) -> Tensor:
        if self.mean.dim() == 1 or len(self.mean) < len(x):
            self.mean = torch.linspace(0, 1, len(x)).unsqueeze(1).expand(-1, 8).clone()
        return x + self.mean[: len(x)]


@pytest.mark.parametrize(("model", "sizes"), [(Reshaped, [4]), (Table, [4, 3, 6, 4])])
def test_buffers_that_the_first_step_makes(model: type[Net], sizes: list[int]) -> None:
    """FSDP2 makes that step."""
    pair = Twins(model, X, SGD)
    for rows in sizes:
        pair.batch = {"x": torch.linspace(-1, 1, 8 * rows).reshape(rows, 8)}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pair.assert_equal_steps(3)
        assert torch.equal(pair.ours.mean, pair.theirs.mean)
    assert pair.step._plans._made


@pytest.mark.parametrize("model", [Sharing, Attached])
def test_buffers_that_are_not_assigned_in_place(model: type[Net], tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="'mean' was assigned in forward"):
        capture(model(), kwargs=X, path=tmp_path / "model.pt")
    with pytest.warns(UserWarning, match="'mean' was assigned in forward"):
        pair = Twins(model, X, SGD)
    pair.assert_equal_steps(2)
    assert torch.equal(pair.ours.mean, pair.theirs.mean)


class Rotated(Averaging):
    """Its buffers change places."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.ones(8))

    def between(self, x: Tensor) -> Tensor:
        self.last, self.mean = self.mean, self.last
        return x * self.mean + self.last

    def left(self) -> list[Tensor]:
        return [self.mean, self.last]


def test_buffers_that_change_places() -> None:
    pair = Twins(Rotated, X, SGD, fallback="error")
    assert_steps(pair)
