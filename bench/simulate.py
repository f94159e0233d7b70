"""Checks the simulator against measured runs and against a published table.

  cpu         the 29 M Llama, batch 2, 2 ranks of this machine: a profile of one run predicts the
              step time and the memory of other runs, of the same plan and of one with activation
              checkpointing
  torchtitan  Llama 3.1 8B on 8 and 128 H100: two constants are fitted to the two 8-GPU rows of
              torchtitan's table (eager and torch.compile), the 128-GPU rows are predicted
  scale       seconds that fsdp-opt takes to compile and simulate it for 8 to 100,000 ranks

Two cores must be free for the first; the others need no particular machine. Writes
out/bench-simulate.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "bench-simulate"
FSDP_OPT = ROOT / "build" / "bin" / "fsdp-opt"
FSDP_RUN = ROOT / "build" / "bin" / "fsdp-run"
WARMUP = 2  # steps of each run that are not measured
GIB = 1 << 30
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}


def run(command: list[Any]) -> str:
    """Standard output of a command that must succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(
            f"simulate: error: exit status {done.returncode} of {' '.join(words)}\n{done.stderr}"
        )
    return done.stdout


@dataclass(frozen=True)
class Simulated:
    """What `fsdp-opt --emit stats` says of a simulated step."""

    seconds: float
    exposed: float
    tokens_a_rank: float
    peak_bytes: float


def simulate(archive: Path, config: Path, ranks: int, *options: Any) -> Simulated:
    command = [FSDP_OPT, archive, "--config", config, "--world-size", ranks, "--emit", "stats"]
    text = run([*command, *options])

    def find(pattern: str) -> re.Match[str]:
        match = re.search(pattern, text, re.MULTILINE)
        if not match:
            sys.exit(f"simulate: error: no '{pattern}' in the statistics\n{text}")
        return match

    peak = find(r"^memory peak a rank +([0-9.]+) (\w+)")
    return Simulated(
        float(find(r"^step time +([0-9.]+) ms")[1]) / 1e3,
        float(find(r"^exposed communication +([0-9.]+) ms")[1]) / 1e3,
        float(find(r"^tokens/s .*a rank ([0-9.]+)")[1]),
        float(peak[1]) * UNITS[peak[2]],
    )


def error(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.1f} %"


# ---------------------------------------------------------------------------
# Measured runs on CPU ranks
# ---------------------------------------------------------------------------


def idle_fraction(seconds: float) -> float:
    """What of the machine's time nobody used over the next so many seconds."""

    def times() -> tuple[int, int]:
        numbers = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return numbers[3], sum(numbers)

    idle, total = times()
    time.sleep(seconds)
    idle_after, total_after = times()
    return (idle_after - idle) / max(1, total_after - total)


def wait_until_idle(limit: float) -> None:
    """Returns when 95 % of the machine are free, at the latest after `limit` seconds."""
    end = time.monotonic() + limit
    while time.monotonic() < end and idle_fraction(3) < 0.95:
        pass


def train(plan: Path, data: Path, steps: int, *options: Any) -> tuple[float, float]:
    """Median step time in seconds and the peak bytes of the largest rank, of one run."""
    metrics = plan.with_suffix(".jsonl")
    run([FSDP_RUN, plan, "--steps", steps, "--data", data, "--metrics", metrics, *options])
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = statistics.median(line["step_ms"] for line in lines[WARMUP:]) / 1e3
    return seconds, max(line["peak_bytes"] for line in lines)


