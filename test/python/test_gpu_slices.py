"""bench/gpu.py with doubles in place of programs: slices, deadlines, and what is kept of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import gpu
import gpu_digest
import gpu_files
import gpu_process
from gpu_cases import PARITY, Case, is_other_fsdp2

CASE = PARITY[0].name

# In place of FSDP2 and of fsdp-run: writes losses and parameters. FAULT names a side and what is
# wrong with it; each run leaves a line in the file RUNS.
SIDE = f"""#!{sys.executable}
import json, os, sys, time
def value(name):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None
side = "fsdp2" if "--case" in sys.argv else "fsdp-run"
side = "compile" if "--compile" in sys.argv else side
side = "graphs" if "--cuda-graphs" in sys.argv else side
side = "unfused" if "--no-kernels" in sys.argv else side
with open(os.environ["RUNS"], "a") as file:
    print(side, file=file)
at_fault, _, fault = os.environ.get("FAULT", "").partition(":")
fault = fault if at_fault == side else ""
if fault == "hang":
    time.sleep(60)
if fault == "nothing":
    sys.exit(0)
if fault == "fail":
    print("one line of many\\n" * 5000 + "error: no such thing", file=sys.stderr)
    sys.exit(1)
line = {{"step_ms": 5.0}}
if "--cuda-graphs" in sys.argv:
    captured = "not captured: no pool" if fault == "eager" else "captured"
    line["cuda_graphs"] = "whole step " + captured
with open(value("--metrics"), "w") as file:
    for step in range(int(value("--steps"))):
        loss = 2.0 if fault == "loss" and step else 1.0
        print(json.dumps(line | {{"rank_losses": [loss]}}), file=file)
