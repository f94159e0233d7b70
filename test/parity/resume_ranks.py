"""One rank of a comparison of resumed runs in one process: FSDP2's and fsdp_mlir's.

    resume_ranks.py CASE.json OUT

Both train the same model and save it with its optimizer; new ones of either kind load what either
kind saved, and go on. Writes to OUT.<rank> what differs (JSON, empty if all bits are equal).
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import fsdp_mlir
import parity_models
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from front_door_ranks import different, make_optimizer, policy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

STEPS = 3


def batch(number: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return {name: torch.randint(256, (2, 8), generator=generator) for name in ("tokens", "targets")}


class Theirs:
    def __init__(self, model: nn.Module, case: dict[str, Any]) -> None:
        self.model = model
        policy(fully_shard, model, case, None)
        self.optimizer = make_optimizer(model, case)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def train(self, number: int, rank: int) -> float:
        loss = self.model(**batch(number, rank))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.item()

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optim": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def load(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optim"])


class Ours:
    def __init__(self, model: nn.Module, case: dict[str, Any]) -> None:
        policy(fsdp_mlir.fully_shard, model, case, None)
        self.optimizer = make_optimizer(model, case)
        self.step = fsdp_mlir.compile(model, optimizer=self.optimizer, example=batch(0, 0))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def train(self, number: int, rank: int) -> float:
        loss = self.step(batch(number, rank)).item()
        self.scheduler.step()
        return loss

    def state(self) -> dict[str, Any]:
        return {"model": self.step.state_dict(), "optim": self.step.optimizer_state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.step.load_state_dict(state["model"])
        self.step.load_optimizer_state_dict(state["optim"])


def differing(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """Of the states of ours and theirs."""
    found = []
    for name, tensor in want["model"].items():
        found += different(name, got["model"][name], tensor)
    ours, theirs = got["optim"], want["optim"]
    if ours["param_groups"] != theirs["param_groups"]:
        found.append(f"groups: {ours['param_groups']}, FSDP2's: {theirs['param_groups']}")
    layouts = [{n: list(s) for n, s in state["state"].items()} for state in (ours, theirs)]
    if layouts[0] != layouts[1] or list(layouts[0]) != list(layouts[1]):
        return [*found, f"state: {layouts[0]}, FSDP2's: {layouts[1]}"]
    for name, state in theirs["state"].items():
        for key, tensor in state.items():
            found += different(f"{name} {key}", ours["state"][name][key], tensor)
    return found


def differences(case: dict[str, Any], folder: str, rank: int) -> list[str]:
    def new(kind: Any, seed: int) -> Any:
        torch.manual_seed(seed)
        return kind(parity_models.own_parameters(), case)

    runs = {"theirs": new(Theirs, 0), "ours": new(Ours, 0)}
    for number in range(STEPS):
        losses = [run.train(number, rank) for run in runs.values()]
        if losses[0] != losses[1]:
            return [f"step {number}: {losses}"]
    states = {name: run.state() for name, run in runs.items()}
    found = differing(states["ours"], states["theirs"])

    if case.get("memory"):  # ignored parameters are of each rank, a checkpoint has only one's
        saved = copy.deepcopy(states)
    else:
        for name, state in states.items():
            dcp.save(state, checkpoint_id=f"{folder}.{name}")
    for kind in (Theirs, Ours):
        for name in states:
            run = new(kind, 1)
            state = run.state()
            if case.get("memory"):
                state = copy.deepcopy(saved[name])
            else:
                dcp.load(state, checkpoint_id=f"{folder}.{name}")
            run.load(state)
            run.scheduler.load_state_dict(runs[name].scheduler.state_dict())
            runs[f"{kind.__name__} from {name}"] = run
    whole = new(Ours, 2)
    options = StateDictOptions(full_state_dict=True)
    theirs = runs["theirs"]
    whole.load(
        {
            "model": get_model_state_dict(theirs.model, options=options),
            "optim": get_optimizer_state_dict(theirs.model, theirs.optimizer, options=options),
        }
    )
    whole.scheduler.load_state_dict(theirs.scheduler.state_dict())
    runs["Ours from whole tensors"] = whole

    for number in range(STEPS, 2 * STEPS):
        losses_of = {name: run.train(number, rank) for name, run in runs.items()}
        if len(set(losses_of.values())) != 1:
            return [*found, f"step {number}: {losses_of}"]
    return found + differing(runs["Ours from ours"].state(), theirs.state())


def main() -> None:
    torch.set_num_threads(1)
    case = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = differences(case, sys.argv[2], rank)
    Path(f"{sys.argv[2]}.{rank}").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # Gloo's threads now and then abort at the end


if __name__ == "__main__":
    main()
