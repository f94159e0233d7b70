"""Numbers of tensors that a step leaves in Python, such as `self.last = loss.item()`: each step
leaves its own, as with FSDP2."""

from __future__ import annotations

import math
import warnings
from typing import Any

import fsdp_mlir
import pytest
import torch
from fsdp_mlir.frontdoor.plan import Compiled
from torch import Tensor, nn


class Stats:
    def __init__(self) -> None:
        self.value, self.size = 0.0, None


class Net(nn.Module):
    """It leaves numbers; `seen` is what a loop reads after a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.last: Any = 0.0
        self.total, self.count = 0, 0
        self.history: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        loss = self.b(torch.tanh(self.a(x))).square().mean()
        return self.keeping(loss, x)

    def keeping(self, loss: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError

    def seen(self) -> Any:
        return self.last

    def change(self, number: int) -> None:
        """Before a step."""


class Attribute(Net):
    def keeping(self, loss: Tensor, x: Tensor) -> Tensor:
        self.last = loss.item()
        return loss


class Formula(Net):
    def keeping(self, loss: Tensor, x: Tensor) -> Tensor:
        self.last = math.sqrt(loss.item()) / max(1, len(x)), (loss > 0.1).sum().item() + 1
        return loss


class InDict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.log: dict[str, Any] = {"loss": None, "n": 0}

    def keeping(self, loss: Tensor, x: Tensor) -> Tensor:
        self.log["loss"], self.log["n"] = loss.item(), (loss > 0.1).sum().item()
        self.log["new"] = {"half": loss.item() / 2, "list": [loss.item(), 1]}
        return loss

    def seen(self) -> Any:
        return self.log


class InObject(Net):
    def __init__(self) -> None:
        super().__init__()
        self.stats: Any = Stats()

    def keeping(self, loss: Tensor, x: Tensor) -> Tensor:
        self.stats.value = round(loss.item(), 3)
        self.made = Stats()
        self.made.size = x.sum().item()
        return loss

    def seen(self) -> Any:
        return vars(self.stats), vars(getattr(self, "made", Stats()))


class BesideTensors(Net):
    def keeping(self, loss: Tensor, x: Tensor) -> Tensor:
        self.last = {"loss": loss.detach(), "number": loss.item(), "name": "loss"}
        return loss


class Reset(Attribute):
    """By the loop, as at the end of an epoch."""

    def change(self, number: int) -> None:
        if number in (2, 4, 5):
            self.last = 0.0


class Counted(Net):
    """Beside a count."""

    def keeping(self, loss: Tensor, x: Tensor) -> Tensor:
        self.count += 1
        self.last = loss.item()
        return loss * (1 + 1 / self.count)

    def seen(self) -> Any:
        return self.last, self.count


class Branched(Net):
    """Behind a branch that one step takes."""

    def keeping(self, loss: Tensor, x: Tensor) -> Tensor:
        self.last = loss.item()
        return loss * 2 if self.last > 100 else loss

    def change(self, number: int) -> None:
        self.scale = 100.0 if number == 3 else 1.0


class Meter(Net):
    """It adds."""

    def keeping(self, loss: Tensor, x: Tensor) -> Tensor:
        self.total += loss.item() * len(x)
        return loss

    def seen(self) -> Any:
        return self.total


class Growing(Net):
    def keeping(self, loss: Tensor, x: Tensor) -> Tensor:
        self.history.append(loss.item())
        return loss

    def seen(self) -> Any:
        return list(self.history)


class Previous(Net):
    """Reads that of the step before."""

    def keeping(self, loss: Tensor, x: Tensor) -> Tensor:
        before, self.last = self.last, loss.item()
        return loss * (1 + before)


class Moved(Net):
    """Leaves that of the step before elsewhere."""

    def keeping(self, loss: Tensor, x: Tensor) -> Tensor:
        self.total, self.last = self.last, loss.item()
        return loss

    def seen(self) -> Any:
        return self.total, self.last


class Compared(Net):
    def keeping(self, loss: Tensor, x: Tensor) -> Tensor:
        better = self.last < 0.2
        self.last = loss.item()
        return loss * 2 if better else loss


def trained(kind: type[Net], *, compiled: bool, split: int = 1) -> tuple[list[Any], list[str], int]:
    """What a loop sees, the lines, and how many steps a plan has made."""
    model: Any = fsdp_mlir.fully_shard(kind())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    planned: list[None] = []
    leave = Compiled.leave

    def noted(self: Compiled, count: int) -> None:
        planned.append(None)
        leave(self, count)

    found: list[Any] = []
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(Compiled, "leave", noted)
        options = {"gradient_accumulation_steps": split} if split > 1 else {}
        step = fsdp_mlir.compile(model, optimizer=optimizer, **options) if compiled else None
        for number in range(7):
            model.change(number)
            x = torch.randn(4 * split, 8, generator=torch.Generator().manual_seed(number))
            x = x * getattr(model, "scale", 1.0)
            if step is not None:
                losses = [step(x)]
            else:
                losses = [model(part) for part in x.chunk(split)]
                for loss in losses:
                    (loss / split).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(sum(loss.item() for loss in losses) / len(losses))
            found.append(_plain(model.seen()))
    found += [param.full_tensor().tolist() for param in model.parameters()]
    lines = [str(each.message) for each in caught if "without a plan" in str(each.message)]
    return found, lines, len(planned)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value.tolist() if isinstance(value, Tensor) else (type(value), value)


@pytest.mark.parametrize(
    "kind",
    [
        *(Attribute, Formula, InDict, InObject, BesideTensors, Reset, Counted, Branched),
        *(Meter, Growing, Previous, Moved, Compared),
    ],
)
def test_each_step_leaves_its_own(kind: type[Net]) -> None:
    want, _, _ = trained(kind, compiled=False)
    got, lines, planned = trained(kind, compiled=True)
    assert got == want
    assert lines == []
    assert planned >= 5


def test_the_last_microbatch_leaves_it() -> None:
    want, _, _ = trained(Attribute, compiled=False, split=2)
    got, lines, planned = trained(Attribute, compiled=True, split=2)
    assert got[1::2] == want[1::2]
    assert (lines, planned) == ([], 7)


@pytest.mark.parametrize(("kind", "split"), [(Growing, 2), (Meter, 2), (Previous, 2)])
def test_no_plan(kind: type[Net], split: int) -> None:
    """A plan leaves what the last of several microbatches does."""
    want, _, _ = trained(kind, compiled=False, split=split)
    got, lines, planned = trained(kind, compiled=True, split=split)
    assert got[1::2] == want[1::2]  # the first are means that are rounded otherwise
    assert lines and planned == 0


class Criterion(nn.Module):
    """It calls the model, and leaves a dict of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.log: Any = None

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        output = model(x)
        loss = output.square().mean()
        count = (x > 0).sum().item()
        self.log = {"loss": loss.item(), "count": count, "share": (output > 0).sum().item() / count}
        return loss


def test_a_criterion_leaves_numbers() -> None:
    torch.manual_seed(0)
    model = fsdp_mlir.fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion, other = Criterion(), Criterion()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = fsdp_mlir.compile(model, compute_loss=criterion, optimizer=optimizer)
        for number in range(4):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
            with torch.no_grad():
                want = other(model, x)
            assert torch.equal(step(x), want)
            assert criterion.log == other.log
            assert list(map(type, criterion.log.values())) == [float, int, float]
    assert len(step._plans._made) == 1
