"""What is around a call of a step: settings of PyTorch that decide what the model computes, and
what the caller has entered that only eager code passes through."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def settings() -> tuple[Any, ...]:
    """Those by which plans are told apart. Equal on ranks with the same settings."""
    cuda = torch.backends.cuda  # scaled_dot_product_attention asks these on the CPU too
    return (
        autocast(),
        str(torch.get_default_dtype()),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        torch.backends.mha.get_fastpath_enabled(),
    )


def autocast() -> str:
    """The mode of autocast."""
    if not torch.is_autocast_enabled("cpu"):
        return ""
    # Without the cache the gradients of each use of a weight are cast, and then added.
    return f"{torch.get_autocast_dtype('cpu')} {torch.is_autocast_cache_enabled()}"


def entered() -> str:
    """What the caller has entered that sees, and may change, each call of eager code; empty without
    any."""
    for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
        # The default device: a plan makes its tensors on the CPU.
        if not (isinstance(mode, DeviceContext) and mode.device.type == "cpu"):
            return f"the mode '{type(mode).__name__}' is entered around the call"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "saved_tensors_hooks are entered around the call"
    if torch.is_anomaly_enabled():
        return "anomalies are detected around the call (torch.autograd.set_detect_anomaly)"
    return ""


def without_gradients() -> str:
    """Why no backward is possible; empty if it is."""
    if torch.is_grad_enabled():
        return ""
    return "gradients are off around the call, as under torch.no_grad()"


def each_microbatch(params: list[nn.Parameter]) -> str:
    """What FSDP2 does to these parameters with the gradients of each microbatch that it reduces,
    where a plan has only their sum; empty if there is nothing."""
    for param in params:
        if param._post_accumulate_grad_hooks:
            return (
                "a hook of register_post_accumulate_grad_hook is called with the gradients of each "
                "microbatch"
            )
    if any(param.grad is not None for param in params):
        return "gradients of each microbatch are added to those that are there"
    return ""
