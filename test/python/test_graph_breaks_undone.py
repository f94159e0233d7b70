"""Modules in the middle of a plan that do something else in some steps: nothing of it is left."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import fsdp_mlir
import numpy as np
import pytest
import torch
from fsdp_mlir.frontdoor.plan import Compiled
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MOODS = (0, 0, 0, 1, 0, 1, 0, 0)
LOSSES: list[Tensor] = []


class Mood(nn.Module):
    """Its code has no static form; `other` is what it does in a bad mood."""

    def forward(self, x: Tensor, mood: Tensor) -> Tensor:
        rows = (x.detach() > 0).nonzero()[:, 0]
        y = x * (1 + rows[:1].sum() * 0)
        return self.other(x, y) if mood == 1 else self.usual(x, y)

    def usual(self, _: Tensor, y: Tensor) -> Tensor:
        return y

    def other(self, _: Tensor, y: Tensor) -> Tensor:
        return torch.cat([y, y])


class Counts(Mood):
    calls = 0

    def other(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return super().other(x, y)


class Writes(Mood):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def other(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        return super().other(x, y)


class Draws(Mood):
    def other(self, x: Tensor, y: Tensor) -> Tensor:
        return super().other(x, y) * (1 + np.random.rand()) * torch.rand(())


class Sets(Mood):
    """What code behind it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.is_bad = False

    def other(self, x: Tensor, y: Tensor) -> Tensor:
        self.is_bad = True
        return y


class Appends(Mood):
    def other(self, x: Tensor, y: Tensor) -> Tensor:
        LOSSES.append(x.square().mean() * 10)
        return y


class Aliases(Mood):
    def other(self, x: Tensor, y: Tensor) -> Tensor:
        return x[:]


class Turns(Mood):
    """The gradient of its input."""

    def other(self, x: Tensor, y: Tensor) -> Tensor:
        return (x.t() * 2).t().contiguous() + x.sum()


class Uses(Mood):
    """Its input as often as it likes."""

    def other(self, x: Tensor, y: Tensor) -> Tensor:
        return y + x.sin() * 0.3 + x.cos() * 0.7 + x.tanh()


