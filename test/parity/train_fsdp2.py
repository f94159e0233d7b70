"""The reference: trains a model with FSDP2 over Gloo, with public PyTorch only.

A plain script for `torchrun --nproc-per-node N train_fsdp2.py ...`, one CPU thread a rank. It
reads the same weights and batches as `fsdp-run` and writes the same metrics, so that the two can
be compared number by number. `--mode single` trains one rank eagerly, without FSDP and without
any communication (the physical floor of the step time).

Data: each tensor of the batches file is a keyword argument of the model (or positional: `arg0`,
`arg1`, ...), samples in dim 0. At step s rank r of W takes the b samples from (s * W + r) * b on,
each index modulo the number of samples. With n microbatches a step, s counts microbatches.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import json
import math
import os
import re
import resource
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


class Lion(torch.optim.Optimizer):
    """The update of the example plug-in (https://arxiv.org/abs/2302.06675)."""

    def __init__(self, params: Any, lr: float, library: str, options: dict[str, float]) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                momentum, grad = state["momentum"], param.grad
                param.mul_(1 - group["lr"] * group["weight_decay"])
                update = momentum.mul(group["beta1"]).add_(grad, alpha=1 - group["beta1"])
                param.add_(update.sign_(), alpha=-group["lr"])
                momentum.mul_(group["beta2"]).add_(grad, alpha=1 - group["beta2"])


OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "plugin": Lion,
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["fsdp2", "single"], default="fsdp2")
    parser.add_argument("--compile", action="store_true", help="mode single: by torch.compile")
    parser.add_argument("--model", required=True, metavar="MODULE:FACTORY")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="the factory's, as JSON")
    parser.add_argument("--weights", required=True, help="safetensors, by parameter name")
    parser.add_argument("--data", required=True, help="safetensors, by argument name")
    parser.add_argument("--batch", type=int, required=True, help="samples a rank and step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--units", type=json.loads, default=[], help="the config's, as JSON")
    parser.add_argument("--precision", type=json.loads, help="mixed_precision, as JSON")
    parser.add_argument("--checkpoint", type=json.loads, help="match, and save: operators, as JSON")
    parser.add_argument("--optimizer", type=json.loads, required=True, help="name and arguments")
    parser.add_argument(
        "--training",
        type=json.loads,
        default={},
        help="the config's clip_grad_norm, lr_schedule, grad_scaler, gradient_accumulation_steps, "
        "reduce_each_microbatch, all_reduce_each_microbatch and reshard_after_backward, as JSON",
    )
    parser.add_argument("--eval-data", help="as --data, for --eval-every")
    parser.add_argument("--eval-every", type=int, default=0, help="steps; 0: no evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", help="JSON lines, written at the end")
    parser.add_argument("--save-checkpoint", help="a folder, by torch.distributed.checkpoint")
    parser.add_argument("--save-after", type=int, help="the steps after which; by default all")
    parser.add_argument("--load-checkpoint", help="the same, to go on from")
    parser.add_argument("--save-weights", help="full parameters and buffers at the end")
    return parser.parse_args()


def pattern_to_regex(pattern: str) -> re.Pattern[str]:
    """`*` stays within one dotted segment of a name, `**` crosses segments."""
    parts = re.split(r"(\*\*|\*)", pattern)
    wildcard = {"*": r"[^.]*", "**": r".*"}
    return re.compile("".join(wildcard.get(part, re.escape(part)) for part in parts))


