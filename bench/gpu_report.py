"""What bench/gpu.py says of its runs: comparison, figures and text. No GPU and no torch."""

from __future__ import annotations

import re
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from gpu_cases import Case

GIB = 1 << 30
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB, "TiB": 1 << 40}

# FLOP/s of dense bfloat16, from the vendor's data sheets; the first name that is part of the GPU's.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "A100": 312e12,
    "B200": 2250e12,
}

STATUSES = ("passed", "failed", "refused", "skipped")
"""Of an item; refused: NCCL or the host did not give what it needs. skipped: with a reason."""


@dataclass(frozen=True)
class Item:
    """Something that was tried."""

    name: str
    status: str
    detail: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"expected one of {', '.join(STATUSES)}, got {self.status}")


@dataclass(frozen=True)
class Sample:
    """One side's run in one round: its steps' metrics, warm-up included."""

    side: str
    metrics: list[dict[str, Any]]


@dataclass(frozen=True)
class Figures:
    """Of one side in one case, medians over rounds of medians over steps after the warm-up."""

    side: str
    step_ms: float
    spread: tuple[float, float]
    host_ms: float | None
    mfu: float | None
    tokens_per_s: float
    peak_bytes: int | None
    peak_reserved_bytes: int | None


@dataclass
class Report:
    machine: dict[str, Any]
    items: list[Item] = field(default_factory=list)
    benchmarks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(item.status == "failed" for item in self.items)

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "items": [asdict(item) for item in self.items],
            "benchmarks": self.benchmarks,
        }


def first_difference(ours: list[list[float]], theirs: list[list[float]]) -> str | None:
    """Where losses, a list of ranks a step, differ; None if they are equal bit for bit."""
    if len(ours) != len(theirs):
        return f"expected {len(theirs)} steps, got {len(ours)}"
    for step, (own, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        if len(own) != len(other):
            return f"step {step}: expected losses of {len(other)} ranks, got {len(own)}"
        for rank, (a, b) in enumerate(zip(own, other, strict=True)):
            if a != b:
                return f"step {step}, rank {rank}: expected the loss {b:.9g}, got {a:.9g}"
    return None


def peak_flops(gpu: str) -> float | None:
    return next((flops for name, flops in PEAK_FLOPS.items() if name in gpu), None)


def predicted_peak(stats: str) -> int | None:
    """Bytes a rank, from what `fsdp-opt --emit stats` printed."""
    found = re.search(r"^peak bytes a rank +([\d.]+) (\w+)$", stats, re.MULTILINE)
    return round(float(found[1]) * UNITS[found[2]]) if found else None


def median_of(runs: list[list[dict[str, Any]]], key: str) -> list[float]:
    """Of each run, the median over its steps; empty if none reports the key."""
    return [
        statistics.median(step[key] for step in run)
        for run in runs
        if run and all(step.get(key) is not None for step in run)
    ]


def most(runs: list[list[dict[str, Any]]], key: str) -> int | None:
    values = [step[key] for run in runs for step in run if step.get(key) is not None]
    return int(max(values)) if values else None


def figures(case: Case, side: str, samples: list[Sample], warmup: int, gpu: str) -> Figures | None:
    """None where no run of this side has a step after its warm-up."""
    runs = [sample.metrics[warmup:] for sample in samples if sample.side == side]
    times = median_of(runs, "step_ms")
    if not times:
        return None
    step_ms = statistics.median(times)
    peak, host = peak_flops(gpu), median_of(runs, "host_ms")
    return Figures(
        side=side,
        step_ms=step_ms,
        spread=(min(times), max(times)),
        host_ms=statistics.median(host) if host else None,
        mfu=case.flops / (step_ms / 1e3) / peak if peak else None,
        tokens_per_s=case.tokens / (step_ms / 1e3),
        peak_bytes=most(runs, "peak_bytes"),
        peak_reserved_bytes=most(runs, "peak_reserved_bytes"),
    )


def benchmark(
    case: Case,
    samples: list[Sample],
    warmup: int,
    gpu: str,
    predicted: int | None,
) -> dict[str, Any]:
    sides = list(dict.fromkeys(sample.side for sample in samples))
    rows = [figures(case, side, samples, warmup, gpu) for side in sides]
    return {
        "case": case.name,
        "parameters": case.parameters,
        "seq": case.seq,
        "batch": case.batch,
        "flops": case.flops,
        "predicted_peak_bytes": predicted,
        "warmup": warmup,
        "sides": [asdict(row) for row in rows if row],
        "samples": [asdict(sample) for sample in samples],
    }


def table(result: dict[str, Any]) -> str:
    def cell(value: Any, form: str, scale: float = 1) -> str:
        return "-" if value is None else format(value / scale, form)

    lines = [
        "| | step, ms (min-max) | host, ms | MFU, % | tokens/s | peak, GiB | reserved, GiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["sides"]:
        low, high = row["spread"]
        cells = [
            row["side"],
            f"{row['step_ms']:.1f} ({low:.1f}-{high:.1f})",
            cell(row["host_ms"], ".1f"),
            cell(row["mfu"], ".1f", 0.01),
            f"{row['tokens_per_s']:.0f}",
            cell(row["peak_bytes"], ".2f", GIB),
            cell(row["peak_reserved_bytes"], ".2f", GIB),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    if result["predicted_peak_bytes"] is not None:
        lines.append(f"\npredicted peak: {result['predicted_peak_bytes'] / GIB:.2f} GiB")
    return "\n".join(lines)


def render(report: Report) -> str:
    lines = [f"{name}: {value}" for name, value in report.machine.items()]
    lines.append("")
    width = max((len(item.name) for item in report.items), default=0)
    for item in report.items:
        detail = f"  {item.detail}" if item.detail else ""
        lines.append(f"{item.status:<8} {item.name:<{width}}{detail}".rstrip())
    for result in report.benchmarks:
        lines.append(
            f"\n{result['case']}: {result['parameters'] / 1e9:.2f} B parameters, "
            f"batch {result['batch']}, sequence {result['seq']}\n\n{table(result)}"
        )
    return "\n".join(lines) + "\n"
