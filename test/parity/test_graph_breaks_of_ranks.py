"""Modules that run in Python, in the middle of a plan, on two ranks whose data differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_script

SCRIPT = """
import os, warnings
import fsdp_mlir, torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_mlir.frontdoor.plan import Compiled
from torch import nn
from torch.distributed.fsdp import fully_shard

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
made, leave = [], Compiled.leave
Compiled.leave = lambda self, count: made.append(1) or leave(self, count)

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 8, 8) * 0.2)

    def forward(self, x, chosen, mood):
        out = torch.zeros_like(x)
        for index, weight in enumerate(self.weights):
            rows = (chosen == index).nonzero().flatten()
            out = out.index_add(0, rows, F.dropout(x[rows] @ weight, 0.1, self.training))
        if mood == 1:
            return torch.cat([out, out])
        if mood == 2:
            raise ValueError("a bad mood")
        return out

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.experts = nn.BatchNorm1d(8), nn.Linear(8, 3), Experts()

    def forward(self, x, mood):
        y = self.norm(x)
        return x + self.experts(y, self.gate(y).argmax(-1), mood)[: len(x)]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, mood):
        for block in self.blocks:
            x = F.dropout(block(x, mood), 0.1, self.training)
        return x.tanh().square().mean()

MOODS

def batch_of(step):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(2 * step + rank))
    return {"x": x, "mood": torch.tensor([MOOD[step]])}

found = []
for shard in (fully_shard, fsdp_mlir.fully_shard):
    model = Model()
    for block in model.blocks:
        shard(block)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = model
    if shard is not fully_shard:
        step = fsdp_mlir.compile(model, optimizer=optimizer)
    losses = []
    for number in range(len(MOOD)):
        torch.manual_seed(number)
        loss = step(**batch_of(number))
        losses.append(loss.item())
        if step is model:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    tensors = [x.full_tensor() if hasattr(x, "full_tensor") else x
               for x in (*model.parameters(), *model.buffers())]
    found.append((losses, tensors, torch.get_rng_state()))
(want, tensors, state), (got, ours, own) = found
assert want == got, (want, got)
assert all(map(torch.equal, tensors, ours))
assert torch.equal(state, own)
assert len(made) == PLANNED, made
dist.barrier()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("moods", "planned"),
    [
        ("MOOD = [0] * 5", 4),
        # What one rank's module does otherwise, all ranks do anew.
        ("MOOD = [0, 0, rank, 0, 1, 1 - rank, 0]", 3),
        ("MOOD = [0, 0, *[rank] * 5, 0, 0]", 1),
    ],
    ids=["alike", "otherwise", "too often"],
)
def test_two_ranks(tmp_path: Path, moods: str, planned: int) -> None:
    script = tmp_path / "breaks.py"
    script.write_text(SCRIPT.replace("MOODS", moods).replace("PLANNED", str(planned)))
    statuses, errors = run_script(script, 2)
    assert statuses == [0, 0], errors
