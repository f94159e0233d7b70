"""Tensors in places of their own that no plan can follow, and what a capture leaves of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import fsdp_mlir
import pytest
import torch
from test_followed import Criterion, Net, Swapped, Weights, captures, trained
from torch import Tensor

__all__ = ["captures"]


class InPlaceToo(Criterion):
    """Who has the tensor from before sees half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.c

    def __call__(self, y: Tensor) -> Tensor:
        loss = (y - self.c).square().mean()
        self.c.mul_(0.9)
        self.c = self.c + y.detach().mean(0)
        return loss

    def left(self) -> list[Any]:
        return [self.c, self.first]


class TwoNames(Criterion):
    def __init__(self) -> None:
        self.c = self.first = torch.zeros(8)

    def __call__(self, y: Tensor) -> Tensor:
        loss = (y - self.c - self.first).square().mean()
        self.c = self.c + y.detach().mean(0)
        return loss


class OneForBoth(Swapped):
    """Which the loop changes in place."""

    def __call__(self, y: Tensor) -> Tensor:
        loss = (y - self.old * 0.5 - self.new).square().mean()
        self.old = self.new = y.detach().mean(0)
        return loss

    def change(self, number: int) -> None:
        if number == 2:
            self.old.add_(1)


class Differentiated(Criterion):
    """A tensor that autograd would reach."""

    def __call__(self, y: Tensor) -> Tensor:
        mean = y.mean(0)
        loss = (y - self.c.detach()).square().mean()
        self.c = 0.5 * mean + self.c.detach()
        return loss

    def left(self) -> list[Any]:
        return [self.c.detach()]


class Default(Criterion):
    """A constant, which the loop changes."""

    def __init__(self) -> None:
        super().__init__()
        self.default = torch.ones(8)

    def __call__(self, y: Tensor) -> Tensor:
        loss = (y - self.c - self.default).square().mean()
        self.c = self.default
        return loss

    def change(self, number: int) -> None:
        if number == 3:
            self.default.mul_(3)


class State:
    def __init__(self, calls: int, c: Tensor) -> None:
        self.calls, self.c = calls, c


class Anew(Criterion):
    """An object that each step makes anew."""

    def __init__(self) -> None:
        self.state = State(0, torch.zeros(8))

    def __call__(self, y: Tensor) -> Tensor:
        calls, c = self.state.calls, self.state.c
        self.state = State(calls + 1, 0.9 * c + y.detach().mean(0))
        return (y - c).square().mean()

    def left(self) -> list[Any]:
        return [torch.tensor(self.state.calls), self.state.c]


class Functions(Criterion):
    """Functions change their places."""

    def __init__(self) -> None:
        self.one, self.other = torch.sin, torch.cos

    def __call__(self, y: Tensor) -> Tensor:
        self.one, self.other = self.other, self.one
        return self.one(y).square().mean()

    def left(self) -> list[Any]:
        return [torch.tensor(self.one is torch.sin)]


