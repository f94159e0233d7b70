"""What programs of around_ranks.py share: a model, batches, a loop with FSDP2 or compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsdp_mlir
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

SGD = (torch.optim.SGD, {"lr": 0.1})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.b(torch.tanh(self.a(x)))).square().mean()

    def scaled(self, x: Tensor) -> Tensor:
        return x


def batch(number: int, size: int = 4) -> Tensor:
    seed = number + 10 * dist.get_rank()
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Loop:
    """A model and its step: FSDP2's with `count` microbatches, or the compiled one."""

    def __init__(
        self, model: Any, compiled: bool, optimizer: Any = SGD, count: int = 1, **options: Any
    ) -> None:
        ignored = options.pop("ignored", set())
        policy = options.pop("policy", {})
        self.model, self.count = fully_shard(model, ignored_params=ignored, **policy), count
        self.optimizer = optimizer[0](model.parameters(), **optimizer[1])
        if count > 1:
            options["gradient_accumulation_steps"] = count
        self.compiled = None
        if compiled:
            self.compiled = fsdp_mlir.compile(model, optimizer=self.optimizer, **options)

    def step(self, x: Tensor) -> float:
        if self.compiled is not None:
            return float(self.compiled(x))
        total = 0.0
        for part in x.chunk(self.count):
            loss = self.model(part)
            (loss / self.count).backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.tensor(total / self.count, dtype=loss.dtype).item()

    def evaluate(self, x: Tensor) -> float:
        if self.compiled is not None:
            loss = float(self.compiled.evaluate(x))
        else:
            self.model.eval()
            with torch.no_grad():
                loss = float(self.model(x))
            self.model.train()
        self.model.reshard()  # the root, which FSDP2 keeps unsharded for a backward
        return loss

    def backward(self, x: Tensor) -> None:
        if self.compiled is not None:
            self.compiled.backward(x)
        else:
            self.model(x).backward()

    def weights(self) -> list[float]:
        return [whole(p).double().sum().item() for p in self.model.parameters()]


def trained(
    model: Any, optimizer: Any, step: Any, compute_loss: Callable[..., Tensor]
) -> list[float]:
    """The losses of three steps: of `step`, or FSDP2's without one."""
    losses = []
    for number in range(3):
        if step is not None:
            loss = step(batch(number))
        else:
            loss = compute_loss(model, batch(number))
            loss.backward()
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # where set_reshard_after_backward(False) has kept it
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses
