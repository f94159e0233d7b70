"""Autocast around calls of a step: the casts are those of FSDP2's loop that enters it for each
forward, and nothing else is cast."""

from __future__ import annotations

import warnings
from typing import Any

import fsdp_mlir
import pytest
import torch
from fsdp_mlir.check import eager_check
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

BF16 = torch.autocast("cpu", torch.bfloat16)


class Apart(nn.Module):
    """A product in float32 amid those of autocast, as rotary embeddings have one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        with torch.autocast("cpu", enabled=False):
            x = self.b(x.float())
        return x.square().mean()


class Attention(nn.Module):
    """Whose dropout leaves it to operators that compute in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x[None]).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attend = nn.functional.scaled_dot_product_attention
        x = attend(q, k, v, dropout_p=0.25, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(x).float().square().mean()


class Counting(Apart):
    """It has no plan."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.name = f"call {self.calls}"
        return super().forward(x)


class Loop:
    def __init__(self, kind: Any, compiled: bool, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = kind()
        for layer in list(self.model.children())[:1]:
            fsdp_mlir.fully_shard(layer)
        fsdp_mlir.fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = None
        if compiled:
            self.step = fsdp_mlir.compile(self.model, optimizer=self.optimizer, **options)
        self.found: list[Any] = []

    def train(self, *microbatches: Tensor) -> None:
        torch.manual_seed(len(self.found))
        if self.step is not None:
            with BF16:
                losses = self.step.accumulate(microbatches)
            self.step.update()
        else:
            losses = []
            for at, x in enumerate(microbatches):
                self.model.set_requires_gradient_sync(at == len(microbatches) - 1)
                with BF16:
                    losses.append(self.model(x))
                losses[-1].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.found += [
            *(loss.item() for loss in losses),
            *(param.full_tensor().tolist() for param in self.model.parameters()),
        ]

    def evaluate(self, x: Tensor) -> None:
        with BF16:
            if self.step is not None:
                value = self.step.evaluate(x)
            else:
                self.reshard()
                self.model.eval()
                with torch.no_grad():
                    value = self.model(x)
                self.model.train()
        self.found.append(value.item())

    def reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def batch(number: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def trained(kind: Any, compiled: bool, count: int = 1, **options: Any) -> list[Any]:
    loop = Loop(kind, compiled, **options)
    for number in range(3):
        loop.train(*(batch(10 * number + at) for at in range(count)))
    return loop.found


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("kind", [Apart, Attention])
def test_what_autocast_does_not_cast(
    kind: Any, checked: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not checked:
        monkeypatch.setattr(eager_check, "run", lambda recording: True)
    assert trained(kind, True, count, fallback="error") == trained(kind, False, count)


def test_microbatches_without_a_plan() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert trained(Counting, True, 2) == trained(Counting, False, 2)
    assert any("without a plan" in str(each.message) for each in caught)


@pytest.mark.parametrize("kind", [Apart, Counting])
def test_evaluations(kind: Any) -> None:
    """Of a plan that also trains, and without one; a change between them counts."""
    planned = kind is Apart
    options = {"evaluation": True, "fallback": "error"} if planned else {}
    loops = [Loop(kind, True, **options), Loop(kind, False)]
    for loop in loops:
        with warnings.catch_warnings():
            warnings.simplefilter("error" if planned else "ignore")
            loop.train(batch(0))
        for number in range(2):
            loop.evaluate(batch(0))
            loop.reshard()
            with torch.no_grad():
                loop.model.b.weight.mul_(1.5 + number)
    assert loops[0].found == loops[1].found
