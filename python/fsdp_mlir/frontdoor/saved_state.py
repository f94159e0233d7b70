"""What a step saves and loads: state dicts, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_mlir.frontdoor.checkpoints import Checkpoints, Counters, Resumed
from fsdp_mlir.frontdoor.plan import Compiled
from fsdp_mlir.frontdoor.plans import Plans
from fsdp_mlir.frontdoor.requests import Requests
from fsdp_mlir.modules import sharding
from fsdp_mlir.modules.hooks import AfterStep
from fsdp_mlir.state import optimizers
from fsdp_mlir.state.model_state import ModelState
from fsdp_mlir.state.optimizer_state import OptimizerState


class SavedState:
    """That part of a Step, which has these."""

    _model: nn.Module
    _optimizer: torch.optim.Optimizer | None
    _config: dict[str, Any]
    _plans: Plans
    _rendezvous: Any
    _groups: Any
    _requests: Requests
    _cache: dict[Any, Compiled | None]
    _own_update: AfterStep
    _steps: int
    _scaler: tuple[float, int] | None
    _updates: int | None
    _checkpoints: Checkpoints | None

    def state_dict(self) -> dict[str, Any]:
        """model.state_dict()."""
        return self._state.state_dict()

    def full_state_dict(self) -> dict[str, Any]:
        """Whole copies on rank 0, made one tensor at a time; an empty dict on the others."""
        return self._state.full_state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state dict of DTensors or of whole tensors as model.load_state_dict() does, with
        its hooks. Raises ValueError, and changes nothing, if keys or shapes are not the model's."""
        self._state.load_state_dict(state)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """What get_optimizer_state_dict of torch.distributed.checkpoint.state_dict returns: `state`
        by parameter names, with DTensors sharded as the parameters are, and `param_groups`."""
        return self._optimizer_state.state_dict()

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """The same with whole tensors, on rank 0; an empty dict on the others."""
        return self._optimizer_state.full_state_dict(self._rendezvous.rank)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from such a state; its tensors may also be whole."""
        self._steps = self._optimizer_state.load_state_dict(state)

    @property
    def steps(self) -> int:
        """Training steps so far: calls of the step, of update, and of optimizer.step() after
        backward or accumulate, including those before the checkpoint that was loaded."""
        return self._steps

    def save(
        self,
        folder: str | Path,
        *,
        samples: int = 0,
        extra: Any = None,
        keep: int = 0,
        wait: bool = True,
    ) -> Future[str]:
        """Saves to `folder`/step-N, where N is `steps`, as fsdp-run does (docs/checkpoints.md): the
        parameters, buffers, the optimizer's state and settings, the loss scaler, and each rank's
        generators. `extra`: what else the loop needs on this rank, such as the state dict of a
        scheduler or a loader, made of None, numbers, text, bytes, tensors, NumPy's numbers and
        arrays, and lists, tuples and dicts of these. `samples`: the number of data samples that all
        ranks have taken, for fsdp-run.

        `keep`: how many of the newest checkpoints stay; 0: all. Without `wait`, it copies all of
        this and writes the copies during the next steps: the future that it returns, or the next
        save or load, waits for that, and a failure becomes a warning. A save that fails, at
        whatever point, leaves older checkpoints as they were."""
        self._expect_optimizer("save")
        return self._checkpoint.save(
            folder,
            self._state_of_optimizer(makes=False),
            Counters(self._steps, *self._of_plans()),
            samples=samples,
            plan=self._plan_hash,
            extra=extra,
            keep=keep,
            wait=wait,
        )

    def load(self, path: str | Path) -> Resumed | None:
        """Continues from the checkpoint at `path`, or from the newest valid one in the folder
        `path`; damaged ones are skipped with a warning. Returns None if there is none, or no such
        folder. The checkpoint may come from fsdp-run, and from another number of ranks. Raises
        ValueError or RuntimeError, and changes nothing, if it is not one of this model and
        optimizer."""
        self._expect_optimizer("load")
        sharding.reshard(self._groups)
        found = self._checkpoint.load(
            path,
            self._state_of_optimizer(makes=False),
            self._plan_hash,
            scales=bool(self._config.get("grad_scaler")),
        )
        if found is not None:
            self._steps = found.step
            self._own_update.forget()
            self._updates, self._scaler = found.counters.updates, found.counters.scaler
        return found

    def _expect_optimizer(self, what: str) -> None:
        if isinstance(self._optimizer, optimizers.NoOptimizer):
            raise TypeError(
                f"{what}: expected an optimizer in compile; without one, step.backward and "
                "step.accumulate leave gradients for the loop"
            )

    def _of_plans(self) -> tuple[int | None, tuple[float, int] | None]:
        """Updates of a plan's own optimizer, and the loss scaler, as the next step will use
        them."""
        updates = self._updates if self._optimizer is None else None
        return updates, self._scaler or self._requests.first_scaler

    @property
    def _checkpoint(self) -> Checkpoints:
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(self._model, self._rendezvous)
        return self._checkpoints

    @property
    def _plan_hash(self) -> str:
        """Those of the first plan; empty while there is none."""
        made = [made for made in self._cache.values() if made is not None]
        return made[0].plan_hash if made else ""

    @property
    def _state(self) -> ModelState:
        return ModelState(self._model, self._rendezvous.rank)

    @property
    def _optimizer_state(self) -> OptimizerState:
        return self._state_of_optimizer(makes=True)

    def _state_of_optimizer(self, *, makes: bool) -> OptimizerState:
        self._expect_optimizer("the state of the optimizer")
        sharding.reshard(self._groups)
        made = next((made for made in self._cache.values() if made is not None), None)
        session = made.session if made else None
        return OptimizerState(
            self._model, self._optimizer, session, self._plans.trained, self._steps, makes=makes
        )
