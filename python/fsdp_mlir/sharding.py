"""`fully_shard`, as FSDP2's: it records the policy on the modules, and `compile` reads it.

Arguments, defaults and errors are those of torch.distributed.fsdp.fully_shard. What the compiler
cannot do yet is a NotImplementedError that names the argument.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import contract
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_init import (
    _get_managed_modules,
    _get_managed_states,
    _validate_mesh,
    _validate_module,
)
from torch.distributed.tensor import Shard
from torch.distributed.utils import _get_root_modules

from fsdp_mlir import weights
from fsdp_mlir.errors import CompileError
from fsdp_mlir.module import ShardPolicy, make_fsdp_module, policy_of

_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

_logger = logging.getLogger(__name__)


@contract(state_cls=ShardPolicy)  # type: ignore[misc]
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # as in torch
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Records that the parameters of `module` (of all modules of a list) are one FSDP unit.

    As FSDP2's, it is called bottom-up and on the whole model last, and returns its argument. The
    module becomes an FSDPModule, whose methods record policy too; its parameters stay as they are:
    `compile` shards them.
    """
    _validate_module(module, "fully_shard")
    if dp_mesh_dims is not None:
        raise NotImplementedError("fully_shard: 'dp_mesh_dims' is not supported")
    if mesh is not None:
        _validate_mesh(mesh)
        if mesh.device_type != "cpu":
            raise NotImplementedError(
                f"fully_shard: 'mesh' is not supported on '{mesh.device_type}', only on 'cpu'"
            )
    reshard = _checked_reshard(reshard_after_forward, _shard_size(mesh))
    _check_precision(mp_policy)
    _check_offload(offload_policy)

    modules = (module,) if isinstance(module, nn.Module) else tuple(_get_root_modules(module))
    managed = _get_managed_modules(modules, ignored_params, None, policy_of)
    params, _ = _get_managed_states(managed, ignored_params)
    placements: dict[nn.Parameter, int] = {}
    for param in params:
        if not param.is_contiguous():
            raise NotImplementedError(
                f"FSDP does not support non-contiguous parameters yet: {param.shape=} "
                f"{param.stride()=}"
            )
        dim = _sharded_dim(param, shard_placement_fn, _shard_size(mesh))
        if dim != 0:
            placements[param] = dim

    policy = fully_shard.state(modules[0])
    policy.modules, policy.params = modules, params
    policy.mesh, policy.reshard_after_forward = mesh, reshard
    policy.precision = mp_policy
    policy.offload = isinstance(offload_policy, CPUOffloadPolicy)
    policy.placements = placements
    for each in modules:
        make_fsdp_module(each, policy)
    return module


def _shard_size(mesh: DeviceMesh | None) -> int:
    if mesh is not None:
        return mesh.size(mesh.ndim - 1)
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _checked_reshard(value: bool | int | None, size: int) -> bool | int | None:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the "
            f"group size to reshard to, not {value}"
        )
    if value < 1 or value > size or size % value != 0:
        raise ValueError(
            "If passing reshard_after_forward as an int, it should be a "
            f"factor of {size}, not {value}"
        )
    if value == 1:
        _logger.warning(
            "reshard_after_forward=1 (int) means resharding parameters to world size 1, "
            "instead of reshard_after_forward=True (bool)"
        )
        return False
    return True if value == size else value


def _check_precision(policy: MixedPrecisionPolicy) -> None:
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(
            f"fully_shard: expected a MixedPrecisionPolicy for 'mp_policy', got {policy!r}"
        )
    if policy.param_dtype_override_fn is not None:
        raise NotImplementedError(
            "fully_shard: 'param_dtype_override_fn' of 'mp_policy' is not supported yet"
        )
    for name in _DTYPES:
        dtype = getattr(policy, name)
        if dtype is not None and dtype not in _FLOATS:
            raise NotImplementedError(
                f"fully_shard: '{name}' of 'mp_policy' is one of {', '.join(map(str, _FLOATS))}, "
                f"got {dtype}"
            )


def _check_offload(policy: OffloadPolicy) -> None:
    if not isinstance(policy, OffloadPolicy):
        raise TypeError(
            f"fully_shard: expected an OffloadPolicy for 'offload_policy', got {policy!r}"
        )


def _sharded_dim(
    param: nn.Parameter, placement_fn: Callable[[nn.Parameter], Any] | None, size: int
) -> int:
    placement = placement_fn(param) if placement_fn else None
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ValueError(f"Invalid shard_placement_fn result: {placement}")
    dim: int = placement.dim + (param.ndim if placement.dim < 0 else 0)
    if not 0 <= dim < param.ndim:
        raise ValueError(
            f"fully_shard: 'shard_placement_fn' gave {placement} for a parameter of shape "
            f"{list(param.shape)}"
        )
    if dim > 0 and param.size(dim) % size != 0:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: "
            f"{param.size()} (world size: {size})"
        )
    return dim


