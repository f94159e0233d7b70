"""The captured evaluation gives the model's loss in eval mode, bit for bit."""

from __future__ import annotations

from pathlib import Path

import fsdp_mlir
import pytest
import torch
import torch.nn.functional as F
from fsdp_mlir.models.gpt2 import gpt2_debug_dropout
from graphs import Captured
from torch import Tensor, nn


def captured(tmp_path: Path, model: nn.Module, **inputs: Tensor) -> Captured:
    path = tmp_path / "model.pt"
    assert fsdp_mlir.capture(model, kwargs=inputs, evaluation=True, path=path, check=True).checked
    return Captured.load(path)


def eval_loss(model: nn.Module, **inputs: Tensor) -> Tensor:
    with torch.no_grad():
        output = model.eval()(**inputs)
    return output if isinstance(output, Tensor) else output.loss


def test_dropout_is_off(tmp_path: Path) -> None:
    model, ids = gpt2_debug_dropout(), torch.arange(64).view(2, 32)
    capture = captured(tmp_path, model, input_ids=ids, labels=ids)
    assert model.training
    loss = capture.run_evaluation({"input_ids": ids, "labels": ids})
    assert torch.equal(loss, eval_loss(model, input_ids=ids, labels=ids))


class Norm(nn.Module):
    """Batch normalisation, a constant used in both modes and one used in eval mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.layer = nn.Linear(6, 3)
        self.both, self.single = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 0.25, 4.0])
        self.dropout = nn.Dropout()
        self.dropout.eval()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.dropout(self.norm(x))) * self.both
        if not self.training:
            y = F.relu(y + self.single)
        return y.square().mean()


def test_running_statistics_and_constants(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Norm(), torch.randn(8, 6)
    capture = captured(tmp_path, model, x=x)
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert [b["name"] for b in capture.record["buffers"][-2:]] == ["(constant).0", "(constant).1"]
    capture.run({"x": x})  # updates the running statistics, as training does
    model(x)
    before = {name: value.clone() for name, value in capture.weights.items()}
    loss = capture.run_evaluation({"x": x})
    assert torch.equal(loss, eval_loss(model, x=x))
    assert all(torch.equal(capture.weights[name], value) for name, value in before.items())


def test_without_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fsdp_mlir.capture(Norm(), kwargs={"x": torch.randn(8, 6)}, path=path)
    capture = Captured.load(path)
    assert capture.record["evaluation"] is None and capture.evaluation is None


class Breaks(Norm):
    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        return loss if self.training else loss ** loss.item()


def test_what_cannot_be_captured_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(fsdp_mlir.CaptureError, match=r"test_evaluation_capture\.py:\d+: "):
        captured(tmp_path, Breaks(), x=torch.randn(8, 6))
    assert not list(tmp_path.iterdir())
