"""Fake tensors, made without the calls that a FakeTensorMode would have to look into."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager


def fake_tensor(
    mode: FakeTensorMode,
    shape: Sequence[int],
    strides: Sequence[int] | None,
    dtype: torch.dtype,
    device: torch.device,
    offset: int = 0,
    base: Tensor | None = None,
) -> FakeTensor:
    """With memory of its own, or in that of `base`, at an offset in elements. Without `strides` it
    is contiguous."""
    with in_kernel_invocation_manager(mode):
        if base is not None:
            data = torch.empty((), dtype=dtype, device="meta")
            data.set_(base.untyped_storage(), offset, shape, strides)
        elif strides is None:
            data = torch.empty(shape, dtype=dtype, device="meta")
        else:
            data = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, data, device)
