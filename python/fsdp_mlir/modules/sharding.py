"""`fully_shard` is PyTorch's; this module reads its policy back from a model that it sharded.

FSDP2 keeps the policy on the modules (`FSDPState`) and their parameter groups. `config_of`
expresses it in the keys of fsdp-opt's config. What the compiler does not support raises a
NotImplementedError that names it: such a model trains as FSDP2 does.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from types import FunctionType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state
from torch.distributed.fsdp._fully_shard._fully_shard import _UnshardHandleImpl

from fsdp_mlir.modules import weights
from fsdp_mlir.support.errors import CompileError, SourceMap, located
from fsdp_mlir.support.policy_schema import DTYPE_KEYS, DTYPES, key_at
from fsdp_mlir.support.threads import while_recorded

_FLOATS = tuple(getattr(torch, name) for name in DTYPES)


@functools.wraps(fsdp.fully_shard)
def fully_shard(module: Any, **options: Any) -> Any:
    """torch.distributed.fsdp.fully_shard. Without torchrun this process is the only rank."""
    if not dist.is_initialized() and "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return fsdp.fully_shard(module, **options)


def states(model: nn.Module) -> dict[str, FSDPState]:
    """The state of each module that fully_shard was called on, by its name, in the order of the
    model; the name of the whole model is ''. CompileError if there are none."""
    found = {
        name: state
        for name, module in model.named_modules()
        if (state := _get_module_fsdp_state(module)) is not None and module in state._modules
    }
    if not found:
        raise CompileError("expected a model that fully_shard was called on, found no call")
    return found


def groups(model: nn.Module) -> list[FSDPParamGroup]:
    """The parameter groups, each once."""
    distinct = dict.fromkeys(states(model).values())
    return [group for state in distinct for group in state._fsdp_param_groups]


def managed(model: nn.Module) -> dict[int, FSDPParam]:
    """FSDP2's record of each sharded parameter, by the id of the parameter."""
    return {id(p.sharded_param): p for group in groups(model) for p in group.fsdp_params}


@dataclass(frozen=True)
class Shown:
    """What is seen of a model while nothing is gathered: FSDP2's records of its parameters, by
    their first names, and whether these are `kept` whole after backward. By the ids of modules that
    have hooks of FSDP2, the keys of others: of those that run `before` its forward pre-hooks, and
    of those that run `behind` its forward hooks."""

    records: dict[str, FSDPParam]
    kept: bool
    before: dict[int, list[int]]
    behind: dict[int, list[int]]


def shown(model: nn.Module) -> Shown:
    """Reads that from a model."""
    found, before, behind = managed(model), {}, {}
    for module in model.modules():
        own = {handle.id for handle in forward_handles(module)}
        pre, post = list(module._forward_pre_hooks), list(module._forward_hooks)
        if own.intersection(pre):
            before[id(module)] = list(takewhile(lambda key, own=own: key not in own, pre))
        if own.intersection(post):
            last = max(post.index(key) for key in own.intersection(post))
            behind[id(module)] = post[last + 1 :]
    params = ((param.name, found.get(id(param.tensor))) for param in weights.parameters(model))
    records = {name: record for name, record in params if record}
    kept = any(not group.reshard_after_backward for group in groups(model) if group.fsdp_params)
    return Shown(records, kept, before, behind)


def forward_handles(module: nn.Module) -> list[Any]:
    """Of the forward hooks of FSDP2 on the modules of its call for this one; none without one."""
    state = _get_module_fsdp_state(module)
    if state is None or module not in state._modules:
        return []
    found: dict[int, Any] = {}
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        for each in getattr(handle, "handles", (handle,)):
            found[id(each)] = each
    return list(found.values())


def has_parts(model: nn.Module) -> bool:
    """Whether parameters were DTensors before fully_shard."""
    return any(entry.is_dtensor for entry in managed(model).values())


