"""Tests and measures a built runtime on this machine's GPU, with FSDP2 beside it.

bench/gpu.sh builds the runtime and runs this. Needs torch and the standard library. Writes
report.txt, report.json and every run's files into --out. Exit status: 1 if anything failed.
`--device cpu` runs the same over Gloo, which tests this script.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import gpu_files
import torch
from gpu_cases import BENCHMARKS, PARITY, ROOT, Case
from gpu_report import (
    Item,
    Report,
    Sample,
    benchmark,
    first_difference,
    predicted_peak,
    render,
)
from gpu_trace import disorder

# Those that need a GPU, and their exit status without one.
GPU_TESTS = ("CudaTests", "NcclTests")
SKIPPED = 77

SECTIONS = ("tests", "sanitizer", "parity", "trace", "bench")

GRAPHS = ("--cuda-graphs",)
COMM = {"cuda": "nccl", "cpu": "gloo"}

# Equal results of equal calls, whichever stream cuBLAS runs on.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

LOOPBACK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
}
# By which NCCL may let two ranks share a GPU: environments of rank r.
ONE_GPU: dict[str, Callable[[int], dict[str, str]]] = {
    "NCCL_MULTI_RANK_GPU_ENABLE": lambda rank: {"NCCL_MULTI_RANK_GPU_ENABLE": "1"},
    "NCCL_HOSTID of its own": lambda rank: {"NCCL_HOSTID": f"rank{rank}", **LOOPBACK},
}


class RunFailed(Exception):
    """A rank's exit status was not 0; the last line that it wrote on stderr."""

    by_signal = False


@dataclass(frozen=True)
class Setup:
    build: Path
    out: Path
    device: str
    timeout: float

    @property
    def fsdp_run(self) -> Path:
        return self.build / "bin" / "fsdp-run"


def last_line(text: str, status: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or [f"exit status {status}"])[-1][:300]


