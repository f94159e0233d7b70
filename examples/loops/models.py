"""The models of nanogpt.py and titan.py: plain PyTorch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, from [batch, length, heads, dim] to [batch, length, heads * dim]."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).flatten(2)


class Block(nn.Module):
    """As GPT-2's: norms before attention and feed-forward."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(attention(q, k, v))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens to logits and, with targets, the loss. The output layer is the embedding's matrix."""

    def __init__(self, vocabulary: int, length: int, dim: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.length = length
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(dim, heads=4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        x = self.dropout(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, -1:]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        """The tokens and `count` more, drawn one by one."""
        for _ in range(count):
            logits, _ = self(tokens[:, -self.length :])
            drawn = torch.multinomial(logits[:, -1].softmax(-1), 1)
            tokens = torch.cat((tokens, drawn), 1)
        return tokens


def rotated(x: Tensor, frequencies: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * frequencies[:, None]).flatten(3).type_as(x)


class Layer(nn.Module):
    """As Llama's: rotary positions, a gated feed-forward, no biases."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head = dim // heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(dim, 3 * dim, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor, frequencies: Tensor) -> Tensor:
        y = self.norm1(x)
        # As many heads as there are columns: all, or a rank's part of them.
        q, k, v = (each(y).unflatten(-1, (-1, self.head)) for each in (self.q, self.k, self.v))
        x = x + self.out(attention(rotated(q, frequencies), rotated(k, frequencies), v))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Tokens to logits. Has no values before `init_weights`, so that it may be built on meta."""

    def __init__(self, vocabulary: int, length: int, dim: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.length, self.rotary = length, dim // 4
        self.embeddings = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleDict({str(i): Layer(dim, heads=4) for i in range(layers)})
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        self.register_buffer("frequencies", self._frequencies(), persistent=False)

    def _frequencies(self) -> Tensor:
        inverse = 1e4 ** (-torch.arange(0, self.rotary, 2) / self.rotary)
        angles = torch.outer(torch.arange(self.length), inverse)
        return torch.polar(torch.ones_like(angles), angles)

    @torch.no_grad()
    def init_weights(self) -> None:
        self.frequencies = self._frequencies()
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.trunc_normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.frequencies)
        return self.output(self.norm(x))
