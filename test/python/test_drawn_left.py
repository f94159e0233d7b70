"""Numbers that a step draws or is given, and leaves in Python: a compiled step leaves those of its
own there, as FSDP2's does."""

from __future__ import annotations

import random
import warnings
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from test_drawn_numbers import Net, Run, T, X, plain
from torch import Tensor, nn
from twins import full


class Mixed(Net):
    """Mixup inside of the model, whose loss function asks it for the weight."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.lam = np.random.beta(0.4, 0.4)
        self.index = torch.randperm(len(x))
        return super().forward(self.lam * x + (1 - self.lam) * x[self.index])


def mixed(model: Any, x: Tensor, t: Tensor) -> Tensor:
    output, loss = model(x), nn.functional.cross_entropy
    return model.lam * loss(output, t) + (1 - model.lam) * loss(output, t[model.index])


class Point(NamedTuple):
    x: float
    y: int


@dataclass
class Settings:
    scale: float = 1.0


class InContainers(Net):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.scales = [random.random(), 2 * random.uniform(1, 2)]
        self.info = {"count": random.randint(1, 5), "rest": {"half": self.scales[0] / 2}}
        self.point = Point(random.random(), random.randrange(4))
        self.settings = Settings(random.gauss(1, 0.1))
        self.space = SimpleNamespace(p=1 - self.point.x, tensor=x.mean() * self.point.y)
        return super().forward(x * self.scales[1] * self.settings.scale)


class Choosing(Net):
    """By a number that it leaves, and a truth value."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.drawn = random.random()
        self.flips = self.drawn < 0.5
        return super().forward(x.flip(0) * self.drawn if self.flips else x)


class Averaging(Net):
    """The next step reads what the last one left."""

    mean = 0.5

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.mean = 0.75 * self.mean + 0.25 * random.random()
        return super().forward(x * self.mean)


class Delayed(Net):
    """The same with a number of the last step alone."""

    last: float | None = None

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        if self.last is not None and self.last > 0.5:
            x = x * self.last
        self.last = random.random()
        return super().forward(x) * self.last


class Unused(Net):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.drawn, self.seed = random.random(), random.getrandbits(16)
        return super().forward(x)


class Large(Net):
    """No float has this integer."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.seed = random.getrandbits(60)
        return super().forward(x)


class InEvaluation(Net):
    """With the number of the last step."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        if self.training:
            self.drawn = random.random()
        return super().forward(x * self.drawn)


class Given(Net):
    def forward(self, x: Tensor, *, scale: float = 1.0, count: int = 1) -> Tensor:
        self.scale, self.pair = scale * 2, (scale, count + 1)
        return super().forward(x * scale * count)


# What the loop changes.
LOOP = {"count": 1}


def given(model: Any, x: Tensor, t: Tensor) -> Tensor:
    number = LOOP["count"]
    return nn.functional.cross_entropy(model(x, scale=number / 7, count=number), t)


class InBackward(Net):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.scale = random.random()
        output = super().forward(x)
        output.register_hook(lambda grad: grad * self.scale)
        return output


class Formatted(Net):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.drawn = random.random()
        self.text = f"{self.drawn:.3f}"
        return super().forward(x * self.drawn)


def shown(value: Any) -> Any:
    if isinstance(value, Tensor):
        return full(value).tolist()
    if isinstance(value, (dict, SimpleNamespace)):
        items = value if isinstance(value, dict) else vars(value)
        return {key: shown(each) for key, each in items.items()}
    if isinstance(value, (list, tuple, deque)):
        return [type(value).__name__, *map(shown, value)]
    return type(value).__name__, repr(value)


def left(model: nn.Module) -> dict[str, Any]:
    """What the model holds besides modules."""
    own = {key: each for key, each in vars(model).items() if key[0] != "_" and key != "training"}
    return {key: shown(each) for key, each in own.items()}


def steps_of(model: type[nn.Module], loss: Any, *, ours: bool, **options: Any) -> tuple[Any, ...]:
    evaluates = options.pop("evaluates", False)
    run = Run(model, loss, ours=ours, **options)
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    found: list[Any] = []
    for number in range(16):
        LOOP["count"] = number + 1
        returned = run(X * (1 + number / 8), T.roll(number))
        found.append((returned, left(run.model)))
        if evaluates:
            found.append(run.evaluate(X, T))
    parameters = [full(param).tolist() for param in run.model.parameters()]
    return (found, parameters, random.random(), np.random.rand()), run


def assert_equal(model: type[nn.Module], loss: Any, **options: Any) -> tuple[Run, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got, run = steps_of(model, loss, ours=True, **options)
    want, _ = steps_of(model, loss, ours=False, evaluates=options.get("evaluates", False))
    assert got == want
    return run, [str(each.message) for each in caught if "FSDP2 does" in str(each.message)]


@pytest.mark.parametrize(
    ("model", "loss", "plans"),
    [
        *((Mixed, mixed, 1), (InContainers, plain, 1), (Choosing, plain, 2), (Unused, plain, 1)),
        (Given, given, 2),
    ],
)
def test_left(model: type[nn.Module], loss: Any, plans: int) -> None:
    run, lines = assert_equal(model, loss, fallback="error")
    assert len(run.step._plans._made) == plans and not lines


@pytest.mark.parametrize("model", [Averaging, Delayed])
def test_what_the_next_step_reads(model: type[nn.Module]) -> None:
    run, _ = assert_equal(model, plain)
    assert run.step._plans._made


@pytest.mark.parametrize("evaluation", [False, True])
def test_what_an_evaluation_reads(evaluation: bool) -> None:
    """Recorded with the step, there is none for what the step leaves."""
    run, lines = assert_equal(InEvaluation, plain, evaluates=True, evaluation=evaluation)
    assert bool(run.step._plans._made) is not evaluation and bool(lines) is evaluation


def test_an_integer_that_no_float_has() -> None:
    """Each is another step."""
    _, lines = assert_equal(Large, plain)
    assert len(lines) == 1


@pytest.mark.parametrize("model", [InBackward, Formatted])
def test_what_has_no_plan(model: type[nn.Module]) -> None:
    run, lines = assert_equal(model, plain)
    assert not run.step._plans._made and len(lines) == 1
