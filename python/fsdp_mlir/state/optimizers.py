"""torch.optim's optimizers as the `optimizer` of fsdp-opt's config."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_mlir.modules.sharding import escaped
from fsdp_mlir.modules.weights import State
from fsdp_mlir.support.errors import CompileError
from fsdp_mlir.support.policy_schema import hyperparameters

Optimizer = torch.optim.Optimizer
Group = dict[str, Any]
# An instance, a class or a partial of one, a class with its arguments, the config's mapping, or
# none.
OptimizerSpec = Optimizer | type[Optimizer] | functools.partial | tuple | dict | None

# What the plan takes from a group of torch.optim's, besides what decides its name and kernel.
SETTINGS = {name: hyperparameters(name) for name in ("sgd", "adam", "adamw")}
# What is read at each step: everything that does not affect the form of the state.
FOLLOWED = {key for keys in SETTINGS.values() for key in keys} - {"amsgrad"}


class NoOptimizer(Optimizer):
    """In place of one that compile was not given: whoever owns the loop uses the gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:
        raise TypeError("expected an optimizer in compile")


def instance_of(spec: Any, model: nn.Module) -> Optimizer | None:
    """The optimizer that `spec` describes, on the model's parameters; None for a mapping of the
    config for which torch.optim has no class.

    What torch.optim refuses raises its own error.
    """
    if spec is None:
        return NoOptimizer(model)
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


def check_params(optimizer: Optimizer, params: Sequence[State]) -> None:
    """CompileError if none of its parameters is the model's."""
    own = {id(param.tensor) for param in params}
    given = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(id(param) in own for param in given):
        raise CompileError(
            f"the optimizer has {len(given)} parameters that are not the model's, and no others; "
            "make it after fully_shard"
        )


def structure(optimizer: Optimizer, positions: Mapping[int, int]) -> tuple[Any, ...]:
    """What decides about a plan's update and its state; a step follows changes of the rest.
    `positions` are those of the model's parameters, by id."""
    return tuple(
        (
            tuple(positions.get(id(param), -1) for param in group["params"]),
            bool(group.get("amsgrad")),
            bool(group.get("fused")),
            bool(group.get("foreach")),
            bool(group.get("decoupled_weight_decay")),
            group.get("momentum", 0) != 0,
        )
        for group in optimizer.param_groups
    )


def config_of(optimizer: Optimizer, params: Sequence[State]) -> dict[str, Any]:
    """The config's `optimizer` for an optimizer that a plan can have: its own settings are those of
    the first of `groups_of`; the others become groups with exact names."""
    names = {id(param.tensor): param.name for param in params}
    name = name_of(optimizer)
    groups = [
        ([names[id(param)] for param in group["params"]], _settings(group))
        for group in groups_of(optimizer)
    ]
    config: dict[str, Any] = {"name": name, **groups[0][1]}
    for key in ("fused", "foreach"):
        if groups_of(optimizer)[0].get(key):
            config[key] = True
    if len(groups) > 1:
        config["groups"] = [
            {"match": [escaped(member) for member in members], **settings}
            for members, settings in groups[1:]
        ]
    return config


def name_of(optimizer: Optimizer) -> str:
    """The config's, of an SGD, Adam or AdamW. The groups, not the class, say which Adam it is."""
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd"
    decoupled = any(group.get("decoupled_weight_decay") for group in groups_of(optimizer))
    return "adamw" if decoupled else "adam"


def groups_of(optimizer: Optimizer) -> list[Group]:
    """The parameter groups that have parameters."""
    return [group for group in optimizer.param_groups if group["params"]]


def nesterov_of(group: Group) -> bool:
    """torch.optim ignores it where there is no momentum."""
    return bool(group["nesterov"]) and group["momentum"] != 0


def followed(optimizer: Optimizer) -> list[Group]:
    """The settings of each group that a step reads anew, as they are now."""
    return [
        {key: value for key, value in _settings(group).items() if key in FOLLOWED}
        for group in groups_of(optimizer)
    ]


def _settings(group: Group) -> Group:
    """Those of a group that a plan can have, as Python's own numbers."""
    keys = SETTINGS["adam" if "betas" in group else "sgd"]
    settings = {key: _plain(group[key]) for key in keys}
    if "nesterov" in settings:
        settings["nesterov"] = nesterov_of(group)
    return settings


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):  # a list after a state dict was loaded
        return [_plain(item) for item in value]
    return value if isinstance(value, bool) else float(value)
