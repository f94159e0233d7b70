"""Time and memory of fsdp-opt on the shapes of Llama 3 at several depths.

Captures `transformers`' Llama 3, 8B or 405B, on `meta` (no weights) and compiles each capture to a
plan, one process a run, nothing cached. Files stay in out/bench-compile/; a capture that is there
is made again, because its time is part of the table. Writes out/bench-compile.json and .md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "bench-compile"
FSDP_OPT = ROOT / "build" / "bin" / "fsdp-opt"
CONFIG = "units: [{match: model.layers.*}]\n"
MIB = 1 << 20


@dataclass(frozen=True)
class Capture:
    """A captured model; `seconds` is capture alone, without the imports of Python."""

    layers: int
    elements: int
    nodes: int
    seconds: float
    path: str


@dataclass(frozen=True)
class Compilation:
    """One capture compiled for a number of ranks: wall and CPU times of whole processes."""

    layers: int
    ranks: int
    seconds: list[float]
    cpu_seconds: list[float]
    peak_rss: int
    plan_bytes: int


def capture_layers(shape: str, layers: int, seq: int) -> Capture:
    """Runs in a process of its own: torch would raise the peak RSS of every child of this one."""
    import torch
    from fsdp_mlir import capture
    from fsdp_mlir.models import llama3

    path = OUT / f"llama3-{shape}-{layers}.pt"
    tokens = torch.zeros((1, seq), dtype=torch.int64)
    tokens[0, 0] = 128255
    with torch.device("meta"):
        model = getattr(llama3, f"llama3_{shape}")(layers)
    summary = capture(model, kwargs={"input_ids": tokens, "labels": tokens}, path=path)
    return Capture(layers, summary.elements, summary.nodes, summary.seconds, str(path))


def measure(command: list[str]) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and peak RSS in bytes of one process, which must succeed."""
    start = time.monotonic()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"compile: error: exit status {process.returncode} of {' '.join(command)}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def compile_capture(captured: Capture, ranks: int, rounds: int, schedule: str) -> Compilation:
    plan = OUT / f"llama3-{captured.layers}.{ranks}.json"
    command = opt_command(captured.path, ranks, "plan", plan, schedule)
    samples = [measure(command) for _ in range(rounds)]
    return Compilation(
        captured.layers,
        ranks,
        [seconds for seconds, _, _ in samples],
        [cpu for _, cpu, _ in samples],
        max(rss for _, _, rss in samples),
        plan.stat().st_size,
    )


def opt_command(
    archive: str, ranks: int, emit: str, output: Path | str, schedule: str
) -> list[str]:
    config = OUT / "fsdp.yaml"
    config.write_text(CONFIG + (f"schedule: {schedule}\n" if schedule else ""))
    options = ["--config", config, "--world-size", ranks, "--emit", emit, "-o", output]
    return [str(part) for part in (FSDP_OPT, archive, *options)]


def table(captures: list[Capture], compilations: list[Compilation]) -> str:
    rows = [
        "| layers | parameters, B | ATen calls | capture, s | ranks | compile, s (min-max) "
        "| CPU, s | us a call | peak RSS, MiB | plan, MiB |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    by_layers = {captured.layers: captured for captured in captures}
    for result in compilations:
        captured = by_layers[result.layers]
        median = statistics.median(result.seconds)
        cells = [
            str(captured.layers),
            f"{captured.elements / 1e9:.2f}",
            f"{captured.nodes:,}",
            f"{captured.seconds:.2f}",
            f"{result.ranks:,}",
            f"{median:.2f} ({min(result.seconds):.2f}-{max(result.seconds):.2f})",
            f"{statistics.median(result.cpu_seconds):.2f}",
            f"{median / captured.nodes * 1e6:.0f}",
            f"{result.peak_rss / MIB:.0f}",
            f"{result.plan_bytes / MIB:.2f}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def machine() -> dict[str, str | int | None]:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {"cpu": names[0] if names else platform.machine(), "cores": os.cpu_count()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=["8b", "405b"], default="8b")
    parser.add_argument("--schedule", default="", help="the config's key, as YAML in one line")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 1024])
    parser.add_argument("--rounds", type=int, default=5, help="runs of fsdp-opt, the median counts")
    parser.add_argument("--seq", type=int, default=2048, help="sequence length, batch 1")
    parser.add_argument(
        "--stats",
        type=int,
        metavar="LAYERS",
        help="also print fsdp-opt --emit stats of this depth for every number of ranks",
    )
    args = parser.parse_args()
    if min([args.rounds, args.seq, *args.layers, *args.ranks]) < 1:
        parser.error("expected --layers, --ranks, --rounds and --seq of at least 1")
    if args.stats and args.stats not in args.layers:
        parser.error(f"expected --stats among --layers, got {args.stats}")
    if not FSDP_OPT.exists():
        parser.error(f"{FSDP_OPT.relative_to(ROOT)} is missing; run make build")

    OUT.mkdir(parents=True, exist_ok=True)
    captures: list[Capture] = []
    compilations: list[Compilation] = []
    for layers in args.layers:
        # A new process for each capture: torch and the graph before would slow it.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            captured = pool.apply(capture_layers, (args.shape, layers, args.seq))
        captures.append(captured)
        print(f"{layers} layers: captured in {captured.seconds:.2f} s", flush=True)
        for ranks in args.ranks:
            result = compile_capture(captured, ranks, args.rounds, args.schedule)
            compilations.append(result)
            seconds = statistics.median(result.seconds)
            print(f"{layers} layers, {ranks} ranks: {seconds:.2f} s", flush=True)

    text = table(captures, compilations) + "\n"
    (OUT.with_suffix(".md")).write_text(text)
    record = {
        "machine": machine(),
        "settings": vars(args),
        "captures": [asdict(captured) for captured in captures],
        "compilations": [asdict(result) for result in compilations],
    }
    (OUT.with_suffix(".json")).write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{text}\nwritten: out/bench-compile.json, out/bench-compile.md")
    for captured in captures:
        if captured.layers == args.stats:
            for ranks in args.ranks:
                print(f"\n{captured.layers} layers, {ranks} ranks", flush=True)
                subprocess.run(
                    opt_command(captured.path, ranks, "stats", "-", args.schedule), check=True
                )


if __name__ == "__main__":
    main()
