"""Models that call operators of torch.library: of the C++ library of examples/operators, of kernels
in Python that only call operators, and of kernels in Python that read data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from parity_models import OwnParameters
from torch import Tensor, nn

LIBRARY = Path(__file__).resolve().parents[2] / "build" / "lib" / "libexample_operators.so"
torch.ops.load_library(LIBRARY)


@torch.library.custom_op("parity::normed", mutates_args=())
def normed(x: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """RMS norm of the last dimension, and its factor for backward."""
    factor = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * factor, factor


@normed.register_fake
def _(x: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)


def _normed_backward(ctx: object, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
    x, factor = ctx.saved_tensors  # type: ignore[attr-defined]
    part = (grad * x).mean(-1, keepdim=True) * factor * factor
    return (grad - x * part) * factor, None


def _keep(ctx: object, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])  # type: ignore[attr-defined]


normed.register_autograd(_normed_backward, setup_context=_keep)


@torch.library.custom_op("parity::arctan", mutates_args=())
def arctan(x: Tensor) -> Tensor:
    return torch.from_numpy(np.arctan(x.numpy()))


@torch.library.custom_op("parity::arctan_backward", mutates_args=())
def arctan_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.from_numpy(grad.numpy() / (1 + x.numpy() * x.numpy()))


for _operator in (arctan, arctan_backward):
    _operator.register_fake(lambda x, *others: torch.empty_like(x))
arctan.register_autograd(
    lambda ctx, grad: arctan_backward(grad.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Gate(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.register_buffer("open", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x, _ = normed(x)
        if self.training:
            x = torch.ops.example.jitter(x, 0.05)
        y, opens = torch.ops.example.gated(self.up(x), self.gate(x), slope=1.5)
        if self.training:
            torch.ops.example.count(self.open, opens - 0.5)
        return y


class Arctan(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(arctan(x))


class Operators(OwnParameters):
    """With a gate in each block."""

    def __init__(self, block: type[nn.Module] = Gate) -> None:
        torch.manual_seed(0)
        super().__init__(vocab=256, dim=20, layers=0)
        self.layers.extend(block(20) for _ in range(2))


def in_python() -> nn.Module:
    """With kernels that need Python."""
    return Operators(Arctan)
