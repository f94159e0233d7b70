"""How many calls of its unit backward goes through before the gradient of a parameter is whole."""

from __future__ import annotations

from pathlib import Path

import fsdp_mlir
import pytest
import torch
import yaml
from fsdp_mlir.modules.compute_loss import ComputeLoss
from graphs import Captured
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, alone: bool = False) -> Tensor:
        return self.b(x if alone else self.a(x)).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4, bias=False), Layer()

    def forward(self, x: Tensor, alone: bool = False, reentrant: bool = False) -> Tensor:
        x = self.first(x)
        for each in (alone, False):
            if reentrant:
                x = checkpoint(self.layer, x, each, use_reentrant=True)
            else:
                x = self.layer(x, each)
        return x


def captured(loss: object, folder: Path) -> dict[str, int]:
    config = folder / "config.yaml"
    config.write_text(
        yaml.safe_dump({"units": [{"match": "layer"}], "optimizer": {"name": "sgd", "lr": 0.1}})
    )
    path = folder / "model.pt"
    batch = {"x": torch.ones(2, 4)}
    fsdp_mlir.capture(Net(), kwargs=batch, loss=ComputeLoss(loss), config=config, path=path)
    params = Captured.load(path).record["params"]
    return {each["name"]: each["post_backward"] for each in params if "post_backward" in each}


def test_the_call_that_a_gradient_waits_for(tmp_path: Path) -> None:
    assert captured(lambda m, x: m(x, alone=True).mean(), tmp_path) == {"layer.b.weight": 1}
    both = {"layer.a.weight": 1, "layer.b.weight": 1}
    assert captured(lambda m, x: m(x).mean(), tmp_path) == both


def test_calls_of_the_root(tmp_path: Path) -> None:
    """The second one takes what the first one gives."""
    waits = {"layer.a.weight": 3, "layer.b.weight": 3, "first.weight": 1}
    assert captured(lambda m, x: m(m(x)).mean(), tmp_path) == waits


def test_several_calls_in_reentrant_checkpoints(tmp_path: Path) -> None:
    line = "unit 'layer' is called 2 times in a step with reentrant checkpoints"
    with pytest.raises(fsdp_mlir.CaptureError, match=line):
        captured(lambda m, x: m(x, reentrant=True).mean(), tmp_path)
    assert not (tmp_path / "model.pt").exists()
