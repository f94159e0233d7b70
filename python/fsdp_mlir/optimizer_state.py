"""The optimizer's state of a session, in the form that torch.distributed.checkpoint.state_dict's
get_optimizer_state_dict gives it: by parameter names, sharded as the parameters are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_mlir import hooks, optimizers

# Of a parameter's index and a tensor of its shard's shape: the tensor as this rank's part.
Sharded = Callable[[int, Tensor], Tensor]

STEPS = "steps"


class OptimizerState:
    """Reads and writes the state of `session`. `indices` are those of the plan's parameters by
    the names of model.named_parameters()."""

    def __init__(
        self,
        session: Any,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        indices: Mapping[str, int],
        sharded: Sharded,
    ) -> None:
        self._session = session
        self._optimizer = optimizer
        self._indices = indices
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._sharded = sharded

    def state_dict(self) -> dict[str, Any]:
        groups = self._groups()
        if self._session.counts_steps:
            for group in groups:
                group[STEPS] = self._session.steps
        state = {}
        for name in (name for group in groups for name in group["params"]):
            index = self._indices[name]
            own = self._session.optimizer_state(index)
            if own:
                state[name] = {
                    key: tensor if key == "step" else self._sharded(index, tensor)
                    for key, tensor in own.items()
                }
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        own = self.state_dict()
        _same("keys", own, given)
        _same("parameters", own["state"], given["state"])
        for name, state in own["state"].items():
            _same(f"entries of '{name}'", state, given["state"][name])
            for key, tensor in state.items():
                source = given["state"][name][key]
                if key != "step" and source.shape != tensor.shape:
                    raise ValueError(
                        f"'{name}': expected shape {list(tensor.shape)} of '{key}', got "
                        f"{list(source.shape)}"
                    )
        self._check_groups(own["param_groups"], given["param_groups"])
        steps = self._steps(given)

        with torch.no_grad():
            for name, state in own["state"].items():
                for key, tensor in state.items():
                    _copy(tensor, given["state"][name][key])
        self._session.steps = steps
        if self._optimizer is None:
            self._session.follow(given["param_groups"])
            return
        for group, loaded in zip(self._optimizer.param_groups, given["param_groups"], strict=True):
            group.update((k, v) for k, v in loaded.items() if k not in ("params", STEPS))

    def _groups(self) -> list[dict[str, Any]]:
        if self._optimizer is not None:
            hooks.check_optimizer_state(self._optimizer)
        if self._optimizer is None:
            names = {self._indices[name]: name for name in self._names.values()}
            return [
                {**group, "params": [names[index] for index in group["params"]]}
                for group in self._session.param_groups
            ]
        return [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [self._names[id(param)] for param in group["params"]],
            }
            for group in self._optimizer.param_groups
        ]

    def _check_groups(self, own: list[dict[str, Any]], given: Any) -> None:
        """The same parameters, and the same settings where a compiled step follows none."""
        if [group["params"] for group in own] != [group["params"] for group in given]:
            raise ValueError("expected the parameter groups of the compiled step, got others")
        for number, (group, loaded) in enumerate(zip(own, given, strict=True)):
            for key, value in group.items():
                if key not in optimizers.COMPILED and self._optimizer is not None:
                    continue
                follows = optimizers.FOLLOWED if "maximize" in own[number] else {"lr"}
                if key in {"params", STEPS} | follows:
                    continue
                if key not in loaded or _plain(loaded[key]) != _plain(value):
                    raise ValueError(
                        f"group {number}: the step was compiled with {key}={value!r}, got "
                        f"{loaded.get(key)!r}; compile it with that"
                    )

    def _steps(self, given: Mapping[str, Any]) -> int:
        if self._session.counts_steps and all(STEPS in g for g in given["param_groups"]):
            return int(given["param_groups"][0][STEPS])
        counted = [int(s["step"]) for s in given["state"].values() if "step" in s]
        if counted:
            return max(counted)
        if self._session.counts_steps:
            raise ValueError(f"expected the number of steps so far as '{STEPS}' of each group")
        # SGD's first step only sets the momentum.
        return max(1, self._session.steps)


def _same(what: str, own: Iterable[str], given: Iterable[str]) -> None:
    for name, differing in (
        ("missing", set(own) - set(given)),
        ("unexpected", set(given) - set(own)),
    ):
        if differing:
            listed = ", ".join(f"'{key}'" for key in sorted(differing)[:4])
            raise ValueError(f"{len(differing)} {name} {what} in the optimizer state: {listed}")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _copy(target: Tensor, source: Any) -> None:
    """Into this rank's part, from such a part or from a whole tensor."""
    if not isinstance(target, DTensor):
        whole = source.full_tensor() if isinstance(source, DTensor) else source
        target.copy_(torch.as_tensor(whole))
        return
    local = target.to_local()
    if isinstance(source, DTensor):
        if source.placements == target.placements and source.device_mesh == target.device_mesh:
            local.copy_(source.to_local())
            return
        source = source.full_tensor()
    mesh, dim = target.device_mesh, target.placements[-1].dim  # type: ignore[attr-defined]
    parts = source.chunk(mesh.size(mesh.ndim - 1), dim)
    rank = mesh.get_local_rank(mesh.ndim - 1)
    if rank < len(parts):
        local.copy_(parts[rank])
