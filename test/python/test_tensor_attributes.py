"""What code asks of tensors besides their data, and of loggers and sets: their attributes, levels
and orders."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import fsdp_mlir
import pytest
import torch
from torch import Tensor, nn

LOG = logging.getLogger("fsdp_mlir_test.of.code")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.ones(4))
        self.mean.scale = 3.0
        self.weight = torch.full((4,), 0.5)
        self.weight.scale = 2.0
        self.parts = {3, 11}  # two orders of these have the same hashes

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


Ask = Callable[[Any, Tensor, Tensor], Any]


def of_input(model: Any, x: Tensor, y: Tensor) -> Any:
    return y * getattr(x, "scale", 1.0)


def has_input(model: Any, x: Tensor, y: Tensor) -> Any:
    return y * 2 if hasattr(x, "other") else y


def set_on_input(model: Any, x: Tensor, y: Tensor) -> Any:
    x.seen = True
    return y


def of_buffer(model: Any, x: Tensor, y: Tensor) -> Any:
    return y * getattr(model.mean, "scale", 1.0)


def set_on_buffer(model: Any, x: Tensor, y: Tensor) -> Any:
    model.mean.calls = 1
    return y


def of_kept(model: Any, x: Tensor, y: Tensor) -> Any:
    return y * model.weight * model.weight.scale


def of_kept_if_any(model: Any, x: Tensor, y: Tensor) -> Any:
    return y * model.weight * getattr(model.weight, "other", 1.0)


def in_a_list(model: Any, x: Tensor, y: Tensor) -> Any:
    return y * getattr(model.held[0], "other", 1.0)


def set_on_kept(model: Any, x: Tensor, y: Tensor) -> Any:
    model.weight.calls = getattr(model.weight, "calls", 0) + 1
    return y * model.weight.calls


def of_logger(model: Any, x: Tensor, y: Tensor) -> Any:
    if LOG.isEnabledFor(logging.DEBUG):
        model.stat = y.detach().abs().mean()
    return y * 2 if LOG.level == logging.ERROR else y


def of_held_logger(model: Any, x: Tensor, y: Tensor) -> Any:
    return y * 2 if model.loggers["of"].isEnabledFor(logging.DEBUG) else y


def of_order(model: Any, x: Tensor, y: Tensor) -> Any:
    for part in model.parts:
        y = y * 2 + part
    return y


def change(model: Any, x: Tensor, number: int) -> None:
    """Before a step, by its number."""
    x.scale = 1.5 + number
    if number == 2:
        x.other = model.weight.other = model.held[0].other = 4.0
        model.weight.scale = 5.0
        LOG.parent.setLevel(logging.DEBUG)
        # Which one is first depends on which was put there first.
        model.parts.clear()
        model.parts.update([11, 3])
    if number == 4:
        LOG.setLevel(logging.ERROR)


def _trained(ask: Ask, *, compiled: bool) -> tuple[list[Any], list[str]]:
    model: Any = fsdp_mlir.fully_shard(Net())
    model.held, model.loggers = [torch.ones(4)], {"of": LOG}
    LOG.setLevel(logging.NOTSET)
    LOG.parent.setLevel(logging.WARNING)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: Any, x: Tensor) -> Any:
        return ask(model, x, model(x)).square().mean()

    found: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = None
        if compiled:
            step = fsdp_mlir.compile(model, compute_loss=loss, optimizer=optimizer)
        for number in range(6):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            change(model, x, number)
            if step is not None:
                value = step(x)
            else:
                value = loss(model, x)
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
            found += [value.item(), vars(x), dict(vars(model.mean)), dict(vars(model.weight))]
            found.append(getattr(model, "stat", torch.zeros(())).item())
    lines = [str(each.message) for each in caught]
    return found, [line for line in lines if "without a plan" in line]


@pytest.mark.parametrize(
    "ask",
    [of_kept, of_kept_if_any, in_a_list, of_logger, of_held_logger, of_order],
    ids=lambda ask: ask.__name__,
)
def test_a_change_is_seen(ask: Ask) -> None:
    want, _ = _trained(ask, compiled=False)
    got, lines = _trained(ask, compiled=True)
    assert got == want
    assert lines == []


@pytest.mark.parametrize(
    ("ask", "line"),
    [
        (of_input, "reads the attribute 'scale' of input 'x'"),
        (has_input, "reads the attribute 'other' of input 'x'"),
        (set_on_input, "sets the attribute 'seen' of input 'x'"),
        (of_buffer, "reads the attribute 'scale' of buffer 'mean'"),
        (set_on_buffer, "sets the attribute 'calls' of buffer 'mean'"),
        (set_on_kept, "attribute 'weight.calls' changes in each step"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_no_plan(ask: Ask, line: str) -> None:
    want, _ = _trained(ask, compiled=False)
    got, lines = _trained(ask, compiled=True)
    assert got == want
    assert lines and all("test_tensor_attributes.py" in each and line in each for each in lines)


def test_an_input_that_is_a_parameter() -> None:
    x = nn.Parameter(torch.ones(4, 8), requires_grad=False)
    model = fsdp_mlir.fully_shard(Net())
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "fallback": "error"}
    step = fsdp_mlir.compile(model, compute_loss=lambda m, x: m(x).mean(), **options)
    with pytest.raises(fsdp_mlir.CaptureError, match="input 'x' is a parameter: expected data"):
        step(x)
