"""Calls that an older PyTorch makes otherwise, in a step that is captured for its GPU.

A capture has the operators that the installed PyTorch chooses. Where another version that the step
is captured for chooses others, the plan would not have its bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from fsdp_mlir.support.errors import Location, located
from fsdp_mlir.view.device import Device

aten = torch.ops.aten

#: Since this version, cuDNN's attention is not taken for dropout other than in sixteenths.
_SIXTEENTHS = (2, 15)
_OTHER_ATTENTION = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
)


def check(func: OpOverload, values: list[Any], device: Device, where: Location | None) -> None:
    """CaptureError for a call that the PyTorch of `device` does not make."""
    if device.version >= _SIXTEENTHS or func not in _OTHER_ATTENTION or device.capability < (9, 0):
        return
    names = [argument.name for argument in func._schema.arguments]
    dropout = dict(zip(names, values, strict=True))["dropout_p"]
    if dropout and values[0].dtype in (torch.float16, torch.bfloat16):
        raise located(
            where,
            f"'{func}' with dropout {dropout:g} is what the installed PyTorch takes; "
            f"torch {device.torch} takes cuDNN's attention there, which has other bits: expected "
            "dropout in sixteenths, or a capture for the installed version",
        )
