"""Conversions of modules within a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def conversions_kept() -> Iterator[None]:
    """Makes `module.to(dtype)` in forward do nothing if the module has that dtype. PyTorch's would
    replace each tensor by itself, and refuses that for fake tensors."""
    convert = nn.Module._apply

    def apply(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        held = [*module.parameters(recurse), *module.buffers(recurse)]
        with torch.no_grad():
            same = all(fn(tensor) is tensor for tensor in held)
        return module if same else convert(module, fn, recurse)

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = convert  # type: ignore[method-assign]
