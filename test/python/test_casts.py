"""What `float` and `int` make of tensors, and of numbers of each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import test_items
import test_numbers
import torch
from test_items import LABELS
from torch import Tensor, nn
from torch.nn import functional as F


def of_tensors(model: nn.Module, x: Tensor) -> Any:
    output = model(x)
    loss, positive = F.cross_entropy(output, LABELS), int((x > 0).sum())
    share = float((output.argmax(-1) == LABELS).float().mean())
    low = min(map(float, (loss.detach(), output.mean())))
    if isinstance(share, float) and not isinstance(positive, (float, str)):
        loss = loss / (positive + 1) + share * output.mean() + float(positive) * output[0, 0]
    thirds = np.array([1, 2], dtype=float).mean() / np.zeros(3, dtype=int).size
    rest = {"low": low, "whole": int(loss * 10), "most": float("inf"), "thirds": thirds.item()}
    return loss * thirds, {"positive": positive, "loss": float(loss), **rest}


def of_a_dtype(model: nn.Module, x: Tensor) -> Any:
    """Which torch takes `float` for."""
    loss = F.cross_entropy(model(x), LABELS)
    return loss + torch.ones((), dtype=float), float(loss)  # type: ignore[arg-type]


def of_a_number(model: nn.Module, x: Tensor, n: int) -> Any:
    return F.cross_entropy(model(x), LABELS) * float(n)


def test_of_tensors() -> None:
    want, _ = test_items._results(of_tensors, compiled=False)
    got, lines = test_items._results(of_tensors, compiled=True)
    assert test_items._plain(got) == test_items._plain(want)
    assert lines == []


def test_as_a_dtype() -> None:
    want, _ = test_items._results(of_a_dtype, compiled=False)
    got, lines = test_items._results(of_a_dtype, compiled=True)
    assert test_items._plain(got) == test_items._plain(want)
    assert len(lines) == 1 and "test_casts.py:" in lines[0] and "depends on the data" in lines[0]


def test_of_numbers() -> None:
    calls = [(n,) for n in range(1, 8)]
    got, lines, captures = test_numbers._results(of_a_number, calls, compiled=True)
    want, _, _ = test_numbers._results(of_a_number, calls, compiled=False)
    assert got == want
    assert lines == [] and captures == 2
