"""One rank of a loop in Python that a step's checkpoints carry over the ends of processes.

    step_checkpoint_ranks.py CASE.json FOLDER OUT

Goes on from FOLDER, or from `load`; trains until step `steps`; saves every `every` steps, without
waiting if `background`; kills itself at the begin of step `kill`. Rank 0 writes to OUT the losses
of its steps, and whole tensors of model and optimizer. With `calls` it makes these instead,
and writes to OUT what they returned or raised on each rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import custom_optimizers
import fsdp_mlir
import torch
import torch.distributed as dist
from front_door_ranks import make_optimizer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh


class Dropping(nn.Module):
    """Draws at each step, and has a buffer that each step changes."""

    def __init__(self, width: int = 20, *, asks: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.tokens.weight
        self.asks = asks

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + nn.functional.dropout(torch.relu(layer(x)), 0.3, self.training)
        if self.asks and f"{x.sum().item():.0f}" == "9":  # which no plan does
            x = -x
        x = self.norm(x.flatten(0, 1))
        return nn.functional.cross_entropy(self.head(x), targets.flatten())


class Experts(nn.Module):
    """Of which each rank has all, and trains some, for itself."""

    def __init__(self, used: list[int]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 20)
        self.experts = nn.ModuleList(nn.Linear(20, 20) for _ in range(2))
        self.head = nn.Linear(20, 64, bias=False)
        self.used = used

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for expert in self.used:
            x = x + self.experts[expert](x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def sharded_experts(used: list[int]) -> nn.Module:
    model = Experts(used)
    fsdp_mlir.fully_shard(model, ignored_params=set(model.experts.parameters()))
    return model


def add_module(model: nn.Module, path: str) -> None:
    for name in path.split("."):
        model.add_module(name, nn.LayerNorm(4))
        model = model.get_submodule(name)


def batch(number: int, rank: int, count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    shape = (2 * count, 8)
    return {name: torch.randint(64, shape, generator=generator) for name in ("tokens", "targets")}


class Loop:
    def __init__(self, case: dict[str, Any], path: Path | None) -> None:
        # What is loaded comes from the checkpoint.
        torch.manual_seed(case.get("seed", 0))
        if "experts" in case:
            model = sharded_experts(case["experts"][dist.get_rank()])
        else:
            model = self.sharded(case)
        self.model = model
        self.scheduler: Any = None
        optimizer: Any = case.get("config")
        if optimizer is None:
            if "custom" in case:
                optimizer = getattr(custom_optimizers, case["custom"])(model.parameters(), lr=1e-2)
            else:
                optimizer = make_optimizer(model, case)
            self.scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)
        self.optimizer = optimizer
        self.manual = case.get("manual", False)
        self.own = optimizer if case.get("own") else None
        self.count = case.get("options", {}).get("gradient_accumulation_steps", 1)
        example = batch(0, 0, 1) if case.get("example") else None
        options = case.get("options", {})
        self.step = fsdp_mlir.compile(
            model, optimizer=optimizer, example=example, path=path, **options
        )
        torch.manual_seed(case.get("seed", 0) + dist.get_rank())

    @staticmethod
    def sharded(case: dict[str, Any]) -> nn.Module:
        model = Dropping(case.get("width", 20), asks=case.get("asks", False))
        if "module" in case:
            add_module(model, case["module"])
        mesh = None
        if case.get("replicas"):
            shards = dist.get_world_size() // case["replicas"]
            names = ("replicate", "shard")
            mesh = init_device_mesh("cpu", (case["replicas"], shards), mesh_dim_names=names)
        for layer in model.layers:
            fsdp_mlir.fully_shard(layer, mesh=mesh)
        fsdp_mlir.fully_shard(model, mesh=mesh)
        return model

    def extra(self, odd: int | None) -> Any:
        rank = dist.get_rank()
        state = {"scheduler": self.scheduler and self.scheduler.state_dict(), "rank": rank}
        return state if odd != rank else {**state, "odd": self}

    def resume(self, path: str) -> Any:
        found = self.step.load(path)
        if found is not None and found.extra is not None:
            if self.scheduler:
                self.scheduler.load_state_dict(found.extra["scheduler"])
            # Another number of ranks has rank 0's.
            assert found.extra["rank"] in (dist.get_rank(), 0), found
        return found

    def train(self, number: int) -> float:
        inputs = batch(number, dist.get_rank(), self.count)
        if self.own is not None:
            loss = sum(x.item() for x in self.step.accumulate([inputs, inputs]))
            nn.utils.clip_grad_norm_(self.step._model.parameters(), 1.0)
            self.own.step()
            self.own.zero_grad()
        elif self.manual:
            loss = self.step.backward(inputs).item()
            self.step.update()
        else:
            loss = self.step(inputs).item()
        if self.scheduler:
            self.scheduler.step()
        return loss

    def call(self, name: str, argument: Any) -> Any:
        if name == "train":
            return [self.train(number) for number in range(self.step.steps, argument)]
        if name == "save":
            return self.step.save(argument, extra=self.extra(None)).result()
        if name == "load":
            found = self.resume(argument)
            return found and found.path
        state = self.optimizer.state
        return [name for name, param in self.model.named_parameters() if state.get(param)]

    def calls(self, calls: list[list[Any]]) -> list[Any]:
        said: list[Any] = []
        for name, *arguments in calls:
            try:
                said.append(self.call(name, *arguments or [None]))
            except (ValueError, RuntimeError) as error:
                said.append(str(error))
        return said


def run(case: dict[str, Any], folder: str, out: str) -> None:
    loop = Loop(case, Path(case["path"]) if "path" in case else None)
    if "calls" in case:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, loop.calls(case["calls"]))
        if dist.get_rank() == 0:
            torch.save(every, out)
        return
    losses: dict[int, float] = {}
    saved = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = loop.resume(case.get("load", folder))
        except RuntimeError:
            if not case.get("stubborn"):
                raise
            found = None
        while loop.step.steps < case["steps"]:
            number = loop.step.steps
            if number == case.get("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            losses[number] = loop.train(number)
            done = loop.step.steps
            if case.get("every") and done % case["every"] == 0:
                saved = loop.step.save(
                    folder,
                    samples=done * 2 * dist.get_world_size(),
                    extra=loop.extra(case.get("odd")),
                    keep=case.get("keep", 0),
                    wait=not case.get("background"),
                )
        if saved is not None:
            assert saved.result().startswith(folder)
        if case.get("saves_last"):
            loop.step.save(folder, extra=loop.extra(case.get("odd")))
    model = loop.step.full_state_dict()
    optimizer = loop.step.full_optimizer_state_dict()
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, losses)
    if dist.get_rank() == 0:
        result = {
            "losses": every,
            "model": model,
            "optimizer": optimizer,
            "found": found and (found.path, found.step, found.samples, found.world_size),
            "warnings": [str(warning.message) for warning in caught],
        }
        torch.save(result, out)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        run(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2], sys.argv[3])
    except (ValueError, RuntimeError) as error:
        Path(f"{sys.argv[3]}.error.{dist.get_rank()}").write_text(str(error))
    dist.barrier()
    os._exit(0)  # Gloo's threads now and then abort at the end


if __name__ == "__main__":
    main()
