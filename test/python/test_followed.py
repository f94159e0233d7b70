"""Tensors in places of their own that a step or its loop replaces: each step reads what is there,
as with FSDP2, and one plan serves them all."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import fsdp_mlir
import pytest
import torch
import torch.distributed as dist
from fsdp_mlir.frontdoor.plans import Plans
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(torch.tanh(self.a(x)))
        return y


class Criterion:
    """Its mean is the step's."""

    def __init__(self) -> None:
        self.c: Any = torch.zeros(8)

    def __call__(self, y: Tensor) -> Any:
        loss = (y - self.c).square().mean()
        self.c = 0.9 * self.c + 0.1 * y.detach().mean(0)
        return loss

    def left(self) -> list[Any]:
        """What a loop reads."""
        return [self.c]

    def change(self, number: int) -> None:
        """What it does before a step."""


class Module(nn.Module):
    """DINO's, which is the center of the outputs of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("c", torch.zeros(1, 8))

    def forward(self, y: Tensor) -> Tensor:
        loss = (y - self.c).square().mean()
        self.update(y)
        return loss

    @torch.no_grad()
    def update(self, y: Tensor) -> None:
        mean = torch.sum(y, dim=0, keepdim=True)
        dist.all_reduce(mean)
        self.c = self.c * 0.9 + mean / (len(y) * dist.get_world_size()) * 0.1

    def left(self) -> list[Any]:
        return [self.c]

    def change(self, number: int) -> None:
        pass


class Initial(Criterion):
    """It keeps the first one, which no code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.c


class Weights(Criterion):
    """The loop sets them."""

    def __call__(self, y: Tensor) -> Tensor:
        return (y.square() * self.c).mean()

    def change(self, number: int) -> None:
        self.c = torch.linspace(0, number + 1, 8)


class Both(Criterion):
    """The loop sets what the step does, and writes it in place."""

    def change(self, number: int) -> None:
        if number == 1:
            self.c = torch.ones(8)
        if number == 2:
            self.c.mul_(3)


class Reset(Criterion):
    """It begins with the first value, and anew."""

    def __init__(self) -> None:
        self.c = None

    def __call__(self, y: Tensor) -> Tensor:
        mean = y.detach().mean(0)
        self.c = mean if self.c is None else 0.9 * self.c + 0.1 * mean
        return (y - self.c).square().mean()

    def change(self, number: int) -> None:
        if number % 3 == 0:
            self.c = None


class Swapped(Criterion):
    def __init__(self) -> None:
        self.old, self.new = torch.zeros(8), torch.ones(8)

    def __call__(self, y: Tensor) -> Tensor:
        loss = (y - self.old * 0.5 - self.new).square().mean()
        self.old, self.new = self.new, y.detach().mean(0)
        return loss

    def left(self) -> list[Any]:
        return [self.old, self.new]


class Exchanged(Swapped):
    def __call__(self, y: Tensor) -> Tensor:
        loss = (y - self.old * 0.5 - self.new).square().mean()
        self.old, self.new = self.new, self.old
        return loss


class OneAtFirst(Swapped):
    def __init__(self) -> None:
        self.old = self.new = torch.zeros(8)

    def __call__(self, y: Tensor) -> Tensor:
        loss = (y - self.old * 0.5 - self.new).square().mean()
        self.old = 0.9 * self.old + y.detach().mean(0)
        self.new = 0.5 * self.new - y.detach().mean(0)
        return loss


class OfClass(Criterion):
    c: Any = torch.zeros(8)

    def __init__(self) -> None:
        OfClass.c = torch.zeros(8)

    def __call__(self, y: Tensor) -> Tensor:
        loss = (y - OfClass.c).square().mean()
        OfClass.c = OfClass.c + 0.1 * y.detach().mean(0)
        return loss


class Pair(NamedTuple):
    h: Tensor
    k: Tensor


class Nested(Criterion):
    """In a dict, a list and a tuple."""

    def __init__(self) -> None:
        self.held = {"list": [torch.zeros(8), torch.ones(8)], "c": torch.zeros(8)}
        self.pair = Pair(torch.zeros(8), torch.ones(8))

    def __call__(self, y: Tensor) -> Tensor:
        held, mean = self.held, y.detach().mean(0)
        loss = (y - held["list"][0] - held["list"][1] - held["c"] - self.pair.h * self.pair.k).sum()
        held["list"][0] = held["list"][0] * 0.5 + mean
        held["c"] = held["c"] * 0.5 - mean
        self.pair = Pair(self.pair.k, mean)
        return loss.square()

    def left(self) -> list[Any]:
        return [*self.held["list"], self.held["c"], *self.pair]


class Lists(Nested):
    """Which it makes anew, as states of an RNN."""

    def __call__(self, y: Tensor) -> Tensor:
        (a, b), mean = self.held["list"], y.detach().mean(0)
        loss = (y - a - b - self.held["c"]).square().mean()
        self.held = {"list": [a * 0.5 + mean, b + a], "c": self.held["c"] * 0.5 - mean}
        return loss

    def change(self, number: int) -> None:
        if number == 3:
            self.held["list"][0] = torch.ones(8)
        if number == 5:
            self.held = {"list": [torch.ones(8), torch.zeros(8)], "c": torch.zeros(8)}


