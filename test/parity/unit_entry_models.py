"""Models whose units share inputs, some of them used several times in one unit."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

DIM = 16


class Block(nn.Module):
    """Uses the memory twice."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Linear(DIM, DIM, bias=False)
        self.v = nn.Linear(DIM, DIM, bias=False)

    def forward(self, h: Tensor, mem: Tensor) -> Tensor:
        return h + (self.k(mem) * self.v(mem)).tanh()


class Decoder(nn.Module):
    """Blocks that all read one memory, given to them by `how`."""

    def __init__(self, how: str = "position") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.embed = nn.Embedding(256, DIM)
        self.enc = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.output = nn.Linear(DIM, 256)

    def block(self) -> nn.Module:
        return Nested() if self.how == "nested" else Block()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.embed(tokens)
        mem = self.enc(h)
        if self.how == "once":
            mem = mem.detach()
        for block in self.blocks:
            if self.how == "keyword":
                h = block(h, mem=mem)
            elif self.how == "nested":
                h = block({"h": h, "rest": [(mem, 3), None]})
            elif self.how == "twice":
                h = block(mem, mem)
            else:
                h = block(h, mem)
        return F.cross_entropy(self.output(h).flatten(0, 1), targets.flatten())


class Nested(Block):
    """Takes its inputs in containers."""

    def forward(self, given: dict) -> Tensor:  # type: ignore[override]
        return super().forward(given["h"], given["rest"][0][0])


class Recurrent(nn.Module):
    """Calls each of its blocks twice, `first` and last with one of its two projections alone; the
    first block at first with "data", or a "leaf", which needs a gradient and leads nowhere."""

    def __init__(self, first: bool = True, last: bool = False, given: str = "hidden") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.alone = [first, last]
        self.given = given
        self.embed = nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList(Halved() for _ in range(2))
        self.output = nn.Linear(DIM, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.embed(tokens)
        if self.given != "hidden":
            h = h + self.blocks[0](h.detach().requires_grad_(self.given == "leaf"), True)
        for alone in self.alone:
            for block in self.blocks:
                h = block(h, alone)
        return F.cross_entropy(self.output(h).flatten(0, 1), targets.flatten())


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(DIM, 11, bias=False)
        self.b = nn.Linear(11, DIM)
        # So that Gloo's pieces of a message are not the ranks' rows.
        self.scales = nn.ParameterList(torch.ones(1) for _ in range(1))

    def forward(self, h: Tensor, alone: bool) -> Tensor:
        out = self.b(h[..., :11] if alone else self.a(h).tanh())
        for scale in self.scales:
            out = out * scale
        return h + out


class Unread(nn.Module):
    """A module without a use of its second input, which no other module uses either."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, DIM)
        self.enc = nn.Linear(DIM, DIM)
        self.block = Reader()
        self.output = nn.Linear(DIM, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.embed(tokens)
        h = self.block(h, self.enc(h))
        return F.cross_entropy(self.output(h).flatten(0, 1), targets.flatten())


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, h: Tensor, _unread: Tensor) -> Tensor:
        return self.inner(h)


class Residual(nn.Module):
    """Normalisations beside a residual stream, as units of their own or of several modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, DIM)
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(3))
        self.layers = nn.ModuleList(Gated() for _ in range(3))
        self.output = nn.Linear(DIM, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            h = h + layer(norm(h)) * h
        return F.cross_entropy(self.output(h).flatten(0, 1), targets.flatten())


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.gate = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * self.gate(x).sigmoid() + x


class Attention(nn.Module):
    """nn.MultiheadAttention takes another path where query, key and value are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.output = nn.Linear(DIM, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.embed(tokens)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return F.cross_entropy(self.output(h).flatten(0, 1), targets.flatten())


def t5() -> nn.Module:
    """Its decoder blocks read one memory, and all blocks of a stack one position bias."""
    torch.manual_seed(0)
    return EncoderDecoder(
        transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=256,
                d_model=32,
                d_kv=8,
                d_ff=64,
                num_layers=3,
                num_heads=4,
                dropout_rate=0.1,
                decoder_start_token_id=0,
            )
        )
    )


def bart() -> nn.Module:
    torch.manual_seed(0)
    return EncoderDecoder(
        transformers.BartForConditionalGeneration(
            transformers.BartConfig(
                vocab_size=256,
                d_model=32,
                encoder_layers=2,
                decoder_layers=3,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                max_position_embeddings=64,
                dropout=0.1,
            )
        )
    )


class EncoderDecoder(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.net(input_ids=tokens, labels=targets).loss
        return loss
