"""Queues of contrastive losses: a pointer in a buffer says where a step puts its keys, and one plan
has them at every place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import fsdp_mlir
import pytest
import torch
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import Tensor, nn
from twins import full


class Queue(nn.Module):
    """As MoCo and ALBEF have it."""

    def __init__(self, size: int = 16, *, columns: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.size, self.columns = size, columns
        self.linear = nn.Linear(8, 8)
        queue = F.normalize(torch.randn(size, 8), dim=1)
        self.register_buffer("queue", queue.t().contiguous() if columns else queue)
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        query = F.normalize(self.linear(x), dim=1)
        queue = self.queue.clone().detach()
        logits = query @ (queue if self.columns else queue.t())
        with torch.no_grad():
            self.enqueue(query.detach() + 0.01)
        return logits.logsumexp(1).mean()

    def enqueue(self, keys: Tensor) -> None:
        count = keys.shape[0]
        pointer = int(self.pointer)
        assert self.size % count == 0
        if self.columns:
            self.queue[:, pointer : pointer + count] = keys.T
        else:
            self.queue[pointer : pointer + count] = keys
        pointer = (pointer + count) % self.size
        self.pointer[0] = pointer


class ByItem(Queue):
    def enqueue(self, keys: Tensor) -> None:
        pointer = self.pointer.item()
        self.queue[pointer : pointer + 4, :] = 0.5
        self.queue[pointer : pointer + 4] = keys.mean(0)
        self.pointer[0] = pointer + 4 if pointer + 4 < self.size else 0


class Wrapping(Queue):
    """Its size is not a multiple of the batch's."""

    def enqueue(self, keys: Tensor) -> None:
        pointer, count = int(self.pointer), len(keys)
        if pointer + count <= self.size:
            self.queue[pointer : pointer + count] = keys
        else:
            rest = self.size - pointer
            self.queue[pointer:], self.queue[: count - rest] = keys[:rest], keys[rest:]
        self.pointer[0] = (pointer + count) % self.size


class Ending(Queue):
    """It is an error where the queue ends."""

    def enqueue(self, keys: Tensor) -> None:
        pointer = int(self.pointer)
        self.queue[pointer : pointer + 4] = keys
        self.pointer[0] = pointer + 4


class Shrinking(Queue):
    """A part whose length the pointer decides."""

    def enqueue(self, keys: Tensor) -> None:
        pointer = int(self.pointer)
        self.queue[pointer : self.size] = keys[0]
        self.pointer[0] = (pointer + 1) % self.size


def trained(make: Callable[[], Any], *, ours: bool) -> tuple[list[Any], Any]:
    model = make()
    (fsdp_mlir if ours else torch.distributed.fsdp).fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fsdp_mlir.compile(model, optimizer=optimizer) if ours else None
    found: list[Any] = []
    for number in range(12):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        try:
            if step is not None:
                loss = step(x)
            else:
                loss = model(x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        except RuntimeError as error:
            found.append(str(error))
        found.append((model.queue.tolist(), model.pointer.tolist()))
    return [*found, *(full(param).tolist() for param in model.parameters())], step


@pytest.mark.parametrize(
    ("make", "plans", "lines"),
    [
        *((Queue, 1, 0), (partial(Queue, columns=True), 1, 0), (ByItem, 2, 0)),
        *((partial(Wrapping, 18), 1, 1), (Ending, 1, 2), (Shrinking, 0, 1)),
    ],
)
def test_a_queue(make: Any, plans: int, lines: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got, step = trained(make, ours=True)
    want, _ = trained(make, ours=False)
    assert got == want
    told = [str(each.message) for each in caught if "without a plan" in str(each.message)]
    assert (len(step._plans._made), len(told)) == (plans, lines)
