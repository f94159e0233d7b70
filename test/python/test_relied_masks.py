"""Masks and flags that the step itself writes, and that decide its shapes and its ways."""

from __future__ import annotations

import warnings

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
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(6, dtype=torch.bool))


class RowOfALiteral(Net):
    """The mask is of literals until something else is written to a part of it."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        mask = torch.zeros(6, dtype=torch.bool)
        row = mask[1:3]
        row |= t[1:3] > 0
        mask[5] = True
        return self.a(x)[mask].square().mean()


class AtLeastOne(Net):
    """As vision models keep one image."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        mask = t > 2
        mask[0] |= ~torch.any(mask)
        return self.a(x)[mask].square().mean()


class CountedBefore(Net):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        mask = torch.ones_like(t, dtype=torch.bool)
        mask[t.argmax()] = False
        count = mask.sum().item()
        mask[0] = False
        return self.a(x)[mask].square().sum() / count


class OfWrittenInputs(Net):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rows = t.view(2, 3)
        rows[0].clamp_(min=1)
        mask = t > 1
        t.zero_()
        return self.a(x)[mask].square().sum()


class OneByOne(Net):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        mask = torch.zeros(6, dtype=torch.bool)
        for index in (3, 4):
            if t[index] > 2:
                mask[index] = True
            else:
                mask.logical_not_()
        mask.view(2, 3)[0].fill_(True)
        return self.a(x)[mask].square().mean()


class First(Net):
    """As layers that begin with the statistics of the first batch."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        hidden = self.a(x)
        if self.calls == 0:
            hidden = hidden * 2
        self.calls += 1
        return hidden.square().mean()


class OfTheFirst(Net):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        if not self.seen.any():
            self.seen.copy_(t > 0)
        return self.a(x)[self.seen].square().sum()


class OfStatistics(Net):
    """Which batch normalisation writes, before they are read; its schema does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=0.9)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        hidden = self.a(x)
        loss = (self.norm(hidden - 99 * x.mean()) * hidden).square().mean()
        return loss * 2 if (self.norm.running_mean > 0).sum().item() > 2 else loss


ALL = [
    RowOfALiteral,
    AtLeastOne,
    CountedBefore,
    OfWrittenInputs,
    OneByOne,
    First,
    OfTheFirst,
    OfStatistics,
]


def run(pair: Twins, count: int, microbatches: int = 1) -> list[str]:
    """The warnings of so many steps."""
    drawn = torch.Generator().manual_seed(count)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            size = 6 * microbatches
            x = torch.randn(size, 4, generator=drawn)
            t = torch.randint(0, 4, (size,), generator=drawn)
            given = [t.clone(), t.clone()]
            got = pair.step(x=x, t=given[0])
            losses = []
            for rows in zip(x.split(6), given[1].split(6), strict=True):
                loss = pair.theirs(*rows) / microbatches
                loss.backward()
                losses.append(loss.detach())
            pair.optimizers[1].step()
            pair.optimizers[1].zero_grad()
            assert torch.equal(got, sum(losses)) and torch.equal(*given)
            pair.assert_equal_state()
    return [str(each.message) for each in caught if "without a plan" in str(each.message)]


@pytest.mark.parametrize("model", ALL)
def test_steps(model: type[Net]) -> None:
    example = {"x": torch.ones(6, 4), "t": torch.tensor([0, 1, 2, 3, 2, 1])}
    assert run(Twins(model, example, SGD), 6) == []


@pytest.mark.parametrize("model", [AtLeastOne, First])
def test_several_microbatches(model: type[Net]) -> None:
    """What one writes is what the next one reads."""
    example = {"x": torch.ones(6, 4), "t": torch.tensor([0, 1, 2, 3, 2, 1])}
    pair = Twins(model, example, SGD, gradient_accumulation_steps=2)
    run(pair, 3, microbatches=2)
