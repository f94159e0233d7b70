"""Calls that torch 2.11 makes otherwise than the installed PyTorch, in a step captured for it.

A capture has the operators that the installed PyTorch chooses. Those of about 230 modules,
functions and losses, with their backward, were compared between 2.11 and 2.15 on fake tensors of
the CPU, sm_80 and sm_90, in three dtypes. What differs in bits is here, and in view/device.py
how group norm of 2.11 is followed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from fsdp_mlir.support.errors import Location, located
from fsdp_mlir.view.device import COMPARED, Device

aten = torch.ops.aten

_OTHER_ATTENTION = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
)
_GROUP_NORMS = (aten.native_group_norm.default, aten.native_group_norm_backward.default)
#: Of an image laid out by channels, row-major before.
_PADS = (aten.reflection_pad2d.default, aten.replication_pad2d.default)
#: Nodes of autograd whose gradients where a number is the bound are others: 1 before, 0 since.
_CLAMPS = ("ClampBackward1", "ClampMinBackward0", "ClampMaxBackward0")
_CLOSED = {aten.gt.Scalar: aten.ge.Scalar, aten.lt.Scalar: aten.le.Scalar}
#: Nodes that compute their gradients by other formulas.
_OTHER_FORMULAS = {
    "ClampBackward0": "clamp with tensors as bounds",
    "ClampMinBackward1": "clamp_min with a tensor as bound",
    "ClampMaxBackward1": "clamp_max with a tensor as bound",
    "CumprodBackward0": "cumprod",
}


def recorded(
    func: OpOverload, values: list[Any], device: Device, where: Location | None
) -> OpOverload:
    """What the PyTorch of `device` calls in place of `func`. CaptureError if that is not known, or
    is no single call."""
    if device.version >= COMPARED[1]:
        return func
    if func in _OTHER_ATTENTION and device.type == "cuda" and device.capability >= (9, 0):
        names = [argument.name for argument in func._schema.arguments]
        dropout = dict(zip(names, values, strict=True))["dropout_p"]
        if dropout and values[0].dtype in (torch.float16, torch.bfloat16):
            instead = "cuDNN's attention, with other bits: expected dropout in sixteenths"
            raise located(where, _differs(f"'{func}' with dropout {dropout:g}", device, instead))
    if func in _GROUP_NORMS and _is_copied_before(func, values, device):
        instead = "a copy in another layout: expected contiguous data"
        raise located(where, _differs(f"'{func}' of this layout", device, instead))
    if func in _PADS and device.type == "cpu" and _by_channels(values[0]):
        instead = "one that gives it row-major: expected a contiguous image"
        raise located(where, _differs(f"'{func}' of an image by channels", device, instead))
    node = torch._C._current_autograd_node()
    name = "" if node is None else node.name()
    if what := _OTHER_FORMULAS.get(name):
        raise located(where, _differs(f"the backward of {what}", device, "another formula"))
    if name in _CLAMPS and func in _CLOSED:
        if device.version != COMPARED[0]:
            raise located(where, _differs("the backward of clamp", device, "another at the bounds"))
        return _CLOSED[func]
    return func


def _is_copied_before(func: OpOverload, values: list[Any], device: Device) -> bool:
    """Whether group norm copied one of the tensors that it has here, before it had NHWC kernels on
    a GPU, and for gradients that are laid out otherwise than the input."""
    if func is aten.native_group_norm.default:
        return device.type == "cuda" and not values[0].is_contiguous()
    grad, image = values[:2]
    layout = torch.contiguous_format if device.type == "cuda" else suggest_memory_format(image)
    return not grad.is_contiguous(memory_format=layout)


def _by_channels(image: torch.Tensor) -> bool:
    return image.dim() == 4 and suggest_memory_format(image) is torch.channels_last


def _differs(what: str, device: Device, instead: str) -> str:
    old, new = (".".join(map(str, version)) for version in COMPARED)
    asked = "" if device.version == COMPARED[0] else f" (what {device.torch} takes is not known)"
    return (
        f"{what} is what torch {new} takes; torch {old} takes {instead}{asked}, or a capture for "
        "the installed version"
    )
