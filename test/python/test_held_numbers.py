"""Numbers that change from call to call where code reads them, as FSDP2's step does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fsdp_mlir
import pytest
import test_numbers
import torch
from fsdp_mlir import fully_shard
from fsdp_mlir.frontdoor import planning
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SCALE = 0.5  # which a loop sets
WEIGHTS: dict[str, Any] = {"kl": 0.5, "parts": {"l2": 0.25, "count": 2}, "name": "weights"}


class Net(nn.Module):
    offset = 0.25

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.compute = compute
        self.beta: Any = 0.5
        self.config = SimpleNamespace(rate=0.5, layers=2, name="net")
        self.settings = {"gain": 0.5, "layers": 2, "names": ["a"]}

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)

    def output(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


Change = Callable[[Any, int], None]


def of_the_model(model: Any, x: Tensor) -> Tensor:
    return model.output(x).square().mean() * model.beta + model.first(x).mean() / (1 + model.beta)


def of_a_config(model: Any, x: Tensor) -> Tensor:
    for _ in range(model.config.layers):
        x = x * model.config.rate
    return model.output(x).square().mean()


def of_the_class(model: Any, x: Tensor) -> Tensor:
    return (model.output(x) + model.offset).square().mean()


def of_a_file(model: Any, x: Tensor) -> Tensor:
    return model.output(x).square().mean() * min(SCALE, 3.0)


def of_a_dict(model: Any, x: Tensor) -> Tensor:
    for _ in range(model.settings["layers"]):
        x = x * model.settings["gain"]
    return model.output(x).square().mean()


def of_dicts_of_a_file(model: Any, x: Tensor) -> Tensor:
    parts = WEIGHTS["parts"]
    penalty = sum(param.square().sum() for param in model.second.parameters())
    loss = model.output(x).square().mean() * WEIGHTS["kl"] / parts["count"]
    return loss + penalty * parts.get("l2", 0.0)


def of_a_dict_twice(model: Any, x: Tensor) -> Tensor:
    model.weights = WEIGHTS
    return model.output(x).square().mean() * model.weights["kl"] + WEIGHTS["kl"]


def recomputed(model: Any, x: Tensor) -> Tensor:
    def scaled(x: Tensor) -> Tensor:
        return torch.tanh(model.output(x) * model.beta)

    return checkpoint(scaled, x, use_reentrant=False).square().mean()


def in_a_hook(model: Any, x: Tensor) -> Tensor:
    output = model.output(x)
    output.register_hook(lambda gradient: gradient * model.beta)
    return output.square().mean()


def dropped(model: Any, x: Tensor) -> Tensor:
    return nn.functional.dropout(model.output(x), model.beta / 100).square().mean()


def assigned(model: Any, x: Tensor) -> Tensor:
    model.beta = model.beta * 0.5
    return model.output(x).square().mean() * model.beta


def kept(model: Any, x: Tensor) -> Tensor:
    model.config.last = model.beta
    return model.output(x).square().mean() * model.beta


def set_in_backward(model: Any, x: Tensor) -> Tensor:
    output = model.output(x)

    def back(gradient: Tensor) -> None:
        model.beta = 9.0

    output.register_hook(back)
    return output.square().mean() * model.beta


def kept_in_backward(model: Any, x: Tensor) -> Tensor:
    output = model.output(x)

    def keep(gradient: Tensor) -> None:
        model.config.last = model.beta

    output.register_hook(keep)
    return output.square().mean() * model.beta


def set_beta(model: Any, call: int) -> None:
    model.beta = (0, 1, 0.25, -3.0, float("inf"), 1e-30, 7)[call % 7]


def set_small(model: Any, call: int) -> None:
    model.beta = (call + 1) / 8


def set_rate(model: Any, call: int) -> None:
    model.config.rate = 1 / (call + 1)


def set_offset(model: Any, call: int) -> None:
    type(model).offset = call / 8


def set_scale(model: Any, call: int) -> None:
    globals()["SCALE"] = call / 2


def set_gain(model: Any, call: int) -> None:
    model.settings["gain"] = 1 / (call + 1)


def set_weights(model: Any, call: int) -> None:
    WEIGHTS["kl"] = min(1.0, call / 8)
    WEIGHTS["parts"].update(l2=0.25 / (call + 1))


def set_dict(model: Any, call: int) -> None:
    """With another key at times, and another dict."""
    set_gain(model, call)
    model.settings["more"] = call // 5
    if call == 7:
        model.settings = dict(model.settings, layers=3)


# How often a step is captured in 12 calls.
CASES: list[tuple[Callable[..., Tensor], Change, int]] = [
    (of_the_model, set_beta, 3),  # of an integer, and of each class
    (of_the_model, set_small, 2),
    (of_a_config, set_rate, 2),
    (of_the_class, set_offset, 2),
    (of_a_file, set_scale, 3),  # whether it is more than 3
    (of_a_dict, set_gain, 2),
    (of_dicts_of_a_file, set_weights, 2),
    (of_a_dict_twice, set_weights, 2),
    (of_a_dict, set_dict, 6),  # with those of the other dict and key
]


def stepped(step: Any, optimizer: Any, loss: Callable[..., Any], *given: Any) -> Any:
    """What a step gives: the compiled one, or without it FSDP2's."""
    if step is not None:
        return step(*given)
    value = loss(*given)
    (value[0] if isinstance(value, tuple) else value).backward()
    optimizer.step()
    optimizer.zero_grad()
    return value


