"""What capture records of activation checkpointing in the model itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_mlir import capture
from graphs import Captured
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    """A linear map and noise, checkpointed `times` over with `options`."""

    def __init__(self, times: int = 1, **options: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.times = times
        self.options = {"use_reentrant": False, **options}

    def forward(self, x: Tensor) -> Tensor:
        return self.again(x, self.times).square().sum()

    def again(self, x: Tensor, times: int) -> Tensor:
        if times == 0:
            return F.dropout(self.linear(x).sin(), 0.5).cos() * torch.rand_like(x)
        return checkpoint(self.again, x, times - 1, **self.options)


def calls(path: Path, model: nn.Module) -> tuple[Counter[str], Counter[str]]:
    """How often forward and backward make each call."""
    capture(model, [torch.ones(2, 4)], path=path / "model.pt", check=True)
    record = Captured.load(path / "model.pt").record
    names = [node["op"].removeprefix("aten::") for node in record["nodes"]]
    return Counter(names[: record["backward_begin"]]), Counter(names[record["backward_begin"] :])


@pytest.mark.parametrize("times", [1, 2, 3])
def test_recomputed_in_backward_with_the_numbers_of_forward(tmp_path: Path, times: int) -> None:
    forward, backward = calls(tmp_path, Checkpointed(times))
    assert forward["bernoulli_"] == forward["rand_like"] == 1
    assert forward["clone"] >= 1  # of draws
    assert backward["addmm"] >= 1
    assert backward["copy_"] >= 1
    assert backward["bernoulli_"] == backward["rand_like"] == 0


def test_fresh_numbers_where_the_generator_is_not_put_back(tmp_path: Path) -> None:
    _, backward = calls(tmp_path, Checkpointed(preserve_rng_state=False))
    assert backward["bernoulli_"] == backward["rand_like"] == 1
    assert backward["copy_"] == backward["clone"] == 0


def test_nothing_is_kept_of_draws_that_are_not_made_again(tmp_path: Path) -> None:
    forward, _ = calls(tmp_path, Checkpointed(times=0))
    assert forward["clone"] == 0


def test_generator_stays_as_it_was(tmp_path: Path) -> None:
    model = Checkpointed()
    before = torch.get_rng_state()
    calls(tmp_path, model)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_is_wrapped_itself(tmp_path: Path) -> None:
    """Its parameters() leave the wrapper out of their names."""
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    done = capture(
        checkpoint_wrapper(inner),
        (torch.randn(2, 3),),
        loss=torch.sum,
        path=tmp_path / "model.pt",
    )
    assert done.params == 4
