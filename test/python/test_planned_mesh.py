"""A model captured in one process for a mesh of ranks that are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_mlir import CaptureError, capture, planned_mesh
from fsdp_mlir.capture import cli
from graphs import Captured
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

INPUTS = ["--inputs", "x=float32[2,8]", "--loss", f"{__name__}:loss"]
MODEL = ["--model", f"{__name__}:feed_forward", "--meta", *INPUTS]


def feed_forward(mesh: DeviceMesh, width: int = 16) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))
    if "tensor" in (mesh.mesh_dim_names or ()):
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
    return model


class Named(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.inner = feed_forward(mesh)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def loss(y: Tensor) -> Tensor:
    return y.square().sum()


def captured(tmp_path: Path, *options: str) -> dict[str, Any]:
    path = tmp_path / "model.pt"
    model = [option.replace("feed_forward", "Named") for option in MODEL]
    assert cli.main([*model, *options, "-o", str(path)]) == 0
    assert not dist.is_initialized()
    return Captured.load(path).record


@pytest.mark.parametrize(
    ("options", "parallel"),
    [
        (["--mesh", "data=4,tensor=2"], (2, 2, (2, 1))),
        (["--mesh", "data=1,tensor=2"], (2, 2, (2, 1))),
        (["--mesh", "tensor=2,data=4", "--shard-over", "data"], (2, 1, (2, 4))),
        # Of HSDP's two axes and a third.
        (["--mesh", "replicas=3,data=2,tensor=4", "--shard-over", "replicas,data"], (4, 4, (4, 1))),
        (["--mesh", "data=4"], None),
    ],
    ids=["inner", "alone", "outer", "replicas", "none"],
)
def test_axes(
    options: list[str], parallel: tuple[int, int, tuple[int, int]] | None, tmp_path: Path
) -> None:
    record = captured(tmp_path, *options)
    if parallel is None:
        assert record["model_parallel"] is None
        return
    ranks, data_stride, (of_axis, stride) = parallel
    # PyTorch gives an axis of all ranks the group that is there already.
    name = "default_pg" if "data=1" in options[1] else "tensor"
    axis = {"name": name, "ranks": of_axis, "stride": stride}
    assert record["model_parallel"] == {"ranks": ranks, "data_stride": data_stride, "axes": [axis]}
    rows = {param["name"]: param["shape"] for param in record["params"]}
    assert rows["inner.0.weight"] == [16 // of_axis, 8]
    assert rows["inner.2.weight"] == [8, 16 // of_axis]
    assert [n["op"] for n in record["nodes"] if "c10d" in n["op"]] == [
        "_c10d_functional::all_reduce"
    ]


class Nested(nn.Module):
    """Collectives over an axis, and over it and another together."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.groups = [mesh["tensor"].get_group(), mesh["context", "tensor"]._flatten().get_group()]

    def forward(self, x: Tensor) -> Tensor:
        for group in self.groups:
            x = x + torch.distributed._functional_collectives.all_reduce(x, "sum", group)
        return self.inner(x)


def test_an_axis_within_another(tmp_path: Path) -> None:
    """Its ranks are not counted twice."""
    path = tmp_path / "model.pt"
    with planned_mesh({"data": 3, "context": 2, "tensor": 2}) as mesh, torch.device("meta"):
        capture(
            Nested(mesh),
            kwargs={"x": torch.zeros(2, 8, device="cpu")},
            loss=loss,
            data_ranks=mesh["data"].mesh.tolist(),
            path=path,
        )
    parallel = Captured.load(path).record["model_parallel"]
    assert (parallel["ranks"], parallel["data_stride"]) == (4, 4)
    assert [(axis["ranks"], axis["stride"]) for axis in parallel["axes"]] == [(2, 1), (4, 1)]


class Metric(nn.Module):
    """Tensor parallelism beside a sum over all ranks, as of a metric."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.inner = feed_forward(mesh)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        world = torch.distributed.group.WORLD
        return y * torch.distributed._functional_collectives.all_reduce(y.detach(), "sum", world)


def test_a_group_of_all_ranks(tmp_path: Path) -> None:
    """FSDP's ranks in it do not share a copy of the model."""
    path = tmp_path / "model.pt"
    with planned_mesh({"data": 4, "tensor": 2}) as mesh, torch.device("meta"):
        capture(
            Metric(mesh),
            kwargs={"x": torch.zeros(2, 8, device="cpu")},
            loss=loss,
            data_ranks=mesh["data"].mesh.tolist(),
            path=path,
        )
    parallel = Captured.load(path).record["model_parallel"]
    assert (parallel["ranks"], parallel["data_stride"]) == (2, 2)
    assert sorted((axis["ranks"], axis["stride"]) for axis in parallel["axes"]) == [(2, 1), (8, 1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*MODEL, "--mesh", "data"], "--mesh 'data': expected name=ranks,... with different names"),
        ([*MODEL, "--mesh", "a=2,a=2"], "--mesh 'a=2,a=2': expected name=ranks"),
        ([*MODEL, "--mesh", "data=0"], "axis 'data': expected at least 1 rank, got 0"),
        (
            [*MODEL, "--mesh", "data=2", "--shard-over", "dp"],
            "--shard-over: expected axes of the mesh (data), got 'dp'",
        ),
        ([*MODEL, "--shard-over", "data"], "--shard-over: expected --mesh too, got none"),
        ([*MODEL, "--loss-parallel"], "--loss-parallel: expected --mesh too, got none"),
        (
            [option for option in MODEL if option != "--meta"] + ["--mesh", "data=2"],
            "--mesh: expected --meta too, as the other ranks are not there",
        ),
    ],
)
def test_bad_options(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*options, "-o", str(tmp_path / "model.pt")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1
    assert not dist.is_initialized() and not list(tmp_path.iterdir())


def test_a_group_that_is_there() -> None:
    with (
        planned_mesh({"data": 2}),
        pytest.raises(CaptureError, match="a process without a process group"),
        planned_mesh({"data": 2}),
    ):
        pass