if value("--save-weights"):
    header = json.dumps({{"w": {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}}}).encode()
    with open(value("--save-weights"), "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.write(b"\\0\\0\\0\\1" if fault == "weights" else bytes(4))
"""


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def shell(path: Path, body: str) -> None:
    put(path, f"#!/bin/sh\n{body}\n")


class Host:
    """A machine whose GPU and programs are doubles."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bin = folder / "build" / "bin"
        self.out = folder / "out"
        self.back = folder / "back"
        self.runs = folder / "runs"
        self.monkeypatch = monkeypatch
        put(self.bin / "fsdp-run", SIDE)
        monkeypatch.setenv("OUT", str(self.back))
        monkeypatch.setenv("RUNS", str(self.runs))
        monkeypatch.delenv("FAULT", raising=False)
        monkeypatch.setattr(gpu, "FSDP2", put(folder / "fsdp2.py", SIDE))
        monkeypatch.setattr(gpu, "facts", lambda device, log: {"gpu": f"a {device}"})

        def write_inputs(case: Case, directory: Path) -> tuple[Path, Path]:
            directory.mkdir(parents=True, exist_ok=True)
            files = directory / "weights.safetensors", directory / "batches.safetensors"
            for file in files:
                file.write_text(case.name)
            return files

        monkeypatch.setattr(gpu_files, "write_inputs", write_inputs)

    def run(self, *options: str, out: Path | None = None, fault: str = "") -> int:
        self.monkeypatch.setenv("FAULT", fault)
        self.runs.write_text("")
        folders = ["--build", str(self.bin.parent), "--out", str(out or self.out)]
        return gpu.main([*folders, *options])

    def sides(self) -> list[str]:
        """That the last call ran."""
        return self.runs.read_text().split()

    def report(self, out: Path | None = None) -> dict[str, Any]:
        return json.loads(((out or self.out) / "report.json").read_text())

    def items(self, out: Path | None = None) -> dict[str, str]:
        """Their status and detail, in their order."""
        items = self.report(out)["items"]
        return {item["name"]: f"{item['status']}: {item['detail']}" for item in items}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_a_program_that_hangs_costs_its_own_deadline(host: Host, tmp_path: Path) -> None:
    child = tmp_path / "child"
    shell(host.bin / "CudaTests", f"echo begun\nsleep 60 &\necho $! > {child}\nwait")
    shell(host.bin / "PlanTests", "echo '[  PASSED  ] 3 tests.'")
    assert host.run("--tests", "CudaTests", "PlanTests", "--deadline", "1.5") == 1
    assert host.items() == {
        "CudaTests": "failed: hung: deadline of 1.5 s; last line: begun",
        "PlanTests": "passed: [  PASSED  ] 3 tests.",
    }
    # Its whole group is gone; what has no parent left may still be there as a zombie.
    status = Path(f"/proc/{child.read_text().strip()}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_whole_output_of_a_failure_is_beside_the_report_and_under_out(host: Host) -> None:
    shell(host.bin / "PlanTests", "seq 1 30000 >&2\necho 'error: the last test' >&2\nexit 3")
    assert host.run("--tests", "PlanTests") == 1
    assert host.items() == {"PlanTests": "failed: exit status 3: error: the last test"}
    for folder in (host.out, host.back):
        assert "failures.log" in (folder / "report.txt").read_text()
        lines = (folder / "failures.log").read_text().splitlines()
        assert lines[0] == "==> PlanTests: exit status 3: error: the last test"
        assert [line for line in lines if line.isdigit()] == [str(i) for i in range(1, 30001)]
    # A pass takes its place, and the exit status is that of this call.
    shell(host.bin / "PlanTests", "exit 0")
    shell(host.bin / "CudaTests", "exit 1")
    assert host.run("--tests", "CudaTests") == 1
    assert host.run("--tests", "PlanTests") == 0
    assert host.items() == {
        "CudaTests": "failed: exit status 1: exit status 1",
        "PlanTests": "passed: ",
    }
    assert "PlanTests" not in (host.back / "failures.log").read_text()


def test_a_shard_is_told_to_the_program(host: Host) -> None:
    shell(host.bin / "PlanTests", 'echo "[  PASSED  ] $GTEST_SHARD_INDEX of $GTEST_TOTAL_SHARDS"')
    assert host.run("--tests", "PlanTests:2/2", "PlanTests:1/2") == 0
    assert host.items() == {
        "PlanTests 1/2": "passed: [  PASSED  ] 0 of 2",
        "PlanTests 2/2": "passed: [  PASSED  ] 1 of 2",
    }


def test_slices_in_several_calls_make_the_report_of_one(host: Host, tmp_path: Path) -> None:
    shell(host.bin / "PlanTests", "echo '[  PASSED  ] 3 tests.'")
    sections = ("--only", "tests", "parity", "bench")
    common = ("--device", "cpu", "--rounds", "2", "--steps", "3", "--warmup", "1")
    names = ("--tests", "PlanTests", "--cases", CASE)
    assert host.run(*sections, *names, *common, out=tmp_path / "one") == 0
    in_one = host.sides()
    in_slices = []
    for options in (
        ("--only", "bench", "--sides", "fsdp-run", "compile"),
        ("--only", "parity", "--cases", CASE, "--sides", "fsdp2"),
        ("--tests", "PlanTests"),
        ("--only", "parity", "--cases", CASE, "--sides", "fsdp-run"),
        ("--only", "bench", "--sides", "fsdp2"),
    ):
        assert host.run(*options, *common) == 0
        in_slices += host.sides()
    assert sorted(in_one) == sorted(in_slices)
    assert list(host.items().items()) == list(host.items(tmp_path / "one").items())
    one, slices = host.report(tmp_path / "one"), host.report()
    assert one["references"] == slices["references"]
    [[mine], [theirs]] = one["benchmarks"], slices["benchmarks"]
    assert mine["sides"] == theirs["sides"]
    assert (host.back / "report.json").read_text() == (host.out / "report.json").read_text()
    # Small: nothing but the report goes back.
    assert {path.name for path in host.back.iterdir()} == {"report.json", "report.txt"}


def test_a_slice_without_the_other_side_runs_it(host: Host) -> None:
    options = ("--device", "cpu", "--only", "parity", "--cases", CASE, "--sides", "fsdp-run")
    assert host.run(*options) == 0
    assert host.sides() == ["fsdp2", "fsdp2", "fsdp-run"]
    assert list(host.items()) == [f"parity {CASE} fsdp2", f"parity {CASE} fsdp-run"]
    # It is known then, of the same steps and inputs.
    assert host.run(*options) == 0
    assert host.sides() == ["fsdp-run"]
    assert host.run(*options, "--parity-steps", "4") == 0
    assert host.sides() == ["fsdp2", "fsdp2", "fsdp-run"]
    with gpu.FSDP2.open("a") as file:
        file.write("# changed\n")
    assert host.run(*options, "--parity-steps", "4") == 0
    assert host.sides() == ["fsdp2", "fsdp2", "fsdp-run"]


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        ("fsdp-run:loss", "step 2, rank 0: expected the loss 1, got 2"),
        ("fsdp-run:weights", 'the final parameter "w" differs'),
        ("fsdp-run:fail", "rank 0: error: no such thing"),
        ("fsdp-run:hang", "hung: deadline of 3 s; still ran: rank 0"),
    ],
)
def test_a_side_is_compared_with_an_earlier_slices(host: Host, fault: str, detail: str) -> None:
    options = ("--device", "cpu", "--only", "parity", "--cases", CASE)
    assert host.run(*options, "--sides", "fsdp2") == 0
    assert host.run(*options, "--sides", "fsdp-run", "--deadline", "3", fault=fault) == 1
    assert host.sides() == ["fsdp-run"]
    assert host.items()[f"parity {CASE} fsdp-run"] == f"failed: {detail}"
    if fault == "fsdp-run:fail":
        assert (host.back / "failures.log").read_text().count("one line of many\n") == 5000


