"""Numbers among the inputs of several ranks, in every kind of call, beside FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_script

SCRIPT = """
import os, sys, warnings
import fsdp_mlir, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

rank, kind = int(os.environ["RANK"]), sys.argv[1]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.beta, self.number = 1.0, 0

    def forward(self, x, beta=None, number=0):
        if beta is None:
            beta, number = self.beta, self.number
        hidden = torch.tanh(self.first(x) * beta)
        loss = self.second(hidden).square().mean() + hidden.mean() / (1 + number)
        return loss * 2 if number % 4 == 3 else loss

def batch(number, microbatch=0):
    data = torch.Generator().manual_seed(10 * number + 2 * rank + microbatch)
    # The ranks' numbers differ, and in call 5 their outcomes.
    late = number + (rank if number == 5 else 0) - (number == 5) * 2
    beta = 0.1 * (number + 1) * (rank + 1) + microbatch
    return {"x": torch.randn(4, 8, generator=data), "beta": beta, "number": late}

def two(number):
    one, other = batch(number), batch(number)
    return one | {"x": torch.cat([one["x"], other["x"]])}

def trained(shard, ours):
    model = Model()
    for layer in (model.first, model.second):
        shard(layer)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    options = {"evaluation": True} if kind == "evaluate" else {}
    if kind == "split":
        options["gradient_accumulation_steps"] = 2
    step = fsdp_mlir.compile(model, optimizer=optimizer, **options) if ours else None
    results = []
    for number in range(8):
        if kind == "held":
            given = batch(number)
            model.beta, model.number = given["beta"], given["number"]
            if rank == 1 and number < 4:
                model.beta = 0.3
        if kind == "accumulate":
            batches = [batch(number, each) for each in range(2)]
            if ours:
                losses = step.accumulate(batches)
            else:
                losses = []
                for each in batches:
                    model.set_requires_gradient_sync(each is batches[-1])
                    losses.append(model(**each))
                    losses[-1].backward()
        elif kind == "split":
            if ours:
                losses = [step(**two(number))]
            else:
                whole = two(number)
                losses = []
                for x in whole["x"].chunk(2):
                    losses.append(model(**{**whole, "x": x}))
                    (losses[-1] / 2).backward()
                losses = [torch.stack([each.detach() for each in losses]).mean()]
        elif kind == "backward":
            losses = [step.backward(**batch(number)) if ours else model(**batch(number))]
            ours or losses[0].backward()
        else:
            given = batch(number)
            if kind == "held":
                given = {"x": given["x"]}
            losses = [step(**given) if ours else model(**given)]
            ours or losses[0].backward()
        if not ours or kind in ("accumulate", "backward"):
            optimizer.step()
            optimizer.zero_grad()
        if kind == "evaluate":
            model.eval()
            with torch.no_grad():
                value = step.evaluate(**batch(number, 1)) if ours else model(**batch(number, 1))
            model.train()
            losses.append(value)
        results += [each.item() for each in losses]
    return results + [param.full_tensor().tolist() for param in model.parameters()]

dist.init_process_group("gloo")
want = trained(fully_shard, False)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    got = trained(fsdp_mlir.fully_shard, True)
lines = [str(each.message) for each in caught if "without a plan" in str(each.message)]
assert got == want, (got[:16], want[:16])
told = ["the call is not that of the other ranks"] if kind != "accumulate" else ["values that"]
for line in lines:
    print(line, file=sys.stderr)
dist.barrier()
os._exit(0)
"""


@pytest.mark.parametrize("kind", ["update", "backward", "accumulate", "split", "evaluate", "held"])
def test_numbers(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("sys.argv[1]", repr(kind)))
    statuses, errors = run_script(path, 2)
    assert statuses == [0, 0], errors
    lines = [line for line in errors[0].splitlines() if "without a plan" in line]
    assert len(lines) == 1 and "the call is not that of the other ranks" in lines[0], errors


DRAWN = """
import os, random, sys, warnings
import fsdp_mlir, torch
import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

rank = int(os.environ["RANK"])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        weight = np.random.beta(0.5, 0.5)
        hidden = nn.functional.dropout(torch.tanh(self.first(x * weight)), 0.1)
        if random.random() < 0.5:
            hidden = hidden.flip(0)
        if FLIPS and torch.rand(()) < 0.5:
            hidden = hidden.roll(1, 1)
        return self.second(hidden).square().mean() * (1 - weight)

def trained(shard, ours):
    for each in (random, np.random):
        each.seed(rank)
    model = Model()
    for layer in (model.first, model.second):
        shard(layer)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = fsdp_mlir.compile(model, optimizer=optimizer) if ours else None
    torch.manual_seed(rank)
    results = []
    for number in range(12):
        x = torch.linspace(-1, 1, 32).reshape(4, 8) * (1 + number + rank)
        loss = step(x) if ours else model(x)
        if not ours:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(loss.item())
    results += [random.random(), np.random.rand(), torch.rand(()).item()]
    made = step._plans._made if ours else []
    return results + [param.full_tensor().tolist() for param in model.parameters()], len(made)

dist.init_process_group("gloo")
want, _ = trained(fully_shard, False)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    got, made = trained(fsdp_mlir.fully_shard, True)
lines = [str(each.message) for each in caught if "without a plan" in str(each.message)]
assert got == want, (got[:15], want[:15])
assert made == (5 if FLIPS else 4) and len(lines) == (FLIPS and rank == 0), (made, lines)
dist.barrier()
os._exit(0)
"""


@pytest.mark.parametrize("flips", [False, True])
def test_drawn_numbers(flips: bool, tmp_path: Path) -> None:
    """Each rank draws its own: there is a plan for what all of them have drawn together."""
    path = tmp_path / "script.py"
    path.write_text(DRAWN.replace("FLIPS", str(flips)))
    statuses, errors = run_script(path, 2)
    assert statuses == [0, 0], errors
