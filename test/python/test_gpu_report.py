"""bench/gpu_report.py and its cases: comparison, figures, text; bench/gpu_files.py: safetensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import gpu_files
from gpu_cases import BENCHMARKS, CASES, PARITY
from gpu_items import SIDES, everything, pick
from gpu_report import (
    FAILURES,
    GIB,
    Item,
    Report,
    Sample,
    benchmark,
    first_difference,
    peak_flops,
    predicted_peak,
    render,
    render_failures,
)
from gpu_store import OUTPUT_LIMIT, Store, limit_output


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
        Sample("fsdp-run", steps([999.0, 100.0, 300.0, 200.0], peak_bytes=3 * GIB, host_ms=7.0), 1),
        Sample("fsdp2", steps([999.0, 400.0, 400.0, 400.0]), 1),
        Sample("fsdp-run", steps([1.0, 400.0, 400.0, 400.0], peak_bytes=2 * GIB, host_ms=9.0), 1),
    ]
    result = benchmark(case, samples, "NVIDIA H100 80GB HBM3", 5 * GIB)
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
    result = benchmark(BENCHMARKS[0], [Sample("fsdp2", steps([1.0]), 1)], "?", None)
    assert result["sides"] == []
    assert "FSDP2" not in render(Report({}, [], [result]))


def test_a_benchmarks_slices_make_one_table() -> None:
    case = BENCHMARKS[0]
    report = Report({"gpu": "NVIDIA H200"})
    ours = [Sample("fsdp-run", steps([9.0, 200.0]), 1, "monday")]
    report.record_benchmark(case, "fsdp-run", ours, None)
    assert "calls" not in render(report)
    theirs = [Sample("fsdp2", steps([9.0, 9.0, 400.0]), 2, "tuesday")]
    report.record_benchmark(case, "fsdp2", theirs, None)
    report.record_benchmark(BENCHMARKS[1], "fsdp2", theirs, None)
    [first, second] = report.benchmarks
    assert [(row["side"], row["step_ms"]) for row in first["sides"]] == [
        ("fsdp2", 400.0),
        ("fsdp-run", 200.0),
    ]
    assert second["case"] == BENCHMARKS[1].name
    assert render(report).count("measured in 2 calls") == 1
    again = [Sample("fsdp-run", steps([9.0, 300.0]), 1, "tuesday")]
    report.record_benchmark(case, "fsdp-run", again, None)
    assert [row["step_ms"] for row in report.benchmarks[0]["sides"]] == [400.0, 300.0]
    assert "calls" not in render(report)


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


def test_the_stderr_of_what_did_not_pass_is_beside_the_report() -> None:
    items = [Item("a", "passed"), Item("c", "skipped", "no GPU")]
    assert FAILURES not in render(Report({}, items))
    assert render_failures(Report({}, items)) == ""
    items += [Item("b", "refused", "no", output="no NCCL\n"), Item("d", "failed", "step 1", 2.4)]
    report = Report({}, items)
    text = render(report)
    assert "failed   d  step 1  (2 s)" in text
    assert f"stderr of what failed: {FAILURES}" in text
    assert render_failures(report).startswith("==> b: no\nno NCCL\n\n==> d: step 1\n")
    with pytest.raises(ValueError, match="expected one of passed, failed"):
        Item("a", "ok")


def test_an_item_takes_the_place_of_the_same_item_of_an_earlier_slice() -> None:
    report = Report({})
    for name in ("bench llama-1b-2048 graphs", "RuntimeTests 2/2", "RuntimeTests 1/2", "CudaTests"):
        report.record(Item(name, "failed"))
    report.record(Item("RuntimeTests 1/2", "passed"))
    assert [(item.name, item.status) for item in report.items] == [
        ("CudaTests", "failed"),
        ("RuntimeTests 1/2", "passed"),
        ("RuntimeTests 2/2", "failed"),
        ("bench llama-1b-2048 graphs", "failed"),
    ]


def test_a_report_goes_on_where_it_is_this_machines(tmp_path: Path) -> None:
    machine = {"date": "monday", "gpu": "NVIDIA H200", "torch": "2.11.0"}
    mirror = tmp_path / "mirror"
    store = Store([tmp_path, mirror])
    report = store.open(machine)
    report.record(Item("CudaTests", "failed", "a test", 1.5, "monday", "all \u00e4 of it"))
    report.references["llama-1-fp32"] = {"losses": [[1.5]]}
    report.record_benchmark(BENCHMARKS[0], "fsdp2", [Sample("fsdp2", steps([1.0]))], None)
    store.write(report)
    names = ["failures.log", "report.json", "report.txt"]
    assert [path.name for path in sorted(mirror.iterdir())] == names
    assert all((tmp_path / name).read_text() == (mirror / name).read_text() for name in names)
    again = Store([tmp_path]).open({**machine, "date": "tuesday"})
    assert again.machine["date"] == "tuesday"
    assert (again.items, again.references) == (report.items, report.references)
    assert json.dumps(again.benchmarks) == json.dumps(report.benchmarks)
    # With nothing that failed there is no such file.
    again.record(Item("CudaTests", "passed"))
    Store([tmp_path]).write(again)
    assert not (tmp_path / "failures.log").exists()


def test_a_report_of_another_machine_is_kept_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store([tmp_path])
    store.write(Report({"gpu": "NVIDIA H200"}, [Item("CudaTests", "passed")]))
    assert store.open({"gpu": "NVIDIA H100"}).items == []
    said = "the earlier report is now report-1.json: expected gpu NVIDIA H100, got NVIDIA H200"
    assert said in capsys.readouterr().err
    assert "CudaTests" in (tmp_path / "report-1.json").read_text()
    for text in ("{", "[]", '{"items": [{"nome": 1}]}'):
        (tmp_path / "report.json").write_text(text)
        assert store.open({"gpu": "NVIDIA H100"}).items == []
        assert "it cannot be read" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    Store([tmp_path / "out", tmp_path / "file"]).write(Report({}))
    assert (tmp_path / "out" / "report.txt").exists()
    assert "warning" in capsys.readouterr().err


def test_the_middle_of_endless_output_is_left_out() -> None:
    text = "begin" + "x" * OUTPUT_LIMIT + "end"
    items = [Item(name, "failed", output=text) for name in "ab"]
    [one, two] = limit_output(Report({}, items)).items
    assert len(one.output) + len(two.output) < OUTPUT_LIMIT + 100
    assert one.output.startswith("begin") and one.output.endswith("end")
    assert "characters left out]" in one.output
    short = Report({}, [Item("a", "failed", output="x" * 200_000)])
    assert limit_output(short).items == short.items


def test_a_slice_fits_nine_minutes() -> None:
    """Also if every item of it hangs; where FSDP2 hangs, what is compared with it does not run."""
    assert all(item.deadline <= 540 for item in everything("cuda"))
    for case in BENCHMARKS:
        assert sum(item.deadline for item in pick("cuda", cases=[case.name])) <= 540
    there = pick("cuda", only=["parity", "trace"])
    for name in {item.case.name for item in there if item.case}:
        items = pick("cuda", only=["parity", "trace"], cases=[name])
        assert sum(item.deadline for item in items) <= 540


def test_options_of_an_item_pick_it() -> None:
    for item in everything("cuda"):
        words = item.options.split()
        given = {
            option.removeprefix("--"): [name]
            for option, name in zip(words[::2], words[1::2], strict=True)
        }
        picked = pick("cuda", **given)
        assert item in picked
        assert len({other.means for other in picked}) == len(picked)
    assert [item.name for item in pick("cuda", tests=["PlanTests:2/3"])] == ["PlanTests 2/3"]
    assert len(pick("cuda")) == len(everything("cuda"))
    assert {item.side for item in everything("cuda") if item.side} == set(SIDES)


def test_sizes_are_the_models() -> None:
    for case in CASES.values():
        model = gpu_files.build_model(case, "meta")
        if case.model == "llama":
            assert sum(p.numel() for p in model.parameters()) == case.parameters
    assert 0.9e9 < BENCHMARKS[0].parameters < 1.2e9
    assert [case.tokens for case in BENCHMARKS] == [8192] * 4


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
