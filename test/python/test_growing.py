"""Lists that each step appends to: a compiled step appends what FSDP2's does, and reads nothing."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from test_drawn_left import left
from test_drawn_numbers import Net, Run, T, X, plain
from torch import Tensor, nn
from twins import full


class Growing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.all: list[Any] = []


class Tensors(Growing):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        output = super().forward(x)
        self.all.append(output.mean())
        return output


class Mixed(Growing):
    """What a step computes, draws and is."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        output, scale = super().forward(x), random.random()
        self.all += [{"sum": output.detach().sum(0), "scales": (scale, 1 - scale, None)}, "step"]
        self.all.extend([output.sum().item() / 4, 3])
        return output * scale


class Recent(Net):
    """The last ones, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = {"means": deque(maxlen=4), "other": 1}

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.logs["means"].append(x.mean().item())
        return super().forward(x)


class Rotating(Growing):
    """It is full."""

    def __init__(self) -> None:
        super().__init__()
        self.all = deque((torch.zeros(()),) * 3, maxlen=3)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.all.append(x.mean())
        return super().forward(x)


class Bounded(Growing):
    """By a length that the loop changes, with the list."""

    def __init__(self) -> None:
        super().__init__()
        self.all = deque(maxlen=4)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.all.append(x.mean())
        return super().forward(x * self.all.maxlen)


class Criterion:
    def __init__(self) -> None:
        self.history: list[float] = []

    def __call__(self, model: Any, x: Tensor, t: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), t)
        self.history.append(loss.item())
        return loss


FOUND: list[Tensor] = []


def in_a_global(model: Any, x: Tensor, t: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), t)
    FOUND.append(loss.detach())
    return loss


class Counting(Growing):
    """Each third step is another one."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.all.append(x.mean())
        return super().forward(x * 2 if len(self.all) % 3 == 0 else x)


class Catching(Growing):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.all.append(x.mean())
        with suppress(Exception):
            x = x * 2 if self.all[5:] else x
        return super().forward(x)


class Stacking(Growing):
    """An operator of PyTorch does not ask for the items by the methods of a list."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.all.append(x.mean())
        return super().forward(x) * torch.stack(self.all).mean()


class OfABuffer(Growing):
    """Which is in the list itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(1.5)
        self.all.append(self.scale)
        return super().forward(x)


class InBackward(Growing):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        output = super().forward(x)
        output.register_hook(lambda grad: self.all.append(grad.mean()))
        return output


class ByTwoNames(Growing):
    def __init__(self) -> None:
        super().__init__()
        self.same = self.all

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.all.append(x.mean())
        return super().forward(x * 2 if len(self.same) % 3 == 0 else x)


class Named(Growing):
    same: list[Any] | None = None

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.all.append(x.mean())
        return super().forward(x * 2 if self.same and len(self.same) % 3 == 0 else x)


class InATuple(Growing):
    def __init__(self) -> None:
        super().__init__()
        self.pair = (self.all, 1)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.all.append(x.mean())
        return super().forward(x * 2 if len(self.pair[0]) % 3 == 0 else x)


class ByAMethod(Growing):
    def __init__(self) -> None:
        super().__init__()
        self._count = self.all.__len__

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.all.append(x.mean())
        return super().forward(x * (1 + self._count() % 3))


class OfItsClass(Growing):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.all.append(x.mean())
        return super().forward(x * 2 if type(self.all) is list else x)