class Balanced(Criterion):
    """Terms of a loss, weighed by their running means, which it also returns."""

    def __init__(self) -> None:
        self.c = None

    def __call__(self, y: Tensor) -> Any:
        terms = torch.stack([y.square().mean(), y.abs().mean()])
        now = terms.detach()
        self.c = now if self.c is None else self.c * 0.9 + now * 0.1
        return {"loss": (terms * torch.softmax(self.c, 0)).sum(), "means": self.c}


# With the number of captures.
FOLLOWED = {
    **{Criterion: 1, Initial: 1, Weights: 1, Both: 1, Reset: 3, Swapped: 1, Exchanged: 1},
    **{OneAtFirst: 2, OfClass: 1, Nested: 1, Lists: 1, Balanced: 2},
}


def trained(
    criterion: Any, compiled: bool, model: Any = None, count: int = 7, **options: Any
) -> list[Any]:
    """Losses, and what is left after each; those of earlier steps as they are at the end."""
    torch.manual_seed(0)
    model = fsdp_mlir.fully_shard(model or Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = None
    if compiled:
        step = fsdp_mlir.compile(model, optimizer=optimizer, loss=criterion, **options)
    found: list[Any] = []
    kept: list[Any] = []
    for number in range(count):
        kept += criterion.left()
        criterion.change(number)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        if step is not None:
            loss = step(x)
        else:
            loss = criterion(model(x))
            (loss["loss"] if isinstance(loss, dict) else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        parts = loss.values() if isinstance(loss, dict) else [loss]
        found += [[part.tolist() for part in parts], [x.tolist() for x in criterion.left()]]
    found += [x.tolist() for x in kept if x is not None]
    return [*found, [param.full_tensor().tolist() for param in model.parameters()]]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An element for each."""
    made: list[None] = []
    compile_plan = Plans.compile

    def noted(self: Plans, *args: Any) -> Any:
        made.append(None)
        return compile_plan(self, *args)

    monkeypatch.setattr(Plans, "compile", noted)
    return made


@pytest.mark.parametrize("kind", FOLLOWED)
def test_one_plan_reads_what_is_there(kind: Any, captures: list[None]) -> None:
    options = {} if kind in (Reset, Balanced, OneAtFirst) else {"fallback": "error"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert trained(kind(), True, **options) == trained(kind(), False)
    assert len(captures) == FOLLOWED[kind]


def test_the_buffer_of_a_loss_that_communicates(captures: list[None]) -> None:
    """Such a step does not run beside eager PyTorch when it is captured."""
    assert trained(Module(), True, fallback="error") == trained(Module(), False)
    assert len(captures) == 1


class Recurrent(nn.Module):
    """The state of each batch is that of the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y, (h, c) = self.rnn(x[None], self.state)
        self.state = h.detach(), c.detach()
        out: Tensor = self.out(y)
        return out


class Checkpointed(Net):
    """An attribute, assigned where backward comes by again."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(checkpoint(self.inner, x, use_reentrant=False))
        return y

    def inner(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        out = hidden - self.state
        self.state = 0.9 * self.state + 0.1 * hidden.detach().mean(0)
        return out


class OfModel(Weights):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def left(self) -> list[Any]:
        state = self.model.state
        return list(state) if isinstance(state, tuple) else [state]


@pytest.mark.parametrize("kind", [Recurrent, Checkpointed])
def test_attributes_of_the_model(kind: Any, captures: list[None]) -> None:
    def run(compiled: bool) -> list[Any]:
        torch.manual_seed(1)
        model = kind()
        return trained(OfModel(model), compiled, model)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert run(True) == run(False)
    assert len(captures) <= 2


def mixed(model: Any, criterion: Any, compiled: bool, left: Callable[[], Any]) -> list[Any]:
    """Losses of steps over several microbatches, of whole steps and of evaluations in eval mode,
    with what is `left` after each."""
    model = fsdp_mlir.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = iter(torch.randn(24, 4, 8, generator=torch.Generator().manual_seed(0)).unbind())
    options = {"loss": criterion, "optimizer": optimizer, "evaluation": True}
    step = fsdp_mlir.compile(model, fallback="error", **options) if compiled else None
    found: list[Any] = []
    for count in (3, 1) * 4:
        several = [next(data) for _ in range(count)]
        if step is None:
            losses = []
            for index, x in enumerate(several):
                model.set_requires_gradient_sync(index == count - 1)
                losses.append(criterion(model(x)))
                losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        elif count > 1:
            losses = step.accumulate(several)
            step.update()
        else:
            losses = [step(*several)]
        found += [[loss.item() for loss in losses], left()]
        if count == 1:
            model.eval()
            with torch.no_grad():
                x = next(data)
                loss = criterion(model(x)) if step is None else step.evaluate(x)
            model.train()
            found += [loss.item(), left()]
    return found


def test_in_each_microbatch_and_in_evaluation() -> None:
    def run(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        criterion = Criterion()
        return mixed(Net(), criterion, compiled, lambda: criterion.c.tolist())

    assert run(True) == run(False)
