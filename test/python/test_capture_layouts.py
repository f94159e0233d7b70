"""Strides of what the step takes from outside are recorded, and the step is eager's with them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import fsdp_mlir
import pytest
import torch
from fsdp_mlir.support.errors import CaptureError
from graphs import Captured, assert_same_step
from torch import Tensor, nn

DENSE = torch.arange(120, dtype=torch.float32).reshape(2, 3, 4, 5)

LAYOUTS = {
    "contiguous": (DENSE, None),
    "channels_last": (DENSE.to(memory_format=torch.channels_last), [60, 1, 15, 3]),
    "permuted": (DENSE.permute(3, 1, 0, 2), [1, 20, 60, 5]),
    "sliced": (DENSE[:, :, ::2], None),
    "sliced_columns": (DENSE.transpose(1, 3)[:, :2], [24, 1, 2, 8]),
    "expanded": (DENSE[:, :1].expand(2, 3, 4, 5), [20, 0, 5, 1]),
    "expanded_transposed": (DENSE[:, :1].expand(2, 3, 4, 5).transpose(2, 3), [20, 0, 1, 5]),
    "empty": (DENSE[:0].transpose(1, 2), None),
}


class Holder(nn.Module):
    """Reads a buffer, a tensor that it holds besides, and an input."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("buffer", tensor)
        self.beside = [deepcopy(tensor)]

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.sum() * (self.buffer * self.beside[0]).sum() * x).sum()


def capture(model: nn.Module, tmp_path: Path, **inputs: Tensor) -> Captured:
    fsdp_mlir.capture(model, kwargs=inputs, path=tmp_path / "model.pt")
    return Captured.load(tmp_path / "model.pt")


def strides(entries: list[dict[str, Any]]) -> list[list[int] | None]:
    return [entry.get("strides") for entry in entries]


@pytest.mark.parametrize(("tensor", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_strides_are_recorded(tmp_path: Path, tensor: Tensor, expected: list[int] | None) -> None:
    captured = capture(Holder(tensor), tmp_path, x=torch.ones(2))
    assert strides(captured.record["params"]) == [None]
    assert strides(captured.record["buffers"]) == [expected, expected]
    assert all(torch.equal(captured.weights[name], tensor) for name in ("buffer", "(constant).0"))


@pytest.mark.parametrize(("tensor", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_inputs_hold_every_sample(
    tmp_path: Path, tensor: Tensor, expected: list[int] | None
) -> None:
    """An expanded example says nothing about the data of other steps."""
    if expected and 0 in expected:
        expected = torch.empty_like(tensor).stride()
        expected = None if torch.empty_like(tensor).is_contiguous() else list(expected)
    captured = capture(Holder(torch.ones(2)), tmp_path, x=tensor)
    assert strides(captured.record["inputs"]) == [expected]


class Window(nn.Module):
    """Reads a tensor by its strides."""

    def __init__(self, tensor: Tensor, offset: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("buffer", tensor)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        window = self.buffer.as_strided((3, 4), (4, 1), self.offset)
        return (window * self.weight).cos().sum() + x.as_strided((6,), (2,)).sin().sum()


INPUT = torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("tensor", "offset"),
    [
        (DENSE[0, 0].t(), None),
        (DENSE[0, 0].t().contiguous().t(), 2),
        (DENSE.to(memory_format=torch.channels_last), 1),
        (DENSE[0], None),
        (DENSE[1], None),
        (DENSE[:1, :1].expand(2, 3, 4, 5), None),
    ],
)
def test_as_strided_reads_what_eager_reads(
    tmp_path: Path, tensor: Tensor, offset: int | None
) -> None:
    model = Window(tensor, offset)
    assert_same_step(model, capture(model, tmp_path, x=INPUT), {"x": INPUT})


@pytest.mark.parametrize(("tensor", "offset"), [(DENSE[1], 0), (DENSE[:, :, ::2], None)])
def test_as_strided_of_a_part_is_refused(
    tmp_path: Path, tensor: Tensor, offset: int | None
) -> None:
    message = (
        r"test_capture_layouts\.py:\d+: 'aten\.as_strided' of a tensor of shape \[.*\] that is a "
        r"part of a larger one; expected one with a storage of its own, as \.clone\(\) gives"
    )
    with pytest.raises(CaptureError, match=message):
        capture(Window(tensor, offset), tmp_path, x=INPUT)


def test_as_strided_of_an_expanded_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="that is a part of a larger one"):
        capture(Window(DENSE[0], None), tmp_path, x=torch.ones(1, 12).expand(4, 12))


def test_results_have_strides(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    path = tmp_path / "model.pt"
    fsdp_mlir.capture(model, args=[x], loss=lambda y: y.square().sum(), path=path)
    nodes = {node["op"]: node["outs"][0] for node in Captured.load(path).record["nodes"]}
    assert nodes["aten::relu"]["strides"] == [80, 1, 20, 4]
    assert "strides" not in nodes["aten::sum"]
