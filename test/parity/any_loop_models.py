"""The small models of random loops, from a description, and their losses and batches.

A description is JSON: `seed`, `tokens` (embeddings of tokens; otherwise a linear layer of floats),
`layers` (names of LAYERS), `dropout`, `tie` (head and embedding share a weight), `unused` (a layer
that forward does not call), `frozen` (the number of layers at the front that are not trained),
`returns` (what forward gives), `units` (which modules are units beside the root), `reshard` (of the
units), `precision` (MixedPrecisionPolicy's arguments, or None).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

VOCAB, DIM = 11, 8
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
INTEGERS = {"float64": torch.int32}
Spec = dict[str, Any]


class Stopped(Exception):
    """What forward raises where it is told to."""


class Mlp(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 12), nn.Linear(12, DIM, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.tanh(self.up(x))))


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        p = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Conv(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(DIM, DIM, 3, padding=1), nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)


class Counting(nn.Module):
    """Writes one buffer in place, and assigns another."""

    mean: Tensor
    seen: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.register_buffer("mean", torch.zeros(DIM))
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().float().mean((0, 1)), alpha=0.1)
            self.seen = self.seen + 1
        return self.norm(x - self.mean.to(x.dtype)) / self.seen.to(x.dtype).sqrt()


LAYERS = {"mlp": Mlp, "attention": Attention, "conv": Conv, "counting": Counting}


class Model(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.tokens, self.returns = spec["tokens"], spec["returns"]
        self.embed = nn.Embedding(VOCAB, DIM) if self.tokens else nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(LAYERS[name](spec["dropout"]) for name in spec["layers"])
        if spec["unused"]:
            self.unused = nn.Linear(DIM, 3)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if spec["tie"]:
            self.head.weight = self.embed.weight
        self.scale, self.stops = 1.0, -1

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        x = self.embed(x if self.tokens else x.to(self.embed.weight.dtype))
        for number, layer in enumerate(self.layers):
            if number == self.stops:
                raise Stopped
            x = layer(x)
        logits = self.head(x).float() * self.scale
        if self.returns == "logits":
            return logits
        loss = loss_of(logits, targets)
        if self.returns == "loss":
            return loss
        return {"loss": loss, "parts": (logits, {"hidden": x.float().mean((0, 1))})}


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def several_of(logits: Tensor, targets: Tensor) -> dict[str, Any]:
    hits = (logits.argmax(-1) == targets).sum()
    return {"loss": loss_of(logits, targets), "logits": logits, "hits": hits}


def part_of(output: dict[str, Any]) -> tuple[Tensor, Any]:
    return output["loss"], output["parts"]


def compute_loss(model: Any, x: Tensor, targets: Tensor, weight: float = 1.0) -> Any:
    logits = model(x)
    return loss_of(logits, targets) * weight, {"largest": logits.abs().max(), "weight": weight}


# What forward returns, and what compile is told, by the form of the loss.
FORMS: dict[str, tuple[str, Spec]] = {
    "loss": ("logits", {"loss": loss_of}),
    "several": ("logits", {"loss": several_of}),
    "compute": ("logits", {"compute_loss": compute_loss}),
    "model": ("loss", {}),
    "nested": ("nested", {"loss": part_of}),
}


def value_of(form: str, model: Any, batch: Spec) -> Any:
    """What the loss of this form returns."""
    match form:
        case "compute":
            return compute_loss(model, **batch)
        case "model":
            return model(**batch)
        case "nested":
            return part_of(model(**batch))
    loss = loss_of if form == "loss" else several_of
    return loss(model(batch["x"]), batch["targets"])


def build(spec: Spec) -> Any:
    """The model, sharded."""
    with torch.random.fork_rng():
        torch.manual_seed(spec["seed"])
        model = Model(spec)
    for layer in model.layers[: spec["frozen"]]:
        layer.requires_grad_(False)
    options: Spec = {}
    if spec["precision"] is not None:
        dtypes = {name: DTYPES[dtype] for name, dtype in spec["precision"].items()}
        options["mp_policy"] = MixedPrecisionPolicy(**dtypes)
    units = [*model.layers, *([] if spec["tie"] else [model.head])]
    for unit in units[: {"root": 0, "first": 1, "all": len(units)}[spec["units"]]]:
        fully_shard(unit, reshard_after_forward=spec["reshard"], **options)
    return fully_shard(model, **options)


def make_batch(
    spec: Spec, number: int, size: int, length: int, dtype: str = "float32"
) -> dict[str, Tensor]:
    """A batch of this rank."""
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    targets = torch.randint(VOCAB, (size, length), generator=generator)
    if spec["tokens"]:
        x = torch.randint(VOCAB, (size, length), generator=generator)
        x = x.to(INTEGERS.get(dtype, torch.int64))
    else:
        x = torch.randn(size, length, DIM, generator=generator).to(DTYPES[dtype])
    return {"x": x, "targets": targets}
