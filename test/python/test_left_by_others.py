"""What eager code, such as an evaluation, leaves where a step leaves something too."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from leaving import SGD, Net, X, assert_alike, counted_captures
from test_left import InAList, OfTheLoss
from torch import Tensor
from twins import Twins


class Pyramid(Net):
    """As RAFT's, in a new list."""

    def between(self, x: Tensor) -> Tensor:
        self.aux = [x]
        self.aux.append(x.mean(0))
        return self.aux[0] + self.aux[1]

    def left(self) -> list[Tensor]:
        return list(self.aux)


class Read(Net):
    """What is there is read after an evaluation: the values are those of each."""

    def between(self, x: Tensor) -> Tensor:
        before = 0.0 if self.aux is None else self.aux
        self.aux = x.detach().mean(0)
        return x + before


@pytest.mark.parametrize("model", [OfTheLoss, InAList, Pyramid, Read])
@pytest.mark.parametrize("few", [False, True])
def test_what_eager_code_leaves_there(
    model: type[Net], few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no capture after each evaluation."""

    def evaluate(model: Net) -> None:
        model.eval()
        with torch.no_grad():
            model(X["x"][: 2 if few else 4])
        model.train()

    with counted_captures(monkeypatch) as captures:
        pair = Twins(model, X, SGD)
        for _ in range(5):
            pair.assert_equal_steps(1)
            pair.change(evaluate)
            assert_alike(pair)
    assert len(captures) <= 3


class Same(Net):
    """It asks whether two lists are one."""

    def __init__(self) -> None:
        super().__init__()
        self.other: Any = 0

    def forward(self, x: Tensor, otherwise: bool = False) -> Tensor:
        hidden = self.between(torch.tanh(self.a(x)))
        if otherwise:
            self.leave()
        return self.b(hidden).square().mean()

    def between(self, x: Tensor) -> Tensor:
        scale = 2.0 if self.aux is self.other else 1.0
        self.aux, self.other = [x], [x]
        return x * scale

    def leave(self) -> None:
        self.other = self.aux

    def left(self) -> list[Tensor]:
        return [*self.aux, *self.other]


class Asking(Same):
    """It asks what a tensor is, beside its values."""

    def between(self, x: Tensor) -> Tensor:
        asked = [] if self.aux is None else [self.aux._version > 0, self.aux.storage_offset() > 0]
        self.aux = x[1:].clone()
        return x * (1 + sum(asked))

    def leave(self) -> None:
        self.aux = torch.cat([self.aux, self.aux])[3:]

    def left(self) -> list[Tensor]:
        return [self.aux]


@pytest.mark.parametrize("model", [Same, Asking])
@pytest.mark.parametrize("evaluates", [False, True])
def test_what_code_sees_there(model: type[Same], evaluates: bool) -> None:
    """Beside the values of tensors."""

    def evaluate(model: Same, otherwise: bool, writes: bool) -> None:
        model.eval()
        with torch.no_grad():
            model(**X, otherwise=otherwise)
            if writes:
                model.left()[0].add_(1)
        model.train()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair = Twins(model, X, SGD, evaluation=evaluates)
        for number in (0, 0, 1, 1, 0, 2, 2, 0, 1, 3, 0, 2):
            pair.assert_equal_steps(1)
            pair.change(partial(evaluate, otherwise=number % 2 == 1, writes=number > 1))
    assert pair.step._plans._made
