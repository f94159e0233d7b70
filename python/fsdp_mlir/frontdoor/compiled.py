"""`compile`: a sharded model and an optimizer into a training step of this process.

    fully_shard(block); fully_shard(model)
    step = fsdp_mlir.compile(model, optimizer=optimizer)
    for batch in loader:
        loss = step(batch)

Every rank captures the model, and all must capture the same step; rank 0 runs fsdp-opt; every rank
executes the plan, in the memory of the model's own DTensors. A call without a plan runs as FSDP2
does. The ranks are those that torchrun started, or this process alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_mlir.frontdoor.plans import Plans
from fsdp_mlir.frontdoor.step import Example, Step
from fsdp_mlir.frontdoor.together import together
from fsdp_mlir.modules import sharding, weights
from fsdp_mlir.modules.compute_loss import ComputeLoss
from fsdp_mlir.state import optimizers
from fsdp_mlir.step.eager import Clipping
from fsdp_mlir.step.training_step import Loss
from fsdp_mlir.support import build, policy_schema
from fsdp_mlir.support.errors import CompileError, warn
from fsdp_mlir.view.asked import Factory


def compile(
    model: nn.Module,
    *,
    loss: Loss | None = None,
    compute_loss: Callable[..., Tensor] | None = None,
    optimizer: optimizers.OptimizerSpec = None,
    example: Example | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    init: Factory | None = None,
    init_seed: int | None = None,
    evaluation: bool = False,
    path: str | Path | None = None,
    cache: str | Path | None = None,
    outputs: bool = False,
    fallback: str = "eager",
    comm: str | None = None,
    deadline: float = 1800.0,
    **options: Any,
) -> Step:
    """Compiles forward, loss, backward and update of `model`, which fully_shard sharded.

    `loss(output)` gives the scalar. Further parameters of `loss`, as in `loss(output, labels)`,
    name inputs that go to it instead of the model. Without `loss` the output or its `.loss` is the
    scalar. `compute_loss(model, ...)`, in place of `loss`, gets the model and all inputs, and calls
    the model itself. `example` is one rank's batch of one microbatch: a tensor, a sequence of them,
    or a mapping by the names of the model's arguments. Without an example, the first call of the
    step compiles.

    `optimizer` is an optimizer on model.parameters(), or a class, or `(class, arguments)`, or the
    mapping of the config. SGD, Adam and AdamW become part of the plan, with the settings that their
    groups have at each step; any other optimizer gets the gradients and makes its own step. Without
    one there are only the step's `backward`, `accumulate` and `evaluate`. With
    `max_norm` the gradients are clipped as by torch.nn.utils.clip_grad_norm_. `options` are further
    keys of fsdp-opt's config (docs/config.md) that the other arguments and fully_shard do not
    determine, such as `gradient_accumulation_steps`. `grad_scaler` may be a torch.amp.GradScaler.
    `units="auto"` may be given if fully_shard was called on the whole model only.

    `loss` may return more than the scalar, which is then the first element, the entry 'loss' or the
    attribute `loss` of what it returns: the step then returns all of it. With `outputs`, a step
    without `loss` also returns everything that the model returns.

    With `evaluation` the loss in eval mode is also compiled, for `Step.evaluate`.

    The step trains the model: its parameters' local tensors move to memory of the plan, which the
    ranks of one host share. Parameters on `meta` are initialised by `init`, the function that
    builds the model, as on one device at `init_seed` (default: that of rank 0's torch.manual_seed).

    A call without a plan runs as FSDP2 does, after one warning that says why; with fallback="error"
    it raises that as an error. `comm`: how the ranks communicate: "shm", through memory of one host
    (the default if all ranks are on one host), or "gloo". `deadline`: seconds after which a call
    fails if other ranks do not come to it, or make no progress in it. The files of the first plan
    lie in `path`, by default in a temporary folder until the plan is open. Plans are kept in the
    folder `cache`, by default the one that the variable FSDP_MLIR_CACHE names, if it is set; a
    later process with the same code, model, settings and versions finds them there. This is a
    collective: an error on one rank is raised on all of them.
    """
    if fallback not in ("eager", "error"):
        raise ValueError(f"fallback: expected 'eager' or 'error', got {fallback!r}")
    if comm not in (None, "shm", "gloo"):
        raise ValueError(f"comm: expected 'shm' or 'gloo', got {comm!r}")
    if max_norm is not None and not max_norm >= 0:
        raise ValueError(f"max_norm: expected a number of at least 0, got {max_norm!r}")
    if compute_loss is not None:
        if loss is not None:
            raise ValueError("compute_loss: expected it or loss, got both")
        loss = ComputeLoss(compute_loss)
    runtime = build.runtime()
    rendezvous = runtime.Rendezvous()

    def prepare() -> tuple[torch.optim.Optimizer | None, dict[str, Any], Path | None]:
        if not isinstance(model, nn.Module):
            raise CompileError(f"expected a torch.nn.Module, got '{type(model).__name__}'")
        if dist.is_initialized() and dist.get_world_size() != rendezvous.world_size:
            raise CompileError(
                f"torch.distributed has {dist.get_world_size()} ranks, the environment "
                f"{rendezvous.world_size}: expected ranks that torchrun started"
            )
        sharding.reshard(sharding.groups(model))
        build.built("bin/fsdp-opt")
        config = dict(options)
        for key in policy_schema.keys_where("compile", "argument"):
            if key in config:
                raise CompileError(f"option '{key}' follows from the other arguments")
        for key in config:
            if policy_schema.key_of(policy_schema.SCHEMA, key) is None:
                raise CompileError(policy_schema.unknown(key))
        if isinstance(options.get("grad_scaler"), torch.amp.GradScaler):
            config["grad_scaler"] = _scaler_config(options["grad_scaler"])
        if not any(param.is_meta for param in weights.of_model(model)):
            sharding.initialise(model)
        elif init is None:
            raise CompileError(
                "the model is on 'meta': expected init=, the function that builds it, or values"
            )
        given = optimizers.instance_of(optimizer, model)
        if given is None:
            config["optimizer"] = dict(optimizer)  # type: ignore[call-overload]
        else:
            optimizers.check_params(given, weights.parameters(model))
        return given, config, _cache_folder(cache)

    (given, config, kept), has = together(rendezvous, prepare, lambda made: str(made[2] is None))
    if len(set(has)) > 1:  # finding a plan is a collective
        kept = None
        if rendezvous.rank == 0:
            warn(
                f"plans are neither kept nor found: rank {has.index('True')} has no cache, others "
                "have"
            )
    if comm is None:
        comm = "shm" if rendezvous.on_one_host() else "gloo"
    clipping = None if max_norm is None else Clipping(float(max_norm), float(norm_type))
    plans = Plans(
        model,
        loss,
        given,
        init=init,
        init_seed=init_seed,
        path=Path(path) if path is not None else None,
        cache=kept,
        rendezvous=rendezvous,
        comm=comm,
        deadline=deadline,
    )
    step = Step(
        model,
        loss,
        given,
        clipping,
        config,
        plans,
        rendezvous,
        evaluation=evaluation,
        outputs=outputs,
        fallback=fallback,
        deadline=deadline,
    )
    scaler = options.get("grad_scaler")
    if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
        step._scaler = scaler.get_scale(), scaler._get_growth_tracker()
    if example is not None:
        step._compile_example(example)
    return step


def _cache_folder(given: str | Path | None) -> Path | None:
    named = given if given is not None else os.environ.get("FSDP_MLIR_CACHE")
    return Path(named).expanduser().absolute() if named else None


def _scaler_config(scaler: torch.amp.GradScaler) -> dict[str, Any] | bool:
    if not scaler.is_enabled():
        return False
    return {
        "init_scale": scaler.get_scale(),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
    }
