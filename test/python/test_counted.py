"""Numbers that each step changes where code holds them, such as a count of its calls: the step is
for all of them, and leaves the next one, as with FSDP2."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from test_followed import Criterion, Net, captures, mixed, trained
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["captures"]

CALLS = 0


class Warmup(Criterion):
    """A warm-up of its own: its end is another plan."""

    def __init__(self) -> None:
        self.calls, self.rate = 0, 0.0

    def __call__(self, y: Tensor) -> Any:
        self.calls += 1
        self.rate += 0.5
        return y.square().mean() * min(1.0, self.calls / 4) + y.abs().mean() * self.rate

    def left(self) -> list[Any]:
        return [torch.tensor([self.calls, self.rate])]


class FromLoop(Warmup):
    """The loop sets it, too."""

    def change(self, number: int) -> None:
        if number == 2:
            self.calls = -5


class Bounded(Criterion):
    """It begins anew."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, y: Tensor) -> Any:
        self.calls = 0 if self.calls >= 2 else self.calls + 1
        return y.square().mean() * (1 + self.calls)

    def left(self) -> list[Any]:
        return [torch.tensor(self.calls)]


class Lazy(Bounded):
    """The first step sets what there was not."""

    def __init__(self) -> None:
        self.calls: Any = None

    def __call__(self, y: Tensor) -> Any:
        self.calls = (self.calls or 0) + 1
        return y.square().mean() * (1 + self.calls % 2)

    def left(self) -> list[Any]:
        return [torch.tensor(self.calls or 0)]


class InDicts(Bounded):
    def __init__(self) -> None:
        self.held = {"calls": 0, "inner": {"rate": 1.5}}

    def __call__(self, y: Tensor) -> Any:
        self.held["calls"] += 1
        self.held["inner"]["rate"] *= 0.9
        return y.square().mean() * self.held["inner"]["rate"]

    def left(self) -> list[Any]:
        return [torch.tensor([self.held["calls"], self.held["inner"]["rate"]])]


class OfAFile(Bounded):
    def __init__(self) -> None:
        global CALLS
        CALLS = 0

    def __call__(self, y: Tensor) -> Any:
        global CALLS
        CALLS += 1
        return y.square().mean() * math.cos(CALLS)

    def left(self) -> list[Any]:
        return [torch.tensor(CALLS)]


class Corrected(Bounded):
    """A running mean, corrected as Adam's, and the number before in another attribute."""

    def __init__(self) -> None:
        self.calls, self.before, self.mean = 0, 0, torch.zeros(8)

    def __call__(self, y: Tensor) -> Any:
        self.before = self.calls
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return (y - self.mean / (1 - 0.9**self.calls)).square().mean()

    def left(self) -> list[Any]:
        return [torch.tensor([self.calls, self.before]), self.mean]


class Returned(Bounded):
    def __call__(self, y: Tensor) -> Any:
        self.calls += 1
        return {"loss": y.square().mean(), "rate": y.sum().detach() / self.calls}


class Meter(Bounded):
    """As loops print it, of what the step computes."""

    def __init__(self) -> None:
        self.total, self.seen = 0.0, 0

    def __call__(self, y: Tensor) -> Any:
        loss = y.square().mean()
        self.total += loss.item() * len(y)
        self.seen += (y > 0).sum().item()
        return loss

    def left(self) -> list[Any]:
        return [torch.tensor([self.total], dtype=torch.float64), torch.tensor(self.seen)]


class Smoothed(Meter):
    """The next step computes with it, as a balance of losses does."""

    def __call__(self, y: Tensor) -> Any:
        loss, penalty = y.square().mean(), y.abs().mean()
        self.total = 0.9 * self.total + 0.1 * loss.item()
        return loss + penalty / (1.0 + self.total)


class Adapted(Meter):
    """It weighs by that of the step before, which has a limit."""

    def __call__(self, y: Tensor) -> Any:
        weight = min(self.total, 0.5)
        loss = y.square().mean()
        self.total += loss.detach().double().item()
        return loss * weight + y.abs().mean()


class Index(Bounded):
    def __call__(self, y: Tensor) -> Any:
        weight = [1.0, 2.0, 3.0][self.calls % 3]
        self.calls += 1
        return y.square().mean() * weight


class Table(Bounded):
    """It goes to the table's end."""

    def __call__(self, y: Tensor) -> Any:
        weight = [1.0, 0.5, 0.25][min(self.calls, 2)]
        self.calls += 1
        return y.square().mean() * weight