def has_replicas(model: nn.Module) -> bool:
    """Whether gradients are all-reduced after they are scattered."""
    return any(isinstance(group.mesh_info, HSDPMeshInfo) for group in groups(model))


def reshard(model_groups: list[FSDPParamGroup]) -> None:
    """Registers the sharded parameters where eager code left unsharded ones. A forward that raised
    has not ended for FSDP2, whose own reshard() then keeps some unsharded."""
    for group in model_groups:
        group._to_sharded()


@contextmanager
def no_gathers() -> Iterator[None]:
    """In the body, a call of a module that fully_shard was called on is a CaptureError, before
    FSDP2 gathers its parameters. The hooks of the model itself are off while it is recorded."""
    sources = SourceMap()

    def pre_forward(state: FSDPState, module: nn.Module, *_: Any) -> Any:
        state._training_state = TrainingState.IDLE  # which its caller has set
        raise located(
            sources.frame(sys._getframe(2)),
            f"the step calls '{class_name(module)}', which fully_shard was called on and which is "
            "not the model; a plan gathers the parameters of one model only",
        )

    refusing = while_recorded(FSDPState._root_pre_forward, pre_forward)
    with mock.patch.object(FSDPState, "_root_pre_forward", refusing):
        yield


@contextmanager
def no_methods() -> Iterator[None]:
    """In the body, a call of a method of FSDPModule by what is recorded is a CaptureError, before
    the method does anything: a plan would not call it again."""
    sources = SourceMap()

    def refusing(name: str) -> Callable[..., Any]:
        def refused(module: Any, *_: Any, **__: Any) -> Any:
            of = f" of '{class_name(module)}'" if isinstance(module, FSDPModule) else ""
            raise located(
                sources.frame(sys._getframe(2)),
                f"the step calls FSDP2's '{name}()'{of}, which a plan does not; call it before or "
                "after the step",
            )

        return refused

    methods = [
        (FSDPModule, name)
        for name, method in vars(FSDPModule).items()
        if isinstance(method, FunctionType) and not name.startswith("_")
    ]
    with ExitStack() as stack:
        for owner, name in (*methods, (_UnshardHandleImpl, "wait")):
            patched = while_recorded(getattr(owner, name), refusing(name))
            stack.enter_context(mock.patch.object(owner, name, patched))
        yield


