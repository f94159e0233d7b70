"""The optimizer's state in the form that torch.distributed.checkpoint.state_dict's
get_optimizer_state_dict gives it: by parameter names, sharded as the parameters are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_mlir.modules.weights import saved_name
from fsdp_mlir.state.model_state import clone_like
from fsdp_mlir.state.own_step import STATE_NAMES, state_names
from fsdp_mlir.state.trained import Trained

STEPS = "steps"


class OptimizerState:
    """The state of a torch optimizer or, if there is none, of a session's own. With `counts_steps`,
    each group has the number of steps so far, `steps`. An optimizer that has no state yet creates
    it, as get_optimizer_state_dict does, unless `makes` is false."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        session: Any,
        trained: Trained | None,
        steps: int,
        *,
        makes: bool = True,
    ) -> None:
        self._optimizer = optimizer
        self._session = session
        self._steps = steps
        self._counts = session is not None and session.counts_steps
        self._params = {saved_name(name): param for name, param in model.named_parameters()}
        self._names = {id(param): name for name, param in self._params.items()}
        self._trained = trained
        self._indices = {}
        if session is not None and trained is not None:
            self._indices = {self._names[id(p)]: index for index, p in trained.params.items()}
        elif optimizer is None:
            raise TypeError("expected a compiled step: call it once, or give compile an example")
        elif makes and not optimizer.state:
            # Imported here: it takes half as long as all of this package.
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

            get_optimizer_state_dict(model, optimizer)  # which makes it

    @property
    def is_new(self) -> bool:
        """Whether it is a torch optimizer that has made no step yet."""
        return self._optimizer is not None and not self._optimizer.state

    @property
    def kind(self) -> str:
        """The class of torch.optim that the optimizer is of; empty for a session's own."""
        classes = type(self._optimizer).__mro__ if self._optimizer is not None else ()
        return next((c.__name__ for c in classes if c.__module__.startswith("torch.optim.")), "")

    def state_dict(self) -> dict[str, Any]:
        groups = self._groups()
        if self._counts:
            for group in groups:
                group[STEPS] = self._steps
        entries = {name: self._entries(name) for group in groups for name in group["params"]}
        state = {name: entry for name, entry in entries.items() if entry}
        return {"state": state, "param_groups": groups}

    def full_state_dict(self, rank: int) -> dict[str, Any]:
        sharded = self.state_dict()
        state: dict[str, Any] = {}
        for name, entries in sharded["state"].items():
            whole = {
                key: value.full_tensor() if isinstance(value, DTensor) else value
                for key, value in entries.items()
            }
            if rank == 0:
                state[name] = {
                    key: value.detach().clone() if isinstance(value, Tensor) else value
                    for key, value in whole.items()
                }
        return {"state": state, "param_groups": sharded["param_groups"]} if rank == 0 else {}

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """The model's, by the names that the state has."""
        return self._params

    @property
    def _known(self) -> set[str] | None:
        """The names of its state, where they are known: a subclass may have others."""
        kind = type(self._optimizer)
        is_torch_s = kind.__module__.startswith("torch.optim.")
        return STATE_NAMES.get(kind.__name__) if is_torch_s else None

    def check(self, given: Mapping[str, Any], *, saved: bool = False) -> dict[str, Any]:
        """ValueError for a state that is not of this optimizer; returns its own. With `saved`, it
        is all that a checkpoint has, each tensor in its form: a torch optimizer takes this in place
        of its own, which may be of fewer or more parameters."""
        own = self.state_dict()
        _same("keys", own, given)
        replaces = saved and self._optimizer is not None
        if not replaces and (own["state"] or self._optimizer is None):
            _same("parameters", own["state"], given["state"])
        _same_groups(own["param_groups"], given["param_groups"])
        self._check_settings(given)
        groups = {name: group for group in own["param_groups"] for name in group["params"]}
        for name, entries in given["state"].items():
            if name not in groups:
                raise ValueError(f"1 unexpected parameters in the optimizer state: '{name}'")
            if not replaces and name in own["state"]:
                _same(f"entries of '{name}'", own["state"][name], entries)
            for key, value in entries.items():
                self._check_shape(name, key, value, None if replaces else own["state"].get(name))
        if replaces:
            self._check_entries(given)
        return own

    def _check_shape(self, name: str, key: str, value: Any, own: Mapping[str, Any] | None) -> None:
        want = (own or {}).get(key)
        if not isinstance(want, Tensor):
            if self._optimizer is not None and self._known is None:
                return  # it may have any
            want = self._params[name]
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape != want.shape:
            raise ValueError(
                f"'{name}': expected shape {list(want.shape)} of '{key}', got {list(value.shape)}"
            )

    def _check_entries(self, given: Mapping[str, Any]) -> None:
        """ValueError if the state lacks what an Adam with these settings reads."""
        assert self._optimizer is not None
        for own, group in zip(self._optimizer.param_groups, given["param_groups"], strict=True):
            if self._known is None or "betas" not in own:
                continue
            names = state_names({**own, **group})
            for name in group["params"]:
                entries = given["state"].get(name)
                if entries and (missing := sorted(set(names) - set(entries))):
                    raise ValueError(
                        f"'{name}': expected '{missing[0]}' in its state, as the settings of "
                        f"{self.kind} are"
                    )

    def _check_settings(self, given: Mapping[str, Any]) -> None:
        """ValueError for the settings or the state of another kind of optimizer. Versions of
        PyTorch, and schedulers, add settings to groups or leave some out, but not both."""
        if self._optimizer is None:
            return
        for own, group in zip(self._optimizer.param_groups, given["param_groups"], strict=True):
            more, less = sorted(set(group) - set(own) - {STEPS}), sorted(set(own) - set(group))
            if more and less:
                raise ValueError(
                    f"expected the settings of {self.kind or 'the optimizer'}, '{less[0]}' among "
                    f"them, got those of another optimizer, with '{more[0]}'"
                )
        known = self._known
        for name, entries in given["state"].items():
            if known is not None and (others := sorted(set(entries) - known)):
                raise ValueError(
                    f"'{name}': expected the state of {self.kind}, got an entry '{others[0]}'"
                )

    def load_state_dict(self, given: Mapping[str, Any], *, saved: bool = False) -> int:
        """Returns the number of steps so far. Changes nothing if check raises."""
        own = self.check(given, saved=saved)
        steps = self._steps_of(given)
        if self._optimizer is not None and not given["state"]:
            self._optimizer.state.clear()
        elif self._optimizer is not None and saved:
            for param in self._params.values():
                self._optimizer.state.pop(param, None)
        with torch.no_grad():
            for name, entries in given["state"].items():
                self._load(name, entries, own["state"].get(name, {}), saved=saved)
        if self._optimizer is None:
            self._session.follow(given["param_groups"])
        else:
            for group, loaded in zip(
                self._optimizer.param_groups, given["param_groups"], strict=True
            ):
                group.update((k, v) for k, v in loaded.items() if k not in ("params", STEPS))
        return steps

    def _load(
        self, name: str, entries: Mapping[str, Any], own: Mapping[str, Any], *, saved: bool
    ) -> None:
        param = self._params[name].detach()
        made = (
            dict(entries)
            if saved
            else {key: _formed(value, own.get(key), param) for key, value in entries.items()}
        )
        if self._optimizer is not None:
            self._optimizer.state[self._params[name]] = made
            return
        for key, tensor in own.items():
            tensor.copy_(made[key])

    def _entries(self, name: str) -> dict[str, Any]:
        if self._optimizer is not None and self._optimizer.state:
            return dict(self._optimizer.state.get(self._params[name], {}))
        index = self._indices.get(name)
        if index is None or self._trained is None:
            return {}
        # Before the first step: what that step will begin with.
        return {
            key: tensor if key == "step" else self._trained.as_part(index, tensor)
            for key, tensor in self._session.optimizer_state(index).items()
        }

    def _groups(self) -> list[dict[str, Any]]:
        if self._optimizer is None:
            names = {index: name for name, index in self._indices.items()}
            return [
                {**group, "params": [names[index] for index in group["params"]]}
                for group in self._session.param_groups
            ]
        return [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [self._name(param) for param in group["params"]],
            }
            for group in self._optimizer.param_groups
        ]

    def _name(self, param: Tensor) -> str:
        if id(param) not in self._names:
            raise ValueError(
                f"the optimizer has a parameter of shape {list(param.shape)} that is not the "
                "model's: its state has no name; save optimizer.state_dict()"
            )
        return self._names[id(param)]

    def _steps_of(self, given: Mapping[str, Any]) -> int:
        if self._counts and all(STEPS in group for group in given["param_groups"]):
            return int(given["param_groups"][0][STEPS])
        counted = [int(s["step"]) for s in given["state"].values() if "step" in s]
        if counted:
            return max(counted)
        if self._counts:
            raise ValueError(f"expected the number of steps so far as '{STEPS}' of each group")
        return max(1, self._steps)