class Setting(Bounded):
    """Of an operator."""

    def __call__(self, y: Tensor) -> Any:
        self.calls += 1
        return y.clamp(-self.calls % 2, 0.5).square().mean()


class Rows(Bounded):
    def __call__(self, y: Tensor) -> Any:
        self.calls += 1
        rows = y[: 2 + self.calls % 2]
        return rows.square().mean() * (1.5, 2.5)[self.calls % 2]


# With the number of captures: the first has no plan, and one is for each outcome of comparisons.
COUNTED = {
    **{Warmup: 3, FromLoop: 2, Bounded: 3, Lazy: 3, InDicts: 2, OfAFile: 2, Corrected: 2},
    **{Returned: 2, Meter: 2, Smoothed: 2, Adapted: 3},
    **{Index: 4, Table: 5, Setting: 3, Rows: 3},
}


class Text(Bounded):
    def __call__(self, y: Tensor) -> Any:
        self.calls += 1
        self.name = f"step {self.calls}"
        return y.square().mean()


class Rolled(Bounded):
    def __call__(self, y: Tensor) -> Any:
        self.calls += 1
        return (y.roll(self.calls, 0) * y).mean()


class Slow(Bounded):
    """It has nine values in the steps to come."""

    def __call__(self, y: Tensor) -> Any:
        self.calls += 1
        return F.dropout(y, min(0.9, (self.calls // 30) / 10)).square().mean()


class Signed(Bounded):
    """Zeros of both signs."""

    def __init__(self) -> None:
        self.calls = 0.0

    def __call__(self, y: Tensor) -> Any:
        self.calls = -self.calls
        return (1 / y.mul(0).copysign(torch.full_like(y, self.calls)) > 0).sum() + y.mean()


class Seen(Bounded):
    """It is hashed, and kept."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, set()

    def __call__(self, y: Tensor) -> Any:
        self.calls += 1
        self.seen.add(self.calls % 3)
        return y.square().mean() * len(self.seen)


class Drawn(Bounded):
    def __call__(self, y: Tensor) -> Any:
        self.calls += int(torch.initial_seed() % 2**20) + 1
        return y.square().mean()


@pytest.mark.parametrize("kind", COUNTED)
def test_each_step_leaves_the_next_one(kind: Any, captures: list[None]) -> None:
    options = {} if kind is Lazy else {"fallback": "error"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert trained(kind(), True, **options) == trained(kind(), False)
    assert len(captures) == COUNTED[kind]


class InAModule(nn.Module):
    """A criterion that the loss function closes over, or a list holds."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, y: Tensor) -> Tensor:
        self.calls += 1
        return y.square().mean() * min(1.0, self.calls / 4)


@pytest.mark.parametrize("in_a_list", [False, True])
def test_a_criterion_beside_the_loss(in_a_list: bool, captures: list[None]) -> None:
    def run(compiled: bool) -> list[Any]:
        module = InAModule()
        held = [module]

        class Loss(Criterion):
            def __call__(self, y: Tensor) -> Any:
                return held[0](y) if in_a_list else module(y)

            def left(self) -> list[Any]:
                return [torch.tensor(module.calls)]

        return trained(Loss(), compiled, **({"fallback": "error"} if compiled else {}))

    assert run(True) == run(False)
    assert len(captures) == 3


@pytest.mark.parametrize("kind", [Text, Rolled, Slow, Signed, Seen])
def test_more_than_a_tensor_may_be_has_no_plan(kind: Any) -> None:
    with pytest.warns(UserWarning, match="'.*calls' changes in each step"):
        got = trained(kind(), True)
    assert got == trained(kind(), False)


def test_a_number_that_a_recording_alone_has_is_not_left() -> None:
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        got = trained(Drawn(), True)
    assert got == trained(Drawn(), False)


class Training(Net):
    """It counts in train mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class OfAnInput(Net):
    """It has the name of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.x = 0

    def forward(self, x: Tensor) -> Tensor:
        self.x += 1
        return super().forward(x) * (1 + 0.1 * self.x)


@pytest.mark.parametrize("kind", [Net, Training, OfAnInput])
def test_in_each_microbatch_and_in_evaluation(kind: Any) -> None:
    def run(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        criterion, model = Warmup(), kind()

        def left() -> Any:
            return criterion.calls, criterion.rate, getattr(model, "calls", 0)

        return mixed(model, criterion, compiled, left)

    assert run(True) == run(False)
