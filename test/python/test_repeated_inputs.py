"""A tensor that is in a batch twice is one object to the model, as code may ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsdp_mlir
import pytest
import torch
from torch import Tensor, nn

Batch = dict[str, Any]


class Attention(nn.Module):
    """nn.MultiheadAttention projects what is the same object at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.output = nn.Linear(16, 4)

    def forward(self, q: Tensor, kv: Any) -> dict[str, Any]:
        kv = kv["value"][0] if isinstance(kv, dict) else kv
        mixed = self.attention(q, kv, kv, need_weights=False)[0]
        return {"loss": self.output(mixed).square().mean(), "same": q is kv}


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> dict[str, Any]:
        loss = self.linear(x).square().mean() * a + b
        return {"loss": loss + (1 if a is b else 0), "same": a is b}


def drawn(call: int) -> Tensor:
    return torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(call))


def plain(call: int, *, same: bool) -> Batch:
    q = drawn(call)
    return {"q": q, "kv": q if same else q * 2}


def nested(call: int, *, same: bool) -> Batch:
    q = drawn(call)
    return {"q": q, "kv": {"value": [q if same else q.clone()]}}


def scalars(call: int, *, same: bool) -> Batch:
    a = torch.tensor(float(call + 1))
    return {"x": drawn(call), "a": a, "b": a if same else a.clone()}


def results(
    make: Callable[[], nn.Module], batch: Callable[..., Batch], first: bool, *, compiled: bool
) -> list[Any]:
    model: Any = fsdp_mlir.fully_shard(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = None
    if compiled:
        step = fsdp_mlir.compile(model, optimizer=optimizer, outputs=True, fallback="error")
    found: list[Any] = []
    for call in range(6):
        given = batch(call, same=first if call % 4 < 2 else not first)
        if step is not None:
            output = step(**given)
        else:
            output = model(**given)
            output["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        found += [output["loss"].item(), output["same"]]
    return found + [param.full_tensor().tolist() for param in model.parameters()]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("make", "batch"), [(Attention, plain), (Attention, nested), (Scalars, scalars)]
)
def test_as_fsdp2(make: Callable[[], nn.Module], batch: Callable[..., Batch], first: bool) -> None:
    got = results(make, batch, first, compiled=True)
    assert got == results(make, batch, first, compiled=False)


def test_microbatches() -> None:
    """Parts of one object are one object."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(16, 4)

        def forward(self, q: Tensor, kv: Tensor) -> Tensor:
            return self.linear(q if q is kv else kv * 3).square().mean()

    def losses(*, same: bool) -> list[float]:
        model = fsdp_mlir.fully_shard(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"gradient_accumulation_steps": 2, "fallback": "error"}
        step = fsdp_mlir.compile(model, optimizer=optimizer, **options)
        x = drawn(0)
        return [step(q=x, kv=x if same else x / 3).item() for _ in range(2)]

    assert losses(same=True) == pytest.approx(losses(same=False))
