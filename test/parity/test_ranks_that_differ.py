"""Ranks whose models differ: what each has of its own stays its own, and so does its step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run_script

SCRIPT = """
import os, sys
import fsdp_mlir, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

rank = int(os.environ["RANK"])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.scale, self.shift = 2.0, torch.zeros(4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        x = torch.tanh(self.first(x)) * self.scale
        FORWARD
        return self.second(x * self.table + self.shift).mean()

def changed(model):
    CHANGE
    return model

batch = {"x": torch.linspace(-1, 1, 12).reshape(3, 4) * (rank + 1)}
"""

FAILING = (
    SCRIPT
    + """
model = changed(Model())
fsdp_mlir.fully_shard(model)
try:
    sgd = (torch.optim.SGD, {"lr": 0.1})
    fsdp_mlir.compile(model, optimizer=sgd, example=batch, fallback="error")
except Exception as error:
    print(type(error).__name__, error, sep=": ", file=sys.stderr)
os._exit(0)
"""
)

EQUAL = (
    SCRIPT
    + """
dist.init_process_group("gloo")
losses, states = [], []
for shard in (fully_shard, fsdp_mlir.fully_shard):
    model = changed(Model())
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = model
    if shard is not fully_shard:
        step = fsdp_mlir.compile(model, optimizer=optimizer, example=batch)
    for _ in range(3):
        loss = step(**batch)
        losses.append(loss.item())
        if step is model:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    states.append(step.state_dict())
assert losses[:3] == losses[3:], losses
for name, tensor in states[0].items():
    want, got = (x.to_local() if hasattr(x, "to_local") else x for x in
                 (tensor, states[1][name]))
    assert torch.equal(want, got), name
dist.barrier()
os._exit(0)
"""
)

CACHED = EQUAL.replace(
    "example=batch)", 'example=batch, cache=sys.argv[0] + ".plans" if rank == 0 else None)'
)

NESTED = (
    SCRIPT
    + """
import warnings
dist.init_process_group("gloo")

class Nested(Model):
    def forward(self, batch):
        return super().forward(batch["x"])

def told(fallback, batches):
    model = Nested()
    fsdp_mlir.fully_shard(model)
    step = fsdp_mlir.compile(model, optimizer=(torch.optim.SGD, {"lr": 0.1}), fallback=fallback)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for each in batches:
                step(batch={"x": each})
        except Exception as error:
            return [str(error)]
    return [str(each.message) for each in caught if "without a plan" in str(each.message)]

x = batch["x"]
assert told("error", [x, x + rank, x * 2]) == [], "other data"
short = x[: 3 - rank]
line = "the call is not that of the other ranks"
lines = told("eager", [x, short, x, short])
assert len(lines) == (rank == 0) and all(line in each for each in lines), lines
lines = told("error", [x, short])
assert len(lines) == 1 and line in lines[0], lines
os._exit(0)
"""
)

VALUES = (
    SCRIPT
    + """
dist.init_process_group("gloo")

class Cut(Model):
    def forward(self, x, sizes):
        first = super().forward(x[: sizes.max().item()])
        return first if sizes.sum().item() < 7 else first * sizes.min().item()

# Of each rank and step: what another rank's values have a plan for, these may not.
given = [[1, 2, 1, 2, 3, 1, 1, 2, 3], [1, 1, 2, 2, 1, 1, 2, 2, 1]][rank]
losses, count = [], None
for shard in (fully_shard, fsdp_mlir.fully_shard):
    torch.manual_seed(0)
    model = Cut()
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = model
    if shard is not fully_shard:
        step = fsdp_mlir.compile(model, optimizer=optimizer, fallback="error")
    for number in (*given, 9):
        sizes = torch.tensor([number, number if number < 9 else -rank])
        if number == 9 and step is not model:
            try:
                step(batch["x"], sizes)
            except Exception as error:
                assert "no more such plans" in str(error), error
            break
        loss = step(batch["x"], sizes)
        losses.append(loss.item())
        if step is model:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
assert losses[: len(given)] == losses[len(given) + 1 :], losses
assert len(step._plans._made) == 5
dist.barrier()
os._exit(0)
"""
)

# Code of forward, and a change before `compile`, after which ranks have plans of their own.
DIFFERENT: dict[str, tuple[str, str]] = {
    "an_attribute": ("pass", "model.scale = 2.0 + rank"),
    "a_shape": ("pass", "model.table = torch.ones(4) if rank == 0 else torch.ones(1)"),
    "a_dtype": (
        "pass",
        "model.shift = model.shift.to(torch.float32 if rank == 0 else torch.bfloat16)",
    ),
    "a_branch": ("x = x.sin() if rank == 0 else x", "pass"),
    "what_decides": (
        "x = x.sin() if rank == 0 and (self.table > 0).sum().item() > 3 else x",
        "pass",
    ),
    "a_slice": ("x = x * x.detach()[rank]", "pass"),
}

# The same, and what the message says, where ranks would reduce other parameters, or in another
# order.
APART: dict[str, tuple[str, str, list[str]]] = {
    "a_frozen_parameter": (
        "pass",
        "model.first.bias.requires_grad_(rank == 0)",
        ["param 'first.bias' of float32[4] requires_grad=False position=1 there"],
    ),
    "an_unused_parameter": (
        "x = x if rank == 0 else x.detach()",
        "fully_shard(model.first)",
        ["script.py:21", "reduce the same parameters in the same order on every rank"],
    ),
}


def both(script: str, directory: Path, forward: str, change: str) -> list[str]:
    path = directory / "script.py"
    path.write_text(script.replace("FORWARD", forward).replace("CHANGE", change))
    statuses, errors = run_script(path, 2)
    assert statuses == [0, 0], errors
    return errors


@pytest.mark.parametrize("name", DIFFERENT)
def test_steps_of_each_rank(name: str, tmp_path: Path) -> None:
    """With FSDP2's bits, and without a line."""
    errors = both(EQUAL, tmp_path, *DIFFERENT[name])
    assert not any("without a plan" in text for text in errors), errors


def test_values_that_decide(tmp_path: Path) -> None:
    """A plan serves those of all ranks; else there is another."""
    both(VALUES, tmp_path, "pass", "pass")


@pytest.mark.parametrize("name", APART)
def test_apart(name: str, tmp_path: Path) -> None:
    forward, change, parts = APART[name]
    errors = both(FAILING, tmp_path, forward, change)
    lines = [[line for line in text.splitlines() if "Error: " in line] for text in errors]
    assert len(lines[0]) == 1 and lines[0] == lines[1], lines
    assert lines[0][0].startswith("CompileError: the step of rank 1 is not that of rank 0: ")
    for part in parts:
        assert part in lines[0][0]


@pytest.mark.parametrize(
    "change",
    ["model.shift = torch.full((4,), 1.0 + rank)", "model.table.fill_(1.0 + rank)"],
    ids=["constant", "buffer"],
)
def test_values_of_each_rank(change: Any, tmp_path: Path) -> None:
    """FSDP2 does not make them equal either."""
    both(EQUAL, tmp_path, "pass", change)


def test_data_and_forms_of_each_rank(tmp_path: Path) -> None:
    """Other data in a container has the same plan; a batch of another form has a line, or is an
    error, on all ranks."""
    both(NESTED, tmp_path, "pass", "pass")


def test_a_cache_of_some_ranks(tmp_path: Path) -> None:
    """Runs without it, after a line."""
    errors = both(CACHED, tmp_path, "pass", "pass")
    lines = [[line for line in text.splitlines() if "cache" in line] for text in errors]
    assert "plans are neither kept nor found: rank 1 has no cache, others have" in lines[0][0]
    assert not lines[1] and [path.name for path in tmp_path.iterdir()] == ["script.py"]