def load_weights(model: nn.Module, path: str) -> None:
    """Copies every parameter and buffer; a tied parameter is stored under one of its names."""
    weights = load_file(path)
    missing = {id(p): name for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in weights:
                parameter.copy_(weights[name])
                missing.pop(id(parameter), None)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name in weights:
                buffer.copy_(weights[name])
    if missing:
        raise SystemExit(f"{path}: no weights for {', '.join(sorted(missing.values()))}")


PRODUCTS = [
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::convolution"),
    "aten::_scaled_dot_product_flash_attention_for_cpu",
]


def checkpoint_modules(model: nn.Module, policy: dict[str, Any]) -> None:
    """Wraps the forward of each matching module; `save`: results that are kept (selective)."""
    regex = pattern_to_regex(policy["match"])
    context = {}
    if "save" in policy:
        save = PRODUCTS if policy["save"] == "products" else policy["save"]
        names = [name.removeprefix("aten::").split(".") for name in save]
        kept = [getattr(getattr(torch.ops.aten, n[0]), [*n, "default"][1]) for n in names]
        context["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)
    for name, module in model.named_modules():
        if regex.fullmatch(name):
            forward = module.forward
            module.forward = functools.partial(checkpoint, forward, use_reentrant=False, **context)


def matches(patterns: list[str], name: str) -> bool:
    return any(pattern_to_regex(pattern).fullmatch(name) for pattern in patterns)


def mixed_precision(given: dict[str, Any] | None) -> MixedPrecisionPolicy:
    dtypes = {k: v and getattr(torch, v) for k, v in (given or {}).items() if k.endswith("_dtype")}
    return MixedPrecisionPolicy(**{**(given or {}), **dtypes})


def offload(given: bool | None) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=False) if given else OffloadPolicy()


DIVISION = ("gradient_divide_factor", "force_sum_reduction_for_comms")


def shard_model(
    model: nn.Module,
    units: list[dict[str, Any]],
    policy: dict[str, Any],
    precision: dict[str, Any] | None,
) -> None:
    """One unit for each matching module (for all of a list), inner ones first, then the root; a
    module belongs to the first entry of `units` that matches it."""
    common: dict[str, Any] = {}
    if "mesh" in policy:
        sizes = {"replicate": 1, "shard": -1, **policy["mesh"]}
        others = -sizes["replicate"] * sizes["shard"]
        shape = [dist.get_world_size() // others if n == -1 else n for n in sizes.values()]
        common["mesh"] = init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(sizes))
    if "ignore" in policy:
        named = model.named_parameters(remove_duplicate=False)
        common["ignored_params"] = {p for n, p in named if matches(policy["ignore"], n)}
    if "shard_placement" in policy:
        shards: dict[nn.Parameter, Shard] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            for entry in reversed(policy["shard_placement"]):  # the first that matches wins
                if matches([entry["match"]], name):
                    shards[parameter] = Shard(entry["dim"])
        common["shard_placement_fn"] = shards.get

    # With the outermost module's name first; the unit or the policy last.
    calls: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = []
    claimed: set[str] = set()
    for unit in units:
        keys = ("match", "class", "mixed_precision", "cpu_offload", *DIVISION)
        options = {key: value for key, value in unit.items() if key not in keys}
        options["offload_policy"] = offload(unit.get("cpu_offload", policy.get("cpu_offload")))
        options["mp_policy"] = mixed_precision(unit.get("mixed_precision", precision))
        patterns = unit.get("match", [])
        grouped = not isinstance(patterns, str)
        found = [
            (name, module)
            for name, module in model.named_modules()
            if name
            and name not in claimed
            and (
                type(module).__name__ == unit["class"]
                if "class" in unit
                else matches(patterns if grouped else [patterns], name)
            )
        ]
        claimed.update(name for name, _ in found)
        if "match" in unit and grouped:
            calls.append((found[0][0], [module for _, module in found], options, unit))
        else:
            calls += [(name, module, options, unit) for name, module in found]
    calls.sort(key=lambda call: call[0].count("."), reverse=True)
    for _, modules, options, unit in calls:
        divide(fully_shard(modules, **common, **options), {**policy, **unit})
    common["offload_policy"] = offload(policy.get("cpu_offload"))
    divide(fully_shard(model, mp_policy=mixed_precision(precision), **common), policy)


def divide(unit: FSDPModule | list[FSDPModule], policy: dict[str, Any]) -> None:
    """How the gradients of one unit are divided."""
    module = unit[0] if isinstance(unit, list) else unit
    if policy.get("gradient_divide_factor") is not None:
        module.set_gradient_divide_factor(policy["gradient_divide_factor"])
    module.set_force_sum_reduction_for_comms(policy.get("force_sum_reduction_for_comms", False))


def take_batch(data: dict[str, Tensor], first: int, batch: int) -> dict[str, Tensor]:
    indices = torch.arange(first, first + batch)
    return {name: samples[indices % samples.shape[0]] for name, samples in data.items()}


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    positional = [batch[f"arg{i}"] for i in range(len(batch)) if f"arg{i}" in batch]
    keyword = {name: x for name, x in batch.items() if not re.fullmatch(r"arg\d+", name)}
    output = model(*positional, **keyword)
    return output if isinstance(output, Tensor) else output.loss


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers under all their names; a collective operation."""
    state = model.state_dict()
    full = {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in state.items()}
    return {name: x.detach().clone().contiguous() for name, x in full.items()}


def evaluate(model: nn.Module, data: dict[str, Tensor], batch: int, rank: int, world: int) -> float:
    """The mean loss in eval mode of this rank's whole batches of the data."""
    count = max(1, min(x.shape[0] for x in data.values()) // (batch * world))
    model.eval()
    with torch.no_grad():
        losses = [
            compute_loss(model, take_batch(data, (i * world + rank) * batch, batch)).item()
            for i in range(count)
        ]
    model.train()
    return sum(losses) / count


def make_optimizer(model: nn.Module, given: dict[str, Any]) -> torch.optim.Optimizer:
    """A parameter belongs to the first of `groups` whose pattern matches its name."""
    settings = dict(given)
    optimizer = OPTIMIZERS[settings.pop("name")]
    groups = [dict(group) for group in settings.pop("groups", [])]
    patterns = [group.pop("match") for group in groups]
    members: list[list[nn.Parameter]] = [[] for _ in range(len(groups) + 1)]
    for name, parameter in model.named_parameters():
        found = [
            i + 1
            for i, match in enumerate(patterns)
            if matches([match] if isinstance(match, str) else match, name)
        ]
        members[found[0] if found else 0].append(parameter)
    own: list[dict[str, Any]] = []
    for params, options in zip(members, [{}, *groups], strict=True):
        # One kernel takes no mixture of sharded and ignored parameters.
        for sharded in (True, False):
            alike = [p for p in params if isinstance(p, DTensor) == sharded]
            if alike:
                own.append({"params": alike, **options})
    return optimizer(own, **settings)


def make_schedule(
    optimizer: torch.optim.Optimizer, given: dict[str, Any]
) -> torch.optim.lr_scheduler.LRScheduler:
    """torchtitan's linear warm-up and decay; after the last step the factor stays."""
    warmup, decay = given.get("warmup_steps", 0), given.get("decay", "constant")
    total, floor = given.get("total_steps", 0), given.get("min_lr_ratio", 0.0)

    def factor(current: int) -> float:
        if current < warmup:
            return float((current + 1) / warmup)
        if decay == "constant":
            return 1.0
        progress = min(float(current + 1 - warmup) / (total - warmup), 1.0)
        left = 1 - progress if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return floor + (1 - floor) * left

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def clip(model: nn.Module, given: Any) -> float:
    """clip_grad_norm_; returns the total norm."""
    given = given if isinstance(given, dict) else {"max_norm": given}
    norm_type = float(given.get("norm_type", 2))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), given["max_norm"], norm_type)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def checkpoint_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    step: int,
) -> dict[str, Any]:
    """Under torchtitan's names."""
    return get_model_state_dict(model) | {
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
        "lr_scheduler": {"last_epoch": schedule.last_epoch},
        "train_state": {"step": step},
    }


