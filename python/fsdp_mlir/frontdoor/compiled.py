"""`compile`: a sharded model and an optimizer into a training step of this process.

    fully_shard(block); fully_shard(model)
    step = fsdp_mlir.compile(model, optimizer=optimizer)
    for batch in loader:
        loss = step(batch)

Every rank captures the model, which must give the same step; rank 0 runs fsdp-opt; every rank
executes the plan, in the memory of the model's own DTensors. What has no plan runs as FSDP2 does.
The ranks are those of torchrun, or this process alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from fsdp_mlir.frontdoor.plans import (
    Compiled,
    NoPlan,
    Plans,
    has_no_plan,
    together,
    warn_of_fallback,
)
from fsdp_mlir.frontdoor.requests import OF_LOOP, Requests
from fsdp_mlir.modules import sharding, weights
from fsdp_mlir.state import optimizers
from fsdp_mlir.state.model_state import ModelState
from fsdp_mlir.state.optimizer_state import OptimizerState
from fsdp_mlir.step import eager
from fsdp_mlir.step.batches import Batch, Inputs, form, split, tensors
from fsdp_mlir.step.eager import Clipping
from fsdp_mlir.step.outputs import scalar_of
from fsdp_mlir.step.training_step import ComputeLoss, EachLoss, Loss, TrainingStep
from fsdp_mlir.support import build, policy_schema
from fsdp_mlir.support.errors import CompileError
from fsdp_mlir.view.asked import Factory

Example = Tensor | Sequence[Any] | Mapping[str, Any]

# What a rank says before a call.
_READY, _COMPILE, _EAGER, _OTHER_VALUES = range(4)

# Options without which a step of FSDP2 would be another one.
_OF_PLAN = policy_schema.keys_where("compile", "plan")


def compile(
    model: nn.Module,
    *,
    loss: Loss | None = None,
    compute_loss: Callable[..., Tensor] | None = None,
    optimizer: optimizers.OptimizerSpec,
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

    `loss(output)` gives the scalar; further parameters of it, as in `loss(output, labels)`, name
    inputs that it takes instead of the model. Without it the output or its `.loss` is the scalar.
    `compute_loss(model, ...)`, in place of `loss`, gets the model and all inputs, and calls the
    model itself. `example` is one rank's batch of one microbatch: a tensor, a sequence of them, or
    a mapping by the names of the model's arguments. Without it the first call of the step compiles.

    `optimizer` is an optimizer on model.parameters(), or a class, or `(class, arguments)`, or the
    mapping of the config. SGD, Adam and AdamW are part of the plan, with the settings that their
    groups have at each step; any other one gets gradients and makes its own step. With `max_norm`
    the gradients are clipped as by torch.nn.utils.clip_grad_norm_. `options` are further keys of
    fsdp-opt's config (docs/config.md) that the other arguments and fully_shard do not give, such
    as `gradient_accumulation_steps`; `grad_scaler` may be a torch.amp.GradScaler, and
    `units="auto"` stands where fully_shard was called on the whole model only.

    `loss` may give more than the scalar, of which that is the first element, the entry 'loss' or
    the attribute `loss`: the step then returns all of it. With `outputs` it returns all that a
    model gives without `loss`, too.

    With `evaluation` the loss in eval mode is compiled too, for `Step.evaluate`.

    The step trains the model: its parameters' local tensors move to memory of the plan, which the
    ranks of one host share. Parameters on `meta` are initialised by `init`, the function that
    builds the model, as on one device at `init_seed` (default: that of rank 0's torch.manual_seed).

    What has no plan runs as FSDP2 does, after one warning that says why; with fallback="error" it
    is the error. `comm`: how the ranks reach each other, "shm", the memory of one host, or "gloo";
    by default the first where all are on one host. `deadline`: seconds after which a call fails
    whose other ranks do not come, or do not go on in it. The files of the first plan lie in `path`,
    by default in a temporary folder until it is open. Plans are kept in the folder `cache`, by
    default that of the variable FSDP_MLIR_CACHE if there is one, and found there by a later process
    with the same code, model, settings and versions. A collective: an error of one rank is raised
    on all of them.
    """
    if fallback not in ("eager", "error"):
        raise ValueError(f"fallback: expected 'eager' or 'error', got {fallback!r}")
    if comm not in (None, "shm", "gloo"):
        raise ValueError(f"comm: expected 'shm' or 'gloo', got {comm!r}")
    if compute_loss is not None:
        if loss is not None:
            raise ValueError("compute_loss: expected it or loss, got both")
        loss = ComputeLoss(compute_loss)
    runtime = build.runtime()
    rendezvous = runtime.Rendezvous()

    def prepare() -> tuple[torch.optim.Optimizer | None, dict[str, Any]]:
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
        if not any(param.is_meta for param in model.parameters()):
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
        return given, config

    (given, config), _ = together(rendezvous, prepare, lambda _: "")
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
        cache=_cache_folder(cache),
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


