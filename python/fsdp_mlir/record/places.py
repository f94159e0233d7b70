"""What a step that is captured for a GPU may do on the CPU.

A run has all tensors on the GPU. Calls that only move data, or whose result is of integers or
bools, are the same there. Calls that draw or compute on the CPU in eager execution are not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fsdp_mlir.record.known import flat_tensors
from fsdp_mlir.support.errors import Location, located

aten = torch.ops.aten

# Of floating-point numbers too, these give the same bits everywhere. Views do so by their schemas.
_SAME_EVERYWHERE = {
    *(aten._to_copy, aten.clone, aten.copy_, aten.copy, aten.cat, aten.stack, aten.repeat),
    *(aten.zeros, aten.ones, aten.full, aten.zeros_like, aten.ones_like, aten.full_like),
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_zeros),
    *(aten.new_ones, aten.new_full, aten.new_empty_strided, aten.scalar_tensor, aten.eye),
    *(aten.fill, aten.fill_, aten.zero, aten.zero_, aten.where, aten.masked_fill),
    *(aten.masked_fill_, aten.index, aten.gather, aten.index_select, aten.flip, aten.roll),
    *(aten.tril, aten.triu, aten.neg, aten.abs, aten.constant_pad_nd, aten.lift_fresh),
    *(aten.diag_embed, aten.max, aten.min, aten.maximum, aten.minimum, aten.clamp),
}


def check(func: OpOverload, fakes: list[Any], result: Any, where: Location | None) -> None:
    """CaptureError for a call whose result on a GPU would have different bits than in eager
    execution, which computes it on the CPU."""
    made = flat_tensors(result)
    on_cpu = [tensor for tensor in made if tensor.device.type == "cpu"]
    if on_cpu and torch.Tag.nondeterministic_seeded in func.tags:
        raise located(
            where,
            f"'{func}' draws on the CPU, in a step that is captured for a GPU; draw on the GPU, as "
            "with device=x.device",
        )
    computed = any(_is_approximate(tensor) for tensor in on_cpu) and not _is_same(func, fakes)
    if computed:
        raise located(
            where,
            f"'{func}' computes on the CPU, in a step that is captured for a GPU, where its bits "
            "may differ; compute on the GPU, as with device=x.device, or before the step",
        )
    for tensor in flat_tensors(fakes) if len(on_cpu) < len(made) else []:
        given_on_cpu = tensor.device.type == "cpu" and _is_approximate(tensor)
        if given_on_cpu and func is not aten._to_copy.default and func is not aten.copy_.default:
            narrower = [each for each in made if each.dtype != tensor.dtype]
            if narrower:
                raise located(
                    where,
                    f"'{func}' takes a number from a tensor of {tensor.dtype} on the CPU and gives "
                    f"{narrower[0].dtype} on the GPU; pass a Python number, or a tensor on the GPU",
                )


def _is_approximate(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_same(func: OpOverload, values: list[Any]) -> bool:
    if func.overloadpacket is aten.arange:
        return not any(isinstance(value, float) for value in values)
    view = any(result.alias_info is not None for result in func._schema.returns)
    return (view and not func._schema.is_mutable) or func.overloadpacket in _SAME_EVERYWHERE
