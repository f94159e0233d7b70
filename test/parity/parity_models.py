"""Models that only the parity tests need; both sides import them by name."""

from __future__ import annotations

import fnmatch

import torch
from fsdp_mlir.models import llama
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import resnet, vision_transformer


def frozen_llama(pattern: str) -> nn.Module:
    """The debug Llama with the parameters that match `pattern` frozen."""
    model = llama.llama_debug()
    for name, parameter in model.named_parameters():
        if fnmatch.fnmatchcase(name, pattern):
            parameter.requires_grad_(False)
    return model


class Scaled(nn.Module):
    """A module with parameters of its own before those of its children, some of three rows: at
    four ranks shards are uneven and empty."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((dim,), 0.5))
        self.mixture = nn.Parameter(torch.eye(3))
        self.inner = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        head, tail = x[..., :3] @ self.mixture, x[..., 3:]
        return torch.tanh(self.inner(torch.cat([head, tail], -1))) * self.scale


class OwnParameters(nn.Module):
    """Its parameters() yields another order than FSDP2's units have."""

    def __init__(self, vocab: int, dim: int, layers: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, vocab))
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Scaled(dim) for _ in range(layers))
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.output(x) + self.shift
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Stateful(OwnParameters):
    """With dropout, a mutated buffer and a frozen, tied parameter besides."""

    def __init__(self) -> None:
        super().__init__(vocab=256, dim=20, layers=2)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.base = nn.Linear(20, 20)
        self.base.weight.requires_grad_(False)
        self.again = self.base

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.seen.add_(tokens.shape[0])
        x = self.dropout(self.embedding(tokens)) * self.scratch.sum()
        for layer in self.layers:
            x = x + self.again(layer(x))
        logits = self.output(x) + self.shift
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _split(module: nn.Module, state: dict, prefix: str, _metadata: object) -> None:
    fused = state.pop(f"{prefix}fused")
    state |= dict(zip((f"{prefix}{name}" for name in "qkv"), fused.chunk(3), strict=True))


def _join(module: nn.Module, state: dict, prefix: str, *_: object) -> None:
    state[f"{prefix}fused"] = torch.cat([state.pop(f"{prefix}{name}") for name in "qkv"])


class FusedProjections(nn.Module):
    """Saves its one weight as three, its bias by another name, and a count besides."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(3 * dim, dim) / dim)
        self.shift = nn.Parameter(torch.zeros(dim))
        self.count = 3
        self._register_state_dict_hook(_split)
        self.register_load_state_dict_pre_hook(_join)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.fused).chunk(3, -1)
        return torch.tanh(q * k + v + self.shift)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.count)

    def set_extra_state(self, state: Tensor) -> None:
        assert int(state) == self.count

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}bias"] = destination.pop(f"{prefix}shift")

    def _load_from_state_dict(self, state: dict, prefix: str, *args: object) -> None:
        state[f"{prefix}shift"] = state.pop(f"{prefix}bias")
        super()._load_from_state_dict(state, prefix, *args)


class Renamed(OwnParameters):
    """With layers whose state dict has other names than their parameters."""

    def __init__(self) -> None:
        super().__init__(vocab=256, dim=20, layers=0)
        self.layers.extend(FusedProjections(20) for _ in range(2))


class WithoutInputs(nn.Module):
    """Forward takes nothing: the data are the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("data", torch.randn(6, 10))
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.output = nn.Linear(10, 3)

    def forward(self) -> Tensor:
        x = self.data
        for layer in self.layers:
            x = layer(x).relu()
        return self.output(x).square().mean()


def own_parameters(vocab: int = 256, dim: int = 20, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return OwnParameters(vocab, dim, layers)


class Classifier(nn.Module):
    """An image model with its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(images), labels)


def resnet18() -> nn.Module:
    """torchvision's ResNet-18: BatchNorm, whose buffers every step mutates."""
    torch.manual_seed(0)
    return Classifier(resnet.resnet18(num_classes=10))


def resnet18_without_mkldnn() -> nn.Module:
    """In a script that turns oneDNN off, for the whole process."""
    torch._C._set_mkldnn_enabled(False)
    return resnet18()


def resnet50() -> nn.Module:
    """Bottlenecks, the first of each row with a downsampling branch."""
    torch.manual_seed(0)
    return Classifier(resnet.resnet50(num_classes=10))


def vit_b_16() -> nn.Module:
    torch.manual_seed(0)
    return Classifier(vision_transformer.vit_b_16(num_classes=10))


class PartlyUsed(nn.Module):
    """Two blocks, of which forward uses one, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, 16)
        self.used = nn.Linear(16, 16)
        self.unused = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.spare = nn.Parameter(torch.ones(5))
        self.output = nn.Linear(16, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.used(self.embed(tokens)) * self.scale
        return F.cross_entropy(self.output(x).flatten(0, 1), targets.flatten())


class Norms(nn.Module):
    """Tokens through normalisations that have parameters and, but for one, no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 24)
        self.layer_norm = nn.LayerNorm(24)
        self.group_norm = nn.GroupNorm(4, 24)
        self.batch_norm = nn.BatchNorm1d(24)
        self.output = nn.Linear(24, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.layer_norm(self.embed(tokens)).transpose(1, 2)
        x = self.output(self.batch_norm(self.group_norm(x)).transpose(1, 2))
        return F.cross_entropy(x.flatten(0, 1).float(), targets.flatten())


def norms() -> nn.Module:
    torch.manual_seed(0)
    return Norms()
