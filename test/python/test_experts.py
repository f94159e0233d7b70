"""Mixtures of experts: what has a static shape is compiled, the rest runs as FSDP2 does."""

from __future__ import annotations

from pathlib import Path

import fsdp_mlir
import pytest
import torch
from fsdp_mlir import CaptureError
from torch import Tensor, nn
from torch.nn import functional as F
from twins import Twins

SGD = (torch.optim.SGD, {"lr": 0.1})
X = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))


class Experts(nn.Module):
    """Each row goes through the expert that its place in the sorted rows says."""

    def __init__(self, dim: int, count: int, *, grouped: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, dim, dim) * 0.1)
        self.gate = nn.Parameter(torch.randn(count, dim, dim) * 0.1)
        self.down = nn.Parameter(torch.randn(count, dim, dim) * 0.1)
        self.grouped = grouped

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        if not self.grouped:
            parts = torch.split(x, rows.tolist())
            return torch.cat(
                [
                    (F.silu(part @ self.up[i].t()) * (part @ self.gate[i].t())) @ self.down[i].t()
                    for i, part in enumerate(parts)
                ]
            )
        ends = torch.cumsum(rows, dim=0, dtype=torch.int32)
        up, gate, down = (w.bfloat16().transpose(-2, -1) for w in (self.up, self.gate, self.down))
        h = F.silu(torch._grouped_mm(x.bfloat16(), up, offs=ends))
        h = h * torch._grouped_mm(x.bfloat16(), gate, offs=ends)
        return torch._grouped_mm(h, down, offs=ends).type_as(x)


class Mixture(nn.Module):
    """Tokens choose their top two experts, by sigmoid scores with a bias that balances the load."""

    def __init__(self, counts: str, *, grouped: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.counts, self.count, self.top = counts, 4, 2
        self.embed = nn.Linear(32, 32)
        self.router = nn.Linear(32, self.count, bias=False)
        self.experts = Experts(32, self.count, grouped=grouped)
        self.shared = nn.Linear(32, 32)
        self.register_buffer("bias", torch.zeros(self.count))
        self.register_buffer("seen", torch.zeros(self.count), persistent=False)

    def rows(self, chosen: Tensor) -> Tensor:
        flat = chosen.reshape(-1)
        if self.counts == "histc":
            return torch.histc(flat.float(), bins=self.count, min=0, max=self.count)
        return torch.bincount(flat, minlength=self.count)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).reshape(-1, 32)
        scores = torch.sigmoid(self.router(x).float())
        _, chosen = torch.topk(scores + self.bias, k=self.top, dim=1)
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        rows = self.rows(chosen)
        with torch.no_grad():
            self.seen.add_(rows)
        order = torch.argsort(chosen.reshape(-1), stable=True)
        place = (order // self.top).reshape(-1, 1).expand(-1, 32)
        routed = torch.gather(x, 0, place) * weights.reshape(-1)[order].reshape(-1, 1)
        out = self.shared(x).scatter_add(0, place, self.experts(routed, rows))
        return out.square().mean()


@pytest.mark.parametrize("counts", ["histc", "bincount"])
def test_grouped_experts_have_a_plan(counts: str) -> None:
    twins = Twins(lambda: Mixture(counts), {"x": X}, SGD, fallback="error", evaluation=True)
    twins.assert_equal_steps(3)


def test_splits_by_data_run_in_python() -> None:
    twins = Twins(lambda: Mixture("bincount", grouped=False), {"x": X}, SGD)
    with pytest.warns(UserWarning, match=r"'experts' .* in Python, .*'aten._local_scalar_dense"):
        twins.assert_equal_steps(3)


class Counting(nn.Module):
    def __init__(self, most: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.most = most

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        y = self.linear(x)
        computed = kinds + (y.sum() * 0).long()
        return y.sum() * torch.bincount(computed, minlength=self.most).max()


def test_count_of_more_kinds_than_said(tmp_path: Path) -> None:
    """Its length is data then."""
    inputs = {"x": torch.ones(3, 4), "kinds": torch.tensor([0, 1, 5])}
    options = {"kwargs": inputs, "check": True, "path": tmp_path / "model.pt"}
    with pytest.raises(CaptureError, match=r"test_experts.py:\d+: 'aten.bincount.default' gives"):
        fsdp_mlir.capture(Counting(2), **options)
    with pytest.raises(CaptureError, match="depends on the data of a tensor"):
        fsdp_mlir.capture(Counting(0), **options)


def test_count_of_more_kinds_in_a_later_batch_ends_the_step() -> None:
    inputs = {"x": torch.ones(3, 4), "kinds": torch.tensor([0, 1, 1])}
    model = fsdp_mlir.fully_shard(Counting(2))
    step = fsdp_mlir.compile(model, optimizer=SGD, example=inputs, fallback="error")
    step(inputs)
    with pytest.raises(RuntimeError, match=r"aten::bincount .* expected a result of shape \[2\]"):
        step(x=inputs["x"], kinds=torch.tensor([0, 1, 5]))
