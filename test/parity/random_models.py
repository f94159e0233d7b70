"""Small models from a description, for the randomised test. Both sides import `build` by name.

A description is JSON: `layers` (each with a `kind`), `tie` (head and embedding share a weight),
`unused` (a layer that forward does not call), `frozen` (patterns of parameter names), `seed`.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, DIM = 13, 6
ACTIVATIONS = {
    "relu": nn.ReLU(),
    "relu_": nn.ReLU(inplace=True),
    "gelu": nn.GELU(),
    "silu_": nn.SiLU(inplace=True),
    "tanh": nn.Tanh(),
}


class Mlp(nn.Module):
    def __init__(self, width: int, bias: bool, activation: str) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, width, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.down = nn.Linear(width, DIM, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(x)))


class Conv(nn.Module):
    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Scale(nn.Module):
    """A parameter of its own, smaller than the number of ranks can be, and writes in place."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, rows))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale.mean()
        y[:, 0].mul_(2)
        return y.add_(x)


def make_layer(layer: dict[str, Any]) -> nn.Module:
    match layer["kind"]:
        case "mlp":
            return Mlp(layer["width"], layer["bias"], layer["activation"])
        case "conv":
            return Conv(layer["kernel"])
        case "attention":
            return Attention(layer["heads"], layer["dropout"])
        case "layernorm":
            return nn.LayerNorm(DIM)
        case "rmsnorm":
            return nn.RMSNorm(DIM)
        case "batchnorm":
            return BatchNorm()
        case "dropout":
            return nn.Dropout(layer["p"])
        case "scale":
            return Scale(layer["rows"])
        case kind:
            raise ValueError(f"no layer of kind '{kind}'")


class RandomModel(nn.Module):
    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(make_layer(layer) for layer in spec["layers"])
        if spec["unused"]:
            self.unused = nn.Linear(DIM, 3)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if spec["tie"]:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def build(spec: dict[str, Any]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(spec["seed"])
        model = RandomModel(spec)
    for name, parameter in model.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in spec["frozen"]):
            parameter.requires_grad_(False)
    return model