def _formed(value: Any, own: Any, param: Tensor) -> Any:
    """A copy of an entry, in the form that the optimizer's own has, or else the parameter."""
    if not isinstance(value, Tensor):
        return value
    like = own if isinstance(own, Tensor) else param
    alike = value.dim() > 0 and value.shape == like.shape
    return clone_like(like, value) if alike else value.clone()


def _same_groups(own: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]) -> None:
    if [group["params"] for group in own] == [group["params"] for group in given]:
        return
    here, there = (
        {name: f"group {index}" for index, group in enumerate(groups) for name in group["params"]}
        for groups in (own, given)
    )
    differing = (name for name in {**here, **there} if here.get(name) != there.get(name))
    what = f"{len(given)} groups, or an order, that are not those of the optimizer"
    if (name := next(differing, None)) is not None:
        what = (
            f"'{name}' in {there.get(name, 'no group')}, which the optimizer has in "
            f"{here.get(name, 'none')}"
        )
    raise ValueError(f"expected the parameter groups of the compiled step, got others: {what}")


def _same(what: str, own: Iterable[str], given: Iterable[str]) -> None:
    for name, differing in (
        ("missing", set(own) - set(given)),
        ("unexpected", set(given) - set(own)),
    ):
        if differing:
            listed = ", ".join(f"'{key}'" for key in sorted(differing)[:4])
            raise ValueError(f"{len(differing)} {name} {what} in the optimizer state: {listed}")
