"""Fixtures of the tests that interrupt saves."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsdp_mlir
import pytest
import torch
from runs import BIN, Job
from safetensors.torch import save_file


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("test/faults")
    group.addoption("--exhaustive-faults", action="store_true", help="pairs of lost operations too")


@pytest.fixture(scope="session")
def exhaustive(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--exhaustive-faults"))


class Net(torch.nn.Module):
    """Has parameters of uneven shards, dropout, and buffers that differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 201), torch.nn.BatchNorm1d(201))
        self.head = torch.nn.Linear(201, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.dropout(self.inner(x), 0.25)
        return torch.nn.functional.mse_loss(self.head(hidden), y)


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("job")
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 4), "y": torch.randn(4, 3)}
    config = folder / "config.yaml"
    config.write_text("units: [{match: inner}]\noptimizer: {name: adamw, lr: 0.01}\n")
    archive = folder / "model.pt"
    fsdp_mlir.capture(Net(), (), inputs, config=str(config), path=str(archive))
    plan = folder / "plan.json"
    command = [BIN / "fsdp-opt", archive, "--config", config, "--world-size", 2, "--emit", "plan"]
    subprocess.run([*map(str, command), "-o", str(plan)], check=True)
    data = folder / "data.safetensors"
    save_file({"x": torch.randn(64, 4), "y": torch.randn(64, 3)}, str(data))
    return Job(plan, data)


@pytest.fixture()
def scratch() -> Iterator[Path]:
    """A folder in memory, where thousands of small files cost little."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder / "states"
    shutil.rmtree(folder)
