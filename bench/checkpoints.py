"""What a checkpoint costs training: stall of its step, slow-down of the ten after it, throughput.

Runs rounds of A B C A B C ... of the 29 M Llama with fused AdamW on 2 ranks, each of which saves
once, after step 20 of 31:

  waits    training waits for the save
  copies   --checkpoint-async: it waits for copies of what is saved
  staged   the plan, with `schedule: {stage_checkpoints: true}`, makes them beside the next step
  none     no save, but the same steps compared

The checkpoints lie in out/bench, so the figures are of that disk, too. Prints a table.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "test" / "parity"))

from harness import (  # noqa: E402
    ADAMW_FUSED,
    LLAMA_29M,
    Captured,
    Case,
    capture,
    compile_plan,
    execute,
    read_run,
    run_command,
)

from bench import spread  # noqa: E402

SAVED, NEAR = 20, 10  # the step, and the steps before and after it
STEPS = SAVED + NEAR + 1


@dataclass(frozen=True)
class Sample:
    step_ms: float  # before the save
    stall_ms: float
    save_ms: float
    slowdown: float
    gigabytes: float


def run(captured: Captured, plan: Path, case: Case, words: list[Any]) -> Sample:
    folder, metrics = captured.directory / "saved", captured.directory / "checkpoints.jsonl"
    shutil.rmtree(folder, ignore_errors=True)
    command = [*run_command(captured, plan, case), "--metrics", metrics, *words]
    if words:
        command += ["--checkpoint", folder]
    execute([*command, "--nproc", case.world])
    lines = read_run(metrics, None).metrics
    times = [line["step_ms"] for line in lines]
    before, after = times[SAVED - NEAR : SAVED], times[SAVED : SAVED + NEAR]
    (saved,) = [line for line in lines if line.get("saved_step") == SAVED] or [{}]
    return Sample(
        statistics.median(before),
        saved.get("save_stall_ms", 0),
        saved.get("save_ms", 0),
        statistics.mean(after) / statistics.mean(before),
        saved.get("save_bytes", 0) * 1e-9,
    )


def table(rounds: list[dict[str, Sample]]) -> str:
    rows = ["| | step, ms | stall, ms | save, ms | GB/s | next ten steps |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    for side in rounds[0]:
        samples = [r[side] for r in rounds]
        cells = [spread([x.step_ms for x in samples], 0)]
        if side == "none":
            cells += ["", "", ""]
        else:
            cells += [spread([x.stall_ms for x in samples], 0)]
            cells += [spread([x.save_ms for x in samples], 0)]
            cells += [spread([x.gigabytes / x.save_ms * 1e3 for x in samples], 2)]
        cells.append("x " + spread([x.slowdown for x in samples], 2))
        rows.append(f"| {side} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    captured = capture(LLAMA_29M, ROOT / "out" / "bench", samples=256)
    case = Case(LLAMA_29M, ADAMW_FUSED, world=2, steps=STEPS)
    staging = replace(case, training={"schedule": {"stage_checkpoints": True}})
    plans = {
        "plain": compile_plan(captured, case, "plain"),
        "staged": compile_plan(captured, staging, "staged"),
    }
    every: list[Any] = ["--checkpoint-every", SAVED]
    sides: dict[str, tuple[str, list[Any]]] = {
        "waits": ("plain", every),
        "copies": ("plain", [*every, "--checkpoint-async"]),
        "staged": ("staged", [*every, "--checkpoint-async"]),
        "none": ("plain", []),
    }
    rounds: list[dict[str, Sample]] = []
    for number in range(args.rounds):
        rounds.append({})
        for side, (plan, words) in sides.items():
            rounds[-1][side] = sample = run(captured, plans[plan], case, words)
            print(f"round {number + 1}/{args.rounds}  {side:<6}  {sample}", flush=True)
    size = rounds[0]["waits"].gigabytes
    print(f"\n{size:.2f} GB a save; median over {args.rounds} rounds (min-max)\n")
    print(table(rounds))


if __name__ == "__main__":
    main()
