"""Step time with `schedule: {fuse: exact}` and without, beside the eager floor.

Each model trains on one rank of one thread: eagerly (`floor`), by `torch.compile` (`compiled`), by
`fsdp-run` without kernels, and with them, in turn, so that drift of the machine affects all alike.
Fails if a loss differs between the two plans. Writes out/fusion.json and out/fusion.md.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "test" / "parity"))

from harness import (  # noqa: E402
    ADAMW_FUSED,
    Case,
    capture,
    compile_plan,
    train_plan,
)
from operators import MODELS, parse_arguments  # noqa: E402

from bench import PRECISIONS, Sample, machine, measure, run_single, spread  # noqa: E402

SIDES = ("floor", "compiled", "plain", "fused")
_RATIOS = (("plain", "floor"), ("fused", "floor"), ("fused", "compiled"), ("fused", "plain"))


class Bench:
    """One model, captured and compiled twice."""

    def __init__(self, name: str, steps: int) -> None:
        model, precision = MODELS[name]
        folder = ROOT / "out" / "fusion" / re.sub(r"\W+", "-", name)
        folder.mkdir(parents=True, exist_ok=True)
        policy = PRECISIONS[precision]
        self.captured = capture(model, folder, samples=8 * model.batch, precision=policy)
        self.case = Case(model, ADAMW_FUSED, world=1, steps=steps, precision=policy)
        plain = replace(self.case, training={"schedule": {"fuse": "none"}})
        self.plans = {
            "plain": compile_plan(self.captured, plain, "plain"),
            "fused": compile_plan(self.captured, self.case, "fused"),
        }
        self.losses: dict[str, list[float]] = {}

    def run(self, side: str) -> Sample:
        if side in ("floor", "compiled"):
            return measure(run_single(self.captured, self.case, side, compiled=side == "compiled"))
        run = train_plan(self.captured, self.plans[side], self.case, save=False)
        self.losses[side] = run.column("loss")
        return measure(run)

    def counts(self) -> tuple[int, int]:
        """Places of kernels, and the calls that they make."""
        tree = json.loads(self.plans["fused"].read_text())
        kernels = [each["fused"] for each in tree["instructions"] if "fused" in each]
        return len(kernels), sum(len(tree["kernels"][kernel]["calls"]) for kernel in kernels)


def row(name: str, bench: Bench, rounds: list[dict[str, Sample]]) -> str:
    places, calls = bench.counts()
    cells = [name, f"{calls} in {places}"]
    cells += [spread([sample[side].step_ms for sample in rounds], 0) for side in SIDES]
    for side, base in _RATIOS:
        cells.append(spread([each[side].step_ms / each[base].step_ms for each in rounds], 3))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    args = parse_arguments(__doc__)

    benches = {name: Bench(name, args.steps) for name in args.models}
    samples: dict[str, list[dict[str, Sample]]] = {name: [] for name in benches}
    for number in range(args.rounds):
        for name, bench in benches.items():
            samples[name].append({side: bench.run(side) for side in SIDES})
            if bench.losses["plain"] != bench.losses["fused"]:
                raise SystemExit(f"{name}: the losses differ: {bench.losses}")
            ratio = statistics.median(
                each["fused"].step_ms / each["plain"].step_ms for each in samples[name]
            )
            print(f"round {number + 1}/{args.rounds}  {name}  {ratio:.3f}", flush=True)

    head = ["", "calls in kernels", *(f"{side}, ms" for side in SIDES)]
    head += [f"{side} x {base}" for side, base in _RATIOS]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    lines += [row(name, benches[name], rounds) for name, rounds in samples.items()]
    text = "\n".join(lines)
    record: dict[str, Any] = {
        "machine": machine(),
        "settings": vars(args),
        "samples": {
            name: [{side: asdict(sample) for side, sample in each.items()} for each in rounds]
            for name, rounds in samples.items()
        },
    }
    out = ROOT / "out"
    (out / "fusion.md").write_text(text + "\n")
    (out / "fusion.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{text}\nwritten: out/fusion.json, out/fusion.md")


if __name__ == "__main__":
    main()
