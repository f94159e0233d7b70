"""FSDP2 gives a unit views of its inputs, which have other strides along dimensions of one element:
convolutions then take another way, with other bits."""

from __future__ import annotations

from typing import Any

import fsdp_mlir
import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from twins import full


class Block(nn.Module):
    def __init__(self, groups: int, *, residual: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1, groups=groups)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class Net(nn.Module):
    """Channels last, as linear layers leave them."""

    def __init__(self, groups: int = 1, *, residual: bool = False, views: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.block = Block(groups, residual=residual)
        self.views = views

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).permute(0, 3, 1, 2)
        if self.views:
            x = x.view_as(x)
        return self.last(self.block(x).permute(0, 2, 3, 1)).square().mean()


def trained(model: Any, shape: tuple[int, ...], *, ours: bool, unit: bool) -> list[Any]:
    shard = fsdp_mlir.fully_shard if ours else torch.distributed.fsdp.fully_shard
    if unit:
        shard(model.block)
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = None
    if ours:
        step = fsdp_mlir.compile(model, optimizer=optimizer, fallback="error")
    found: list[Any] = []
    for number in range(3):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        if step is not None:
            found.append(step(x).item())
            continue
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return [*found, *(full(param).tolist() for param in model.parameters())]


SHAPES = [(1, 8, 8, 16), (2, 8, 8, 16), (2, 1, 8, 16), (1, 1, 8, 16)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"groups": 16}, {"residual": True}, {"views": True}],
    ids=lambda options: next(iter(options), "plain"),
)
@pytest.mark.parametrize("unit", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_unit(shape: tuple[int, ...], options: dict[str, Any], unit: bool) -> None:
    got = trained(Net(**options), shape, ours=True, unit=unit)
    assert got == trained(Net(**options), shape, ours=False, unit=unit)
