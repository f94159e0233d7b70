"""One rank of an FSDP2 run that is saved by torch.distributed.checkpoint, converted, and loaded.

    interchange_ranks.py FSDP_CHECKPOINT FOLDER OUT

Trains, and saves with torchtitan's names to FOLDER/theirs; fsdp-checkpoint writes FOLDER/ours of
it. A new model and optimizer load that, and go on as the first do. Writes to OUT.<rank> what
differs (JSON, empty if all bits are equal).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Trainer:
    """A model whose parameters do not divide by two, and its torchtitan-like state."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 5), nn.Linear(5, 1))
        self.model.register_buffer("scale", torch.rand(2))
        for part in [*self.model, self.model]:
            fully_shard(part, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, betas=(0.8, 0.95))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(2 * self.step + dist.get_rank())
            loss = self.model(torch.randint(7, (4,), generator=generator)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        """With torchtitan's names."""
        return get_model_state_dict(self.model) | {
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=FLAT),
            "lr_scheduler": {"last_epoch": self.scheduler.last_epoch},
            "train_state": {"step": torch.tensor(self.step), "ntokens_seen": 4 * self.step},
            "dataloader": {f"dp_rank_{dist.get_rank()}": b"\x00\xff" * (dist.get_rank() + 1)},
        }

    def load(self, folder: Path) -> dict[str, Any]:
        if not self.optimizer.state:
            self.train(1)  # makes the optimizer's state
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        model = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        set_model_state_dict(self.model, model)
        set_optimizer_state_dict(
            self.model, self.optimizer, optim_state_dict=state["optimizer"], options=FLAT
        )
        # Not what stepped above.
        self.scheduler.last_epoch = state["lr_scheduler"]["last_epoch"]
        self.step = int(state["train_state"]["step"])
        return state


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Bits of tensors, and values."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            shape = [str(value.dtype), *local.shape]
            found[prefix + name] = (shape, local.contiguous().view(-1).view(torch.uint8).tolist())
        else:
            found[prefix + name] = (type(value).__name__, value)
    return found


def main() -> None:
    tool, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo")
    first = Trainer(seed=0)
    first.train(3)
    state = first.state()
    dcp.save(state, checkpoint_id=folder / "theirs")
    saved = flat(state)  # a copy, before training goes on
    if dist.get_rank() == 0:
        command = [tool, "convert", folder / "theirs", folder / "ours", "--to", "dcp"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    dist.barrier()
    second = Trainer(seed=1)
    loaded = flat(second.load(folder / "ours"))
    differs = [name for name in saved.keys() | loaded.keys() if saved.get(name) != loaded.get(name)]
    if first.train(3) != second.train(3):
        differs.append("losses")
    last = flat(get_model_state_dict(first.model))
    if last != flat(get_model_state_dict(second.model)):
        differs.append("weights after further steps")
    Path(f"{out}.{dist.get_rank()}").write_text(json.dumps([sorted(differs), len(saved)]))
    dist.destroy_process_group()
