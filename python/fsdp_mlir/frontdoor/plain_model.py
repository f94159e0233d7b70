"""A sharded model as it was before fully_shard, for the duration of a capture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from fsdp_mlir.check.proof import CHECKED_BYTES
from fsdp_mlir.modules import placed, sharding


def whole_values(model: nn.Module) -> dict[int, Tensor]:
    """For each sharded parameter, by its id: its whole value if all of them together are small
    enough to be run beside eager PyTorch, else a tensor on 'meta'. A collective."""
    entries = list(sharding.managed(model).values())
    params = [entry.sharded_param for entry in entries]
    total = sum(param.numel() * param.element_size() for param in params)
    has_parts = any(entry.is_dtensor for entry in entries)
    if has_parts or total > CHECKED_BYTES or any(param.is_meta for param in params):
        return forms(model)
    with torch.no_grad():
        return {id(param): param.detach().full_tensor() for param in params}


def forms(model: nn.Module) -> dict[int, Tensor]:
    """The same without data: all on 'meta'. Those that were DTensors are so again."""
    return {id(entry.sharded_param): _form(entry) for entry in sharding.managed(model).values()}


def _form(entry: FSDPParam) -> Tensor:
    whole = torch.empty(entry._orig_size, dtype=entry.sharded_param.dtype, device="meta")
    spec = entry._unsharded_dtensor_spec
    return whole if spec is None else placed.placed(whole, spec)


@contextmanager
def plain(model: nn.Module, values: Mapping[int, Tensor]) -> Iterator[None]:
    """Within the body, the model has `values`, by the ids of its own parameters, in place of these,
    and no FSDP2 hooks."""
    sharding.reshard(sharding.groups(model))
    slots: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None or id(param) not in values:
                continue
            leaf = made.setdefault(
                id(param), nn.Parameter(values[id(param)], requires_grad=param.requires_grad)
            )
            slots.append((module._parameters, name, param))
            module._parameters[name] = leaf
    handles = {id(each): each for m in model.modules() for each in sharding.forward_handles(m)}
    hooks = [_without(handle) for handle in handles.values()]
    try:
        yield
    finally:
        for held, before in reversed(hooks):
            later = {key: hook for key, hook in held.items() if key not in before}
            held.clear()
            held.update({**before, **later})
        for held, name, param in slots:
            held[name] = param


def _without(handle: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Removes the hook of a handle; returns the dictionary that held it, and its previous
    contents."""
    held = handle.hooks_dict_ref()
    before = dict(held)
    held.pop(handle.id, None)
    return held, before
