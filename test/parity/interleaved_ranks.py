"""One rank of a run that mixes all that a training loop does, with FSDP2 alone and with a compiled
step beside it.

    interleaved_ranks.py CASE.json OUT

Both do the same random actions on the same data. Writes to OUT.<rank> what differs (JSON, empty if
all bits are equal) with the actions before it.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdp_mlir
import parity_models
import torch
import torch.distributed as dist
from front_door_ranks import different, local
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


class Side:
    """A model, its optimizer, and for ours the compiled step."""

    def __init__(self, case: dict[str, Any], compiled: bool) -> None:
        torch.manual_seed(0)
        self.model: Any = parity_models.own_parameters()
        policy = {}
        if case["mixed"]:
            policy["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in self.model.layers:
            fully_shard(layer, **policy)
        fully_shard(self.model, **policy)
        self.optimizer = OPTIMIZERS[case["optimizer"]](self.model.parameters())
        self.max_norm = case["max_norm"]
        self.step = None
        if compiled:
            self.step = fsdp_mlir.compile(
                self.model,
                optimizer=self.optimizer,
                max_norm=self.max_norm,
                evaluation=True,
                comm=case["comm"],
            )

    def train(self, batch: dict[str, Tensor]) -> Tensor:
        if self.step:
            return self.step(batch)
        loss = self.backward(batch)
        self.update()
        return loss

    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        if self.step:
            return self.step.backward(batch)
        loss = self.model(**batch)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        if self.step:
            return self.step.update()
        if self.max_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, batch: dict[str, Tensor]) -> Tensor:
        if self.step:
            return self.step.evaluate(batch)
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        with torch.no_grad():
            loss = self.model(**batch)
        for module, training in modes:
            module.training = training
        return loss


class Actions:
    """Each takes a side and returns tensors to compare. `own` draws what differs by rank."""

    def __init__(self, drawn: random.Random, own: random.Random) -> None:
        self.drawn = drawn
        self.own = own

    def batch(self, drawn: random.Random, rows: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(drawn.randrange(1 << 30) + dist.get_rank())
        names = ("tokens", "targets")
        return {name: torch.randint(256, (rows, 8), generator=generator) for name in names}

    def step(self, side: Side) -> list[Tensor]:
        rows = self.drawn.choice([2, 2, 2, 3])
        return [side.train(self.batch(self.drawn, rows)) for _ in range(self.drawn.randint(1, 2))]

    def other_rows_on_each_rank(self, side: Side) -> list[Tensor]:
        return [side.train(self.batch(self.drawn, 1 + dist.get_rank()))]

    def eager(self, side: Side) -> list[Tensor]:
        loss = side.model(**self.batch(self.drawn, 2))
        loss.backward()
        side.update()
        return [loss.detach()]

    def accumulate(self, side: Side) -> list[Tensor]:
        losses = [side.backward(self.batch(self.drawn, 2)) for _ in range(2)]
        side.update()
        return losses

    def accumulate_without_reductions(self, side: Side) -> list[Tensor]:
        side.model.set_requires_gradient_sync(False)
        losses = [side.backward(self.batch(self.drawn, 2))]
        side.model.set_requires_gradient_sync(True)
        losses.append(side.backward(self.batch(self.drawn, 2)))
        side.update()
        return losses

    def gradient_left(self, side: Side) -> list[Tensor]:
        side.model(**self.batch(self.drawn, 2)).backward()
        return [side.train(self.batch(self.drawn, 2))]

    def evaluate(self, side: Side) -> list[Tensor]:
        return [side.evaluate(self.batch(self.drawn, self.drawn.choice([2, 4]))).detach()]

    def mode(self, side: Side) -> list[Tensor]:
        side.model.train(self.drawn.random() < 0.5)
        return []

    def freeze(self, side: Side) -> list[Tensor]:
        side.model.reshard()
        params = list(side.model.layers[0].parameters())
        param = params[self.drawn.randrange(len(params))]
        param.requires_grad_(not param.requires_grad)
        return []

    def load(self, side: Side) -> list[Tensor]:
        for module in side.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        factor = self.drawn.choice([0.5, 2.0])
        state = {name: x * factor for name, x in side.model.state_dict().items()}
        side.model.load_state_dict(state)
        return []

    def settings(self, side: Side) -> list[Tensor]:
        group = side.optimizer.param_groups[0]
        group["lr"] *= self.drawn.choice([0.5, 1.0])
        group["weight_decay"] = self.drawn.choice([0.0, 0.1])
        return []

    def checkpoint(self, side: Side) -> list[Tensor]:
        state = copy.deepcopy(side.optimizer.state_dict())
        self.step(side)
        side.optimizer.load_state_dict(state)
        return []


def whole_states_that_differ(theirs: Side, step: fsdp_mlir.Step, rank: int) -> list[str]:
    """Between the optimizer's state of FSDP2 and full_optimizer_state_dict, which rank 0 gets."""
    ours = step.full_optimizer_state_dict()
    found = [] if rank == 0 or not ours else ["a whole state on another rank than 0"]
    for name, param in theirs.model.named_parameters():
        for key, value in theirs.optimizer.state[param].items() if theirs.optimizer.state else ():
            want = value.full_tensor() if isinstance(value, DTensor) else value
            if rank == 0 and different(f"{key} of {name}", ours["state"][name][key], want):
                found.append(f"whole {key} of {name}")
    return found


def differences(case: dict[str, Any], rank: int) -> list[str]:
    sides = [Side(case, compiled=False), Side(case, compiled=True)]
    names = [name for name in vars(Actions) if not name.startswith("_") and name != "batch"]
    chosen = random.Random(case["seed"])
    done: list[str] = []
    for number in range(case["actions"]):
        name = "step" if number == 0 else chosen.choice(names)
        done.append(name)
        results = []
        for side in sides:
            torch.manual_seed(number + 100 * rank)
            actions = Actions(random.Random(number), random.Random(number + 1000 * rank))
            results.append(getattr(actions, name)(side))
        for want, got in zip(*results, strict=True):
            if not torch.equal(want, got):
                return [f"{done}: {got}, FSDP2's: {want}"]
        for side in sides:
            side.model.reshard()
        found = []
        theirs, ours = (side.model.state_dict() for side in sides)
        for key, tensor in theirs.items():
            found += different(key, ours[key], tensor)
        theirs, ours = (side.optimizer.state_dict()["state"] for side in sides)
        if theirs.keys() != ours.keys():
            found.append(f"states of {list(ours)}, FSDP2's: {list(theirs)}")
        for index, state in theirs.items():
            for key, tensor in state.items():
                if not torch.equal(local(ours.get(index, {}).get(key, tensor + 1)), local(tensor)):
                    found.append(f"{key} of {index}")
        if found:
            return [f"{done}: {found[:4]}"]
    assert sides[1].step is not None
    if found := whole_states_that_differ(sides[0], sides[1].step, rank):
        return [f"{done}: {found[:4]}"]
    return [] if any(sides[1].step._cache.values()) else ["nothing was compiled"]


def main() -> None:
    torch.set_num_threads(1)
    case = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = differences(case, rank)
    Path(f"{sys.argv[2]}.{rank}").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # Gloo's threads now and then abort at the end


if __name__ == "__main__":
    main()