class Counts(Criterion):
    """More of them than are looked at one by one."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(range(5000), 0)
        self.names = [f"name {index}" for index in range(2000)] + [[]]

    def __call__(self, y: Tensor) -> Tensor:
        self.counts[7] += 1
        self.names[3] += "+"
        return y.square().mean()

    def left(self) -> list[Any]:
        return [torch.tensor([self.counts[7], len(self.names[3])])]


# With the reason.
NOT_FOLLOWED = {
    InPlaceToo: "the captured step is not what eager PyTorch does",
    TwoNames: "'c' is assigned in forward, which looks at more of the tensor there",
    OneForBoth: "the captured step is not what eager PyTorch does",
    Default: "the captured step is not what eager PyTorch does",
    Anew: "the captured step is not what eager PyTorch does",
    Functions: "the captured step is not what eager PyTorch does",
    Counts: "changes in each step",
}


@pytest.mark.parametrize("kind", NOT_FOLLOWED)
def test_what_is_seen_elsewhere_too_has_no_plan(kind: Any) -> None:
    with pytest.warns(UserWarning, match=NOT_FOLLOWED[kind]):
        got = trained(kind(), True)
    assert got == trained(kind(), False)


def test_what_autograd_reaches_has_no_plan() -> None:
    with pytest.warns(UserWarning, match="without a plan"):
        got = trained(Differentiated(), True)
    assert got == trained(Differentiated(), False)


class Other(Weights):
    """Tensors of another form, or with memory that the step trains or writes."""

    def __init__(self, value: Callable[[], Any]) -> None:
        super().__init__()
        self.value = value

    def change(self, number: int) -> None:
        if number == 2:
            self.c = self.value()


class OtherData(Criterion):
    """The same object with other memory, of another shape."""

    def change(self, number: int) -> None:
        if number in (2, 4):
            self.c.data = torch.ones(1)


def test_other_memory_of_one_tensor() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = trained(OtherData(), True, count=6)
    assert got == trained(OtherData(), False, count=6)


class Parameters(Weights):
    """A parameter that the loop makes anew, until it no longer does."""

    def change(self, number: int) -> None:
        if number < 14:
            value = torch.linspace(0, number + 1, 8)
            self.c = torch.nn.Parameter(value, requires_grad=False)


def test_what_is_another_one_before_each_call(captures: list[None]) -> None:
    with pytest.warns(UserWarning, match=r"before each of 8 calls .*\bc' is a tensor") as told:
        got = trained(Parameters(), True, count=20)
    assert got == trained(Parameters(), False, count=20)
    assert len([each for each in told if "without a plan" in str(each.message)]) == 1
    assert len(captures) == 1 + 8 + 1 + 1  # the last, after 16, is of what stays


class Normed(Net):
    """It has a buffer that each step writes before the loss reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.mean.mul_(0.5).add_(y.detach().mean(0))
        return y


@pytest.mark.parametrize(
    "value",
    [
        lambda _: torch.ones(1),
        lambda _: torch.ones(4, 8),
        lambda _: torch.ones(8, dtype=torch.float64),
        lambda _: 2.0,
        lambda _: torch.ones(8, requires_grad=True),
        lambda model: model.mean,
        lambda model: model.mean.view(8),
        lambda model: model.a.bias.to_local(),
    ],
)
def test_another_form_or_memory_is_another_step(value: Callable[[Any], Any]) -> None:
    def run(compiled: bool) -> list[Any]:
        torch.manual_seed(1)
        model = Normed()
        criterion = Other(lambda: value(model))
        criterion.left = list  # type: ignore[method-assign]
        return trained(criterion, compiled, model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = run(True)
    assert got == run(False)


def test_a_buffer_with_its_memory() -> None:
    """The loop puts the tensor of the place, or its data, into a buffer that the step writes."""

    def run(compiled: bool, moves_data: bool) -> list[Any]:
        torch.manual_seed(1)
        model = Normed()

        class Shared(Weights):
            def change(self, number: int) -> None:
                if number == 2:
                    self.c = torch.ones(8)
                if number == 4 and moves_data:
                    self.c.data = model.mean
                elif number == 4:
                    model.mean = self.c

        return trained(Shared(), compiled, model)

    for moves_data in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = run(True, moves_data)
        assert got == run(False, moves_data)


def test_a_batch_that_the_loop_fills_anew() -> None:
    def run(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        model, kept = fsdp_mlir.fully_shard(Net()), [torch.zeros(8)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def compute_loss(model: Any, x: Tensor) -> Tensor:
            loss: Tensor = (model(x) - kept[0]).square().mean()
            kept[0] = x[0]
            return loss

        options = {"optimizer": optimizer, "compute_loss": compute_loss}
        step = fsdp_mlir.compile(model, **options) if compiled else None
        found, x = [], torch.zeros(4, 8)
        for number in range(5):
            x.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(number)))
            loss = step(x) if step is not None else compute_loss(model, x)
            if step is None:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        return found

    with pytest.warns(UserWarning, match="without a plan"):
        got = run(True)
    assert got == run(False)
