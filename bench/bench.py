"""Step time and memory of fsdp-run beside FSDP2 and beside the machine's floor.

Runs rounds of A B C D A B C D ... so that drift of the machine meets all alike:

  fsdp2    FSDP2 over Gloo, 2 ranks, one thread each
  fsdp-run this project, 2 ranks, one thread each
  floor    one eager rank, one thread, no communication, alone on the machine
  compiled the same by torch.compile
  floor2   two such independent processes at once: what the shared memory
           bandwidth and caches leave to two ranks

on the 29 M Llama, sequence 256, fused AdamW, in fp32 or with mixed precision: parameters in bf16,
reductions in fp32; the floors compute with a copy of the weights in bf16. Writes
out/bench.json and out/bench.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "test" / "parity"))

from harness import (  # noqa: E402
    ADAMW_FUSED,
    LLAMA_29M,
    Captured,
    Case,
    Run,
    capture,
    compile_plan,
    run_reference,
    train_plan,
)

WARMUP = 2  # steps of each run that are not measured
MIB = 1 << 20
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
}


@dataclass(frozen=True)
class Sample:
    """One run: median step time and the peak resident set of its largest rank."""

    step_ms: float
    peak_rss: int


def measure(*runs: Run) -> Sample:
    lines = [line for run in runs for line in run.metrics[WARMUP:]]
    return Sample(
        statistics.median(line["step_ms"] for line in lines),
        max(line["peak_rss_bytes"] for line in lines),
    )


def run_single(captured: Captured, case: Case, stem: str, *, compiled: bool = False) -> Run:
    """One rank of PyTorch without FSDP."""
    return run_reference(captured, case, stem, mode="single", compiled=compiled, save=False)


def run_floor2(captured: Captured, case: Case) -> Sample:
    def run(index: int) -> Run:
        return run_single(captured, case, f"floor2.{index}")

    with ThreadPoolExecutor(2) as pool:
        return measure(*pool.map(run, range(2)))


def sides(
    captured: Captured, steps: int, precision: dict[str, Any]
) -> dict[str, Callable[[], Sample]]:
    two = Case(captured.model, ADAMW_FUSED, world=2, steps=steps, precision=precision)
    one = replace(two, world=1)
    plan = compile_plan(captured, two, "bench")
    return {
        "fsdp2": lambda: measure(run_reference(captured, two, "bench", save=False)),
        "fsdp-run": lambda: measure(train_plan(captured, plan, two, save=False)),
        "floor": lambda: measure(run_single(captured, one, "floor")),
        "compiled": lambda: measure(run_single(captured, one, "compiled", compiled=True)),
        "floor2": lambda: run_floor2(captured, one),
    }


def spread(values: list[float], digits: int) -> str:
    middle = f"{statistics.median(values):.{digits}f}"
    return f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def table(rounds: list[dict[str, Sample]]) -> str:
    """A Markdown table; each cell is the median over rounds (min-max)."""
    rows = ["| | step, ms | x floor | x floor2 | x compiled | x FSDP2 | peak RSS a rank, MiB |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- |")
    for side in rounds[0]:
        cells = [spread([r[side].step_ms for r in rounds], 0)]
        for base in ("floor", "floor2", "compiled", "fsdp2"):
            ratios = [r[side].step_ms / r[base].step_ms for r in rounds]
            cells.append(spread(ratios, 2) if side != base else "1")
        cells.append(spread([r[side].peak_rss / MIB for r in rounds], 0))
        rows.append(f"| {side} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def machine() -> dict[str, Any]:
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {"cpu": model, "cores": os.cpu_count(), "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=2, help="samples a rank and step")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="steps a run, 2 of them warm-up")
    args = parser.parse_args()
    if args.steps <= WARMUP or args.rounds < 1 or args.batch < 1:
        parser.error(f"expected --steps > {WARMUP}, --rounds and --batch > 0")

    model = replace(LLAMA_29M, batch=args.batch)
    precision = PRECISIONS[args.precision]
    captured = capture(model, ROOT / "out" / "bench", samples=256, precision=precision or None)
    runs = sides(captured, args.steps, precision)
    rounds: list[dict[str, Sample]] = []
    for number in range(args.rounds):
        rounds.append({})
        for side, run in runs.items():
            rounds[-1][side] = sample = run()
            print(
                f"round {number + 1}/{args.rounds}  {side:<8}  {sample.step_ms:7.1f} ms a step"
                f"  {sample.peak_rss / MIB:6.0f} MiB",
                flush=True,
            )

    title = (
        f"29 M Llama, sequence {model.seq}, batch {model.batch} a rank, {args.precision}, "
        f"fused AdamW; median over {args.rounds} rounds (min-max)"
    )
    text = f"{title}\n\n{table(rounds)}\n"
    (ROOT / "out" / "bench.md").write_text(text)
    record = {
        "machine": machine(),
        "settings": vars(args),
        "rounds": [{side: vars(sample) for side, sample in r.items()} for r in rounds],
    }
    (ROOT / "out" / "bench.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{text}\nwritten: out/bench.json, out/bench.md")


if __name__ == "__main__":
    main()
