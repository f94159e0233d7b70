"""Numbers that a step draws from Python's and NumPy's generators: a plan takes them as it takes
inputs, and the generators are where FSDP2's step leaves them."""

from __future__ import annotations

import logging
import random
import threading
import warnings
from random import random as uniform
from typing import Any

import fsdp_mlir
import numpy as np
import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from twins import full

X = torch.linspace(-1, 1, 32).reshape(4, 8)
T = torch.tensor([0, 3, 1, 2])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, *, first: int = 0) -> Tensor:
        for layer in self.layers[first:]:
            x = x + layer(x).tanh()
        return self.head(x)


class Dropped(Net):
    """LayerDrop of the last layer, which is asked for in eval mode too."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = x + layer(x).tanh()
        dropped = random.uniform(0, 1)
        if not self.training or dropped > 0.5:
            x = x + self.layers[2](x).tanh()
        return self.head(x)


def plain(model: Any, x: Tensor, t: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), t)


def mixup(model: Any, x: Tensor, t: Tensor) -> Tensor:
    lam, index = np.random.beta(0.4, 0.4), torch.randperm(len(x))
    output = model(lam * x + (1 - lam) * x[index])
    loss = nn.functional.cross_entropy
    return lam * loss(output, t) + (1 - lam) * loss(output, t[index])


def conditioned(model: Any, x: Tensor, t: Tensor) -> Tensor:
    """On its own output, as diffusion models are in half of their steps."""
    before = torch.zeros(len(x), 4)
    if random.random() < 0.5:
        with torch.no_grad():
            before = model(x)
    return nn.functional.cross_entropy(model(x) + before, t)


def nested(model: Any, x: Tensor, t: Tensor) -> Tensor:
    """Another number of draws each way, from both generators."""
    if np.random.rand() < 0.5:
        x = x * random.gauss(0.0, 1.0)
    elif random.randint(0, 3) > 1:
        x = x * np.random.normal(1.0, scale=0.5)
    return nn.functional.cross_entropy(model(x), t) * uniform()


def chosen(model: Any, x: Tensor, t: Tensor) -> Tensor:
    scale = random.choice([0.5, 1.0, 2.0]) * float(np.random.choice([1.0, 3.0]))
    return nn.functional.cross_entropy(model(x * scale), t)


def of_a_size(model: Any, x: Tensor, t: Tensor) -> Tensor:
    """Each is another step."""
    count = random.randint(1, 3)
    for _ in range(count):
        x = x * 0.5
    return nn.functional.cross_entropy(model(x)[:, : count + 1], t % (count + 1))


def calculated(model: Any, x: Tensor, t: Tensor) -> Tensor:
    lam = max(np.random.beta(2, 2), 0.5)
    weight = torch.tensor(lam)
    return nn.functional.cross_entropy(model(x), t) / weight + (x * (1 - lam)).sum()


def of_one_element(model: Any, x: Tensor, t: Tensor) -> Tensor:
    """As the code of CutMix has it."""
    drawn = np.random.rand(1)
    if drawn < 0.5:
        x = x.flip(0) * drawn[0]
    return nn.functional.cross_entropy(model(x), t)


def by_weights(model: Any, x: Tensor, t: Tensor) -> Tensor:
    scale = np.random.choice([0.5, 2.0], p=[0.25, 0.75])
    sign = random.choices([1, -1], weights=[3, 1])[0]
    return nn.functional.cross_entropy(model(x * float(scale)), t) * sign


def handled(model: Any, x: Tensor, t: Tensor) -> Tensor:
    """A coin whose error is no error of the step."""
    try:
        if torch.rand(1) < 0.3:
            raise ValueError("no")
    except ValueError:
        x = x * 2
    return nn.functional.cross_entropy(model(nn.functional.dropout(x)), t)


def raising(model: Any, x: Tensor, t: Tensor) -> Tensor:
    if torch.rand(1) < 0.3:
        raise ValueError("no")
    return nn.functional.cross_entropy(model(nn.functional.dropout(x)), t)


def in_the_middle(model: Any, x: Tensor, t: Tensor) -> Tensor:
    """A number that is written, too, and that one step in twenty goes by."""
    drawn = random.random()
    logging.getLogger(__name__).debug(f"{drawn:.3f}")
    if 0.5 < drawn < 0.55:
        x = x * 2
    return nn.functional.cross_entropy(model(x), t)


def of_an_array(model: Any, x: Tensor, t: Tensor) -> Tensor:
    if 0.5 < np.random.rand(3)[1] < 0.55:
        x = x * 2
    return nn.functional.cross_entropy(model(x), t)


def of_an_array_of_one(model: Any, x: Tensor, t: Tensor) -> Tensor:
    """Whose dtype the product has."""
    hidden = x * np.random.rand(1)
    return nn.functional.cross_entropy(model(hidden.float()), t)


def of_others(model: Any, x: Tensor, t: Tensor) -> Tensor:
    if random.sample([0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0], 1)[0]:
        x = x * 2
    return nn.functional.cross_entropy(model(x), t)


def in_a_thread(model: Any, x: Tensor, t: Tensor) -> Tensor:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(random.random()))
    thread.start(), thread.join()
    return nn.functional.cross_entropy(model(x), t) * (1 + found[0])


def coin(model: Any, x: Tensor, t: Tensor) -> Tensor:
    if torch.rand(1) < 0.5:
        x = x.flip(0)
    return nn.functional.cross_entropy(model(nn.functional.dropout(x, 0.25)), t)


def behind_others(model: Any, x: Tensor, t: Tensor) -> Tensor:
    """Draws of tensors, which are made again up to these."""
    hidden = nn.functional.dropout(model(x), 0.5) + torch.randn(4) * 0.1
    if torch.empty(1).uniform_(0, 1).item() > 0.5:
        hidden = nn.functional.dropout(hidden.double(), 0.5).float()
    scale = 2.0 if torch.rand(()).item() < 0.5 else 1.0
    return nn.functional.cross_entropy(hidden, t) * scale


def of_a_layer(model: Any, x: Tensor, t: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x, first=torch.randint(0, 3, (1,)).item()), t)


class Run:
    """One side: `loss` of `model`, in one process."""

    def __init__(self, model: type[nn.Module], loss: Any, *, ours: bool, **options: Any) -> None:
        self.model, self.loss, self.step = model(), loss, None
        shard = fsdp_mlir.fully_shard if ours else torch.distributed.fsdp.fully_shard
        shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.count = options.get("gradient_accumulation_steps", 1)
        if ours:
            self.step = fsdp_mlir.compile(
                self.model, compute_loss=loss, optimizer=self.optimizer, **options
            )

    def __call__(self, x: Tensor, t: Tensor) -> Any:
        if self.step is not None:
            return self.step(x, t).item()
        losses = []
        pieces = zip(x.chunk(self.count), t.chunk(self.count), strict=True)
        for number, piece in enumerate(pieces, 1):
            last = number == self.count
            self.model.set_is_last_backward(last)
            losses.append(self.loss(self.model, *piece))
            (losses[-1] / self.count).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().item()

    def evaluate(self, x: Tensor, t: Tensor) -> Any:
        if self.step is not None:
            return self.step.evaluate(x, t).item()
        self.model.eval()
        with torch.no_grad():
            loss = self.loss(self.model, x, t)
        self.model.train()
        return loss.item()


def trained(run: Run, steps: int = 16, *, evaluates: bool = False) -> tuple[Any, ...]:
    """What the steps return, the parameters, and the generators' next numbers."""
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    returned = []
    for number in range(steps):
        returned.append(run(X * (1 + number / 8), T.roll(number)))
        if evaluates and number % 2:
            returned.append(run.evaluate(X, T))
    parameters = [full(param).detach().clone() for param in run.model.parameters()]
    following = random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()
    return returned, parameters, (*following, torch.rand(()).item())