def run_ranks(
    command: list[Any], world: int, env: Callable[[int], dict[str, str]], timeout: float
) -> None:
    """Runs a command as each of `world` ranks, each as if alone on a host with this GPU. Throws
    RunFailed by the first that fails; the others are killed then."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(word) for word in command]
    with contextlib.ExitStack() as stack:
        ranks: list[tuple[subprocess.Popen[str], IO[str]]] = []
        for rank in range(world):
            own = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            texts = {name: str(value) for name, value in own.items()}
            log = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            process = subprocess.Popen(
                words,
                env={**os.environ, **DETERMINISTIC, **texts, **env(rank)},
                stdout=subprocess.DEVNULL,
                stderr=log,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append((process, log))
        deadline = time.monotonic() + timeout
        while True:
            running = [process.poll() is None for process, _ in ranks]
            for rank, (process, log) in enumerate(ranks):
                if process.returncode:
                    log.seek(0)
                    line = last_line(log.read(), process.returncode)
                    error = RunFailed(f"rank {rank}: {line}")
                    error.by_signal = process.returncode < 0
                    raise error
            if not any(running):
                return
            if time.monotonic() > deadline:
                raise RunFailed(f"not finished after {timeout:.0f} s")
            time.sleep(0.05)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_fsdp2(
    setup: Setup,
    case: Case,
    files: tuple[Path, Path],
    steps: int,
    stem: str,
    env: Callable[[int], dict[str, str]] = lambda rank: {},
    options: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    metrics = files[0].with_name(f"{stem}.jsonl")
    script = Path(__file__).with_name("gpu_fsdp2.py")
    command = [sys.executable, script, "--case", case.name, "--device", setup.device]
    command += ["--weights", files[0], "--data", files[1], "--steps", steps]
    command += ["--metrics", metrics, *options]
    try:
        run_ranks(command, case.world, env, setup.timeout)
    except RunFailed as error:
        # Gloo aborts now and then while it starts or ends its threads.
        if setup.device == "cuda" or not error.by_signal:
            raise
        run_ranks(command, case.world, env, setup.timeout)
    return read_metrics(metrics)


def run_plan(
    setup: Setup,
    case: Case,
    files: tuple[Path, Path],
    steps: int,
    stem: str,
    env: Callable[[int], dict[str, str]] = lambda rank: {},
    options: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    metrics = files[0].with_name(f"{stem}.jsonl")
    command = [setup.fsdp_run, case.plan, "--weights", files[0], "--data", files[1]]
    command += ["--steps", steps, "--metrics", metrics, *options]
    command += ["--device", setup.device, "--comm", COMM[setup.device]]
    run_ranks(command, case.world, env, setup.timeout)
    return read_metrics(metrics)


def compare(setup: Setup, case: Case, steps: int, env: Callable[[int], dict[str, str]]) -> Item:
    """Losses of all steps and final parameters of both sides."""
    name = f"parity {case.name}"
    directory = setup.out / case.name
    files = gpu_files.write_inputs(case, directory)
    saved = {side: directory / f"{side}.final.safetensors" for side in ("fsdp2", "fsdp-run")}
    theirs: list[list[list[float]]] = []
    try:
        # Twice: a kernel that differs from itself proves nothing.
        for attempt in range(2):
            options = ("--save-weights", str(saved["fsdp2"]))
            run = run_fsdp2(setup, case, files, steps, f"fsdp2-{attempt}", env, options)
            theirs.append([line["rank_losses"] for line in run])
    except RunFailed as error:
        return Item(name, "refused" if case.world > 1 else "failed", f"FSDP2: {error}")
    if difference := first_difference(theirs[1], theirs[0]):
        return Item(name, "skipped", f"FSDP2 differs from itself: {difference}")
    for graphs in ((), GRAPHS) if setup.device == "cuda" else ((),):
        stem = " ".join(("fsdp-run", *graphs))
        try:
            options = ("--save-weights", str(saved["fsdp-run"]), *graphs)
            run = run_plan(setup, case, files, steps, "fsdp-run", env, options)
        except RunFailed as error:
            return Item(name, "failed", f"{stem}: {error}")
        ours = [line["rank_losses"] for line in run]
        difference = first_difference(ours, theirs[0])
        difference = difference or different_weights(saved["fsdp-run"], saved["fsdp2"])
        if difference:
            return Item(name, "failed", f"{stem}: {difference}")
    return Item(name, "passed", f"{steps} steps, losses and final parameters bit for bit")


def different_weights(ours: Path, theirs: Path) -> str | None:
    own = gpu_files.load(ours)
    for name, want in gpu_files.load(theirs).items():
        if name not in own:
            return f'expected the final parameter "{name}", got none'
        if not torch.equal(own[name], want):
            return f'the final parameter "{name}" differs'
    return None


def run_parity(setup: Setup, report: Report, cases: list[Case], steps: int) -> None:
    for case in cases:
        if case.world == 1 or setup.device == "cpu":
            report.items.append(compare(setup, case, steps, lambda rank: {}))
            continue
        for means, env in ONE_GPU.items():
            item = compare(setup, case, steps, env)
            report.items.append(Item(f"{item.name}, {means}", item.status, item.detail))


def run_trace(setup: Setup, report: Report, cases: list[Case]) -> None:
    """A step's times by the streams' events, which the plan orders."""
    for case in (case for case in cases if case.world == 1):
        name = f"trace {case.name}"
        files = gpu_files.write_inputs(case, setup.out / case.name)
        trace = files[0].with_name("trace.json")
        try:
            run_plan(setup, case, files, 4, "trace", options=("--trace", str(trace)))
        except RunFailed as error:
            report.items.append(Item(name, "failed", str(error)))
            continue
        wrong = disorder(trace, case.plan)
        status = "failed" if wrong else "passed"
        report.items.append(Item(name, status, wrong or "streams and events in the plan's order"))


def run_program(setup: Setup, report: Report, name: str, command: list[Any], log: Path) -> None:
    with log.open("w") as file:
        words = [str(word) for word in command]
        done = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, timeout=setup.timeout)
    text = log.read_text(errors="replace")
    if done.returncode == SKIPPED:
        report.items.append(Item(name, "skipped", last_line(text, done.returncode)))
        return
    if done.returncode:
        detail = f"exit status {done.returncode}, {log.name}: {last_line(text, done.returncode)}"
        report.items.append(Item(name, "failed", detail))
        return
    counts = [line for line in text.splitlines() if line.startswith(("[  PASSED", "[  SKIPPED"))]
    report.items.append(Item(name, "passed", ", ".join(counts[:2])))


def run_tests(setup: Setup, report: Report) -> None:
    for program in (*GPU_TESTS, "RuntimeTests", "PlanTests"):
        path = setup.build / "bin" / program
        if not path.exists():
            report.items.append(Item(program, "skipped", "not built"))
        elif setup.device == "cuda" or program not in GPU_TESTS:
            run_program(setup, report, program, [path], setup.out / f"{program}.log")


def run_sanitizer(setup: Setup, report: Report) -> None:
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    tests = setup.build / "bin" / "CudaTests"
    missing = "no compute-sanitizer on the PATH" if not tool else "CudaTests is not built"
    if not tool or not tests.exists() or setup.device == "cpu":
        report.items.append(Item("compute-sanitizer", "skipped", missing))
        return
    command = [tool, "--error-exitcode", "1", tests, "--gtest_filter=CudaFlatCopyTest.*"]
    run_program(setup, report, "compute-sanitizer", command, setup.out / "sanitizer.log")


def run_bench(setup: Setup, report: Report, rounds: int, steps: int, warmup: int) -> None:
    """Rounds of A B C A B C, so that drift of the machine meets all sides alike."""
    for case in BENCHMARKS if setup.device == "cuda" else PARITY[:1]:
        if not case.plan.exists():
            reason = "no plan: bench/gpu.sh pack makes it, where the compiler is"
            report.items.append(Item(f"bench {case.name}", "skipped", reason))
            continue
        files = gpu_files.write_inputs(case, setup.out / case.name)
        sides: dict[str, tuple[Callable[..., list[dict[str, Any]]], tuple[str, ...]]] = {
            "FSDP2": (run_fsdp2, ()),
            "FSDP2 compiled": (run_fsdp2, ("--compile",)),
            "fsdp-run": (run_plan, ()),
        }
        if setup.device == "cuda":
            sides["fsdp-run graphs"] = (run_plan, GRAPHS)
        samples: list[Sample] = []
        broken: dict[str, str] = {}
        for number in range(rounds):
            for side, (run, options) in sides.items():
                if side in broken:
                    continue
                stem = f"{side.replace(' ', '-')}-{number}"
                try:
                    metrics = run(setup, case, files, steps, stem, options=options)
                    samples.append(Sample(side, metrics))
                except RunFailed as error:
                    broken[side] = str(error)
        for side in sides:
            status = "failed" if side in broken else "passed"
            name = f"bench {case.name} {side}"
            report.items.append(Item(name, status, broken.get(side, f"{rounds} rounds")))
        stats = case.plan.with_suffix(".stats")
        predicted = predicted_peak(stats.read_text()) if stats.exists() else None
        gpu = str(report.machine["gpu"])
        report.benchmarks.append(benchmark(case, samples, warmup, gpu, predicted))
        files[0].unlink()  # gigabytes


def machine(device: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": "none",
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
        result |= {
            "gpu": torch.cuda.get_device_name(0),
            "gpus": torch.cuda.device_count(),
            "driver": driver,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "cudnn": torch.backends.cudnn.version(),
        }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, default=ROOT / "build-gpu")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    names = [case.name for case in PARITY]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, help="of parity, trace")
    parser.add_argument("--parity-steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of a benchmark's run")
    parser.add_argument("--warmup", type=int, default=5, help="of those, not measured")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of one run")
    args = parser.parse_args()
    if args.warmup >= args.steps or args.rounds < 1 or args.parity_steps < 1:
        parser.error("expected --steps above --warmup, and a round and a step at least")
    setup = Setup(args.build, args.out, args.device, args.timeout)
    if not setup.fsdp_run.exists():
        parser.error(f"expected fsdp-run at {setup.fsdp_run}: run bench/gpu.sh build")
    setup.out.mkdir(parents=True, exist_ok=True)
    report = Report(machine(args.device))
    cases = [case for case in PARITY if case.name in args.cases]
    sections: dict[str, Callable[[], None]] = {
        "tests": lambda: run_tests(setup, report),
        "sanitizer": lambda: run_sanitizer(setup, report),
        "parity": lambda: run_parity(setup, report, cases, args.parity_steps),
        "trace": lambda: run_trace(setup, report, cases),
        "bench": lambda: run_bench(setup, report, args.rounds, args.steps, args.warmup),
    }
    for name in args.only:
        try:
            sections[name]()
        except (OSError, subprocess.SubprocessError) as error:
            report.items.append(Item(name, "failed", str(error)))
        # After every section: what ran is not lost when a later one takes the host down.
        (setup.out / "report.txt").write_text(render(report))
        (setup.out / "report.json").write_text(json.dumps(report.to_json(), indent=1) + "\n")
    print(render(report), end="")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
