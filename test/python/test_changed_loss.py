"""What the loss itself holds, changed after compile: the next step has it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import fsdp_mlir
import pytest
import torch
from torch import Tensor, nn

X, Y = torch.linspace(-1, 1, 32).reshape(4, 8), torch.tensor([0, 1, 2, 3])


class Inner(nn.Module):
    """A criterion whose buffers are those of a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.CrossEntropyLoss(weight=torch.ones(5))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.part(output, target)
        return loss


def compiled(**options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = fsdp_mlir.fully_shard(nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, fsdp_mlir.compile(model, optimizer=optimizer, fallback="error", **options)


WEIGHTS = [torch.full((5,), 2.0), torch.arange(1.0, 6), torch.arange(5).double()]


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("make", [lambda: nn.CrossEntropyLoss(torch.ones(5)), Inner])
def test_a_buffer_of_the_criterion_is_replaced(
    make: Callable[[], nn.Module], weight: Tensor
) -> None:
    criterion = make()
    model, step = compiled(loss=criterion)
    step(X, target=Y)
    (criterion if make is not Inner else criterion.part).weight = weight
    if weight.dtype == torch.float64:  # as .double() does
        criterion.float()
    assert torch.equal(step(X, target=Y), criterion(model(X), Y).detach())


def mean(model: nn.Module, x: Tensor, *, scale: float = 1.0) -> Tensor:
    return model(x).square().mean() * scale


def test_keywords_of_a_partial_change() -> None:
    loss = functools.partial(mean, scale=2.0)
    model, step = compiled(compute_loss=loss)
    for scale in (2.0, 3.0, 5.0):
        loss.keywords["scale"] = scale
        assert torch.equal(step(X), mean(model, X, scale=scale).detach())
    loss.keywords.clear()
    assert torch.equal(step(X), mean(model, X).detach())