def trained(
    compute: Callable[..., Tensor], change: Change, calls: int, *, compiled: bool, **options: Any
) -> tuple[list[Any], list[str], int]:
    """Results, lines, and how often the step was captured."""
    torch.manual_seed(0)
    model = fully_shard(Net(compute))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    counted, results = test_numbers.Counted(), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mock.patch.object(planning, "capture", counted):
            step = fsdp_mlir.compile(model, optimizer=optimizer, **options) if compiled else None
            for call in range(calls):
                change(model, call)
                torch.manual_seed(call)
                x = torch.randn(6, 4)
                results.append(stepped(step, optimizer, model, x))
                results += [*vars(model.config).values(), model.beta, model.offset, SCALE]
    results += [param.full_tensor().detach().clone() for param in model.parameters()]
    lines = [str(each.message) for each in caught if "without a plan" in str(each.message)]
    return [test_numbers._plain(each) for each in results], lines, counted.count


@pytest.mark.parametrize("fuse", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize(("compute", "change", "captures"), CASES)
def test_a_number_of_each_call(compute: Any, change: Change, captures: int, fuse: bool) -> None:
    options: dict[str, Any] = {} if fuse else {"schedule": {"fuse": "none"}}
    got, lines, count = trained(compute, change, 12, compiled=True, **options)
    want, _, _ = trained(compute, change, 12, compiled=False)
    assert got == want
    assert lines == []
    assert count == captures


@pytest.mark.parametrize("compute", [recomputed, in_a_hook, dropped, kept, kept_in_backward])
def test_a_number_of_one_value(compute: Any) -> None:
    """What backward reads, or is more than a tensor could be, is a part of the step."""
    got, lines, _ = trained(compute, set_small, 4, compiled=True)
    want, _, _ = trained(compute, set_small, 4, compiled=False)
    assert got == want
    assert lines == []


def test_a_number_that_the_step_sets() -> None:
    def change(model: Any, call: int) -> None:
        if call > 3:
            set_small(model, call)

    for compute in (assigned, set_in_backward):
        got, _, _ = trained(compute, change, 8, compiled=True)
        want, _, _ = trained(compute, change, 8, compiled=False)
        assert got == want


def test_not_a_number_anew() -> None:
    def change(model: Any, call: int) -> None:
        model.beta = float("nan")

    def compute(model: Any, x: Tensor) -> Tensor:
        return model.output(x).square().mean() + (model.beta if model.beta > 0 else 1)

    _, lines, count = trained(compute, change, 4, compiled=True)
    assert (lines, count) == ([], 1)


def test_another_owner() -> None:
    """Of the number, which is then another place's."""

    def change(model: Any, call: int) -> None:
        if call in (5, 6):
            model.config = SimpleNamespace(rate=0.5, layers=2, name="net")
        set_rate(model, call)

    got, lines, count = trained(of_a_config, change, 14, compiled=True)
    want, _, _ = trained(of_a_config, change, 14, compiled=False)
    assert got == want
    assert lines == []
    assert count <= 6


def test_a_class_of_fsdp2s_without_code_of_the_model() -> None:
    def results(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
        optimizer = torch.optim.SGD(model.parameters(), 0.05)

        def compute(model: Any, x: Tensor) -> Tensor:
            return model(x).square().mean() * getattr(model, "scale", 1.0)

        step = None
        if compiled:
            step = fsdp_mlir.compile(model, compute_loss=compute, optimizer=optimizer)
        found = []
        for call in range(5):
            if call:
                type(model).scale = call / 4
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(call))
            found.append(stepped(step, optimizer, partial(compute, model), x))
        del type(model).scale
        return [test_numbers._plain(each) for each in found]

    assert results(True) == results(False)


def test_other_changes_at_once() -> None:
    """Are other steps; the number stays one of each call."""

    def change(model: Any, call: int) -> None:
        set_small(model, call)
        model.config.layers = 2 + (call > 2)
        model.train(call < 5)
        model.beta = None if call == 7 else model.beta

    def compute(model: Any, x: Tensor) -> Tensor:
        for _ in range(model.config.layers):
            x = x * (model.beta or 2)
        return model.output(x).square().mean() * (2 if model.training else 3)

    got, lines, count = trained(compute, change, 12, compiled=True)
    want, _, _ = trained(compute, change, 12, compiled=False)
    assert got == want
    assert lines == []
    assert count <= 6


def test_in_an_evaluation() -> None:
    def results(compiled: bool) -> list[Any]:
        model = fully_shard(Net(of_the_model))
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        found: list[Any] = []
        step = None
        if compiled:
            step = fsdp_mlir.compile(model, optimizer=optimizer, evaluation=True, fallback="error")
        for call in range(8):
            set_small(model, call)
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(call))
            found.append(stepped(step, optimizer, model, x))
            model.beta += 1 / 3
            if step is not None:
                found.append(step.evaluate(x))
            else:
                model.eval()
                with torch.no_grad():
                    found.append(model(x))
                model.train()
        return [test_numbers._plain(each) for each in found]

    assert results(True) == results(False)


