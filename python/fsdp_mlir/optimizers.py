"""torch.optim's optimizers as the `optimizer` of fsdp-opt's config."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_mlir import hooks
from fsdp_mlir.errors import CompileError
from fsdp_mlir.sharding import escaped
from fsdp_mlir.weights import State

Optimizer = torch.optim.Optimizer
# An instance, a class or a partial of one, a class with its arguments, or the config's mapping.
OptimizerSpec = Optimizer | type[Optimizer] | functools.partial | tuple | dict

_KEYS = {
    "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "adam": ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"),
    "adamw": ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"),
}
# What the plan has of a group of torch.optim's.
COMPILED = {key for keys in _KEYS.values() for key in keys} | {"fused"}
# What is read at each step: all of it that decides nothing about the state.
FOLLOWED = COMPILED - {"amsgrad", "fused"}


def instance_of(spec: Any, model: nn.Module) -> Optimizer | None:
    """The optimizer that `spec` says, on the model's parameters; None for a config's mapping.

    What torch.optim refuses, its own error says.
    """
    if isinstance(spec, Optimizer):
        return spec
    if isinstance(spec, dict):
        return None
    if isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[1], dict):
        spec = functools.partial(spec[0], **spec[1])
    made = spec(model.parameters()) if callable(spec) else None
    if not isinstance(made, Optimizer):
        raise CompileError(
            "expected an optimizer of torch.optim on model.parameters(), a class, or a class and "
            f"its arguments, got {spec!r}"
        )
    return made


def config_of(optimizer: Optimizer, params: Sequence[State]) -> dict[str, Any]:
    """The config's `optimizer`: its own settings are those of the first of `groups_of`, the
    others are groups by exact names."""
    name = _name(optimizer)
    hooks.check_optimizer(optimizer)
    if optimizer.state:
        raise CompileError("expected an optimizer before its first step, got one with state")
    names = {id(param.tensor): param.name for param in params}
    seen: set[int] = set()
    groups = []
    for group in groups_of(optimizer):
        for param in group["params"]:
            if id(param) not in names:
                raise CompileError(
                    f"the optimizer has a parameter of shape {list(param.shape)} that is not the "
                    "model's"
                )
            seen.add(id(param))
        groups.append(([names[id(param)] for param in group["params"]], _settings(name, group)))
    for param in params:
        if param.tensor.requires_grad and id(param.tensor) not in seen:
            raise CompileError(
                f"expected the optimizer to have every parameter that requires grad, "
                f"'{param.name}' is missing"
            )
    first = groups_of(optimizer)[0]
    for group in groups_of(optimizer):
        if bool(group.get("fused")) != bool(first.get("fused")):
            raise NotImplementedError("optimizer: 'fused' of some groups only is not supported")
    config: dict[str, Any] = {"name": name, **groups[0][1]}
    if first.get("fused"):
        config["fused"] = True
    if len(groups) > 1:
        config["groups"] = [
            {"match": [escaped(member) for member in members], **settings}
            for members, settings in groups[1:]
        ]
    return config


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups that have parameters."""
    return [group for group in optimizer.param_groups if group["params"]]


def followed(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each group that a step takes as they are now."""
    for group in groups_of(optimizer):
        _check_learning_rate(group)
    return [
        {key: _plain(value) for key, value in group.items() if key in FOLLOWED}
        for group in groups_of(optimizer)
    ]


class Settings:
    """What a step was compiled with: an optimizer's groups, and the settings that it does not
    follow."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # `foreach` has no say in the numbers.
        keys = [key for key in optimizer.defaults if key not in FOLLOWED | {"foreach"}]
        self._groups = [
            (list(group["params"]), {key: _comparable(group.get(key)) for key in keys})
            for group in optimizer.param_groups
        ]
        self._momenta = [group.get("momentum", 0) for group in optimizer.param_groups]

    def check(self) -> None:
        """CompileError where a step of the optimizer itself would now be another one."""
        hooks.check_optimizer(self._optimizer)
        groups = self._optimizer.param_groups
        if len(groups) != len(self._groups):
            raise CompileError(
                f"the optimizer has {len(groups)} parameter groups, the step was compiled with "
                f"{len(self._groups)}; compile it again"
            )
        for number, (group, (params, settings)) in enumerate(
            zip(groups, self._groups, strict=True)
        ):
            if list(map(id, group["params"])) != list(map(id, params)):
                raise CompileError(
                    f"group {number} of the optimizer has other parameters than those that the "
                    "step was compiled with; compile it again"
                )
            for key, value in settings.items():
                got = _comparable(group.get(key))
                if got != value:
                    raise CompileError(
                        f"group {number} of the optimizer: the step was compiled with "
                        f"{key}={value!r}, got {got!r}; compile it again"
                    )
            momentum, now = self._momenta[number], group.get("momentum", 0)
            if (momentum != 0) != (now != 0):
                raise CompileError(
                    f"group {number} of the optimizer: the step was compiled with "
                    f"momentum={momentum!r}, got {now!r}, with which there is "
                    f"{'a' if now else 'no'} momentum; compile it again"
                )


def _name(optimizer: Optimizer) -> str:
    kind = type(optimizer)
    if kind is torch.optim.SGD:
        return "sgd"
    if kind is torch.optim.AdamW:
        return "adamw"
    if kind is torch.optim.Adam:
        decoupled = {bool(g.get("decoupled_weight_decay")) for g in optimizer.param_groups}
        if len(decoupled) > 1:
            raise NotImplementedError(
                "optimizer: 'decoupled_weight_decay' of some groups only is not supported"
            )
        return "adamw" if decoupled.pop() else "adam"
    raise NotImplementedError(
        f"optimizer: '{kind.__name__}' is not supported, expected SGD, Adam or AdamW of "
        "torch.optim, or a plug-in's config"
    )


def _settings(name: str, group: dict[str, Any]) -> dict[str, Any]:
    for key in ("capturable", "differentiable"):
        if group.get(key):
            raise NotImplementedError(f"optimizer: '{key}' is not supported")
    _check_learning_rate(group)
    return {key: _plain(group[key]) for key in _KEYS[name]}


def _check_learning_rate(group: dict[str, Any]) -> None:
    if isinstance(group["lr"], Tensor) and "betas" in group and not group.get("fused"):
        raise NotImplementedError(
            "optimizer: a tensor as 'lr', whose products torch.optim rounds to its dtype, is not "
            "supported for Adam and AdamW without fused=True; pass a number"
        )


def _comparable(value: Any) -> Any:
    return False if value is None else _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool) else float(value)
