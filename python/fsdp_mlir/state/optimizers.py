"""torch.optim's optimizers as the `optimizer` of fsdp-opt's config."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_mlir.modules import hooks
from fsdp_mlir.modules.sharding import escaped
from fsdp_mlir.modules.weights import State
from fsdp_mlir.support.errors import CompileError
from fsdp_mlir.support.policy_schema import hyperparameters

Optimizer = torch.optim.Optimizer
# An instance, a class or a partial of one, a class with its arguments, or the config's mapping.
OptimizerSpec = Optimizer | type[Optimizer] | functools.partial | tuple | dict

_KEYS = {name: hyperparameters(name) for name in ("sgd", "adam", "adamw")}
# What the plan takes from a group of torch.optim's.
COMPILED = {key for keys in _KEYS.values() for key in keys} | {"fused", "foreach"}
# What is read at each step: everything that does not affect the form of the state.
FOLLOWED = COMPILED - {"amsgrad", "fused", "foreach"}


def instance_of(spec: Any, model: nn.Module) -> Optimizer | None:
    """The optimizer that `spec` describes, on the model's parameters; None for a mapping of the
    config for which torch.optim has no class.

    What torch.optim refuses raises its own error.
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


def check_params(optimizer: Optimizer, params: Sequence[State]) -> None:
    """CompileError for a parameter that is not the model's."""
    own = {id(param.tensor) for param in params}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in own:
                raise CompileError(
                    f"the optimizer has a parameter of shape {list(param.shape)} that is not the "
                    "model's; make it after fully_shard"
                )


def why_outside(optimizer: Optimizer, params: Sequence[Tensor]) -> str:
    """Why a plan of a model with these parameters cannot update as the optimizer does; empty if it
    can."""
    kind = type(optimizer)
    if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return f"'{kind.__name__}' is not SGD, Adam or AdamW of torch.optim"
    if found := hooks.of_step(optimizer):
        return found
    groups = groups_of(optimizer)
    for group in groups:
        for key in ("capturable", "differentiable"):
            if group.get(key):
                return f"'{key}'"
        if isinstance(group["lr"], Tensor) and "betas" in group and not group.get("fused"):
            return "a tensor as 'lr', whose products torch.optim rounds to its dtype"
    for key in ("fused", "foreach", "decoupled_weight_decay"):
        if len({bool(group.get(key)) for group in groups}) > 1:
            return f"'{key}' of some groups only"
    members = {id(param) for group in groups for param in group["params"]}
    if members - {id(param) for param in params}:
        return "a parameter that is not the model's any more"
    for param in params:
        if param.requires_grad and id(param) not in members:
            return "a parameter that requires grad and is not in the optimizer"
        if param._post_accumulate_grad_hooks:
            return "a hook of register_post_accumulate_grad_hook"
    return ""


def structure(optimizer: Optimizer, positions: Mapping[int, int]) -> tuple[Any, ...]:
    """What decides about a plan's update and its state; a step follows changes of the rest.
    `positions` are those of the model's parameters, by id."""
    return tuple(
        (
            tuple(positions.get(id(param), -1) for param in group["params"]),
            bool(group.get("amsgrad")),
            bool(group.get("fused")),
            bool(group.get("foreach")),
            group.get("momentum", 0) != 0,
        )
        for group in optimizer.param_groups
    )


def config_of(optimizer: Optimizer, params: Sequence[State]) -> dict[str, Any]:
    """The config's `optimizer` for an optimizer that a plan can have: its own settings are those of
    the first of `groups_of`; the others become groups with exact names."""
    names = {id(param.tensor): param.name for param in params}
    name = "sgd"
    if not isinstance(optimizer, torch.optim.SGD):
        decoupled = type(optimizer) is torch.optim.AdamW or any(
            group.get("decoupled_weight_decay") for group in optimizer.param_groups
        )
        name = "adamw" if decoupled else "adam"
    groups = [
        (
            [names[id(param)] for param in group["params"]],
            {key: _plain(group[key]) for key in _KEYS[name]},
        )
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


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups that have parameters."""
    return [group for group in optimizer.param_groups if group["params"]]


def followed(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each group that a step reads anew, as they are now."""
    return [
        {key: _plain(value) for key, value in group.items() if key in FOLLOWED}
        for group in groups_of(optimizer)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, (tuple, list)):  # a list after a state dict was loaded
        return [_plain(item) for item in value]
    return value if isinstance(value, bool) else float(value)
