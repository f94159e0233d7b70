"""Models of which fully_shard took some parameters alone: FSDP2 trains them, so compile does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import fsdp_mlir
import pytest
import torch
import torch.distributed as dist
from fsdp_mlir import fully_shard
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate


class Scaled(nn.Module):
    """With a parameter that no unit may have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean() * self.scale


def parts_alone(model: Scaled) -> None:
    fully_shard(model.first)
    fully_shard(model.second)


def without_scale(model: Scaled) -> None:
    fully_shard(model, ignored_params={model.scale})


@pytest.mark.parametrize(
    ("shard", "reason"),
    [(parts_alone, "fully_shard was called on parts of the model alone"), (without_scale, "")],
)
@pytest.mark.parametrize("count", [1, 2])
def test_like_fsdp2(shard: Callable[[Scaled], None], reason: str, count: int) -> None:
    """Ignored parameters may be scalars, and the whole model need not be sharded."""
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    results: list[list[Any]] = []
    for compiled in (False, True):
        model = Scaled()
        shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses: list[float] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = fsdp_mlir.compile(model, optimizer=optimizer) if compiled else None
            for begin in range(0, 6, count):
                if step is not None:
                    losses += [x.item() for x in step.accumulate(batches[begin : begin + count])]
                    step.update()
                    continue
                for number in range(count):
                    for module in (model, model.first, model.second):
                        if isinstance(module, FSDPModule):
                            last = number == count - 1
                            module.set_requires_gradient_sync(last, recurse=False)
                    loss = model(batches[begin + number])
                    loss.backward()
                    losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        results.append([*losses, *(p.tolist() for p in whole)])
    assert results[0] == results[1]
    assert [reason in str(each.message) for each in caught] == ([True] if reason else [])


class Meeting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y - funcol.all_reduce(y.detach(), "sum", dist.group.WORLD) / 2).square().mean()


def test_groups_of_the_same_name() -> None:
    """After destroy_process_group a plan's collectives find the new group."""
    losses = []
    for _ in range(2):
        if dist.is_initialized():
            dist.destroy_process_group()
        model = fully_shard(Meeting())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = fsdp_mlir.compile(model, optimizer=optimizer, fallback="error")
        losses.append([step(torch.ones(4, 8)).item() for _ in range(2)])
    assert losses[0] == losses[1]


class Alike(nn.Module):
    """Its loss is a DTensor that all ranks have, as one over parallel logits; `asks`: without a
    plan."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.asks = nn.Linear(8, 8), asks
        self.mesh = init_device_mesh("cpu", (1,))

    def forward(self, x: Tensor) -> Tensor:
        loss = self.linear(x).square().mean()
        if self.asks and loss.item() > 1e9:
            loss = -loss
        return DTensor.from_local(loss, self.mesh, [Replicate()])


@pytest.mark.filterwarnings("ignore:.*without a plan")
def test_a_loss_that_all_ranks_have() -> None:
    """Is a plain tensor with and without a plan."""
    losses = []
    for asks in (False, True):
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = fully_shard(Alike(asks))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fallback = "eager" if asks else "error"
        step = fsdp_mlir.compile(model, optimizer=optimizer, fallback=fallback)
        x = torch.ones(4, 8)
        losses.append([step(x), step.evaluate(x), step.backward(x)])
    assert all(type(loss) is Tensor for found in losses for loss in found)
    assert losses[0] == losses[1]


class Swapping(nn.Module):
    """Runs a part with another tensor in place of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        ones = {"weight": torch.ones(8, 8), "bias": torch.full((8,), 0.5)}
        x = torch.func.functional_call(self.parts[0], ones, x)
        return self.parts[1](x).square().mean()


@pytest.mark.parametrize("is_unit", [True, False])
def test_functional_call(is_unit: bool) -> None:
    """FSDP2 puts the parameters of a unit back; of another module it does not."""
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    results = []
    for compiled in (False, True):
        model = Swapping()
        if is_unit:
            fully_shard(model.parts[0])
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = fsdp_mlir.compile(model, optimizer=optimizer) if compiled else None
            losses = []
            for _ in range(3):
                if step is not None:
                    losses.append(step(x).item())
                    continue
                loss = model(x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        results.append(losses)
    assert results[0] == results[1]
    reason = "a unit ('Linear') runs with another tensor in place of its parameter 'weight'"
    assert [reason in str(each.message) for each in caught] == ([True] if is_unit else [])
