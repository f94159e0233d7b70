"""bench/gpu_report.py and its cases: comparison, figures, text; bench/gpu_files.py: safetensors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import gpu_files
from gpu_cases import BENCHMARKS, CASES, PARITY
from gpu_report import (
    GIB,
    Item,
    Report,
    Sample,
    benchmark,
    first_difference,
    peak_flops,
    predicted_peak,
    render,
)


def steps(times: list[float], **more: float) -> list[dict[str, float]]:
    return [{"step": i + 1, "step_ms": time, **more} for i, time in enumerate(times)]


def test_losses_are_compared_by_bits() -> None:
    same = [[1.0, 2.0], [3.0, 4.0]]
    assert first_difference(same, [list(row) for row in same]) is None
    other = [[1.0, 2.0], [3.0, 4.000001]]
    assert first_difference(other, same) == "step 2, rank 1: expected the loss 4, got 4.000001"
    assert first_difference(same[:1], same) == "expected 2 steps, got 1"
    assert first_difference([[1.0]], [[1.0, 2.0]]) == ("step 1: expected losses of 2 ranks, got 1")


def test_not_a_number_is_a_difference() -> None:
    assert first_difference([[float("nan")]], [[float("nan")]]) is not None


def test_figures_are_medians_after_the_warm_up() -> None:
    case = BENCHMARKS[0]
    samples = [
        Sample("fsdp-run", steps([999.0, 100.0, 300.0, 200.0], peak_bytes=3 * GIB, host_ms=7.0)),
        Sample("FSDP2", steps([999.0, 400.0, 400.0, 400.0])),
        Sample("fsdp-run", steps([1.0, 400.0, 400.0, 400.0], peak_bytes=2 * GIB, host_ms=9.0)),
    ]
    result = benchmark(case, samples, 1, "NVIDIA H100 80GB HBM3", 5 * GIB)
    ours, theirs = result["sides"]
    assert (ours["side"], ours["step_ms"], ours["spread"]) == ("fsdp-run", 300.0, (200.0, 400.0))
    assert ours["host_ms"] == 8.0
    assert ours["peak_bytes"] == 3 * GIB
    assert ours["tokens_per_s"] == pytest.approx(case.tokens / 0.3)
    assert ours["mfu"] == pytest.approx(case.flops / 0.3 / 989.4e12)
    assert theirs["host_ms"] is None and theirs["peak_bytes"] is None
    text = render(Report({"gpu": "NVIDIA H100 80GB HBM3"}, [], [result]))
    assert "| fsdp-run | 300.0 (200.0-400.0) | 8.0 | 18.9 | 27307 | 3.00 | - |" in text
    assert "predicted peak: 5.00 GiB" in text


def test_a_side_that_never_ran_has_no_row() -> None:
    result = benchmark(BENCHMARKS[0], [Sample("FSDP2", steps([1.0]))], 1, "?", None)
    assert result["sides"] == []


@pytest.mark.parametrize(
    ("gpu", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Tesla T4", None),
    ],
)
def test_peaks_by_name(gpu: str, flops: float | None) -> None:
    assert peak_flops(gpu) == flops


def test_predicted_peak_is_that_of_stats() -> None:
    stats = "units    3\npeak bytes a rank           31.50 MiB\n  arena   10.01 MiB\n"
    assert predicted_peak(stats) == round(31.5 * 2**20)
    assert predicted_peak("") is None


def test_only_failures_fail() -> None:
    items = [Item("a", "passed"), Item("b", "refused", "no"), Item("c", "skipped", "no GPU")]
    assert not Report({}, items).failed
    report = Report({}, [*items, Item("d", "failed", "step 1")])
    assert report.failed
    assert "failed   d  step 1" in render(report)
    with pytest.raises(ValueError, match="expected one of passed, failed"):
        Item("a", "ok")


def test_sizes_are_the_models() -> None:
    for case in CASES.values():
        model = gpu_files.build_model(case, "meta")
        assert sum(p.numel() for p in model.parameters()) == case.parameters
    assert 0.9e9 < BENCHMARKS[0].parameters < 1.2e9
    assert [case.tokens for case in BENCHMARKS] == [8192, 8192]


def test_files_are_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "n": torch.arange(7), "s": torch.tensor(2.5)}
    path = tmp_path / "x.safetensors"
    gpu_files.save(path, tensors)
    for read in (safetensors.torch.load_file(path), gpu_files.load(path)):
        assert list(read) and all(torch.equal(read[name], x) for name, x in tensors.items())
    # Of another writer, with metadata and parts that are not aligned.
    mixed = {"a": torch.randn(3), "n": torch.arange(7)}
    safetensors.torch.save_file(mixed, path, metadata={"by": "test"})
    read = gpu_files.load(path)
    assert all(torch.equal(read[name], x) for name, x in mixed.items())


def test_both_sides_begin_with_the_same_files(tmp_path: Path) -> None:
    case = PARITY[0]
    weights, data = gpu_files.write_inputs(case, tmp_path / "one")
    again, _ = gpu_files.write_inputs(case, tmp_path / "two")
    assert weights.read_bytes() == again.read_bytes()
    names = set(gpu_files.load(weights))
    assert {"tok_embeddings.weight", "rope_cos", "rope_sin"} <= names
    batches = gpu_files.load(data)
    assert batches["tokens"].shape == (64, case.seq)
    assert torch.equal(batches["tokens"][:, 1:], batches["targets"][:, :-1])
