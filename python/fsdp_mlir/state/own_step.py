"""Why an optimizer of torch.optim makes its own step, on gradients that a plan has reduced."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_mlir.modules import hooks
from fsdp_mlir.state.optimizers import SETTINGS, Group, Optimizer, groups_of, name_of, nesterov_of
from fsdp_mlir.support import policy_schema
from fsdp_mlir.support.errors import in_torch

# Up to here integers and their products are the same as floats.
_MOST_INTEGER = 2**24
# The optimizer's names for its state.
_COUNT = "step"
_MOMENTUM = "momentum_buffer"
_OF_ADAM = (_COUNT, "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
STATE_NAMES = {"SGD": {_MOMENTUM}, "Adam": set(_OF_ADAM), "AdamW": set(_OF_ADAM)}


def why(optimizer: Optimizer, params: Sequence[Tensor]) -> str:
    """Why a plan of a model with these parameters cannot update as the optimizer does; empty if it
    can. What torch.optim refuses is a reason too, so that it says so itself."""
    kind = type(optimizer)
    if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return f"'{kind.__name__}' is not SGD, Adam or AdamW of torch.optim"
    return next(_reasons(optimizer, params), "")


def _reasons(optimizer: Optimizer, params: Sequence[Tensor]) -> Iterator[str]:
    """Of these only the first is asked for; later ones rely on what earlier ones exclude."""
    if found := hooks.of_step(optimizer) or _zero_grad(optimizer):
        yield found
    groups = groups_of(optimizer)
    for group in groups:
        yield from _of_group(optimizer, group)
    for key in ("fused", "foreach", "decoupled_weight_decay"):
        if len({bool(group.get(key)) for group in groups}) > 1:
            yield f"'{key}' of some groups only"
    members = {id(param) for group in groups for param in group["params"]}
    if members - {id(param) for param in params}:
        yield "a parameter that is not the model's"
    for param in params:
        if param.requires_grad and id(param) not in members:
            yield "a parameter that requires grad and is not in the optimizer"
        if param._post_accumulate_grad_hooks:
            yield "a hook of register_post_accumulate_grad_hook"
    yield from _of_state(optimizer, groups)


def _zero_grad(optimizer: Optimizer) -> str:
    """Describes what is in place of the class's own zero_grad; empty if nothing is."""
    function = vars(optimizer).get("zero_grad", type(optimizer).zero_grad)
    code = getattr(function, "__code__", None)
    if "zero_grad" not in vars(optimizer) and code is not None and in_torch(code.co_filename):
        return ""
    return f"{hooks.named(function)} as optimizer.zero_grad"


# ---------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------


def _of_group(optimizer: Optimizer, group: Group) -> Iterator[str]:
    for key in optimizer.defaults:
        if key not in group:
            yield f"a group without '{key}'"
    for key in ("capturable", "differentiable"):
        if group.get(key):
            yield f"'{key}'"
    if group["fused"] and group["foreach"]:
        yield "'fused' with 'foreach'"
    name = name_of(optimizer)
    if isinstance(group["lr"], Tensor) and name != "sgd" and not group["fused"]:
        yield "a tensor as 'lr', whose products torch.optim rounds to its dtype"
    for key in SETTINGS[name]:
        if found := _of_setting(key, group[key]):
            yield found
    if name == "sgd" and nesterov_of(group) and group["dampening"] != 0:
        yield "'dampening' with 'nesterov'"


def _of_setting(key: str, value: Any) -> str:
    """A plan computes with the settings as Python does with its own numbers, and takes those that
    the policy may have."""
    rule = policy_schema.key_at("optimizer", key)
    if "bool" in rule["types"]:
        return "" if type(value) is bool else f"{_kind(value)} as '{key}'"
    if "length" in rule:
        if type(value) not in (tuple, list) or len(value) != rule["length"]:
            return f"{_kind(value)} as '{key}'"
        return next(filter(None, (_of_number(rule, item) for item in value)), "")
    if key == "lr" and _is_one_number(value):
        value = float(value)
    return _of_number(rule, value)


def _of_number(rule: policy_schema.Key, value: Any) -> str:
    key = rule["key"]
    if isinstance(value, Tensor):
        return f"a tensor as '{key}'"
    if type(value) not in (int, float, np.float64):
        return f"{_kind(value)} as '{key}', whose arithmetic is not that of a Python number"
    most = _MOST_INTEGER if type(value) is int else sys.float_info.max
    least, most = max(rule.get("least", -most), -most), min(rule.get("most", most), most)
    within = least <= value < rule.get("below", math.inf) and value <= most
    return "" if within else f"{value} as '{key}'"


def _is_one_number(value: Any) -> bool:
    """Whether it is a tensor that torch.optim's kernels read as a Python number."""
    return (
        type(value) is Tensor
        and value.numel() == 1
        and value.is_floating_point()
        and value.device.type == "cpu"
        and not value.requires_grad
    )


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else f"'{type(value).__name__}'"


# ---------------------------------------------------------------------------
# State
# ---------------------------------------------------------------------------


def _of_state(optimizer: Optimizer, groups: Sequence[Group]) -> Iterator[str]:
    seen: set[int] = set()
    for group in groups:
        names = state_names(group)
        for param in group["params"] if names else ():
            if param.requires_grad:
                state = optimizer.state.get(param) or {}
                if names[0] == _COUNT and (found := _of_count(group, state)):
                    yield found
                yield from _of_tensors(param, state, names if state else (), seen)


def _of_tensors(
    param: Tensor, state: Mapping[str, Any], names: Sequence[str], seen: set[int]
) -> Iterator[str]:
    for name in names:
        value = state.get(name)
        if value is None and name == _MOMENTUM:  # torch.optim makes it
            continue
        if name != _COUNT and not _is_like(value, param):
            yield f"'{name}' of a parameter in another form than the parameter"
        if id(value) in seen:  # torch.optim updates one parameter after the other
            yield f"'{name}' of one parameter that is another's too"
        seen.add(id(value))


def state_names(group: Group) -> tuple[str, ...]:
    """Of each parameter of a group."""
    if "betas" not in group:
        return (_MOMENTUM,) if group["momentum"] != 0 else ()
    return _OF_ADAM if group["amsgrad"] else _OF_ADAM[:-1]


def _of_count(group: Group, state: Mapping[str, Any]) -> str:
    """A plan counts in float32, as torch.optim does by default."""
    if not state:
        is_double = not group["fused"] and torch.get_default_dtype() == torch.float64
        return f"'{_COUNT}' in torch.float64, the default dtype" if is_double else ""
    count = state.get(_COUNT)
    if type(count) is not Tensor:
        return f"{_kind(count)} as '{_COUNT}'"
    if count.dtype != torch.float32 or count.dim() > 0 or count.device.type != "cpu":
        shape = list(count.shape)
        return f"'{_COUNT}' in {count.dtype} of shape {shape} on '{count.device.type}'"
    return ""


def _is_like(value: Any, param: Tensor) -> bool:
    """Whether it is a tensor that a plan can update with the parameter."""
    if isinstance(param, DTensor):
        if not isinstance(value, DTensor) or value.placements != param.placements:
            return False
        if value.device_mesh != param.device_mesh:
            return False
        value, param = value._local_tensor, param._local_tensor
    return (
        isinstance(value, Tensor)
        and not isinstance(value, DTensor)
        and (value.dtype, value.shape) == (param.dtype, param.shape)
        and value.device.type == "cpu"
        and value.is_contiguous()
    )