def assert_equal(
    model: type[nn.Module], loss: Any, *, steps: int = 16, evaluates: bool = False, **options: Any
) -> tuple[Run, list[str]]:
    ours = Run(model, loss, ours=True, **options)
    theirs = Run(model, loss, ours=False, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = trained(ours, steps, evaluates=evaluates)
    want = trained(theirs, steps, evaluates=evaluates)
    assert got[0] == want[0] and got[2] == want[2]
    assert all(map(torch.equal, got[1], want[1]))
    return ours, [str(each.message) for each in caught if "FSDP2 does" in str(each.message)]


@pytest.mark.parametrize(
    ("loss", "plans"),
    [
        *((mixup, 1), (calculated, 2), (conditioned, 2), (nested, 2), (of_a_size, 3), (chosen, 5)),
        *((of_one_element, 2), (by_weights, 3)),
    ],
)
def test_a_loss(loss: Any, plans: int) -> None:
    run, lines = assert_equal(Net, loss, fallback="error" if plans < 5 else "eager")
    assert len(run.step._plans._made) == plans and bool(lines) == (plans == 5)


@pytest.mark.parametrize(
    ("loss", "plans"), [(coin, 2), (behind_others, 4), (of_a_layer, 3), (handled, 2)]
)
def test_draws_of_torch(loss: Any, plans: int) -> None:
    """They stay in the plan, and those that decide a branch are made before it, too."""
    run, lines = assert_equal(Net, loss)
    assert len(run.step._plans._made) == plans and not lines


def test_a_dropped_layer() -> None:
    run, lines = assert_equal(Dropped, plain, evaluation=True, evaluates=True, fallback="error")
    assert len(run.step._plans._made) == 2 and not lines


@pytest.mark.parametrize("loss", [mixup, conditioned])
def test_microbatches(loss: Any) -> None:
    """Each draws its own numbers."""
    run, lines = assert_equal(Net, loss, gradient_accumulation_steps=2)
    assert run.step._plans._made and bool(lines) == (loss is conditioned)


def metrics(model: Any, x: Tensor, t: Tensor) -> Any:
    lam = random.betavariate(0.4, 0.4)
    return lam * nn.functional.cross_entropy(model(x), t), {"lam": lam, "rest": 1 - lam}


def test_outputs() -> None:
    ours = Run(Net, metrics, ours=True, fallback="error")
    random.seed(3)
    drawn = [random.betavariate(0.4, 0.4) for _ in range(3)]
    random.seed(3)
    found = [ours.step(X, T)[1] for _ in range(3)]
    assert found == [{"lam": lam, "rest": 1 - lam} for lam in drawn]


def decided(model: Any, x: Tensor, t: Tensor) -> Tensor:
    """A branch on what the step computes, too."""
    lam, output = np.random.beta(0.4, 0.4), model(x)
    loss = nn.functional.cross_entropy(output, t) * lam
    return loss * 2 if loss > 0.6 else loss


def of_a_size_and_decided(model: Any, x: Tensor, t: Tensor) -> Tensor:
    loss = of_a_size(model, x, t)
    return loss * 2 if loss > 0.6 else loss


@pytest.mark.parametrize("loss", [decided, of_a_size_and_decided])
def test_after_a_step_in_vain(loss: Any) -> None:
    """FSDP2 makes it with the same numbers."""
    run, _ = assert_equal(Net, loss)
    assert run.step._plans._made


def shuffled(model: Any, x: Tensor, t: Tensor) -> Tensor:
    """Draws otherwise, too, from the same generator."""
    order = [0, 1, 2, 3]
    random.shuffle(order)
    return nn.functional.cross_entropy(model(x[order]), t) * random.random()


@pytest.mark.parametrize(
    "loss", [shuffled, in_the_middle, of_an_array, of_others, in_a_thread, of_an_array_of_one]
)
def test_what_has_no_plan(loss: Any) -> None:
    run, lines = assert_equal(Net, loss, steps=60)
    assert not run.step._plans._made and len(lines) == 1


def test_an_error_of_the_step() -> None:
    """The loop goes on after it."""

    def run(ours: bool) -> list[Any]:
        side, found = Run(Net, raising, ours=ours), []
        torch.manual_seed(1)
        for _ in range(8):
            try:
                found.append(side(X, T))
            except ValueError as error:
                found.append(str(error))
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, want = run(True), run(False)
    assert got == want and "no" in got and not isinstance(got[0], str)
