"""`compile`: a model, its policy and an optimizer into a training step of this process.

    fully_shard(block); fully_shard(model)
    step = fsdp_mlir.compile(model, optimizer=optimizer, example=batch)
    for batch in loader:
        loss = step(batch)

Every rank captures the model, which must give the same step; rank 0 runs fsdp-opt; every rank
executes the plan. The ranks are those of torchrun, or this process alone.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp_mlir import build, optimizers, planning, sharding, weights
from fsdp_mlir.eager_check import equal_bits
from fsdp_mlir.errors import CompileError
from fsdp_mlir.init import Factory
from fsdp_mlir.model_state import Index, ModelState
from fsdp_mlir.optimizer_state import OptimizerState
from fsdp_mlir.planning import Captured, Example, Recipe
from fsdp_mlir.training_step import Loss
from fsdp_mlir.unchanged import Unchanged

# Rank 0 compiles meanwhile.
_COMPILE_SECONDS = 3600
_EXCHANGE_SECONDS = 300

# Keys of the config that fully_shard alone makes.
_OF_FULLY_SHARD = ("mesh", "ignore", "shard_placement")


def compile(
    model: nn.Module,
    *,
    loss: Loss | None = None,
    optimizer: optimizers.OptimizerSpec,
    example: Example,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    init: Factory | None = None,
    init_seed: int | None = None,
    evaluation: bool = False,
    path: str | Path | None = None,
    **options: Any,
) -> Step:
    """Compiles forward, loss, backward and update of `model` under what fully_shard recorded.

    `example` is one rank's batch: a tensor, a sequence of them, or a mapping by the names of the
    model's arguments. `loss(output)` gives the scalar; further parameters of it, as in
    `loss(output, labels)`, name inputs that it takes instead of the model. Without it the output
    or its `.loss` is the scalar.

    `optimizer` is an optimizer of torch.optim on model.parameters() (its settings are read at
    each step, so a scheduler of torch works on it), or a class, or `(class, arguments)`, or the
    mapping of the config. It is never stepped itself. With `max_norm` the gradients are clipped as
    by torch.nn.utils.clip_grad_norm_. `options` are further keys of fsdp-opt's config:
    `gradient_accumulation_steps`, `reduce_each_microbatch`, `all_reduce_each_microbatch`,
    `reshard_after_backward`, `activation_checkpoint`, `activation_offload`, `lr_schedule`,
    `grad_scaler` (or a torch.amp.GradScaler), and `units="auto"` where fully_shard was called on
    the whole model only.

    With `evaluation` the loss in eval mode is captured too, for `Step.evaluate`.

    Every rank's part of the parameters is taken from its own `model`, which stays as it is and
    does not follow the training. A model on `meta` is initialised by `init`, the function that
    builds it, as on one device at `init_seed` (default: that of rank 0's torch.manual_seed).

    The files lie in `path`, by default in a temporary folder until the step is open. A collective:
    an error of one rank is raised on all of them, as what it is there, elsewhere as CompileError.
    """
    runtime = build.runtime()
    rendezvous = runtime.Rendezvous()

    def prepare() -> tuple[str, torch.optim.Optimizer | None]:
        if not isinstance(model, nn.Module):
            raise CompileError(f"expected a torch.nn.Module, got '{type(model).__name__}'")
        if dist.is_initialized() and dist.get_world_size() != rendezvous.world_size:
            raise CompileError(
                f"torch.distributed has {dist.get_world_size()} ranks, the environment "
                f"{rendezvous.world_size}: expected ranks that torchrun started"
            )
        config = sharding.config_of(model, rendezvous.world_size)
        given = optimizers.instance_of(optimizer, model)
        params = weights.parameters(model)
        config["optimizer"] = optimizers.config_of(given, params) if given else dict(optimizer)
        if max_norm is not None:
            config["clip_grad_norm"] = {"max_norm": float(max_norm), "norm_type": float(norm_type)}
        clashes = sorted(set(options) & {*config, *_OF_FULLY_SHARD})
        if clashes:
            raise CompileError(f"option '{clashes[0]}' follows from the other arguments")
        if "gradient_accumulation_steps" not in options:
            # One microbatch has no next one to keep parameters for.
            config.pop("reshard_after_backward", None)
        config |= options
        if isinstance(options.get("grad_scaler"), torch.amp.GradScaler):
            config["grad_scaler"] = _scaler_config(options["grad_scaler"])
        if _on_meta(model) and init is None:
            raise CompileError(
                "the model is on 'meta': expected init=, the function that builds it, or values"
            )
        return yaml.dump(config, Dumper=_PlainDumper, sort_keys=False), given

    (text, given), texts = _together(rendezvous, prepare, lambda made: made[0])
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise CompileError(f"the policy of rank {rank} is not that of rank 0")

    with tempfile.TemporaryDirectory(prefix="fsdp-mlir-") as temporary:
        first = rendezvous.rank == 0
        folder = Path(path) if first and path is not None else Path(temporary)
        made = {"loss": loss, "init": init if _on_meta(model) else None, "evaluation": evaluation}
        recipe = Recipe(model, example, text, made)
        captured, _ = _together(
            rendezvous, lambda: recipe.capture(folder), lambda _: "", _COMPILE_SECONDS
        )
        planning.check_same(
            captured.fingerprint, lambda own: rendezvous.exchange(own, _EXCHANGE_SECONDS)
        )

        def make_plan() -> str:
            if first:
                planning.make_plan(folder, rendezvous.world_size)
            return str(folder.resolve())

        _, folders = _together(rendezvous, make_plan, str, _COMPILE_SECONDS)
        # Whoever writes a library into the script wants it to run.
        library = optimizer.get("library") if isinstance(optimizer, dict) else None
        allowed = str(Path(folders[0]) / library) if library else ""
        session = runtime.Session(str(Path(folders[0]) / "plan.json"), allowed, rendezvous)

        _, seeds = _together(rendezvous, torch.initial_seed, str)
        seed = int(seeds[0]) if init_seed is None else init_seed

        def fill() -> str:
            _fill(session, model, captured, seed)
            session.start()
            return ""

        _together(rendezvous, fill, str)
    sharding.mark_compiled(model)
    unchanged = Unchanged(model, loss, captured, recipe.again)
    mesh = _mesh(model, rendezvous.world_size)
    return Step(session, model, given, mesh, rendezvous.rank, unchanged)


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _together(
    rendezvous: Any,
    make: Callable[[], Any],
    text: Callable[[Any], str],
    seconds: int = _EXCHANGE_SECONDS,
) -> tuple[Any, list[str]]:
    """make() on every rank, and its text of all ranks. If one raises, all do."""
    made, error = None, None
    try:
        made = make()
        own = "=" + text(made)
    except Exception as raised:
        error, own = raised, f"!{raised}"
    texts = rendezvous.exchange(own, seconds)
    if error is not None:
        raise error
    for rank, other in enumerate(texts):
        if other.startswith("!"):
            raise CompileError(f"rank {rank}: {other[1:]}")
    return made, [other[1:] for other in texts]


def _on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _fill(session: Any, model: nn.Module, captured: Captured, seed: int) -> None:
    """Every rank's rows of the parameters, its buffers, and what its graph has of constants."""
    if _on_meta(model):
        with torch.random.fork_rng(devices=[]):
            session.initialise(seed)
        return
    params = {state.name: state.tensor for state in weights.parameters(model)}
    buffers = {state.name: state.tensor for state in weights.buffers(model)} | captured.constants
    for index, param in enumerate(session.params):
        session.set_param(index, params[param["name"]])
    for index, buffer in enumerate(session.buffers):
        session.buffer(index).copy_(buffers[buffer["name"]])


def _mesh(model: nn.Module, world_size: int) -> DeviceMesh | None:
    """The recorded mesh, or that of all ranks; None where there is no process group to be had."""
    mesh = sharding.mesh_of(model)
    if mesh is not None:
        return mesh
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            return None
        dist.init_process_group("gloo")
    return init_device_mesh("cpu", (world_size,))


def _scaler_config(scaler: torch.amp.GradScaler) -> dict[str, Any] | bool:
    if not scaler.is_enabled():
        return False
    return {
        "init_scale": scaler.get_scale(),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
    }


class Step:
    """A compiled training step and the parameters that it trains, this rank's part of them.

    Calls are collective: all ranks make them in the same order. A step that failed, here or on
    another rank, raises RuntimeError on every rank, and the object cannot be used any more.
    """

    def __init__(
        self,
        session: Any,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        mesh: DeviceMesh | None,
        rank: int,
        unchanged: Unchanged,
    ) -> None:
        self._session = session
        self._optimizer = optimizer
        self._settings = optimizers.Settings(optimizer) if optimizer else None
        self._mesh = mesh
        self._rank = rank
        self._unchanged = unchanged
        self._microbatches: int = session.microbatches
        self._loss_dtype = getattr(torch, session.loss_dtype)
        self._inputs = {entry["name"]: entry for entry in session.inputs}
        self._params: list[dict[str, Any]] = session.params
        states = _indices(model, session)
        listed = enumerate(session.buffers)  # with the constants
        self._indices = {entry["name"]: ("buffer", i) for i, entry in listed} | states
        self._state = ModelState(session, model, rank, states, self._sharded)
        indices = {name: index for name, (kind, index) in states.items() if kind == "param"}
        self._optimizer_state = OptimizerState(session, model, optimizer, indices, self._sharded)
        self._result: Any = None

    def __call__(self, *args: Any, **kwargs: Tensor) -> Tensor:
        """Trains on this rank's batch and returns its loss, a scalar.

        The batch is the captured inputs in their order, or by name, or one sequence or mapping of
        them. With n `gradient_accumulation_steps` it has n times the samples of the example: n
        microbatches in a row, whose mean loss is returned.
        """
        microbatches = self._split(args, kwargs, self._microbatches)
        self._unchanged.check(self._has_bits)
        if self._optimizer is not None and self._settings is not None:
            self._settings.check()
            self._session.follow(optimizers.followed(self._optimizer))
            # As its own step does, for the schedulers' check of the order of calls.
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self._result = self._session.step(microbatches)
        return torch.tensor(self._result.loss, dtype=self._loss_dtype)

    def evaluate(self, *args: Any, **kwargs: Tensor) -> Tensor:
        """The loss of this rank's batch in eval mode, without training; for a step that was
        compiled with `evaluation`. The batch has the example's number of samples."""
        if not self._session.evaluates:
            raise TypeError("expected evaluation=True in compile, for evaluate")
        (batch,) = self._split(args, kwargs, 1)
        self._unchanged.check(self._has_bits, training=False)
        return torch.tensor(self._session.evaluate(batch), dtype=self._loss_dtype)

    @property
    def grad_norm(self) -> float | None:
        """Total norm of the last step's gradients before clipping; None without clipping."""
        return self._result.grad_norm if self._result else None

    @property
    def loss_scale(self) -> float | None:
        """What the last step's loss was multiplied by; None without a gradient scaler."""
        return self._result.loss_scale if self._result else None

    @property
    def skipped(self) -> bool:
        """Whether the last step changed nothing, because a gradient was not finite."""
        return bool(self._result and self._result.skipped)

    def state_dict(self) -> dict[str, Any]:
        """What model.state_dict(), with its hooks, makes of the trained state. Parameters are
        DTensors of this rank's rows, as FSDP2's (plain tensors where there is no process group),
        and the memory that the step trains; buffers and ignored parameters are this rank's own.
        No communication, but that of DTensor where a hook takes parameters apart."""
        return self._state.state_dict()

    def full_state_dict(self) -> dict[str, Any]:
        """Whole copies on rank 0, made one tensor at a time; an empty dict on the others."""
        return self._state.full_state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What model.load_state_dict(), with its hooks, makes of a state dict of either form.
        ValueError, and no change, where keys or shapes are not the model's."""
        self._state.load_state_dict(state)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """What get_optimizer_state_dict of torch.distributed.checkpoint.state_dict gives for
        FSDP2: `state` by parameter names, DTensors as the parameters are, and `param_groups`. The
        tensors are those that the step uses. No communication."""
        return self._optimizer_state.state_dict()

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from such a state; its tensors may be whole, too. Learning rates, and settings
        that are not the plan's, go to the optimizer that `compile` was given; ValueError where
        other settings differ from the compiled ones."""
        self._optimizer_state.load_state_dict(state)

    def _sharded(self, index: int, local: Tensor) -> Tensor:
        """A tensor of the parameter's shard's shape as this rank's part of a whole one."""
        param = self._params[index]
        if self._mesh is None or param["ignored"]:
            return local
        replicas: list[Placement] = [Replicate()] * (self._mesh.ndim - 1)
        placements = [*replicas, Shard(param["shard_dim"])]
        shape = torch.Size(param["shape"])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self._mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def _has_bits(self, name: str, tensor: Tensor) -> bool:
        """Whether the step has the bits of a whole parameter, a buffer or a constant, in what is
        this rank's of it."""
        kind, index = self._indices[name]
        if kind == "buffer":
            own = self._session.buffer(index)
        else:
            own = self._session.shard(index)
            if self._mesh is not None and not self._params[index]["ignored"]:
                shards = self._mesh.size(self._mesh.ndim - 1)
                rank = self._mesh.get_local_rank(self._mesh.ndim - 1)
                dim = self._params[index]["shard_dim"]
                rows = tensor.detach().chunk(shards, dim)
                tensor = rows[rank] if rank < len(rows) else tensor.narrow(dim, 0, 0)
        return equal_bits(own, tensor)

    def _split(
        self, args: tuple[Any, ...], kwargs: dict[str, Tensor], count: int
    ) -> list[list[Tensor]]:
        names = list(self._inputs)
        if len(args) == 1 and not kwargs and not isinstance(args[0], Tensor):
            args, kwargs = ((), args[0]) if isinstance(args[0], Mapping) else (tuple(args[0]), {})
        given = dict(zip(names, args, strict=False)) | kwargs
        if set(given) != set(names) or len(args) + len(kwargs) != len(names):
            expected = ", ".join(f"'{name}'" for name in names)
            got = ", ".join([f"'{key}'" for key in kwargs] + [f"{len(args)} by position"])
            raise TypeError(f"expected the inputs {expected}, got {got}")
        batches: list[list[Tensor]] = [[] for _ in range(count)]
        for name, entry in self._inputs.items():
            value = given[name]
            shape = [entry["shape"][0] * count, *entry["shape"][1:]]
            got = type(value).__name__
            if isinstance(value, Tensor):
                got = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            if got != f"{entry['dtype']}{shape}":
                raise ValueError(f"input '{name}': expected {entry['dtype']}{shape}, got {got}")
            pieces = value.detach().cpu().contiguous().split(entry["shape"][0])
            for batch, piece in zip(batches, pieces, strict=True):
                batch.append(piece)
        return batches


def _indices(model: nn.Module, session: Any) -> dict[str, Index]:
    """What is a parameter or buffer in the plan, by each name in the model."""
    found = {}
    for kind, states, listed in (
        ("param", weights.parameters(model), session.params),
        ("buffer", weights.buffers(model), session.buffers),
    ):
        position = {entry["name"]: index for index, entry in enumerate(listed)}
        for state in states:
            for name in (state.name, *state.aliases):
                found[name] = (kind, position[state.name])
    return found