# ---------------------------------------------------------------------------
# For compile
# ---------------------------------------------------------------------------


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh that all calls were given; None for the default, all ranks on one axis."""
    meshes = [policy.mesh for policy in _policies(model).values()]
    for mesh in meshes:
        if mesh != meshes[0]:
            raise CompileError(
                f"expected one mesh in all calls of fully_shard, got {meshes[0]} and {mesh}"
            )
    return meshes[0]


def mark_compiled(model: nn.Module) -> None:
    """A step has the policy now; later changes do not reach it."""
    for policy in _policies(model).values():
        policy.compiled = True


def config_of(model: nn.Module, world_size: int) -> dict[str, Any]:
    """The recorded policy as keys of fsdp-opt's config, with modules by exact names."""
    policies = _policies(model)
    config: dict[str, Any] = {}
    mesh = mesh_of(model)
    if mesh is not None:
        if mesh.mesh.flatten().tolist() != list(range(world_size)):
            raise NotImplementedError(
                f"fully_shard: expected a 'mesh' of all {world_size} ranks in order, got {mesh}"
            )
        if mesh.ndim == 2:
            config["mesh"] = {"replicate": mesh.size(0), "shard": mesh.size(1)}

    root = policies.pop("")
    if mixed := _precision_config(root.precision):
        config["mixed_precision"] = mixed
    if root.offload:
        config["cpu_offload"] = True
    if root.reshard_after_forward is not None:
        config["reshard_after_forward"] = root.reshard_after_forward
    if root.divide_factor is not None:
        config["gradient_divide_factor"] = float(root.divide_factor)
    if root.force_sum:
        config["force_sum_reduction_for_comms"] = True
    kept = [not p.reshard_after_backward for p in (root, *policies.values()) if p.params]
    if any(kept):
        if not all(kept):
            raise NotImplementedError(
                "set_reshard_after_backward: not supported on some modules only"
            )
        config["reshard_after_backward"] = False

    units: dict[int, dict[str, Any]] = {}
    for name, policy in policies.items():
        precision = _precision_config(policy.precision)
        if not policy.params:  # no group for FSDP2 either, but it casts
            if precision:
                raise NotImplementedError(
                    f"fully_shard: 'mp_policy' of '{name}', which manages no parameters, is not "
                    "supported yet"
                )
            continue
        unit = units.setdefault(id(policy), {"match": name})
        if precision or mixed:
            unit["mixed_precision"] = precision or False
        if policy.offload or root.offload:
            unit["cpu_offload"] = policy.offload
        if unit["match"] != name:
            patterns = unit["match"] if isinstance(unit["match"], list) else [unit["match"]]
            unit["match"] = [*patterns, name]
        if policy.reshard_after_forward is not None:
            unit["reshard_after_forward"] = policy.reshard_after_forward
        if policy.divide_factor != root.divide_factor:
            factor = policy.divide_factor
            unit["gradient_divide_factor"] = None if factor is None else float(factor)
        if policy.force_sum != root.force_sum:
            unit["force_sum_reduction_for_comms"] = policy.force_sum
    if units:
        config["units"] = list(units.values())
    ignored = [escaped(name) for name in _ignored(model, [root, *policies.values()])]
    if ignored:
        config["ignore"] = ignored
    if placements := _placements(model, [root, *policies.values()]):
        config["shard_placement"] = placements
    return config


def _precision_config(policy: MixedPrecisionPolicy) -> dict[str, Any]:
    """Empty where nothing is cast."""
    dtypes = {name: getattr(policy, name) for name in _DTYPES}
    given = {name: str(x).removeprefix("torch.") for name, x in dtypes.items() if x is not None}
    if not given:
        return {}
    return {**given, "cast_forward_inputs": policy.cast_forward_inputs}


def escaped(name: str) -> str:
    """A pattern that matches exactly `name`."""
    if "*" in name or "?" in name:
        raise CompileError(f"'{name}': a name with '*' or '?' cannot be told from a pattern")
    return name


def _policies(model: nn.Module) -> dict[str, ShardPolicy]:
    """By module name, in the order of the model; that of the root is ''."""
    found = {
        escaped(name): policy
        for name, module in model.named_modules()
        if (policy := policy_of(module)) is not None and module in policy.modules
    }
    if "" not in found:
        raise CompileError("expected a call of fully_shard on the model itself, found none")
    return found


def _placements(model: nn.Module, policies: list[ShardPolicy]) -> list[dict[str, Any]]:
    dims = {param: dim for policy in policies for param, dim in policy.placements.items()}
    return [
        {"match": escaped(param.name), "dim": dims[param.tensor]}
        for param in weights.parameters(model)
        if param.tensor in dims
    ]


def _ignored(model: nn.Module, policies: list[ShardPolicy]) -> list[str]:
    """The parameters that no call manages. The others belong to the innermost module that
    fully_shard was called on, as with the compiler, provided that the calls were bottom-up."""
    owners: dict[int, list[ShardPolicy]] = {}
    for policy in dict.fromkeys(policies):
        for param in policy.params:
            owners.setdefault(id(param), []).append(policy)
    ignored = []
    for param in weights.parameters(model):
        owner = owners.get(id(param.tensor), [])
        if not owner:
            ignored.append(param.name)
        # Units that share a tied parameter become one.
        if len(owner) > 1 and not param.aliases:
            raise CompileError(
                f"parameter '{param.name}': fully_shard was called on a module before it was "
                "called on one inside it, expected calls bottom-up"
            )
    return ignored