def drop_gradients(model: nn.Module) -> None:
    """Those of the parameters, and those of earlier backwards that FSDP2 has yet to reduce."""
    for param in weights.of_model(model):
        param.grad = None
    for group in groups(model):
        for record in group.fsdp_params:
            unsharded = getattr(record, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None
        group._partial_reduce_output = None
        group._partial_reduce_output_layout.clear()


def class_name(module: nn.Module) -> str:
    """Of the class that a module has without fully_shard."""
    cls = type(module)
    return (cls.__mro__[2] if cls.__mro__[1] is FSDPModule else cls).__name__


def escaped(name: str) -> str:
    """A pattern that matches exactly `name`."""
    if "*" in name or "?" in name:
        raise NotImplementedError(
            f"'{name}': a name with '*' or '?' cannot be told from a pattern of the config"
        )
    return name


# ---------------------------------------------------------------------------
# The policy
# ---------------------------------------------------------------------------


def _check_ties(model: nn.Module) -> None:
    """NotImplementedError for a parameter that was tied after fully_shard: FSDP2 gathers it for
    each of its modules, and reduces a gradient for each."""
    found: set[int] = set()
    for group in groups(model):
        for info in (record._module_info for record in group.fsdp_params):
            param = info.module._parameters.get(info.param_name)
            if param is not None and id(param) in found:
                name = next(name for name, each in model.named_parameters() if each is param)
                raise NotImplementedError(f"'{name}' was tied after fully_shard; tie it before")
            found.add(id(param))


def config_of(model: nn.Module) -> dict[str, Any]:
    """The policy as keys of fsdp-opt's config, with modules by exact names."""
    _check_ties(model)
    found = {escaped(name): state for name, state in states(model).items()}
    config: dict[str, Any] = {}
    mesh = mesh_of(model)
    if mesh is not None:
        config |= _mesh_config(mesh)

    root = found.pop("")
    own = _unit_config(root)
    mixed = own.pop("mixed_precision", {})
    if mixed:
        config["mixed_precision"] = mixed
    config |= own
    kept = [not group.reshard_after_backward for group in groups(model) if group.fsdp_params]
    if any(kept):
        if not all(kept):
            raise NotImplementedError(
                "set_reshard_after_backward on some modules only is not compiled"
            )
        config["reshard_after_backward"] = False

    units: dict[int, dict[str, Any]] = {}
    for name, state in found.items():
        settings = _unit_config(state)
        precision = settings.pop("mixed_precision", {})
        if not state._fsdp_param_groups:  # no group for FSDP2 either, but it casts
            if precision:
                raise NotImplementedError(
                    f"'mp_policy' of '{name}', which manages no parameters, is not compiled"
                )
            continue
        unit = units.setdefault(id(state), {"match": name})
        if precision or mixed:
            unit["mixed_precision"] = precision or False
        for key in ("cpu_offload", "gradient_divide_factor", "force_sum_reduction_for_comms"):
            otherwise = key_at(key)["default"]
            if settings.get(key, otherwise) != own.get(key, otherwise):
                unit[key] = settings.get(key, otherwise)
        if "reshard_after_forward" in settings:
            unit["reshard_after_forward"] = settings["reshard_after_forward"]
        if unit["match"] != name:
            patterns = unit["match"] if isinstance(unit["match"], list) else [unit["match"]]
            unit["match"] = [*patterns, name]
    if units:
        config["units"] = list(units.values())
    sharded = managed(model)
    ignored, placements = [], []
    for param in weights.parameters(model):
        entry = sharded.get(id(param.tensor))
        if entry is None:
            ignored.append(escaped(param.name))
        elif entry.fsdp_placement.dim != 0:
            placements.append({"match": escaped(param.name), "dim": entry.fsdp_placement.dim})
    if ignored:
        config["ignore"] = ignored
    if placements:
        config["shard_placement"] = placements
    return config


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh of all parameter groups; None where there are none."""
    meshes = [group.mesh_info.mesh for group in groups(model)]
    for mesh in meshes:
        if mesh != meshes[0]:
            raise NotImplementedError(
                f"more than one mesh is not compiled, got {meshes[0]} and {mesh}"
            )
    return meshes[0] if meshes else None


def ranks_of(model: nn.Module, world_size: int) -> list[int]:
    """The ranks that this rank shards the model with."""
    mesh = mesh_of(model)
    ranks = list(range(world_size)) if mesh is None else mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise NotImplementedError(f"a mesh of ranks in another order is not compiled, got {mesh}")
    return ranks


def _mesh_config(mesh: DeviceMesh) -> dict[str, Any]:
    if mesh.device_type != "cpu":
        raise NotImplementedError(f"a mesh on '{mesh.device_type}' is not compiled, only on 'cpu'")
    return {"mesh": {"replicate": mesh.size(0), "shard": mesh.size(1)}} if mesh.ndim == 2 else {}


def _unit_config(state: FSDPState) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if mixed := _precision_config(state._mp_policy):
        config["mixed_precision"] = mixed
    if not state._fsdp_param_groups:
        return config
    if len(state._fsdp_param_groups) > 1:
        raise NotImplementedError("parameters of one call on several meshes are not compiled")
    (group,) = state._fsdp_param_groups
    for reason in not_compiled(group, state._mp_policy):
        raise NotImplementedError(f"{reason} is not compiled")
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        config["cpu_offload"] = True
    if not state._auto_reshard_after_forward:
        config["reshard_after_forward"] = _reshard_config(group)
    if group.gradient_divide_factor is not None:
        config["gradient_divide_factor"] = float(group.gradient_divide_factor)
    if group.force_sum_reduction_for_comms:
        config["force_sum_reduction_for_comms"] = True
    return config


def not_compiled(group: FSDPParamGroup, precision: MixedPrecisionPolicy) -> Iterator[str]:
    """What of a group no plan has."""
    if group.mesh_info.shard_mesh_dim is None:
        yield "a mesh without a dimension to shard on"
    if group.mesh_info.is_spmd_mesh:
        yield "'dp_mesh_dims'"
    for param in group.fsdp_params:
        if any(
            getattr(param.mp_policy, name) != getattr(precision, name)
            for name in DTYPE_KEYS
            if hasattr(param.mp_policy, name)
        ):
            yield "'param_dtype_override_fn' of 'mp_policy'"
        if param.mesh_info is not group.mesh_info:
            yield "a mesh of a parameter's own"
        if param._has_sharded_grad_dtype_override:
            yield "a parameter's 'grad_dtype'"
        if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
            yield "an extension of the all-gather"
    if type(group._all_gather_comm) is not DefaultAllGather:
        yield "set_custom_all_gather"
    if type(group._reduce_scatter_comm) is not DefaultReduceScatter:
        yield "set_custom_reduce_scatter"
    if group._all_reduce_hook is not None:
        yield "set_all_reduce_hook"
    if group.reduce_scatter_unused_params:
        yield "set_reduce_scatter_unused_params"


def _reshard_config(group: FSDPParamGroup) -> bool | int:
    after = group.post_forward_mesh_info
    if after is None:
        return False
    size = after.shard_mesh_size
    return True if size == group.mesh_info.shard_mesh_size else int(size)


def settable(
    model_states: Collection[FSDPState], *, between_backwards: bool
) -> tuple[tuple[Any, ...], ...]:
    """What methods of FSDP2 may set at any time of all that config_of reads, as plain values: of
    each parameter group, or once if it is the same for all."""
    values = [
        (
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
            group.reduce_scatter_unused_params,
            type(group._all_gather_comm) is DefaultAllGather,
            type(group._reduce_scatter_comm) is DefaultReduceScatter,
            group._all_reduce_hook is None,
            None if state._auto_reshard_after_forward else _reshard_config(group),
            group.reshard_after_backward or not between_backwards,
        )
        for state in model_states
        for group in state._fsdp_param_groups
    ]
    return tuple(values[: 1 if values.count(values[0]) == len(values) else None]) if values else ()


def _precision_config(policy: MixedPrecisionPolicy) -> dict[str, Any]:
    """Empty where nothing is cast."""
    given = {}
    for name in DTYPE_KEYS:
        dtype = getattr(policy, name)
        if dtype is None:
            continue
        if dtype not in _FLOATS:
            raise NotImplementedError(f"'{name}' {dtype} of 'mp_policy' is not compiled")
        given[name] = str(dtype).removeprefix("torch.")
    if not given:
        return {}
    return {**given, "cast_forward_inputs": policy.cast_forward_inputs}


def initialise(model: nn.Module) -> None:
    """What FSDP2 does before its first forward, with its errors."""
    found = states(model)
    if "" not in found:  # each part does it by itself
        return
    # The root's does it for all units; one that was sharded since is a root of its own.
    for state in found.values():
        if state._is_root is None:
            state._lazy_init()


def reduces_now(model: nn.Module, model_groups: list[FSDPParamGroup]) -> bool:
    """Whether the next backward reduces all its gradients and none of an earlier one, according to
    the methods that a training loop calls."""
    root = _get_module_fsdp_state(model)
    if root is None:
        return False
    context = root._state_ctx
    if not context.is_last_backward or context.manual_backward_finalization:
        return False
    for group in model_groups:
        if not (group.reduce_grads and group.all_reduce_grads):
            return False
        if group._partial_reduce_output is not None:
            return False
        for param in group.fsdp_params:
            unsharded = getattr(param, "_unsharded_param", None)
            if unsharded is not None and unsharded.grad is not None:
                return False
    return True
