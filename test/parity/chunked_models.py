"""Models that differ in what lies between the last hidden state and the loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH = 50, 24
IGNORED = 3


class Body(nn.Module):
    """Tokens -> [batch, seq, width], in float64: sums in another order show in the last digits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.double()

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.hidden(tokens))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Capped(Body):
    """A bias, logits that are capped as Gemma's are, and targets that are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB).double()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.hidden(tokens))
        logits = 5.0 * torch.tanh(logits / 5.0)
        return F.cross_entropy(logits.view(-1, VOCAB), targets.flatten(), ignore_index=IGNORED)


class Summed(Body):
    """torchtitan's loss: the sum over the tokens, in float32 or wider, divided by their number."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.hidden(tokens))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss / targets.numel()


class Weighted(Body):
    """A weight for each token."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.hidden(tokens)).view(-1, VOCAB)
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
        weights = (tokens.flatten() % 3).to(losses.dtype)
        return (losses * weights).sum() / weights.sum().clamp(min=1)


class Tied(Body):
    """The head's weight is the embedding's, and a second loss looks at the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.hidden(tokens)
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss + 0.1 * hidden.square().mean()


class Transposed(Body):
    """A weight as GPT-2's Conv1D has it, [in, out], and a scale per class."""

    def __init__(self) -> None:
        super().__init__()
        self.head = None
        self.projection = nn.Parameter(torch.randn(WIDTH, VOCAB, dtype=torch.float64) / 5)
        self.scale = nn.Parameter(torch.ones(VOCAB, dtype=torch.float64))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = (self.hidden(tokens) @ self.projection) * self.scale
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Measured(Body):
    """The logits are also what a second loss is computed from: they are needed whole."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.hidden(tokens))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss + 1e-3 * logits.square().mean()


class Smoothed(Body):
    """Label smoothing."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.hidden(tokens))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


class Balanced(Body):
    """A weight for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("balance", torch.linspace(0.5, 1.5, VOCAB, dtype=torch.float64))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.hidden(tokens))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=self.balance)


class Regression(Body):
    """No cross-entropy at all."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return (self.head(self.hidden(tokens)).mean(-1) - targets).square().mean()


class Penalised(Body):
    """After the loss, forward calls a layer, and reads parameters for a penalty."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.layers[0](hidden).tanh()
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())
        loss = loss + self.layers[1](hidden).tanh().square().mean()
        return loss + 1e-2 * self.head.weight.square().sum()
