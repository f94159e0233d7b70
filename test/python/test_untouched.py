"""A capture, and the check of it beside eager PyTorch, leave no trace in what a step keeps.

Not even where other steps write something else than the recorded one; and code is not told that it
is recorded.
"""

from __future__ import annotations

import functools
import multiprocessing
import re
import warnings
from collections.abc import Callable
from typing import Any

import fsdp_mlir
import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from twins import full

X = torch.linspace(-1, 1, 16).reshape(4, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def seen(self) -> list[Any]:
        """What a loop may look at after a step."""
        return []


class SkipsTheFirst(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean = True, torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.first:
            self.first = False
        else:
            self.mean.add_(y.detach().mean(0))
        return y + self.mean

    def seen(self) -> list[Any]:
        return self.mean.tolist()


class Drift(Net):
    def __init__(self) -> None:
        super().__init__()
        self.before: Tensor | None = None
        self.drift = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        mean = y.detach().mean(0)
        if self.before is not None:
            self.drift.lerp_(mean - self.before, 0.5)
        self.before = mean
        return y

    def seen(self) -> list[Any]:
        return self.drift.tolist()


class RequiresLater(SkipsTheFirst):
    """Another step than the first one changes what autograd and the shape of a tensor are."""

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.first = False
        elif self.mean.requires_grad is False:
            self.mean.resize_(2).fill_(1).requires_grad_()
        return self.linear(x)

    def seen(self) -> list[Any]:
        return [self.mean.tolist(), self.mean.requires_grad]


class Resized(Net):
    """It keeps what it has seen last, and gives the tensor its shape, which it has already."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.other = torch.zeros(4, 4), torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.last.resize_(x.shape[0], 4).copy_(y.detach())
        return y

    def seen(self) -> list[Any]:
        return self.last.tolist()


class Shrunk(Resized):
    def forward(self, x: Tensor) -> Tensor:
        self.other.resize_(1).fill_(3)
        return self.linear(x)

    def seen(self) -> list[Any]:
        return self.other.tolist()


class Gradient(Resized):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.other.grad = y.detach().flatten()[:2].clone()
        return y

    def seen(self) -> list[Any]:
        return [] if self.other.grad is None else self.other.grad.tolist()


class Centers(Net):
    """It looks at another tensor in each step, though with the same data at first."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = [torch.zeros(4) for _ in range(3)]

    def forward(self, x: Tensor) -> Tensor:
        center = self.centers.pop(0)
        self.centers.append(center)
        y = super().forward(x) - center
        center.lerp_(y.detach().mean(0), 0.5)
        return y

    def seen(self) -> list[Any]:
        return [each.tolist() for each in self.centers]


class Shared(Net):
    """Objects whose attributes are written in C."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = multiprocessing.Value("i", 3)
        self.pattern = re.compile("layers", re.ASCII | re.IGNORECASE)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.epoch.value * bool(self.pattern.match("Layers"))


@functools.lru_cache(maxsize=1)
def positions(mask: Tensor) -> Tensor:
    return mask.cumsum(1)


class Positions(Net):
    """Its memo has tensors for keys, as that of DETR."""

    def __init__(self) -> None:
        super().__init__()
        positions(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + positions(torch.ones(4, 4)))


def scaled(factor: int, x: int) -> int:
    return factor * x


multiple = functools.lru_cache(maxsize=4)(functools.partial(scaled, 2))


class Multiple(Net):
    """Of a function that has some arguments already, as einx's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * multiple(3)


class Masked(Net):
    """As models of transformers, which do not look at a mask while they are traced."""

    kinds: tuple[Callable[[], type], ...] = (
        lambda: FakeTensor,
        lambda: torch._subclasses.FakeTensor,
    )

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, :1] < 0.9
        traced = any(isinstance(mask, kind()) for kind in self.kinds)
        if not traced and mask.all():
            return super().forward(x) * 3
        return super().forward(x) * mask


def steps(kind: type[Net], *, ours: bool) -> list[Any]:
    model = kind()
    (fsdp_mlir if ours else torch.distributed.fsdp).fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).square().mean()

    step = fsdp_mlir.compile(model, compute_loss=loss, optimizer=optimizer) if ours else None
    found: list[Any] = []
    for number in range(6):
        x = X * (1 if number < 2 else 0.5)
        if step is not None:
            found.append(step(x).item())
        else:
            value = loss(model, x)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(value.item())
        found.append(model.seen())
    return [*found, *(full(param).tolist() for param in model.parameters())]


@pytest.mark.parametrize(
    "kind",
    [
        SkipsTheFirst,
        Drift,
        RequiresLater,
        Resized,
        Shrunk,
        Gradient,
        Centers,
        Shared,
        Positions,
        Multiple,
        Masked,
    ],
    ids=lambda kind: kind.__name__,
)
def test_as_fsdp2(kind: type[Net]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = steps(kind, ours=True)
    assert got == steps(kind, ours=False)