def check_cpu(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    sys.path.insert(0, str(ROOT / "test" / "parity"))
    from harness import ADAMW_FUSED, LLAMA_29M, Case, capture, compile_plan

    model = replace(LLAMA_29M, batch=args.batch)
    captured = capture(model, OUT / "cpu", samples=256)
    base = Case(model, ADAMW_FUSED, world=2, steps=args.steps)
    cases = {
        "plain": base,
        "checkpointed": replace(base, checkpoint={"match": "layers.*", "save": ["aten::mm/2"]}),
    }
    plans = {name: compile_plan(captured, case, name) for name, case in cases.items()}
    profile = OUT / "cpu" / "profile.json"
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(args.rounds):
        wait_until_idle(args.wait_idle)
        train(plans["plain"], captured.data, args.steps, "--profile", profile)
        rounds.append({})
        for name, plan in plans.items():
            config = OUT / "cpu" / f"{name}.yaml"
            predicted = simulate(captured.archive, config, 2, "--profile", profile)
            seconds, peak = train(plan, captured.data, args.steps)
            rounds[-1][name] = {
                "predicted_seconds": predicted.seconds,
                "measured_seconds": seconds,
                "predicted_bytes": predicted.peak_bytes,
                "measured_bytes": peak,
            }
            print(
                f"cpu, round {number + 1}/{args.rounds}  {name:<12}"
                f"  predicted {predicted.seconds * 1e3:7.1f} ms, measured {seconds * 1e3:7.1f} ms"
                f" ({error(predicted.seconds, seconds)})",
                flush=True,
            )
    rows = [
        "| plan | step predicted, ms | measured, ms | error (min, max) "
        "| peak predicted, MiB | measured, MiB | error |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in plans:

        def median(key: str, name: str = name) -> float:
            return statistics.median(r[name][key] for r in rounds)

        errors = sorted(
            r[name]["predicted_seconds"] / r[name]["measured_seconds"] - 1 for r in rounds
        )
        middle = 100 * statistics.median(errors)
        cells = [
            name,
            f"{median('predicted_seconds') * 1e3:.0f}",
            f"{median('measured_seconds') * 1e3:.0f}",
            f"{middle:+.1f} % ({100 * errors[0]:+.1f}, {100 * errors[-1]:+.1f})",
            f"{median('predicted_bytes') / (1 << 20):.1f}",
            f"{median('measured_bytes') / (1 << 20):.1f}",
            error(median("predicted_bytes"), median("measured_bytes")),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows), {"rounds": rounds}


# ---------------------------------------------------------------------------
# torchtitan's table
# ---------------------------------------------------------------------------

# benchmarks/llama3_h100_202412_torchtitan.md: tokens/s a GPU and GiB, eager and with
# torch.compile; local batch 2, sequence 8,192.
TITAN = {
    (8, False): (5762, 82.4),
    (8, True): (6667, 77.0),
    (128, False): (5605, 67.0),
    (128, True): (6514, 62.0),
}
BATCH, SEQUENCE = 2, 8192

# Units, precision, clipping and selective checkpointing by operator as torchtitan's: of every two
# matrix products of a block the first is kept, and attention.
TITAN_CONFIG = """\
units:
  - match: model.layers.*
  - match: [model.norm, lm_head]
    reshard_after_forward: false
mixed_precision: {param_dtype: bfloat16, reduce_dtype: float32}
activation_checkpoint:
  match: model.layers.*
  save: ["aten::mm/2", "aten::_scaled_dot_product_flash_attention_for_cpu"]
optimizer: {name: adamw, lr: 3.0e-4, fused: true}
clip_grad_norm: 1.0
schedule: {prefetch: fsdp2, reduce_scatters_in_flight: 1, fuse: none}
"""


def capture_titan() -> tuple[Path, Path]:
    import torch
    from fsdp_mlir import capture
    from fsdp_mlir.models.llama3 import llama3_8b

    folder = OUT / "torchtitan"
    folder.mkdir(parents=True, exist_ok=True)
    config, archive = folder / "fsdp.yaml", folder / "model.pt"
    config.write_text(TITAN_CONFIG)
    tokens = torch.zeros((BATCH, SEQUENCE), dtype=torch.int64)
    tokens[0, 0] = 128255
    with torch.device("meta"):
        model = llama3_8b()
    inputs = {"input_ids": tokens, "labels": tokens}
    capture(model, kwargs=inputs, path=str(archive), config=str(config))
    return archive, config


@dataclass(frozen=True)
class Titan:
    """The captured model on torchtitan's machines, as a function of what is fitted."""

    archive: Path
    config: Path

    def step(self, ranks: int, compiled: bool, matmul: float, memory: float) -> Simulated:
        # H100 with 96 GB of HBM2e at 2.4 TB/s and 500 W. What FlashAttention 2 reaches of an H100
        # is from FlashAttention 3's paper (arXiv:2407.08608).
        override = {
            "name": "H100, HBM2e, 500 W",
            "memory_bandwidth": 2.4e12,
            "memory_capacity": 96.0e9,
            "attention_fraction": 0.35,
            "matmul_fraction": matmul,
            "memory_fraction": memory,
            "collective_copies": "true",
            "fuse_pointwise": str(compiled).lower(),
        }
        members = ", ".join(f'{key}: "{value}"' for key, value in override.items())
        cluster = self.archive.parent / "cluster.yaml"
        cluster.write_text(f"device: h100\nranks: {ranks}\noverride: {{{members}}}\n")
        return simulate(self.archive, self.config, ranks, "--simulate", cluster)


def fit(titan: Titan) -> tuple[float, float]:
    """The fractions of the peaks that matrix products and memory reach, so that the 8-GPU rows come
    out. A step's time is about linear in their inverses: Newton's method, within (0, 1].
    """
    goals = [BATCH * SEQUENCE / TITAN[8, compiled][0] for compiled in (False, True)]

    def residuals(x: float, y: float) -> list[float]:
        return [
            titan.step(8, compiled, 1 / x, 1 / y).seconds - goal
            for compiled, goal in zip((False, True), goals, strict=True)
        ]

    x, y, delta = 1 / 0.6, 1 / 0.9, 0.01
    for _ in range(8):
        r = residuals(x, y)
        dx = [(after - r[i]) / delta for i, after in enumerate(residuals(x + delta, y))]
        dy = [(after - r[i]) / delta for i, after in enumerate(residuals(x, y + delta))]
        determinant = dx[0] * dy[1] - dy[0] * dx[1]
        step_y = (dx[1] * r[0] - dx[0] * r[1]) / determinant
        before = (x, y)
        y = max(1.0, y + step_y)
        # With a bound on one, the other takes the eager row.
        x = max(1.0, x - (r[0] + dy[0] * (y - before[1])) / dx[0])
        if abs(x - before[0]) + abs(y - before[1]) < 1e-4:
            break
    return 1 / x, 1 / y


def check_titan(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    titan = Titan(*capture_titan())
    matmul, memory = fit(titan)
    rows = [
        f"fitted to the 8-GPU rows: `matmul_fraction` {matmul:.3f}, `memory_fraction` {memory:.3f}",
        "",
        "| GPUs | | tokens/s a GPU, published | simulated | error | exposed, ms "
        "| GiB, published | simulated | error |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    record = []
    for (ranks, compiled), (tokens, gib) in TITAN.items():
        step = titan.step(ranks, compiled, matmul, memory)
        peak = step.peak_bytes / GIB
        cells = [
            f"{ranks}",
            "torch.compile" if compiled else "eager",
            f"{tokens:,}",
            f"{step.tokens_a_rank:,.0f}",
            error(step.tokens_a_rank, tokens),
            f"{step.exposed * 1e3:.0f}",
            f"{gib:.1f}",
            f"{peak:.1f}",
            error(peak, gib),
        ]
        rows.append("| " + " | ".join(cells) + " |")
        record.append({"ranks": ranks, "compiled": compiled, **vars(step)})
    fitted = {"matmul_fraction": matmul, "memory_fraction": memory}
    return "\n".join(rows), {"fitted": fitted, "rows": record}


def check_scale(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    archive, config = capture_titan()
    rows = ["| ranks | seconds (min-max) |", "| ---: | ---: |"]
    record = {}
    for ranks in (8, 128, 1024, 100_000):
        seconds = []
        for _ in range(args.rounds):
            begin = time.monotonic()
            simulate(archive, config, ranks, "--device", "h100")
            seconds.append(time.monotonic() - begin)
        middle = statistics.median(seconds)
        rows.append(f"| {ranks:,} | {middle:.2f} ({min(seconds):.2f}-{max(seconds):.2f}) |")
        record[ranks] = seconds
    return "\n".join(rows), record


def machine() -> dict[str, Any]:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }


PARTS: dict[str, Callable[[argparse.Namespace], tuple[str, dict[str, Any]]]] = {
    "cpu": check_cpu,
    "torchtitan": check_titan,
    "scale": check_scale,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="cpu, torchtitan, scale; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="steps of a run of `cpu`")
    parser.add_argument(
        "--wait-idle", type=float, default=0, help="seconds that a round may wait for free cores"
    )
    parser.add_argument("--batch", type=int, default=2, help="samples a rank and step of `cpu`")
    args = parser.parse_args()
    if args.steps <= WARMUP or min(args.rounds, args.batch) < 1:
        parser.error(f"expected --steps > {WARMUP}, --rounds and --batch > 0")
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"expected parts among {', '.join(PARTS)}, got {part}")
    OUT.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"machine": machine(), "settings": vars(args)}
    sections = []
    for name in args.parts or PARTS:
        text, record[name] = PARTS[name](args)
        sections.append(f"{name}\n\n{text}\n")
        print(f"\n{sections[-1]}", flush=True)
    (OUT.with_suffix(".md")).write_text("\n".join(sections))
    (OUT.with_suffix(".json")).write_text(json.dumps(record, indent=1) + "\n")
    print("written: out/bench-simulate.json, out/bench-simulate.md")


if __name__ == "__main__":
    main()
