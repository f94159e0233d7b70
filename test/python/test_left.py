"""What forward leaves in the model for the loop to read: as after a step of FSDP2, bit for bit."""

from __future__ import annotations

import collections
import dataclasses
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdp_mlir
import pytest
import torch
from fsdp_mlir import capture, fully_shard
from leaving import SGD, Averaging, Net, X, assert_alike, assert_steps, counted_captures
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput
from twins import Twins

KEPT: dict[int, Tensor] = {}


class OfTheLoss(Net):
    def between(self, x: Tensor) -> Tensor:
        self.aux = x.square().mean()
        return x * self.aux


class Transposed(Net):
    def between(self, x: Tensor) -> Tensor:
        self.aux = x.t()
        return x


class Dropped(Net):
    def between(self, x: Tensor) -> Tensor:
        self.aux = nn.functional.dropout(x, 0.5)
        return self.aux


class Input(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.aux = x
        return super().forward(x)

    def between(self, x: Tensor) -> Tensor:
        return x


class Checkpointed(Net):
    reentrant = False

    def between(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.region, x, use_reentrant=self.reentrant)
        return result

    def region(self, x: Tensor) -> Tensor:
        self.aux = x.sin()
        return self.aux * 2


class Reentrant(Checkpointed):
    reentrant = True


class OfBackward(Net):
    def between(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: setattr(self, "aux", gradient.norm()))
        return x


class InAList(Net):
    def between(self, x: Tensor) -> Tensor:
        self.items.clear()
        self.items += [x.mean(), x.sum()]
        return x * self.items[0]

    def left(self) -> list[Tensor]:
        return self.items


class InNewContainers(Net):
    def between(self, x: Tensor) -> Tensor:
        self.aux = {"a": (x.mean(), 1), "b": [x.detach()], "c": collections.deque([x.sum()])}
        return x

    def left(self) -> list[Tensor]:
        return [self.aux["a"][0], *self.aux["b"], *self.aux["c"]]


@dataclasses.dataclass
class Stats:
    mean: Tensor
    count: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    mean: Tensor


@dataclasses.dataclass
class Output(ModelOutput):
    mean: Tensor | None = None
    x: Tensor | None = None


class InObjects(Net):
    def between(self, x: Tensor) -> Tensor:
        self.aux = [Stats(x.mean()), Frozen(x.sum()), Output(mean=x.mean(), x=x), x.max(1)]
        return x

    def left(self) -> list[Tensor]:
        stats, frozen, output, most = self.aux
        return [stats.mean, frozen.mean, *output.to_tuple(), output["x"], most.values, most.indices]


class Global(Net):
    def between(self, x: Tensor) -> Tensor:
        KEPT[0] = x.mean()
        return x

    def left(self) -> list[Tensor]:
        return [KEPT[0]]


MODELS = [
    *(OfTheLoss, Transposed, Dropped, Input, Checkpointed, Reentrant, OfBackward),
    *(InAList, InNewContainers, InObjects),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_loop_reads_what_fsdp2_leaves(model: type[Net], monkeypatch: pytest.MonkeyPatch) -> None:
    earlier: list[tuple[list[Tensor], list[Tensor]]] = []
    with counted_captures(monkeypatch) as captures:
        pair = Twins(model, X, SGD, fallback="error")
        for _ in range(4):
            pair.assert_equal_steps(1)
            assert_alike(pair)
            read = pair.ours.left()
            earlier.append(([*read], [tensor.clone() for tensor in read]))
    assert len(captures) == 1
    for read, values in earlier:  # which a loop may keep
        assert all(map(torch.equal, read, values))


def test_tensors_left_in_globals() -> None:
    pair = Twins(Global, X, SGD, fallback="error")
    pair.step(pair.batch)
    got = KEPT[0]
    pair.theirs(**pair.batch)
    assert torch.equal(got, KEPT[0])


class Recurrent(Net):
    """It keeps its weights in a list besides."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8)

    def between(self, x: Tensor) -> Tensor:
        result: Tensor = self.rnn(x)[0]
        return result


def test_parameters_in_lists_are_not_copied() -> None:
    pair = Twins(Recurrent, X, SGD, fallback="error")
    pair.assert_equal_steps()
    (compiled,) = pair.step._cache.values()
    assert compiled is not None
    assert not compiled.captured.constants


CHANGES: dict[str, Callable[[Net], Any]] = {
    "none": lambda model: setattr(model, "aux", None),
    "removed": lambda model: delattr(model, "aux"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_loop_may_take_it_away(
    change: Callable[[Net], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted_captures(monkeypatch) as captures:
        pair = Twins(OfTheLoss, X, SGD, fallback="error")
        for _ in range(4):
            pair.assert_equal_steps(1)
            assert_alike(pair)
            pair.change(change)
    assert len(captures) <= 2


class Skipping(Net):
    def between(self, x: Tensor) -> Tensor:
        if isinstance(self.aux, dict) and self.aux.get("skip"):
            return x
        self.aux = {"mean": x.mean()}
        return x * self.aux["mean"]


def test_what_a_loop_puts_there_counts() -> None:
    """It may decide what the next step is."""
    pair = Twins(Skipping, X, SGD, fallback="error")
    pair.assert_equal_steps(2)
    pair.change(lambda model: model.aux.update(skip=True))
    pair.assert_equal_steps(2)
    assert torch.equal(pair.ours.aux["mean"], pair.theirs.aux["mean"])
    pair.change(lambda model: setattr(model, "aux", None))
    pair.assert_equal_steps(2)
    assert torch.equal(pair.ours.aux["mean"], pair.theirs.aux["mean"])


def test_two_plans_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    with counted_captures(monkeypatch) as captures:
        pair = Twins(OfTheLoss, X, SGD, fallback="error")
        for number in range(6):
            pair.batch = {"x": X["x"][: 4 - 2 * (number % 2)]}
            pair.assert_equal_steps(1)
            assert_alike(pair)
    assert len(captures) <= 3


class Lazy(Net):
    """Its first forward makes what later ones use, and sets a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.ready, self.scale = False, lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.make()
            self.ready = True
        return super().forward(x)

    def between(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.scale(x)
        return scaled

    def make(self) -> None:
        raise NotImplementedError

    def left(self) -> list[Tensor]:
        """With what it makes once, in eager code."""
        return [self(X["x"])]


class LazyHook(Lazy):
    def make(self) -> None:
        self.b.register_forward_hook(lambda module, args, output: output * 2)


class LazyPreHook(Lazy):
    def make(self) -> None:
        self.a.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


class LazyFunction(Lazy):
    def make(self) -> None:
        self.scale = lambda x: x * 2  # type: ignore[assignment]


class LazyModule(Lazy):
    def make(self) -> None:
        self.scale = self.act = nn.Tanh()  # type: ignore[assignment]


class LazyForward(Lazy):
    def make(self) -> None:
        self.a.forward = lambda x: nn.functional.linear(x, self.a.weight) * 2


class Hooked(Lazy):
    """As transformers' models collect hidden states."""

    def make(self) -> None:
        self.a.register_forward_hook(lambda module, args, output: self.items.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.items = []
        loss = super().forward(x)
        return loss + self.items[0].square().mean()


LAZY = [LazyHook, LazyPreHook, LazyFunction, LazyModule, LazyForward, Hooked]


@pytest.mark.parametrize("model", LAZY, ids=lambda model: model.__name__)
@pytest.mark.filterwarnings("error:.*will not call it")
def test_what_the_first_forward_makes_is_there_later(model: type[Net]) -> None:
    pair = Twins(model, X, SGD, fallback="error")
    for number in range(6):
        pair.batch = {"x": X["x"][: 4 - 2 * (number // 3)]}
        pair.assert_equal_steps(1)
        with torch.no_grad():
            assert_alike(pair)
        pair.ours.reshard()
        pair.theirs.reshard()


def test_hooks_of_a_step_with_evaluation() -> None:
    pair = Twins(LazyHook, X, SGD, fallback="error", evaluation=True)
    for _ in range(3):
        pair.assert_equal_steps(1)
        with torch.no_grad():
            assert_alike(pair)
        pair.ours.reshard()
        pair.theirs.reshard()


def test_what_runs_elsewhere_leaves_nothing(tmp_path: Path) -> None:
    """The step of `capture` has no slots: nobody reads them there."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = capture(OfTheLoss(), kwargs=X, path=tmp_path / "model.pt")
    assert done.buffers == 0
    assert any("'aux' was set in forward" in str(each.message) for each in caught)


class HeldToo(Averaging):
    def __init__(self) -> None:
        super().__init__()
        self.held = [self.mean]

    def between(self, x: Tensor) -> Tensor:
        self.mean = self.mean + 1
        return x * self.mean + self.held[0]

    def left(self) -> list[Tensor]:
        return [self.mean, *self.held]


class Distribution(Net):
    """Of a class whose objects are not made by copying."""

    def between(self, x: Tensor) -> Tensor:
        self.aux = torch.distributions.Normal(x, 1.0)
        return x

    def left(self) -> list[Tensor]:
        return [self.aux.mean]


class Closure(Net):
    def between(self, x: Tensor) -> Tensor:
        self.aux = lambda: x
        return x

    def left(self) -> list[Tensor]:
        return [self.aux()]


class Uncopied:
    def __init__(self, mean: Tensor) -> None:
        self.mean = mean

    def __copy__(self) -> Uncopied:
        raise NotImplementedError


class OfAClassThatDoesNotCopy(Net):
    def between(self, x: Tensor) -> Tensor:
        self.aux = Uncopied(x.mean())
        return x

    def left(self) -> list[Tensor]:
        return [self.aux.mean]


class Parameters(Net):
    def between(self, x: Tensor) -> Tensor:
        self.aux = [self.a.weight, x.sum()]
        return x

    def left(self) -> list[Tensor]:
        return [self.aux[1]]


class TheBuffer(Averaging):
    def between(self, x: Tensor) -> Tensor:
        self.aux = self.mean[2:4]
        return x

    def left(self) -> list[Tensor]:
        return [self.aux]


class TakingTurns(Net):
    """Two tensors, of which each step takes the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = [torch.ones(4), torch.zeros(4)]
        self.current = self.turns[0]

    def between(self, x: Tensor) -> Tensor:
        self.current = self.turns[self.current is self.turns[0]]
        return x

    def left(self) -> list[Tensor]:
        return [self.current]


class Rotated(TakingTurns):
    def between(self, x: Tensor) -> Tensor:
        self.turns.append(self.turns.pop(0))
        return x

    def left(self) -> list[Tensor]:
        return self.turns


class Functions(TakingTurns):
    """A loop looks at what is there, and evaluation may."""

    def between(self, x: Tensor) -> Tensor:
        self.turns = [self.turns[1], self.turns[0]]
        self.act = torch.tanh if getattr(self, "act", None) is torch.relu else torch.relu
        return x

    def left(self) -> list[Tensor]:
        return [self.act(torch.linspace(-1, 1, 4))]


class Order(Net):
    def __init__(self) -> None:
        super().__init__()
        self.order = collections.OrderedDict(a=1.0, b=2.0, c=3.0)

    def between(self, x: Tensor) -> Tensor:
        self.order.move_to_end(next(iter(self.order)))
        return x

    def left(self) -> list[Tensor]:
        return [torch.tensor([*self.order.values()])]


class Gone(Net):
    """In every other step there is something."""

    def __init__(self) -> None:
        super().__init__()
        self.there: dict[str, Tensor] = {}

    def between(self, x: Tensor) -> Tensor:
        mean = x.mean()
        if self.there:
            self.there.clear()
        else:
            self.there["x"] = mean
        return x

    def left(self) -> list[Tensor]:
        return [*self.there.values(), torch.tensor(len(self.there))]


class Kinds(Net):
    def between(self, x: Tensor) -> Tensor:
        self.kind = [1] if type(getattr(self, "kind", None)) is tuple else (1,)
        return x

    def left(self) -> list[Tensor]:
        return [torch.tensor(type(self.kind) is tuple)]


WITHOUT_PLAN = {
    HeldToo: "'held.0.' keeps what was there",
    Distribution: "set in each step to what a compiled step cannot put there",
    Closure: "set in each step to what a compiled step cannot put there",
    OfAClassThatDoesNotCopy: "set in each step to what a compiled step cannot put there",
    Parameters: "set in each step to what a compiled step cannot put there",
    TheBuffer: "set in each step to what a compiled step cannot put there",
    TakingTurns: "in one step and elsewhere in the next",
    Rotated: "in one step and elsewhere in the next",
    **dict.fromkeys((Functions, Order, Kinds), "in one step and elsewhere in the next"),
}


@pytest.mark.parametrize("model", WITHOUT_PLAN, ids=lambda model: model.__name__)
def test_what_a_plan_cannot_leave(model: type[Net]) -> None:
    with pytest.warns(UserWarning, match=WITHOUT_PLAN[model]):
        pair = Twins(model, X, SGD)
    assert_steps(pair)


def test_what_is_there_in_every_other_step() -> None:
    """The first one makes it, so only a later one tells."""
    pair = Twins(Gone, X, SGD)
    with pytest.warns(UserWarning, match="in one step and elsewhere in the next"):
        assert_steps(pair)


class Empty:
    __slots__ = ("mean",)


class EmptySlots(Net):
    def __init__(self) -> None:
        super().__init__()
        self.aux = Empty()

    def between(self, x: Tensor) -> Tensor:
        self.aux.mean = x.mean()
        return x

    def left(self) -> list[Tensor]:
        return [self.aux.mean]


def test_slots_that_were_empty() -> None:
    pair = Twins(EmptySlots, X, SGD, fallback="error")
    assert_steps(pair)


class DrawingAndLeaving(Net):
    def between(self, x: Tensor) -> Tensor:
        random.random()
        self.aux = x.mean()
        return x


def test_a_capture_draws_nothing() -> None:
    pair = Twins(DrawingAndLeaving, X, SGD, fallback="error", example=None)
    random.seed(3)
    pair.step(pair.batch)
    got = random.random()
    random.seed(3)
    random.random()
    assert got == random.random()


class Reading(Net):
    def forward(self, x: Tensor, reads: bool) -> tuple[Tensor, dict[str, bool]]:
        hidden = torch.tanh(self.a(x))
        first = reads and self.aux is None
        self.aux = hidden.detach()
        return self.b(hidden).square().mean(), {"first": first}


def test_none_is_proven_for_one_capture_of_a_plan() -> None:
    model = fully_shard(Reading())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fsdp_mlir.compile(model, loss=lambda output: output, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(**X, reads=False)
        assert step(**X, reads=True)[1] == {"first": False}
        model.aux = None
        assert step(**X, reads=True)[1] == {"first": True}


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(8)  # no buffer

    def between(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.count

    def left(self) -> list[Tensor]:
        return [self.count]


def test_a_constant_written_in_a_step_with_evaluation() -> None:
    pair = Twins(Counting, X, SGD, fallback="error", evaluation=True)
    assert_steps(pair)
