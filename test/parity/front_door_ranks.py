"""One rank of a comparison in one process: the same script for FSDP2 and for fsdp_mlir.

    front_door_ranks.py CASE.json OUT

Trains a model with torch.distributed.fsdp, and its twin with the front door, from the same weights
and batches, and writes to OUT.<rank> what differs (JSON, empty if all bits are equal).
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import fsdp_mlir
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

STEPS = 4


def policy(shard: Any, model: nn.Module, case: dict[str, Any], mesh: Any) -> None:
    """The calls that a user writes, with either fully_shard."""
    if "first_dtype" in case:
        model.to(getattr(torch, case["first_dtype"]))
    named = dict(model.named_parameters())
    common: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
    if "ignored" in case:
        common["ignored_params"] = {named[name] for name in case["ignored"]}
    if case.get("largest_dim"):
        common["shard_placement_fn"] = lambda p: Shard(max(range(p.ndim), key=p.size))
    for call in case["calls"]:
        arguments = converted({key: x for key, x in call.items() if key != "modules"})
        modules = [model.get_submodule(name) for name in call["modules"]]
        result = modules if call.get("list", len(modules) > 1) else modules[0]
        arguments.pop("list", None)
        assert shard(result, **common, **arguments) is result
    shard(model, **common, **converted(case.get("root", {})))
    model.to(torch.float32)
    for module, method, *arguments in case.get("methods", []):
        getattr(model.get_submodule(module), method)(*arguments)


def converted(arguments: dict[str, Any]) -> dict[str, Any]:
    """With policies in place of what JSON can say of them."""
    if arguments.get("offload"):
        others = {key: x for key, x in arguments.items() if key != "offload"}
        return {**converted(others), "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    policy = dict(arguments.get("mp_policy", {}))
    if not policy:
        return arguments
    dtypes = {key: getattr(torch, x) for key, x in policy.items() if key.endswith("_dtype")}
    return {**arguments, "mp_policy": MixedPrecisionPolicy(**{**policy, **dtypes})}


def make_optimizer(model: nn.Module, case: dict[str, Any]) -> torch.optim.Optimizer:
    settings = dict(case["optimizer"])
    kind = getattr(torch.optim, settings.pop("name"))
    if not case.get("groups"):
        return kind(model.parameters(), **settings)
    biases = [p for n, p in model.named_parameters() if p.dim() == 1]
    others = [p for n, p in model.named_parameters() if p.dim() != 1]
    return kind([{"params": others}, {"params": biases, **case["groups"]}], **settings)


def make_scheduler(optimizer: torch.optim.Optimizer, case: dict[str, Any]) -> Any:
    """Of the learning rate alone, or of momentum and betas too."""
    if case.get("one_cycle"):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def batches(case: dict[str, Any], rank: int) -> list[dict[str, Tensor]]:
    if case.get("model") == "WithoutInputs":
        return [{} for _ in range(STEPS)]
    generator = torch.Generator().manual_seed(rank)
    n = case.get("accumulation", 1)
    return [
        {
            "tokens": torch.randint(256, (2 * n, 8), generator=generator),
            "targets": torch.randint(256, (2 * n, 8), generator=generator),
        }
        for _ in range(STEPS)
    ]


def train_fsdp2(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: dict[str, Any], rank: int
) -> list[float]:
    losses = []
    n = case.get("accumulation", 1)
    scheduler = make_scheduler(optimizer, case)
    for batch in batches(case, rank):
        total = 0.0
        for m in range(n):
            if not case.get("reduce_each_microbatch", True):
                model.set_requires_gradient_sync(m == n - 1)
            elif not case.get("all_reduce_each_microbatch", True):
                model.set_requires_all_reduce(m == n - 1)
            part = {name: tensor[2 * m : 2 * m + 2] for name, tensor in batch.items()}
            loss = model(**part)
            (loss if "together" in case else loss / n).backward()
            total += loss.item()
        losses.append(total / n)
        if "max_norm" in case:
            nn.utils.clip_grad_norm_(model.parameters(), case["max_norm"])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses


def train_ours(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: dict[str, Any], rank: int
) -> tuple[fsdp_mlir.Step, list[float]]:
    options: dict[str, Any] = {}
    together = case.get("together", False)
    if "accumulation" in case and not together:
        options["gradient_accumulation_steps"] = case["accumulation"]
    for key in ("reduce_each_microbatch", "all_reduce_each_microbatch"):
        if key in case and not together:
            options[key] = case[key]
    example = {name: tensor[:2] for name, tensor in batches(case, rank)[0].items()}
    step = fsdp_mlir.compile(
        model,
        optimizer=optimizer,
        example=example,
        max_norm=case.get("max_norm"),
        evaluation=True,
        comm=case.get("comm"),
        **options,
    )
    losses = []
    scheduler = make_scheduler(optimizer, case)
    for batch in batches(case, rank):
        if together:
            parts = [tensor.split(2) for tensor in batch.values()]
            pieces = [dict(zip(batch, part, strict=True)) for part in zip(*parts, strict=True)]
            each = step.accumulate(pieces)
            losses.append(sum(loss.item() for loss in each) / len(each))
            step.update()
        else:
            losses.append(step(batch).item())
        scheduler.step()
    return step, losses


def differences(case: dict[str, Any], rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    module, _, name = case.get("model", "own_parameters").rpartition(":")
    theirs = getattr(importlib.import_module(module or "parity_models"), name)()
    ours = copy.deepcopy(theirs)
    shape = case.get("mesh")
    mesh = shape and init_device_mesh(
        "cpu", tuple(shape), mesh_dim_names=("replicate", "shard")[-len(shape) :]
    )
    policy(fully_shard, theirs, case, mesh)
    policy(fsdp_mlir.fully_shard, ours, case, mesh)
    torch.manual_seed(rank)
    expected = train_fsdp2(theirs, make_optimizer(theirs, case), case, rank)
    torch.manual_seed(rank)
    step, got = train_ours(ours, make_optimizer(ours, case), case, rank)

    found = []
    if not torch.equal(torch.tensor(got), torch.tensor(expected)):
        found.append(f"losses: {got}, FSDP2's: {expected}")
    want, state = theirs.state_dict(), step.state_dict()
    if list(want) != list(state):
        found.append(f"keys: {list(state)}, FSDP2's: {list(want)}")
    for name, tensor in want.items():
        found += different(name, state[name], tensor)
    full = step.full_state_dict()
    if rank != 0 and full:
        found.append("full_state_dict is not empty")
    for name, tensor in want.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if rank == 0 and not torch.equal(full[name], whole):
            found.append(f"{name}: full tensors differ")

    theirs.eval()
    held_out = {name: tensor[:2] for name, tensor in batches(case, rank + world)[0].items()}
    if not torch.equal(step.evaluate(held_out), theirs(**held_out).detach()):
        found.append("the losses in eval mode differ")

    # Any form of state can be loaded back.
    saved = {name: tensor.clone() for name, tensor in state.items()}
    step(batches(case, rank)[0])
    if all(torch.equal(local(tensor), local(state[name])) for name, tensor in saved.items()):
        found.append("a step changes nothing")
    step.load_state_dict(saved)
    objects = [full]
    dist.broadcast_object_list(objects)
    for name, tensor in step.state_dict().items():
        found += different(f"loaded {name}", tensor, saved[name])
    step(batches(case, rank)[0])
    step.load_state_dict(objects[0])
    again = step.full_state_dict()
    found += [f"{n}: loaded from a full one" for n in again if not torch.equal(again[n], full[n])]
    return found


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def different(name: str, got: Tensor, want: Tensor) -> list[str]:
    if isinstance(got, DTensor) != isinstance(want, DTensor):
        return [f"{name}: {type(got)}, FSDP2's: {type(want)}"]
    if isinstance(got, DTensor) and (
        got.placements != want.placements
        or got.shape != want.shape
        or got.stride() != want.stride()
        or got.device_mesh != want.device_mesh
    ):
        return [f"{name}: {got.placements}{got.shape}, FSDP2's: {want.placements}{want.shape}"]
    if not torch.equal(local(got), local(want)):
        return [f"{name}: the shards differ"]
    return []


def main() -> None:
    torch.set_num_threads(1)
    case = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found = differences(case, rank, world)
    Path(f"{sys.argv[2]}.{rank}").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # Gloo's threads now and then abort at the end


if __name__ == "__main__":
    main()
