"""Models whose graphs are unusual; both sides of a comparison import them by name."""

from __future__ import annotations

import torch
from fsdp_mlir.models import llama
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, DIM = 256, 18


class Block(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class IgnoredOutput(nn.Module):
    """Runs both blocks; the loss ignores what the second one computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.first, self.second = Block(), Block()
        self.output = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.first(x)
        self.second(x)
        return next_token_loss(self.output(y), targets)


class Recurrent(nn.Module):
    """Layers of LSTM and GRU, both ways, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(
            kind(DIM, DIM // 2, num_layers=2, dropout=0.1, bidirectional=True, batch_first=True)
            for kind in (nn.LSTM, nn.GRU)
        )
        self.output = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)[0]
        return next_token_loss(self.output(x), targets)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x) * scale


class ExternalInputs(nn.Module):
    """The second unit takes a tensor that no unit made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.first, self.second = nn.Linear(DIM, DIM), Scaled()
        self.output = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scale = torch.full((tokens.shape[1], DIM), 1 / 3, dtype=torch.float32)
        x = self.second(self.first(self.embed(tokens)), scale)
        return next_token_loss(self.output(x.to(self.output.weight.dtype)), targets)


class Reused(nn.Module):
    """Blocks that forward uses three times over; those in `frozen` are frozen."""

    def __init__(self, frozen: list[int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.output = nn.Linear(DIM, VOCAB)
        for index in frozen or []:
            self.blocks[index].requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return next_token_loss(self.output(x), targets)


class TwoBlocks(nn.Module):
    """An embedding, two blocks and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.output = nn.Linear(DIM, VOCAB)

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Preference(TwoBlocks):
    """Two forwards of one model before the backward, as preference losses have them."""

    def score(self, tokens: Tensor) -> Tensor:
        x = self.run_blocks(self.embed(tokens))
        chosen = self.output(x).log_softmax(-1).gather(-1, tokens.unsqueeze(-1))
        return chosen.mean((1, 2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return -F.logsigmoid(self.score(tokens) - self.score(targets)).mean()


class Shared(nn.Module):
    """One block under two names, one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks.append(self.blocks[0])
        self.output = nn.Linear(DIM, VOCAB, bias=False)
        self.output.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return next_token_loss(self.output(x), targets)


class ClassToken(TwoBlocks):
    """For one sample, the gradient of the token is a part of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, DIM))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        token = self.token.expand(len(tokens), -1, -1)
        x = self.run_blocks(torch.cat([token, self.embed(tokens)], 1))
        return next_token_loss(self.output(x[:, 1:] * x[:, :1]), targets)


class EmbeddingHeavy(nn.Module):
    """Nearly all parameters are tables of the root unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(4096, 48)
        self.positions = nn.Embedding(512, 48)
        self.blocks = nn.ModuleList(Block(48) for _ in range(2))
        self.output = nn.Linear(48, 4096, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return next_token_loss(self.output(x), targets)


def llama_float64() -> nn.Module:
    return llama.llama_debug().double()


class EmptyWeight(TwoBlocks):
    """As MobileBERT has it where the embedding is as wide as the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.randn(0, 16))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.run_blocks(self.embed(tokens))
        weight = torch.cat([self.output.weight.view(-1, 16), self.empty]).view(VOCAB, DIM)
        return next_token_loss(F.linear(x, weight, self.output.bias), targets)


class WeightRead(TwoBlocks):
    """The weight of a unit is read again outside of the unit."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.run_blocks(self.embed(tokens))
        decay = sum(p.float().square().mean() for p in self.blocks.parameters())
        return next_token_loss(self.output(x).float(), targets) + decay


class ScaledInPlace(TwoBlocks):
    """In bfloat16, by numbers that bfloat16 does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.run_blocks(self.embed(tokens))
        x *= 0.9
        x.mul_(1.1).div_(1.3).add_(0.7).sub_(0.3)
        return next_token_loss(self.output(x).float(), targets)