class Hooks(Mood):
    """Of a tensor whose gradient comes from elsewhere too."""

    def other(self, x: Tensor, y: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return y


class Modes(Mood):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Dropout(0.5)

    def usual(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(y)

    def other(self, x: Tensor, y: Tensor) -> Tensor:
        self.last.eval()
        return y


class Table(Mood):
    """It gives a tensor that stays, which is changed then."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(6, 8)

    def other(self, x: Tensor, y: Tensor) -> Tensor:
        return self.table

    def usual(self, x: Tensor, y: Tensor) -> Tensor:
        return y * self.table.sum()


class Takes(Mood):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(100))

    def other(self, x: Tensor, y: Tensor) -> Tensor:
        return super().other(x, y) * (1 + next(self.numbers))


class Data(Mood):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def usual(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen.data.add_(1)
        return y


class Places(Mood):
    def usual(self, x: Tensor, y: Tensor) -> Tensor:
        return y + y.detach().argmax(1)[:, None]


class Model(nn.Module):
    def __init__(self, mood: Callable[[], nn.Module], *, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.mood, self.reentrant = nn.Linear(8, 8), mood(), reentrant

    def block(self, x: Tensor, mood: Tensor) -> Tensor:
        return self.mood(x, mood)[: len(x)] + x.exp() * 0.1

    def forward(self, x: Tensor, mood: Tensor) -> Tensor:
        x.sub_(x.mean()).mul_(1.5)  # the batch
        y = self.first(x).tanh()
        if self.reentrant:
            z = checkpoint(self.block, y, mood, use_reentrant=True)
        else:
            z = self.block(y, mood)
        z = torch.dropout(z, 0.2, self.training)
        z += y * getattr(self.mood, "is_bad", 0)
        loss = z.square().mean() + sum(LOSSES)
        LOSSES.clear()
        return loss


class Changed(Model):
    """What it gets back is changed in place."""

    def block(self, x: Tensor, mood: Tensor) -> Tensor:
        x = x * 1
        y = self.mood(x, mood)
        y += 1
        return y * 3 + x


class Given(Model):
    """The module reads what forward has put there."""

    def block(self, x: Tensor, mood: Tensor) -> Tensor:
        self.mood.mask = mood
        return super().block(x, mood)


class Masked(Mood):
    def usual(self, x: Tensor, y: Tensor) -> Tensor:
        return y * (1 + self.mask)

    def other(self, x: Tensor, y: Tensor) -> Tensor:
        return y * (3 - self.mask)


class Asserts(Model):
    """What fails on zeros."""

    def block(self, x: Tensor, mood: Tensor) -> Tensor:
        y = self.mood(x.exp(), mood)[: len(x)]
        assert (y.detach() > 0).all(), "not positive"
        return y


class Loops(Model):
    """A second module that would not end on zeros."""

    def __init__(self, mood: Callable[[], nn.Module]) -> None:
        super().__init__(mood)
        self.last = Doubles()

    def block(self, x: Tensor, mood: Tensor) -> Tensor:
        return self.last(self.mood(x.exp(), mood)[: len(x)])


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while x.detach().sum() < 100:
            x = x * 2
        return x


def trained(
    make: Callable[[], nn.Module], moods: Sequence[int], *, ours: bool
) -> tuple[list[Any], list[Any]]:
    """Losses with the batches that are left, and what is left in the end."""
    model = make()
    (fsdp_mlir if ours else torch.distributed.fsdp).fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = fsdp_mlir.compile(model, optimizer=optimizer) if ours else model
    steps: list[Any] = []
    torch.manual_seed(1)
    np.random.seed(1)
    LOSSES.clear()
    for seed, mood in enumerate(moods):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
        loss = step(x=x, mood=torch.tensor([mood]))
        if not ours:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        steps.append((loss.item(), x.tolist()))
    state = [each.full_tensor().tolist() for each in model.parameters()]
    left = [each.tolist() for each in model.buffers()]
    left += [getattr(model.mood, "calls", 0), getattr(model.mood, "is_bad", 0)]
    return steps, [state, left, torch.rand(2).tolist(), np.random.rand()]


@pytest.mark.parametrize(
    ("make", "planned"),
    [
        (lambda: Model(Mood), 5),
        (lambda: Model(Counts), None),
        (lambda: Model(Writes), None),
        (lambda: Model(Draws), 5),
        (lambda: Model(Sets), None),
        (lambda: Model(Appends), None),
        (lambda: Changed(Aliases), 5),
        (lambda: Model(Turns), None),
        (lambda: Model(Uses), 5),
        (lambda: Model(Uses, reentrant=True), None),
        (lambda: Model(Places), 5),
        (lambda: Given(Masked), 0),
        (lambda: Asserts(Mood), 5),
        (lambda: Loops(Mood), None),
        (lambda: Model(Hooks), 5),
        (lambda: Model(Modes), None),
        (lambda: Changed(Table), None),
        (lambda: Model(Takes), 0),
        (lambda: Model(Data), 0),
    ],
    ids=(
        *("form", "count", "buffer", "draws", "flag", "list", "alias", "layout", "uses"),
        *("reentrant", "places", "given", "asserts", "loop", "hooks", "modes", "table", "takes"),
        "data",
    ),
)
def test_like_fsdp2(
    make: Callable[[], nn.Module], planned: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`planned`: how many steps a plan makes, where that is not up to when it gives up."""
    made: list[int] = []
    leave = Compiled.leave
    monkeypatch.setattr(Compiled, "leave", lambda *args: made.append(1) or leave(*args))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, want = (trained(make, MOODS, ours=ours) for ours in (True, False))
    assert got == want
    assert len(made) == planned if planned is not None else len(made) >= 2


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number, which the loop changes, is that of the module too."""

    class Sums(Mood):
        def usual(self, x: Tensor, y: Tensor) -> Tensor:
            counts.append(torch.get_num_threads())
            return y

    counts: list[int] = []
    model = fsdp_mlir.fully_shard(Model(Sums))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = fsdp_mlir.compile(model, optimizer=optimizer)
        try:
            for threads in (1, 1, 1, 2, 1):
                torch.set_num_threads(threads)
                step(x=torch.randn(6, 8), mood=torch.tensor([0]))
        finally:
            torch.set_num_threads(1)
    assert counts[-2:] == [2, 1]


def test_exit() -> None:
    """It ends the process, or what catches it, as without a plan; training can go on."""

    class Exits(Mood):
        def other(self, x: Tensor, y: Tensor) -> Tensor:
            raise SystemExit(3)

    model = fsdp_mlir.fully_shard(Model(Exits))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = fsdp_mlir.compile(model, optimizer=optimizer)
        for mood in (0, 0, 0, 1, 0):
            try:
                step(x=torch.randn(6, 8), mood=torch.tensor([mood]))
                assert not mood
            except SystemExit as error:
                assert error.code == 3 and mood


class Written(nn.Module):
    """It writes its parameter in a bad mood, and then fails, or does not."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.weight, self.fails = nn.Parameter(torch.randn(8, 8)), fails

    def forward(self, x: Tensor, mood: Tensor) -> Tensor:
        rows = (x.detach() > 0).nonzero()[:, 0]
        if mood == 1:
            with torch.no_grad():
                self.weight.clamp_(-0.01, 0.01)
            if self.fails:
                raise ValueError("a bad mood")
        return x @ self.weight * (1 + rows[:1].sum() * 0)


class Interrupts(Mood):
    def other(self, x: Tensor, y: Tensor) -> Tensor:
        raise KeyboardInterrupt


def compiled(mood: Callable[[], nn.Module]) -> Callable[[int], Tensor]:
    model = fsdp_mlir.fully_shard(Model(mood))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = fsdp_mlir.compile(model, optimizer=optimizer)
    return lambda mood: step(x=torch.randn(6, 8), mood=torch.tensor([mood]))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_parameter_that_is_written(fails: bool) -> None:
    """It cannot be put back: the step does not go on as if it were."""
    step = compiled(lambda: Written(fails=fails))
    for _ in range(3):
        step(0)
    with pytest.raises(RuntimeError, match="'weight' is written by a module in the middle"):
        step(1)
    with pytest.raises(RuntimeError, match="cannot be used any more"):
        step(0)


@pytest.mark.filterwarnings("ignore")
def test_an_interrupt() -> None:
    step = compiled(Interrupts)
    for mood in (0, 0, 0, 1, 0):
        try:
            step(mood)
            assert not mood
        except KeyboardInterrupt:
            assert mood
