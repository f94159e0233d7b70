"""What a loss leaves in objects beside the model, such as a criterion: as after a step of FSDP2."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import fsdp_mlir
import pytest
import torch
from torch import Tensor, nn


class Criterion(nn.Module):
    """It keeps a tensor in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(8))
        self.last: Any = None

    def forward(self, y: Tensor) -> Tensor:
        self.last = y.detach().mean(0)
        return y.square().mean()


class Sparse(Criterion):
    """It also holds a tensor that has no strides."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = torch.eye(8).to_sparse()


class Assigning(Criterion):
    """A buffer, which nothing in the step reads."""

    def forward(self, y: Tensor) -> Tensor:
        self.center = y.detach().mean(0)
        return y.square().mean()


class Within(Criterion):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Assigning()

    def forward(self, y: Tensor) -> Tensor:
        loss: Tensor = self.inner(y)
        return loss

    def buffers(self, recurse: bool = True) -> Any:
        return self.inner.buffers(recurse)


class InPlace(Criterion):
    """A buffer in place, which the next step reads."""

    def forward(self, y: Tensor) -> Tensor:
        loss = (y - self.center).square().mean()
        self.center.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return loss


class Averaging(Criterion):
    """A buffer that the next step reads, as the center of DINO's loss."""

    def forward(self, y: Tensor) -> Tensor:
        loss = (y - self.center).square().mean()
        self.center = 0.9 * self.center + 0.1 * y.detach().mean(0)
        return loss


class Momentum(Criterion):
    """It gives a parameter other data, as of MoCo's key encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, y: Tensor) -> Tensor:
        loss = (y - self.key).square().mean()
        self.key.data = 0.9 * self.key.data + 0.1 * y.detach().mean(0)
        return loss

    def buffers(self, recurse: bool = True) -> Any:
        return self.parameters(recurse)


class Counting(Criterion):
    def forward(self, y: Tensor) -> Tensor:
        self.last = (self.last or 0) + 1
        return y.square().mean() * (1 + self.last % 2)


class Plain:
    """No module."""

    def __init__(self) -> None:
        self.last: Any = None

    def __call__(self, y: Tensor) -> Tensor:
        self.last = y.detach().mean(0)
        return y.square().mean()

    def buffers(self) -> list[Tensor]:
        return []


Loss = Callable[[Any, Tensor], Tensor]
OF_ALL: list[Any] = []


def in_a_closure(criterion: Any) -> Loss:
    return lambda model, x: criterion(model(x))


def in_a_list(criterion: Any) -> Loss:
    several = [criterion]
    return lambda model, x: several[0](model(x))


def in_a_global(criterion: Any) -> Loss:
    OF_ALL[:] = [criterion]
    return lambda model, x: OF_ALL[0](model(x))


def in_a_partial(criterion: Any) -> Loss:
    def compute(criterion: Any, model: Any, x: Tensor) -> Tensor:
        loss: Tensor = criterion(model(x))
        return loss

    return partial(compute, criterion)


def in_a_default(criterion: Any) -> Loss:
    def compute(model: Any, x: Tensor, criterion: Any = criterion) -> Tensor:
        loss: Tensor = criterion(model(x))
        return loss

    return compute


def in_a_default_of_another(criterion: Any) -> Loss:
    def applied(y: Tensor, *, criterion: Any = criterion) -> Tensor:
        loss: Tensor = criterion(y)
        return loss

    return lambda model, x: applied(model(x))


def in_a_trainer(criterion: Any) -> Loss:
    class Trainer:
        def __init__(self) -> None:
            self.criterion = criterion

        def compute(self, model: Any, x: Tensor) -> Tensor:
            loss: Tensor = self.criterion(model(x))
            return loss

    return Trainer().compute


class System(nn.Module):
    """A loss that is a module, and gets the model."""

    def __init__(self, criterion: Any) -> None:
        super().__init__()
        self.criterion = criterion

    def forward(self, model: Any, x: Tensor) -> Tensor:
        loss: Tensor = self.criterion(model(x))
        return loss


PLACES = (
    *(in_a_closure, in_a_list, in_a_global, in_a_partial, in_a_default),
    *(in_a_default_of_another, in_a_trainer, System),
)
PLANNED = Criterion, Sparse, Assigning, Within, InPlace, Averaging, Counting, Plain
# Why there is no plan, which a single line says.
UNPLANNED = {
    Momentum: "gets other memory in forward (.data = …)",
}


def trained(kind: Any, place: Callable[[Any], Loss], compiled: bool, **options: Any) -> list[Any]:
    criterion = kind()

    def left() -> list[Any]:
        kept = [criterion.last, *criterion.buffers()]
        assert not any(getattr(each, "requires_grad", False) for each in kept)
        return [x.tolist() if isinstance(x, Tensor) else x for x in kept]

    return losses(place(criterion), left, compiled, **options)


def losses(
    compute_loss: Loss, left: Callable[[], list[Any]], compiled: bool, **options: Any
) -> list[Any]:
    """Those of four steps, what is left after each, and the parameters at the end."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    fsdp_mlir.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = None
    if compiled:
        step = fsdp_mlir.compile(model, optimizer=optimizer, compute_loss=compute_loss, **options)
    found: list[Any] = []
    for number in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        if step is not None:
            loss = step(x)
        else:
            loss = compute_loss(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found += [loss.item(), left()]
    return [*found, [param.full_tensor().tolist() for param in model.parameters()]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", PLANNED)
def test_a_plan_leaves_what_fsdp2_does(kind: Any, place: Callable[[Any], Loss]) -> None:
    assert trained(kind, place, True, fallback="error") == trained(kind, place, False)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", UNPLANNED)
def test_what_the_next_step_reads_has_no_plan(kind: Any, place: Callable[[Any], Loss]) -> None:
    """And the capture has left nothing of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = trained(kind, place, True)
    assert got == trained(kind, place, False)
    told = [str(each.message) for each in caught if "without a plan" in str(each.message)]
    assert len(told) == 1 and UNPLANNED[kind] in told[0], told


def test_a_sharded_teacher_with_an_rnn() -> None:
    """FSDP2 puts other parameters into its lists in each forward: nothing that it keeps."""

    def distilled(compiled: bool, **options: Any) -> list[Any]:
        torch.manual_seed(1)
        teacher = fsdp_mlir.fully_shard(nn.GRU(8, 8).requires_grad_(False))

        def compute(model: Any, x: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = teacher(x[None])[0][0]
            return (model(x) - wanted).square().mean()

        return losses(compute, list, compiled, **options)

    assert distilled(True, fallback="error") == distilled(False)
