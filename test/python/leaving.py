"""A model that leaves something behind, and its twin, compared as a loop reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fsdp_mlir.frontdoor.planning import Recipe
from torch import Tensor, nn
from twins import Twins

SGD = (torch.optim.SGD, {"lr": 0.1})
X = {"x": torch.linspace(-1, 1, 32).reshape(4, 8)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.aux: Any = None
        self.items: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.between(torch.tanh(self.a(x)))
        return self.b(hidden).square().mean()

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def left(self) -> list[Tensor]:
        """What a loop reads."""
        return [self.aux]


def assert_steps(pair: Twins, count: int = 3) -> None:
    for _ in range(count):
        pair.assert_equal_steps(1)
        assert_alike(pair)


def assert_alike(pair: Twins) -> None:
    got, want = pair.ours.left(), pair.theirs.left()
    assert len(got) == len(want) > 0
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


@contextmanager
def counted_captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recipe]]:
    captures: list[Recipe] = []
    original = Recipe.capture

    def counted(self: Recipe, *args: Any) -> Any:
        captures.append(self)
        return original(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Recipe, "capture", counted)
        yield captures


class Averaging(Net):
    """It assigns its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def between(self, x: Tensor) -> Tensor:
        before = (x * self.mean).sum()
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.steps = self.steps + 1
        return (x - self.mean) * before

    def left(self) -> list[Tensor]:
        return [self.mean, self.steps]
