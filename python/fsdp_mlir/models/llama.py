"""A Llama-style decoder: RMSNorm, rotary embedding, SwiGLU, scaled dot-product attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model. `hidden` is the SwiGLU width; 0 takes 8/3 of `dim`, cut to 64s."""

    dim: int = 512
    layers: int = 8
    heads: int = 8
    vocab: int = 4096
    seq: int = 256
    hidden: int = 0
    rope_theta: float = 10000.0

    @property
    def ffn_dim(self) -> int:
        return self.hidden or int(self.dim * 8 / 3) // 64 * 64


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding on halves; x: [batch, heads, seq, head_dim]; cos, sin: [seq, head_dim/2].

    Su et al., RoFormer (arXiv:2104.09864), in the half-split form of GPT-NeoX.
    """
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    """Causal multi-head attention without biases."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.dim, bias=False)
        self.wv = nn.Linear(config.dim, config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        shape = (batch, seq, self.heads, dim // self.heads)
        q = self.wq(x).view(shape).transpose(1, 2)
        k = self.wk(x).view(shape).transpose(1, 2)
        v = self.wv(x).view(shape).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, seq, dim))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x). Shazeer (arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """The language model; with `targets` it returns the mean cross entropy, else the logits."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        head_dim = config.dim // config.heads
        frequency = config.rope_theta ** -(torch.arange(0, head_dim, 2).float() / head_dim)
        angle = torch.outer(torch.arange(config.seq).float(), frequency)
        self.register_buffer("rope_cos", angle.cos(), persistent=False)
        self.register_buffer("rope_sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens, targets: int64 [batch, seq <= config.seq]; logits are [batch, seq, vocab]."""
        seq = tokens.shape[1]
        cos, sin = self.rope_cos[:seq], self.rope_sin[:seq]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.output(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def llama(seed: int = 0, **sizes: int) -> Llama:
    """A Llama of any `LlamaConfig` sizes, initialised at `seed`."""
    torch.manual_seed(seed)
    return Llama(LlamaConfig(**sizes))


def llama_29m(seed: int = 0, **sizes: int) -> Llama:
    """29 M parameters: dim 512, 8 layers, 8 heads, vocabulary 4096, sequence 256."""
    return llama(seed, **sizes)


def llama_debug(seed: int = 0, **sizes: int) -> Llama:
    """Two layers of dim 64, whose widths leave uneven dim-0 shards at 3 and at 4 ranks."""
    defaults = {"dim": 64, "layers": 2, "heads": 4, "vocab": 256, "seq": 32, "hidden": 171}
    return llama(seed, **(defaults | sizes))