def load_checkpoint(
    path: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> int:
    """Returns the steps that were done."""
    state = checkpoint_state(model, optimizer, schedule, 0)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, {n: x for n, x in state.items() if isinstance(x, Tensor)})
    given = state["optimizer"]
    set_optimizer_state_dict(model, optimizer, optim_state_dict=given, options=FLAT)
    schedule.last_epoch = state["lr_scheduler"]["last_epoch"]
    schedule._last_lr = [group["lr"] for group in optimizer.param_groups]
    return state["train_state"]["step"]


class Cast:
    """A copy of a model in the policy's `param_dtype`, which computes for it: the arithmetic of
    mixed precision on one rank, without FSDP. Buffers are cast too, as the policy casts what
    units are given."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model = copy.deepcopy(model).to(dtype)
        self.pairs = list(zip(model.parameters(), self.model.parameters(), strict=True))

    def give_gradients(self) -> None:
        """Moves the gradients to the model, in its own dtype."""
        for own, cast in self.pairs:
            own.grad = None if cast.grad is None else cast.grad.to(own.dtype)
            cast.grad = None

    @torch.no_grad()
    def take_weights(self) -> None:
        for own, cast in self.pairs:
            cast.copy_(own)


def train(args: argparse.Namespace, rank: int, world: int) -> None:
    module_name, _, factory = args.model.partition(":")
    base_rss = peak_rss_bytes()
    model: nn.Module = getattr(importlib.import_module(module_name), factory)(**args.kwargs)
    load_weights(model, args.weights)
    if args.checkpoint:
        checkpoint_modules(model, args.checkpoint)
    if args.mode == "fsdp2":
        shard_model(model, args.units, args.training, args.precision)
    param_dtype = mixed_precision(args.precision).param_dtype
    cast = Cast(model, param_dtype) if args.mode == "single" and param_dtype else None
    if args.compile:
        (cast.model if cast else model).compile()
    optimizer = make_optimizer(model, args.optimizer)
    schedule = make_schedule(optimizer, args.training.get("lr_schedule", {}))
    microbatches = args.training.get("gradient_accumulation_steps", 1)
    scaling = args.training.get("grad_scaler")
    settings = scaling if isinstance(scaling, dict) else {}
    scaler = torch.amp.GradScaler("cpu", enabled=scaling is not None, **settings)
    reshards = args.training.get("reshard_after_backward", True)
    if not reshards and isinstance(model, FSDPModule):
        model.set_reshard_after_backward(False)
    data = load_file(args.data)
    tokens = (
        microbatches
        * args.batch
        * max(
            [x.shape[1] for x in data.values() if x.ndim == 2 and not x.is_floating_point()] or [1]
        )
    )

    steps: list[dict[str, Any]] = []
    done = 0
    if args.load_checkpoint:
        done = load_checkpoint(args.load_checkpoint, model, optimizer, schedule)
    torch.manual_seed(args.seed)
    for step in range(done, args.steps):
        batches = [
            take_batch(data, ((step * microbatches + m) * world + rank) * args.batch, args.batch)
            for m in range(microbatches)
        ]
        record: dict[str, Any] = {"lr": schedule.get_last_lr()[0]}
        start = time.perf_counter()
        losses = []
        for m, batch in enumerate(batches):
            if not args.training.get("reduce_each_microbatch", True):
                model.set_requires_gradient_sync(m == microbatches - 1)
            elif not args.training.get("all_reduce_each_microbatch", True):
                model.set_requires_all_reduce(m == microbatches - 1)
            loss = compute_loss(cast.model if cast else model, batch)
            scaler.scale(loss / microbatches if microbatches > 1 else loss).backward()
            losses.append(loss.item())
        if not reshards:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        if cast:
            cast.give_gradients()
        if scaling is not None:
            record["loss_scale"] = scaler.get_scale()
        if "clip_grad_norm" in args.training:
            scaler.unscale_(optimizer)
            record["grad_norm"] = clip(model, args.training["clip_grad_norm"])
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        if cast:
            cast.take_weights()
        record["seconds"] = time.perf_counter() - start
        if args.eval_every and (step + 1) % args.eval_every == 0:
            record["eval_loss"] = evaluate(
                model, load_file(args.eval_data), args.batch, rank, world
            )
        steps.append({**record, "loss": sum(losses) / microbatches, "rss": peak_rss_bytes()})
        if args.save_checkpoint and step + 1 == (args.save_after or args.steps):
            state = checkpoint_state(model, optimizer, schedule, step + 1)
            dcp.save(state, checkpoint_id=args.save_checkpoint)

    gathered: list[Any] = [steps]
    if args.mode == "fsdp2":
        gathered = [None] * world
        dist.all_gather_object(gathered, steps)
    if args.metrics and rank == 0:
        write_metrics(args.metrics, gathered, tokens, base_rss)
    if args.save_weights:
        state = full_state(model)
        if rank == 0:
            save_file(state, args.save_weights)


def write_metrics(path: str, ranks: list[list[dict[str, Any]]], tokens: int, base: int) -> None:
    """The fields of `fsdp-run --metrics`; `tokens` is what one rank consumes in a step."""
    with open(path, "w") as file:
        for step, records in enumerate(zip(*ranks, strict=True)):
            losses = [float(f"{record['loss']:.9g}") for record in records]
            seconds = records[0]["seconds"]
            line = {
                "step": step + 1,
                "loss": float(f"{sum(record['loss'] for record in records) / len(records):.9g}"),
                "rank_losses": losses,
                "lr": records[0]["lr"],
                "step_ms": seconds * 1e3,
                "tokens_per_s": tokens * len(records) / seconds,
                "peak_rss_bytes": max(record["rss"] for record in records),
                "base_rss_bytes": base,
            }
            if "grad_norm" in records[0]:
                line["grad_norm"] = float(f"{records[0]['grad_norm']:.9g}")
            if "loss_scale" in records[0]:
                line["loss_scale"] = float(f"{records[0]['loss_scale']:.9g}")
            if "eval_loss" in records[0]:
                line["rank_eval_losses"] = [float(f"{r['eval_loss']:.9g}") for r in records]
            file.write(json.dumps(line) + "\n")


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    if args.mode == "single":
        train(args, rank=0, world=1)
        return
    dist.init_process_group("gloo")
    train(args, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    # Tearing Gloo's threads down now and then aborts ("terminate called without an active
    # exception") after all is done and written; leave without it, once every rank is here.
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