@dataclass(frozen=True)
class _Result:
    """What the last step said beside its loss."""

    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False


class Step:
    """A training step of a model, compiled for each form of batch that it gets.

    Calls are collective: all ranks make them in the same order. A compiled step that failed, here
    or on another rank, raises RuntimeError on every rank, and the object cannot be used any more.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        optimizer: torch.optim.Optimizer | None,
        clipping: Clipping | None,
        config: dict[str, Any],
        plans: Plans,
        rendezvous: Any,
        *,
        evaluation: bool,
        outputs: bool,
        fallback: str,
        deadline: float,
    ) -> None:
        self._model = model
        self._loss = loss
        self._optimizer = optimizer
        self._clipping = clipping
        self._config = config
        self._plans = plans
        self._rendezvous = rendezvous
        self._evaluation = evaluation
        # Without a loss function the output is the model's, which may be large.
        self._gives_outputs = outputs or loss is not None
        self._fallback = fallback
        self._groups = sharding.groups(model)
        self._inputs = Inputs(model, loss)
        self._requests = Requests(
            model,
            optimizer,
            clipping,
            config,
            self._inputs,
            evaluation=evaluation,
            gives_outputs=self._gives_outputs,
        )
        self._cache: dict[Any, Compiled | None] = {}  # None: there is no plan
        self._evaluators: dict[Any, Compiled] = {}
        self._steps = 0
        self._failure = ""  # of a call of the ranks
        self._has_warned = False  # of batches that a plan does not take
        self._result = _Result()
        self._agreement: Any = None  # without it there are no plans
        try:
            self._agreement, _ = together(
                rendezvous,
                lambda: build.runtime().Agreement(plans.comm, rendezvous, deadline),
                lambda _: "",
            )
        except RuntimeError as error:
            self._without_plan(NoPlan(str(error)))

    # --- training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Trains on this rank's batch and returns its loss, a scalar; where `loss` gives more than
        that, what it gives.

        The batch is the inputs in their order, or by name, or one sequence or mapping of them. With
        n `gradient_accumulation_steps` it has n times the samples of a microbatch: n microbatches
        in a row, whose mean loss is returned.
        """
        batch = self._inputs.named(args, kwargs)
        microbatches = split(batch, self._requests.count)
        sharding.reshard(self._groups)
        params = list(self._model.parameters())
        # FSDP2 adds to gradients that eager code left.
        outside = self._outside(params) or any(param.grad is not None for param in params)
        compiled = self._plan("gradients" if outside else "update", microbatches, params)
        if compiled is None:
            return self._eager_step(microbatches)
        if self._optimizer is not None and not outside:
            compiled.session.follow(optimizers.followed(self._optimizer))
            # As its own step does, for the schedulers' check of the order of calls.
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
        compiled.bound.optimizer_state(self._steps)
        result = self._run(compiled.session.step, [tensors(batch) for batch in microbatches])
        self._result = _Result(result.grad_norm, result.loss_scale, bool(result.skipped))
        self._steps += 1
        if outside:
            self._take_gradients(compiled)
            if not result.skipped:
                self.update()
            elif self._optimizer is not None:
                self._optimizer.zero_grad()
        else:
            compiled.bound.fill(skipped=bool(result.skipped))
        return compiled.returned(result.loss)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of one microbatch, whose loss it returns: leaves reduced gradients
        in the parameters, added to those that are there, as loss.backward() does with FSDP2."""
        microbatches = split(self._inputs.named(args, kwargs), 1)
        sharding.reshard(self._groups)
        compiled = self._plan("backward", microbatches, list(self._model.parameters()))
        if compiled is None:
            (value,) = eager.backward(
                self._eager(microbatches[0]), [list(microbatches[0].values())]
            )
            return self._returned(value)
        compiled.bound.optimizer_state(self._steps)
        result = self._run(compiled.session.step, [tensors(microbatches[0])])
        self._take_gradients(compiled)
        return compiled.returned(result.loss)

    def accumulate(self, microbatches: Sequence[Example]) -> list[Any]:
        """Forward and backward of microbatches whose gradients are reduced together, as FSDP2 does
        after set_requires_gradient_sync(False) for all but the last: the loss of each. The
        gradients are those of the sum."""
        batches = [self._inputs.named((batch,), {}) for batch in microbatches]
        count = len(batches)
        if count == 1:
            return [scalar_of(self.backward(batches[0]))]
        sharding.reshard(self._groups)
        alike = len({form(batch) for batch in batches}) == 1
        params = list(self._model.parameters())
        compiled = self._plan(
            "accumulate", batches, params, may=alike and EachLoss.fits(count, torch.float32)
        )
        if compiled is None or not EachLoss.fits(count, compiled.loss_dtype):
            inputs = [list(batch.values()) for batch in batches]
            steps = self._eager(batches[0])
            return [
                scalar_of(value)
                for value in eager.backward(steps, inputs, reduce_each=False, mean=False)
            ]
        compiled.bound.optimizer_state(self._steps)
        self._run(compiled.session.step, [tensors(batch) for batch in batches])
        self._take_gradients(compiled)
        return list(self._requests.losses(count).to(compiled.loss_dtype, copy=True))

    def update(self) -> None:
        """Clips the gradients of the parameters, if asked for, and makes the optimizer's step;
        then there are none."""
        if self._optimizer is None:
            raise TypeError("update: expected an optimizer of torch in compile, got a config")
        if self._config.get("lr_schedule"):
            raise CompileError("lr_schedule: only a plan's update follows it; use a scheduler")
        sharding.reshard(self._groups)
        norm = self._clipping.apply(self._model) if self._clipping else None
        self._result = _Result(norm, self._result.loss_scale, False)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """What the loss gives for this rank's batch in eval mode, without training. Without a loss
        function, what the model gives; with `evaluation` in compile, its loss."""
        (batch,) = split(self._inputs.named(args, kwargs), 1)
        if self._plans.trained is not None:
            self._plans.trained.settle()
        key = self._requests.evaluation_key(batch)
        compiled = self._evaluators.get(key)
        ready = (
            compiled is not None
            and self._is_current(compiled, training=False)
            and compiled.takes([batch])
        )
        if self._agreed(key, _READY if ready else _EAGER) != _READY:
            value = eager.evaluate(self._eager(batch), list(batch.values()))
            return self._returned(value) if self._evaluation else value
        assert compiled is not None
        loss = self._run(compiled.session.evaluate, tensors(batch))
        return compiled.returned(loss, evaluation=True)

    # --- what the last step said

    @property
    def grad_norm(self) -> float | None:
        """Total norm of the last step's gradients before clipping; None without clipping."""
        return self._result.grad_norm

    @property
    def loss_scale(self) -> float | None:
        """What the last step's loss was multiplied by; None without a gradient scaler."""
        return self._result.loss_scale

    @property
    def skipped(self) -> bool:
        """Whether the last step changed nothing, because a gradient was not finite."""
        return self._result.skipped

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """model.state_dict()."""
        return self._state.state_dict()

    def full_state_dict(self) -> dict[str, Any]:
        """Whole copies on rank 0, made one tensor at a time; an empty dict on the others."""
        return self._state.full_state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What model.load_state_dict(), with its hooks, makes of a state dict of DTensors or of
        whole tensors. ValueError, and no change, where keys or shapes are not the model's."""
        self._state.load_state_dict(state)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """What get_optimizer_state_dict of torch.distributed.checkpoint.state_dict gives: `state`
        by parameter names, DTensors as the parameters are, and `param_groups`."""
        return self._optimizer_state.state_dict()

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """The same with whole tensors, on rank 0; an empty dict on the others."""
        return self._optimizer_state.full_state_dict(self._rendezvous.rank)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from such a state; its tensors may be whole, too."""
        self._steps = self._optimizer_state.load_state_dict(state)

    @property
    def _state(self) -> ModelState:
        return ModelState(self._model, self._rendezvous.rank)

    @property
    def _optimizer_state(self) -> OptimizerState:
        sharding.reshard(self._groups)
        made = next((made for made in self._cache.values() if made is not None), None)
        session = made.session if made else None
        return OptimizerState(
            self._model, self._optimizer, session, self._plans.trained, self._steps
        )

    # --- plans

    def _plan(
        self,
        kind: str,
        microbatches: list[dict[str, Any]],
        params: list[nn.Parameter],
        *,
        may: bool = True,
    ) -> Compiled | None:
        """The plan for this call, compiled where there is none yet, with what it reads bound to
        it; None where the call runs as FSDP2's, as without `may`."""
        if self._plans.trained is not None:
            self._plans.trained.settle()
        key = self._requests.key(kind, microbatches, params)
        compiled = self._cache.get(key)
        if (
            not may
            or (key in self._cache and compiled is None)
            or not sharding.reduces_now(self._model, self._groups)
            or self._agreement is None
        ):
            own = _EAGER
        else:
            own = _READY if compiled and self._is_current(compiled) else _COMPILE
            if own == _READY and compiled and not compiled.takes(microbatches):
                own = _OTHER_VALUES
        said = self._agreed(key, own)
        if said == _COMPILE:
            compiled = self._compile(key, kind, microbatches)
            if compiled is not None and compiled.captured.relied_on:
                takes = compiled.takes(microbatches)
                said = self._agreed(key, _READY if takes else _OTHER_VALUES)
        return compiled if said in (_READY, _COMPILE) else None

    def _is_current(self, compiled: Compiled, *, training: bool = True) -> bool:
        unchanged = compiled.unchanged
        if not unchanged.holds():
            if not unchanged.holds_what_matters(training=training):
                return False
            if training:
                unchanged.renew()
        return compiled.bound.buffers(compiled.captured.constants)

    def _agreed(self, key: Any, own: int) -> int:
        """What all ranks do, each having said what it would: to compile if one must, and what
        FSDP2 does if one must or if they are not about the same."""
        if self._agreement is None:
            return _EAGER
        word = xxhash.xxh3_64_intdigest(repr(key).encode()) >> 2 << 2
        words = self._run(self._agreement.exchange, word | own)
        if any(other >> 2 != word >> 2 for other in words):
            return _EAGER
        said = max(other & 3 for other in words)
        if said == _OTHER_VALUES and not self._has_warned:
            self._without_plan(
                NoPlan(
                    "values that decide a shape, as those of a mask, are not those of the batch "
                    "that it was compiled for, here or on another rank"
                )
            )
            self._has_warned = True
        return said

    def _run(self, call: Callable[[Any], Any], argument: Any) -> Any:
        """A call that all ranks make. After one that failed there is no other: the ranks may be
        anywhere in it."""
        if self._failure:
            raise RuntimeError(f"the step cannot be used any more: {self._failure}")
        try:
            return call(argument)
        except RuntimeError as error:
            self._failure = str(error)
            raise

    def _compile(
        self, key: Any, kind: str, microbatches: list[Batch], *, is_example: bool = False
    ) -> Compiled | None:
        request = self._requests.request(kind, microbatches, is_example=is_example)
        library = self._config.get("optimizer", {}).get("library", "")
        try:
            compiled = self._plans.compile(request, library)
        except Exception as error:
            self._without_plan(error)
            self._cache[key] = None
            return None
        self._cache[key] = compiled
        if compiled.session.evaluates:
            key = self._requests.evaluation_key(microbatches[0])
            self._evaluators[key] = compiled
        return compiled

    def _compile_example(self, example: Example) -> None:
        args: tuple[Any, ...] = (example,) if isinstance(example, Tensor) else ()
        kwargs: dict[str, Any] = {}
        if isinstance(example, Mapping):
            kwargs = dict(example)
        elif not args:
            args = tuple(example)
        batch = self._inputs.named(args, kwargs)
        sharding.reshard(self._groups)
        if self._agreement is not None:
            params = list(self._model.parameters())
            kind = "gradients" if self._outside(params) else "update"
            key = self._requests.key(kind, [batch] * self._requests.count, params)
            self._compile(key, kind, [batch], is_example=True)

    def _without_plan(self, error: Exception) -> None:
        if self._fallback == "error" or not has_no_plan(error):
            raise error
        missing = [key for key in _OF_PLAN if self._config.get(key)]
        if missing or self._optimizer is None:
            raise CompileError(
                f"{error}; without a plan '{(missing or ['optimizer'])[0]}' of the config is not "
                "there"
            ) from error
        warn_of_fallback(self._rendezvous.rank, type(self._model).__name__, error)

    def _outside(self, params: list[nn.Parameter]) -> str:
        """Why the optimizer's step is not in a plan; empty where it is."""
        if self._optimizer is None:
            return ""
        return optimizers.why_outside(self._optimizer, params)

    # --- FSDP2's way

    def _eager(self, batch: Batch) -> TrainingStep:
        return TrainingStep(self._model, list(batch), self._inputs.positional, self._loss)

    def _eager_step(self, microbatches: list[dict[str, Any]]) -> Any:
        options = {key: self._config.get(key, True) for key in OF_LOOP[1:]}
        values = eager.backward(
            self._eager(microbatches[0]),
            [list(batch.values()) for batch in microbatches],
            reduce_each=options["reduce_each_microbatch"],
            all_reduce_each=options["all_reduce_each_microbatch"],
        )
        self._steps += 1
        self.update()
        if len(values) == 1:
            return self._returned(values[0])
        losses = [scalar_of(value) for value in values]
        return torch.tensor(sum(x.item() for x in losses) / len(losses), dtype=losses[0].dtype)

    def _returned(self, value: Any) -> Any:
        """What is wanted of that, as from a plan."""
        return value if self._gives_outputs else scalar_of(value)

    def _take_gradients(self, compiled: Compiled) -> None:
        assert self._plans.trained is not None
        self._plans.trained.add_gradients(compiled.session.take_gradients())
