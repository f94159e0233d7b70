"""The plans that a GPU host runs: they are what the compiler makes, and give FSDP2's bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import BIN

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH))

from gpu_cases import PARITY, Case  # noqa: E402


def execute(*command: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, timeout=600)


def test_committed_plans_are_the_compilers(tmp_path: Path) -> None:
    done = execute(BENCH / "gpu_plans.py", "small", "--opt", BIN / "fsdp-opt", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    for case in PARITY:
        made = (tmp_path / case.plan.name).read_text()
        assert made == case.plan.read_text(), (
            f"{case.plan.name} is stale: run python bench/gpu_plans.py small"
        )


def halves() -> list[Any]:
    """The cases of CPU ranks: each number of ranks and each precision once, and the others."""
    on_cpu = [case for case in PARITY if case.arch is None]
    once = {(1, "fp32"), (2, "bf16")}
    parts = [
        [case for case in on_cpu if ((case.world, case.precision) in once) == each]
        for each in (True, False)
    ]
    return [
        pytest.param(parts[0], id="each_once"),
        pytest.param(parts[1], id="others"),
    ]


@pytest.mark.exhaustive  # for its time
@pytest.mark.parametrize("on_cpu", halves())
def test_parity_on_cpu_ranks(on_cpu: list[Case], tmp_path: Path) -> None:
    """The script itself, with Gloo in the place of NCCL."""
    options = ["--only", "parity", "trace", "--parity-steps", 2, "--out", tmp_path]
    options += ["--deadline", 300, "--cases", *(case.name for case in on_cpu)]
    done = execute(BENCH / "gpu.py", "--device", "cpu", "--build", BIN.parent, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    traced = [case for case in on_cpu if case.world == 1]
    names = [f"parity {case.name} {side}" for case in on_cpu for side in ("fsdp2", "fsdp-run")]
    names += [f"trace {case.name}" for case in traced]
    assert [item["name"] for item in report["items"]] == names
    assert {item["status"] for item in report["items"]} == {"passed"}
    assert "bit for bit" in (tmp_path / "report.txt").read_text()


def test_a_trace_out_of_order_is_seen(tmp_path: Path) -> None:
    from gpu_trace import disorder

    plan, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    plan.write_text(json.dumps({"instructions": [{"records": 0}, {}, {"waits": [0]}]}))

    def seen(*events: tuple[int, float, float]) -> str | None:
        rows = [
            {"ph": "X", "pid": 0, "name": "op", "tid": tid, "ts": ts, "dur": dur}
            for tid, ts, dur in events
        ]
        trace.write_text(json.dumps({"traceEvents": rows}))
        return disorder(trace, plan)

    assert seen((1, 0, 50), (0, 0, 10), (0, 50, 10)) is None
    assert seen((1, 0, 50), (0, 0, 10), (0, 40, 10)) == (
        "rank 0: instruction 2, op, begins at 40.0 us: expected 50.0 us or later"
    )
    assert "instruction 2" in str(seen((1, 0, 50), (0, 0, 70), (0, 60, 10)))
    assert seen((1, 0, 50)) == "rank 0: expected 3 events, got 1"
    assert seen() == "expected events, got none"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("section", ["trace", "parity", "bench"])
def test_a_failing_runtime_fails_the_report(tmp_path: Path, section: str) -> None:
    binary = tmp_path / "build" / "bin" / "fsdp-run"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\necho 'fsdp-run: error: no such thing' >&2\nexit 1\n")
    binary.chmod(0o755)
    options = ["--only", section, "--parity-steps", 1, "--out", tmp_path / "out"]
    options += ["--cases", PARITY[0].name, "--rounds", 1, "--steps", 2, "--warmup", 1]
    options += ["--sides", "fsdp-run"]
    done = execute(BENCH / "gpu.py", "--device", "cpu", "--build", tmp_path / "build", *options)
    assert done.returncode == 1, done.stdout + done.stderr
    items = json.loads((tmp_path / "out" / "report.json").read_text())["items"]
    failed = [item for item in items if item["status"] == "failed"]
    assert failed
    assert all("rank 0: fsdp-run: error: no such thing" in item["detail"] for item in failed)
