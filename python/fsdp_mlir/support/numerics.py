"""PyTorch's global settings that decide the bits of its kernels, by the names that plans have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdp_mlir.support.errors import CaptureError

_MODES = ("off", "warn", "on")


def _switch(value: Any) -> str:
    # A pair says also whether a matmul may be split along its inner dimension.
    return "on" if (value[0] if isinstance(value, tuple) else value) else "off"


# Each with PyTorch's default, in the order of lib/Plan/Numerics.cpp.
SETTINGS: dict[str, tuple[Callable[[], str], str]] = {
    "float32_matmul_precision": (torch.get_float32_matmul_precision, "highest"),
    "deterministic_algorithms": (lambda: _MODES[torch.get_deterministic_debug_mode()], "off"),
    "mkldnn.enabled": (lambda: _switch(torch._C._get_mkldnn_enabled()), "on"),
    "mkldnn.deterministic": (lambda: _switch(torch._C._get_mkldnn_deterministic()), "off"),
    "nnpack.enabled": (lambda: _switch(torch._C._get_nnpack_enabled()), "on"),
    "cudnn.enabled": (lambda: _switch(torch._C._get_cudnn_enabled()), "on"),
    "cudnn.benchmark": (lambda: _switch(torch._C._get_cudnn_benchmark()), "off"),
    "cudnn.deterministic": (lambda: _switch(torch._C._get_cudnn_deterministic()), "off"),
    "cudnn.allow_tf32": (lambda: _switch(torch._C._get_cudnn_allow_tf32()), "on"),
    "cuda.matmul.allow_fp16_reduced_precision_reduction": (
        lambda: _switch(torch._C._get_cublas_allow_fp16_reduced_precision_reduction()),
        "on",
    ),
    "cuda.matmul.allow_bf16_reduced_precision_reduction": (
        lambda: _switch(torch._C._get_cublas_allow_bf16_reduced_precision_reduction()),
        "on",
    ),
    "cuda.matmul.allow_fp16_accumulation": (
        lambda: _switch(torch._C._get_cublas_allow_fp16_accumulation()),
        "off",
    ),
}


def numerics() -> dict[str, str]:
    """The settings that are not PyTorch's defaults now.

    CaptureError where PyTorch itself cannot say one: its two ways to set the precision of float32
    were both used.
    """
    values = {}
    for name, (read, default) in SETTINGS.items():
        try:
            value = read()
        except RuntimeError as error:
            raise CaptureError(
                f"{name}: expected precisions that are set by torch.set_float32_matmul_precision "
                "and allow_tf32 alone, got some that are set by fp32_precision"
            ) from error
        if value != default:
            values[name] = value
    return values
