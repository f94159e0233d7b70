"""Losses whose backward a library scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _BackwardOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: int) -> Tensor:
        ctx.count = count
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.count, None


def backward_over(loss: Tensor, count: int) -> Tensor:
    """The loss, with the backward of the loss divided by `count`."""
    return _BackwardOver.apply(loss, count) if count > 1 else loss  # type: ignore[no-untyped-call]
