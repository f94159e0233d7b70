"""Models whose operators are other ones on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A norm, attention and dropout, with attention as it is asked for."""

    def __init__(self, head: int, dropout: float, masked: bool, causal: bool) -> None:
        super().__init__()
        dim = 4 * head
        self.norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.drop = nn.Dropout(dropout)
        self.head, self.masked, self.causal = head, masked, causal

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            part.view(batch, length, 4, self.head).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(dim, -1)
        )
        mask = None
        if self.masked:
            at = torch.arange(length, device=x.device)
            mask = (at[:, None] - at[None, :]).abs() < 8
        dropout = self.drop.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, self.causal)
        return x + self.drop(self.out(mixed.transpose(1, 2).reshape(x.shape)))


class Text(nn.Module):
    def __init__(self, block: nn.Module, dim: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, dim)
        self.block = block
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 128)
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def attention(
    head: int = 64,
    dtype: str = "bfloat16",
    dropout: float = 0.0,
    masked: bool = False,
    causal: bool = True,
    checkpointed: bool = False,
) -> nn.Module:
    block = Block(head, dropout, masked, causal)
    return Text(block, 4 * head, checkpointed).to(getattr(torch, dtype))


class Feedforward(nn.Module):
    """Has on a GPU other operators than on the CPU (dropout), which the CPU has too."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.silu(self.up(self.norm(x)))))


def feedforward() -> nn.Module:
    return Text(Feedforward(64), 64)


class Asking(nn.Module):
    """Calls `body` on a projection of its input."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.body(self.linear(x)).sum()
        return loss