@pytest.mark.parametrize(
    ("loss", "calls", "captures"),
    test_numbers.CASES,
    ids=[f"{case[0].__name__}-{index}" for index, case in enumerate(test_numbers.CASES)],
)
def test_as_an_argument(loss: Any, calls: Any, captures: int) -> None:
    """What is done with an argument is done with what a closure holds."""
    held: list[Any] = []

    def of_each_call(compiled: bool) -> Any:
        first = second = calls[0][0]

        def compute(model: nn.Module, x: Tensor) -> Any:
            return loss(model, x, *((first, second) if len(calls[0]) > 1 else (first,)))

        results: list[Any] = []
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        counted = test_numbers.Counted()
        with mock.patch.object(planning, "capture", counted):
            step = None
            if compiled:
                options = {"compute_loss": compute, "fallback": "error"}
                step = fsdp_mlir.compile(model, optimizer=optimizer, **options)
            for number, numbers in enumerate(calls):
                first, second = numbers[0], numbers[-1]
                x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
                results.append(stepped(step, optimizer, partial(compute, model), x))
        results += [param.full_tensor().detach().clone() for param in model.parameters()]
        held.append(counted.count)
        return [test_numbers._plain(each) for each in results]

    assert of_each_call(True) == of_each_call(False)
    assert held[0] <= captures + 1