class Caught(Growing):
    """The error of what stands there while the step is recorded."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.all.append(x.mean() + 2)
        with suppress(TypeError):
            x = x * torch.stack(self.all).mean()
        return super().forward(x)


class Joined(Growing):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.all.append(1.0)
        return super().forward(x * len([0.0] + self.all))  # noqa: RUF005


class Unbound(Growing):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.all.append(1.0)
        list.append(self.all, 2.0)
        return super().forward(x)


class OfItsOwn(Growing):
    """An object that is there before."""

    def __init__(self) -> None:
        super().__init__()
        self.stats = {"n": 0}

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.all.append((self.stats,))
        return super().forward(x)


class Sharing(Growing):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        output = super().forward(x)
        self.all += [output, output[0]]
        return output


class OfAnInput(Growing):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.all.append(x)
        return super().forward(x)


def go_on(_: nn.Module) -> None:
    pass


def clear(model: nn.Module) -> None:
    """As at the end of an epoch."""
    model.all.clear()


def replace(model: nn.Module) -> None:
    model.all = []


def steps_of(
    model: type[nn.Module], loss: Any, each: Callable[[Any], None], *, ours: bool, **options: Any
) -> tuple[list[Any], Run]:
    evaluates = options.pop("evaluates", False)
    run = Run(model, loss() if isinstance(loss, type) else loss, ours=ours, **options)
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    FOUND.clear()
    found: list[Any] = []
    for number in range(10):
        found.append(run(X * (1 + number / 8), T.roll(number)))
        if evaluates:
            found.append(run.evaluate(X, T))
        found += [left(run.model), [*map(float, FOUND)], [*getattr(run.loss, "history", ())]]
        if number % 4 == 3:
            each(run.model)
    return [*found, *(full(param).tolist() for param in run.model.parameters())], run


def assert_equal(
    model: type[nn.Module], loss: Any, each: Callable[[Any], None] = go_on, **options: Any
) -> tuple[Run, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got, run = steps_of(model, loss, each, ours=True, **options)
    options.pop("fallback", None), options.pop("evaluation", None)
    want, _ = steps_of(model, loss, each, ours=False, **options)
    assert got == want
    return run, [str(each.message) for each in caught if "FSDP2 does" in str(each.message)]


@pytest.mark.parametrize(
    ("model", "loss", "each"),
    [
        *((Tensors, plain, each) for each in (go_on, clear, replace)),
        *((Mixed, plain, clear), (Recent, plain, go_on), (Rotating, plain, go_on)),
        *((Net, Criterion, go_on), (Net, in_a_global, go_on)),
    ],
)
def test_appended(model: type[nn.Module], loss: Any, each: Any) -> None:
    run, lines = assert_equal(model, loss, each, fallback="error")
    assert len(run.step._plans._made) == 1 and not lines


@pytest.mark.parametrize("evaluation", [False, True])
def test_evaluation(evaluation: bool) -> None:
    run, lines = assert_equal(Tensors, plain, evaluates=True, evaluation=evaluation)
    assert run.step._plans._made and not lines


@pytest.mark.parametrize(
    ("model", "why"),
    [
        *(
            (Counting, "by __len__"),
            (Catching, "by __getitem__"),
            (Stacking, "an operator takes it"),
        ),
        *((OfABuffer, "append a .clone()"), (InBackward, "so does backward")),
        *((ByTwoNames, "elsewhere in the next"), (InATuple, "elsewhere in the next")),
        *((ByAMethod, "is not what eager"), (OfItsClass, "is not what eager")),
        *(
            (Caught, "an operator takes it"),
            (Joined, "is not what eager"),
            (Unbound, "other means"),
        ),
        *((OfItsOwn, "before the step"), (Sharing, "append a .clone()")),
        (OfAnInput, "append a .clone()"),
    ],
)
def test_what_has_no_plan(model: type[nn.Module], why: str) -> None:
    run, lines = assert_equal(model, plain)
    assert not run.step._plans._made and len(lines) == 1 and why in lines[0]


@pytest.mark.parametrize("made", [lambda all: deque(all, maxlen=3), lambda all: deque(all)])
def test_another_length(made: Callable[[Any], Any]) -> None:
    """Or none: such a step is an error."""

    def change(model: Any) -> None:
        if model.all.maxlen == 4:
            model.all = made(model.all)

    class Guarded(Bounded):
        def forward(self, x: Tensor, **_: Any) -> Tensor:
            self.all.append(x.mean())
            return Net.forward(self, x * (self.all.maxlen or 1))

    run, lines = assert_equal(Guarded, plain, change)
    assert len(run.step._plans._made) == 2 and not lines


def test_a_long_list() -> None:
    """Which no module holds."""
    FOUND[:] = [torch.zeros(())] * 1500
    run = Run(Net, in_a_global, ours=True, fallback="error")
    for number in range(4):
        run(X * number, T)
    assert len(FOUND) == 1504 and len(run.step._plans._made) == 1


def test_another_name_later() -> None:
    def name(model: Any) -> None:
        model.same = model.all

    run, lines = assert_equal(Named, plain, name)
    assert run.step._plans._made and len(lines) == 1 and "has another name, too" in lines[0]


def test_microbatches() -> None:
    """Each appends what it computes."""
    run, lines = assert_equal(Tensors, plain, gradient_accumulation_steps=2)
    assert not run.step._plans._made and len(lines) == 1