def test_files_of_an_earlier_run_are_no_results(host: Host) -> None:
    options = ("--device", "cpu", "--only", "parity", "--cases", CASE)
    assert host.run(*options) == 0
    assert host.run(*options, fault="fsdp-run:nothing") == 1
    assert "failed: FileNotFoundError" in host.items()[f"parity {CASE} fsdp-run"]


def test_without_a_reference_nothing_is_compared(host: Host) -> None:
    options = ("--device", "cpu", "--only", "parity", "--cases", CASE)
    assert host.run(*options) == 0
    assert host.run(*options, fault="fsdp2:fail") == 1
    assert host.items() == {
        f"parity {CASE} fsdp2": "failed: FSDP2: rank 0: error: no such thing",
        f"parity {CASE} fsdp-run": "skipped: nothing to compare with: "
        "FSDP2: rank 0: error: no such thing",
    }
    assert host.report()["references"] == {}


def test_graphs_that_ran_eagerly_fail(host: Host) -> None:
    options = ("--only", "parity", "--cases", f"{CASE}-sm_90")
    equal = "passed: 10 steps, losses and final parameters bit for bit"
    assert host.run(*options, fault="graphs:eager") == 1
    assert host.items() == {
        f"parity {CASE}-sm_90 fsdp2": "passed: 10 steps, twice the same",
        f"parity {CASE}-sm_90 fsdp-run": equal,
        f"parity {CASE}-sm_90 graphs": "failed: cuda graphs: whole step not captured: no pool",
        f"parity {CASE}-sm_90 unfused": equal,
    }
    assert host.run(*options, "--sides", "graphs") == 0
    nothing = "expected the metrics of fsdp-run to say what --cuda-graphs captured, got nothing"
    assert gpu.not_captured([]) == gpu.not_captured([{"step": 1}]) == nothing
    said = "forward and backward captured; optimizer not captured: no fused kernel"
    assert gpu.not_captured([{"cuda_graphs": said}]) == f"cuda graphs: {said}"
    early = {"cuda_graphs": "whole step not captured yet"}
    assert gpu.not_captured([early, {"cuda_graphs": "whole step captured"}]) is None
    assert gpu.not_captured([early]) == "cuda graphs: whole step not captured yet"


def test_a_side_that_fails_in_a_round_leaves_the_others(host: Host) -> None:
    options = ("--device", "cpu", "--only", "bench", "--rounds", "2", "--steps", "2")
    options += ("--warmup", "1", "--deadline", "4")
    assert host.run(*options, fault="compile:hang") == 1
    assert host.sides() == ["fsdp2", "compile", "fsdp-run", "fsdp2", "fsdp-run"]
    assert host.items() == {
        f"bench {CASE} fsdp2": "passed: 2 of 2 rounds",
        f"bench {CASE} compile": "failed: hung: deadline of 4 s; still ran: rank 0",
        f"bench {CASE} fsdp-run": "passed: 2 of 2 rounds",
    }
    assert host.run(*options, "--sides", "compile") == 0
    [result] = host.report()["benchmarks"]
    assert [row["side"] for row in result["sides"]] == ["fsdp2", "compile", "fsdp-run"]


