"""Models without weights: the Llama-3-8B shape, and how capture grows with layers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fsdp_mlir
import pytest
import torch
from fsdp_mlir.archive import torchscript
from fsdp_mlir.models.llama3 import llama3_8b
from graphs import Captured


def captured_layers(tmp_path: Path, layers: int) -> tuple[Captured, fsdp_mlir.CaptureSummary]:
    path = tmp_path / f"llama{layers}.pt"
    ids = torch.zeros(1, 512, dtype=torch.int64)
    with torch.device("meta"):
        model = llama3_8b(layers)
    summary = fsdp_mlir.capture(model, kwargs={"input_ids": ids, "labels": ids}, path=path)
    return Captured.load(path), summary


def test_ops_grow_by_the_layer(tmp_path: Path) -> None:
    counts = [len(captured_layers(tmp_path, layers)[0].ops()) for layers in (1, 2, 4)]
    per_layer = counts[1] - counts[0]
    assert per_layer > 100
    assert counts[2] - counts[1] == 2 * per_layer


def test_attention_stays_one_op(tmp_path: Path) -> None:
    captured, summary = captured_layers(tmp_path, 2)
    ops = captured.ops()
    assert ops.count("aten::_scaled_dot_product_flash_attention_for_cpu") == 2
    assert ops.count("aten::_scaled_dot_product_flash_attention_for_cpu_backward") == 2
    assert captured.record["weights"] is None and summary.weights is None
    assert not list(tmp_path.glob("*.safetensors"))
    rotary = next(b for b in captured.record["buffers"] if b["name"].endswith(".inv_freq"))
    assert rotary["persistent"] is False


def test_sizes_are_those_of_llama_3_8b(tmp_path: Path) -> None:
    captured, summary = captured_layers(tmp_path, 4)
    shapes = {p["name"]: p["shape"] for p in captured.record["params"]}
    assert shapes["model.layers.3.mlp.down_proj.weight"] == [4096, 14336]
    assert shapes["lm_head.weight"] == [128256, 4096]
    layer = sum(torch.Size(shape).numel() for name, shape in shapes.items() if ".layers.0." in name)
    assert summary.elements + 28 * layer == 8_030_261_248


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory of Linux")
def test_takes_no_memory_for_weights(tmp_path: Path) -> None:
    """Four layers hold 7.7 GB of parameters; capture may add 150 MB to the process."""
    script = f"""
import resource, torch
from fsdp_mlir import capture
from fsdp_mlir.models.llama3 import llama3_8b
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
ids = torch.zeros(1, 2048, dtype=torch.int64)
with torch.device("meta"):
    small, model = llama3_8b(1), llama3_8b(4)
capture(small, kwargs=dict(input_ids=ids, labels=ids), path={str(tmp_path / "one.pt")!r})
before = peak()
capture(model, kwargs=dict(input_ids=ids, labels=ids), path={str(tmp_path / "four.pt")!r})
print(peak() - before)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 150


def test_a_long_graph_has_no_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchscript, "MAX_FORWARD_NODES", 10)
    captured, summary = captured_layers(tmp_path, 1)
    graph = torch._C.parse_ir(captured.text)
    calls = [node for node in graph.nodes() if node.kind().startswith("aten::")]
    assert len(calls) == summary.nodes > 10
    assert torch.jit.load(str(tmp_path / "llama1.pt")).forward() is None
