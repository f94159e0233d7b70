"""Models that depend on strides, masks and complex numbers; both sides import them by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PIXELS, CLASSES = 8, 10


class ConvNet(nn.Module):
    """Convolutions of what is not row-major: a buffer, a constant, and the images as given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * PIXELS // 2, CLASSES)
        shift = torch.randn(1, 8, PIXELS, PIXELS).to(memory_format=torch.channels_last)
        self.register_buffer("shift", shift)
        self.scale = torch.randn(8, 1, 1).expand(8, PIXELS, PIXELS)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.first(images) * self.scale + self.shift
        for block in self.blocks:
            x = x + F.softplus(block(x))
        x = F.max_pool2d(self.norm(x), 2)
        rows = x.as_strided((x.shape[0], 8 * PIXELS // 2), (x.stride(0), 1))
        return F.cross_entropy(self.head(rows), labels)


class ChannelsLast(ConvNet):
    """The same of images that the caller lays out so."""

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return super().forward(images.contiguous(memory_format=torch.channels_last), labels)


class TransposedLoss(nn.Module):
    """A loss of a transposed result: its gradient has the strides of the CPU's kernel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(3 * PIXELS, 3 * PIXELS) for _ in range(2))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = images.flatten(1, 2)
        for block in self.blocks:
            x = F.logsigmoid(block(x.transpose(1, 2)).transpose(1, 2))
        return F.mse_loss(x, labels[:, None, None].float().expand_as(x))


class Rows(nn.Module):
    """Has blocks for the rows of images, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(PIXELS, PIXELS) for _ in range(2))
        self.head = nn.Linear(PIXELS, CLASSES)


class Masked(Rows):
    """Masks that do not change as indices, and an assertion."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.arange(3 * PIXELS) % 5 != 0)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = images.flatten(1, 2)
        assert torch.isfinite(x).all()
        for block in self.blocks:
            x = x + block(x).tanh()
        x = x[:, self.kept]
        x = x[:, torch.linspace(0, 1, x.shape[1]) > 0.2]
        return F.cross_entropy(self.head(x.mean(1)), labels)


class Complex(Rows):
    """Rotary embeddings by complex numbers, and a mixing by FFT."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(3 * PIXELS), 1e2 ** -torch.linspace(0, 1, PIXELS // 2))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = images.flatten(1, 2)
        for block in self.blocks:
            pairs = torch.view_as_complex(block(x).unflatten(-1, (-1, 2)))
            x = x + torch.view_as_real(pairs * self.turns * (0.5 - 1j)).flatten(-2)
        x = torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2j, n=x.shape[1], dim=1)
        return F.cross_entropy(self.head(x.mean(1) + x[:, 0]), labels)