def test_what_goes_wrong_in_the_script_fails_the_item_alone(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(gpu_files, "write_inputs", full)
    shell(host.bin / "PlanTests", "exit 0")
    assert host.run("--only", "trace", "tests", "--cases", CASE, "--tests", "PlanTests") == 1
    assert host.items() == {
        "PlanTests": "passed: ",
        f"trace {CASE}": "failed: OSError: No space left on device",
    }
    assert "Traceback" in (host.back / "failures.log").read_text()


def test_the_report_is_there_while_an_item_runs_and_ends_with_its_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, back, pid = tmp_path / "build", tmp_path / "back", tmp_path / "pid"
    shell(build / "bin" / "CudaTests", "exit 0")
    shell(build / "bin" / "PlanTests", f"echo $$ > {pid}; sleep 60")
    monkeypatch.setenv("OUT", str(back))
    options = ["--device", "cpu", "--build", build, "--out", tmp_path / "out"]
    options += ["--tests", "CudaTests", "PlanTests"]
    command = [sys.executable, gpu.__file__, *options]
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL) as script:
        wait_for(lambda: pid.exists() and pid.read_text().strip() != "")
        text = (back / "report.txt").read_text()
        assert "passed   CudaTests" in text
        assert "running  PlanTests, since " in text
        script.send_signal(signal.SIGTERM)
        assert script.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_failing_rank_ends_the_others(tmp_path: Path) -> None:
    def run(command: list[str], seconds: float) -> None:
        deadline = gpu_process.Deadline(seconds)
        gpu_process.run_ranks(command, 2, lambda rank: {}, deadline, tmp_path / "log")

    script = 'if [ "$RANK" = 1 ]; then echo "error: rank one is lost" >&2; exit 3; fi; sleep 60'
    with pytest.raises(gpu_process.RunFailed, match=r"^rank 1: error: rank one is lost$"):
        run(["sh", "-c", script], 50)
    assert "--- rank 0\n--- rank 1\nerror: rank one is lost\n" in (tmp_path / "log").read_text()
    with pytest.raises(
        gpu_process.RunFailed, match=r"^hung: deadline of 1 s; still ran: rank 0, 1"
    ):
        run(["sleep", "60"], 1)


def test_an_fsdp2_that_gloo_aborts_is_run_again_on_cpu_ranks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[bool] = []

    def abort_once(command: list[object], *rest: object) -> str:
        runs.append(True)
        if len(runs) == 1:
            error = gpu.RunFailed("rank 0: terminate called without an active exception")
            error.by_signal = True
            raise error
        Path(str(command[command.index("--metrics") + 1])).write_text('{"step": 1}\n')
        return ""

    monkeypatch.setattr(gpu, "run_ranks", abort_once)
    files = (tmp_path / "weights", tmp_path / "batches")
    item = next(item for item in gpu.everything("cpu") if item.side == "fsdp2")
    deadline = gpu.Deadline(9)
    on_cpu, on_gpu = (gpu.Setup(tmp_path, tmp_path, device) for device in ("cpu", "cuda"))
    assert gpu.run_side(on_cpu, item, files, 1, deadline) == [{"step": 1}]
    runs.clear()
    with pytest.raises(gpu.RunFailed):
        gpu.run_side(on_gpu, item, files, 1, deadline)


def test_digests_tell_bits_and_shapes_apart(tmp_path: Path) -> None:
    import torch

    tensors = [torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), torch.tensor([[0.0], [1.0]])]
    digests = []
    for tensor in tensors:
        gpu_files.save(tmp_path / "x", {"n": torch.arange(3), "w": tensor})
        digests.append(gpu_digest.of_tensors(tmp_path / "x"))
    assert len({digest["w"] for digest in digests}) == 3
    assert len({digest["n"] for digest in digests}) == 1
    assert gpu_digest.difference(digests[0], digests[0]) is None
    assert gpu_digest.difference(digests[0], digests[1]) == 'the final parameter "w" differs'
    assert gpu_digest.difference({}, digests[1]) == 'expected the final parameter "n", got none'


def test_a_plan_of_another_fsdp2_is_not_compared() -> None:
    of = {case.name: case for case in PARITY}
    for name, same, other in [
        ("llama-1-bf16", "2.15.0", "2.11.0+cu130"),
        ("llama-1-bf16-sm_90", "2.11.0+cu130", "2.15.0"),
    ]:
        assert not is_other_fsdp2(of[name], same)
        assert is_other_fsdp2(of[name], other)
    assert not any(is_other_fsdp2(of["llama-1-fp32-sm_90"], v) for v in ("2.11.0", "2.15.0"))
