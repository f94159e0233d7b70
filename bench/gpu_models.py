"""Models of gpu_cases.py besides the Llama, of torch alone: what a GPU has other kernels for.

Both take tokens and targets, int64 [batch, seq], and return the mean cross-entropy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GptBlock(nn.Module):
    """Pre-norm attention with dropout, and a GELU between two linear layers with biases."""

    def __init__(self, dim: int, heads: int, hidden: int, dropout: float, sixteenths: int) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_dropout = sixteenths / 16
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, seq, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.attention_dropout, is_causal=True
        )
        y = self.out(y.transpose(1, 2).reshape(batch, seq, dim))
        x = x + F.dropout(y, self.dropout)
        y = self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))
        return x + F.dropout(y, self.dropout)


class Gpt(nn.Module):
    """GPT-2's architecture: learned positions, layer norms, dropout, an output tied to the table.
    Dropout of the attention is in sixteenths, as cuDNN takes it in all versions of PyTorch."""

    def __init__(
        self, dim: int, layers: int, heads: int, vocab: int, seq: int, hidden: int
    ) -> None:
        super().__init__()
        self.dropout = 0.1
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(seq, dim)
        self.layers = nn.ModuleList(
            GptBlock(dim, heads, hidden, self.dropout, sixteenths=2) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        self.output.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.dropout(self.tokens(tokens) + self.positions(positions), self.dropout)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1), targets.flatten())


class ConvBlock(nn.Module):
    """Down and up by strided convolutions, with batch norm and group norm, and a residual."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(dim, hidden, 3, stride=2, padding=1, bias=False)
        self.batch_norm = nn.BatchNorm2d(hidden)
        self.middle = nn.Conv2d(hidden, hidden, 3, padding=1, groups=4)
        self.group_norm = nn.GroupNorm(8, hidden)
        self.up = nn.ConvTranspose2d(hidden, dim, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.batch_norm(self.down(x)))
        y = F.silu(self.group_norm(self.middle(y)))
        return x + self.up(y)


class ConvNet(nn.Module):
    """The tokens of a sequence, a square number of them, as the pixels of an image."""

    def __init__(
        self, dim: int, layers: int, heads: int, vocab: int, seq: int, hidden: int
    ) -> None:
        super().__init__()
        self.side = round(seq**0.5)
        self.tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(ConvBlock(dim, hidden) for _ in range(layers))
        self.output = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens).transpose(1, 2)
        x = x.reshape(x.shape[0], x.shape[1], self.side, self.side)
        for layer in self.layers:
            x = layer(x)
        x = F.avg_pool2d(F.max_pool2d(x, 3, 1, 1), 3, 1, 1)
        x = self.output(x.flatten(2).transpose(1, 2))
        return F.cross_entropy(x.flatten(0, 1), targets.flatten())


def gpt(seed: int = 0, **sizes: int) -> Gpt:
    torch.manual_seed(seed)
    return Gpt(**sizes)


def convnet(seed: int = 0, **sizes: int) -> ConvNet:
    torch.manual_seed(seed)
    return ConvNet(**sizes)
