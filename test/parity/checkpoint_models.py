"""Models that checkpoint parts of themselves, with random numbers in them."""

from __future__ import annotations

from functools import partial

import torch
import transformers
from fsdp_mlir.models import gpt2
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

DIM, SEQ = 16, 16


def saves_products(_context: object, func: object, *_args: object, **_kwargs: object) -> object:
    saved = func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(create_selective_checkpoint_contexts, saves_products)

OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "fresh": {"preserve_rng_state": False},
    "to_the_end": {"early_stop": False},
    "selective": {"context_fn": SELECTIVE},
}


class Block(nn.Module):
    """Running statistics, attention with dropout, and noise of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(SEQ)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)) for y in self.qkv(self.norm(x)).chunk(3, -1))
        heads = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(*heads, dropout_p=0.1, is_causal=True)
        y = self.dropout(self.out(y.transpose(1, 2).flatten(-2)))
        return x + y * torch.rand_like(y) + 0.1 * torch.randn(DIM)


class Checkpointed(nn.Module):
    """Checkpoints its blocks, a function without parameters and a frozen module."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.embed = nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)
        self.output = nn.Linear(DIM, 256)

    def block(self) -> nn.Module:
        return checkpoint_wrapper(Block()) if self.how == "wrapper" else Block()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        reentrant = self.how == "reentrant"
        run = partial(checkpoint, use_reentrant=reentrant, **OPTIONS.get(self.how, {}))
        x = run(noisy, self.embed(tokens))
        x = run(lambda x: F.dropout(self.frozen(x), 0.1), x)
        if self.how == "sequential":
            x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)
        for block in () if self.how == "sequential" else self.blocks:
            if self.how == "nested":
                x = run(lambda x, block=block: F.dropout(run(block, x), 0.1).tanh(), x)
            elif self.how == "wrapper":
                x = block(x)
            else:
                x = run(block, x)
        return F.cross_entropy(self.output(x).flatten(0, 1), targets.flatten())


def noisy(x: Tensor) -> Tensor:
    """In-place draws whose result is read, then changed, then read again."""
    return F.alpha_dropout(F.dropout(x, 0.2).tanh(), 0.1) * F.rrelu(x, training=True)


def gpt2_checkpointed() -> nn.Module:
    model = gpt2.gpt2_debug_dropout()
    net = next(m for m in model.modules() if isinstance(m, transformers.PreTrainedModel))
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model
