"""What forward in eval mode does to the model, or cannot do in a plan: then evaluations run as
FSDP2 does, between compiled steps."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import Twins

SGD = (torch.optim.SGD, {"lr": 0.1})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)
        self.seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.a(x)).square().mean()

    def of(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class Flag(Net):
    def of(self, hidden: Tensor) -> Tensor:
        if not self.training:
            self.seen = True
        return hidden * 2 if self.seen else hidden


class Mode(Net):
    """Which is after both what it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = "eval"

    def of(self, hidden: Tensor) -> Tensor:
        self.seen = "train" if self.training else "eval"
        return hidden


class Last(Net):
    def of(self, hidden: Tensor) -> Tensor:
        self.seen = hidden
        return hidden


class Table(Net):
    """Of evaluations alone."""

    def of(self, hidden: Tensor) -> Tensor:
        if not self.training:
            self.seen = [*(self.seen or []), hidden.mean()]
        return hidden


class ByData(Net):
    def of(self, hidden: Tensor) -> Tensor:
        return hidden if self.training else hidden[hidden > 0]


class Drawing(Net):
    def of(self, hidden: Tensor) -> Tensor:
        return hidden if self.training else hidden * random.random()


class Counting(Net):
    """Which a compiled evaluation does, as it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def of(self, hidden: Tensor) -> Tensor:
        self.seen += 1
        return hidden * self.seen


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        loss: Tensor = model(x)
    model.train()
    return loss


@pytest.mark.parametrize("model", [Flag, Mode, Last, Table, ByData, Drawing, Counting])
def test_evaluations(model: type[Net]) -> None:
    x = torch.linspace(-1, 1, 24).reshape(6, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair = Twins(model, {"x": x}, SGD, evaluation=True)
        for number in range(6):
            pair.batch = {"x": x * (number + 1)}
            pair.assert_equal_steps(1)
            if number % 3 == 1:
                random.seed(number)
                got = pair.step.evaluate(x)
                random.seed(number)
                assert torch.equal(got, evaluated(pair.theirs, x))
            assert plain(pair.ours.seen) == plain(pair.theirs.seen)
    lines = [str(each.message) for each in caught]
    assert not any("without a plan" in line for line in lines), lines
    told = [line for line in lines if line.startswith("evaluations run as FSDP2 does: ")]
    assert bool(told) == (model not in (Drawing, Counting)), lines
    assert pair.step._plans._made


def plain(value: Any) -> Any:
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value.tolist() if isinstance(value, Tensor) else value
