"""Steps that FSDP2 makes because the forms of inputs before had no plan."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from fsdp_mlir.frontdoor.plans import Plans
from fsdp_mlir.frontdoor.requests import Request
from torch import Tensor, nn
from twins import Twins

SGD = (torch.optim.SGD, {"lr": 0.1})


class Matched(nn.Module):
    """Its loss orders the samples by what it computes, outside of tensors, if there are many."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        order = y.detach().sum(1).numpy().argsort() if len(y) > 3 else range(len(y))
        return y[list(order)].cumsum(0).tanh().square().mean()


def test_forms_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of images of another size in each batch: captures end, and begin again."""
    captured: list[int] = []
    compile_plan = Plans.compile

    def noted(self: Plans, request: Request, library: str) -> Any:
        captured.append(len(request.batch["x"]))
        return compile_plan(self, request, library)

    monkeypatch.setattr(Plans, "compile", noted)
    pair = Twins(Matched, {"x": torch.ones(3, 4)}, SGD)

    def train(size: int) -> list[str]:
        pair.batch = {"x": torch.linspace(-1, 1, size * 4).reshape(size, 4).sin()}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pair.assert_equal_steps(2)
        return [str(each.message) for each in caught if "in a row" in str(each.message)]

    lines = [train(size) for size in range(4, 25)]
    assert captured == [3, 4, 5, 6, 7, 11, 19]
    assert [size for size, found in enumerate(lines, 4) if found] == [8]
    for size in (2, *range(25, 34)):  # up to the 31st
        train(size)
    assert len(captured) == 7
    for size in (1, 34, 1, 2, 2, 2):
        train(size)
    assert captured[7:] == [1, 34, 2]


def test_a_form_that_comes_again() -> None:
    """It is captured for the eighth call, and has a plan."""
    pair = Twins(Matched, {"x": torch.linspace(-1, 1, 16).reshape(4, 4)}, SGD)
    for size in range(5, 9):
        pair.batch = {"x": torch.linspace(-1, 1, size * 4).reshape(size, 4)}
        pair.assert_equal_steps(1)
    pair.batch = {"x": torch.linspace(-1, 1, 8).reshape(2, 4)}
    for calls, plans in ((7, 0), (1, 1), (2, 1)):
        pair.assert_equal_steps(calls)
        assert len(pair.step._plans._made) == plans
