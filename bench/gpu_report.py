"""What bench/gpu.py says of its runs: comparison, figures and text. No GPU and no torch."""

from __future__ import annotations

import re
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from gpu_cases import CASES, Case
from gpu_items import SIDES, position

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

FAILURES = "failures.log"
"""Beside the report."""

STATUSES = ("passed", "failed", "refused", "skipped")
"""Of an item; refused: NCCL or the host did not give what it needs. skipped: with a reason."""


@dataclass(frozen=True)
class Item:
    """Something that was tried."""

    name: str
    status: str
    detail: str = ""
    seconds: float | None = None
    date: str = ""
    output: str = ""  # of one that failed or was refused: what its processes wrote on stderr

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"expected one of {', '.join(STATUSES)}, got {self.status}")


@dataclass(frozen=True)
class Sample:
    """One side's run in one round: its steps' metrics, `warmup` of them included. `call` tells
    those of one call of the script from those of others."""

    side: str
    metrics: list[dict[str, Any]]
    warmup: int = 0
    call: str = ""


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
    """Of all slices that ran on a machine. `references` are FSDP2's results that the other sides
    are compared with, by Planned.reference; `running` is the item that runs now."""

    machine: dict[str, Any]
    items: list[Item] = field(default_factory=list)
    benchmarks: list[dict[str, Any]] = field(default_factory=list)
    references: dict[str, Any] = field(default_factory=dict)
    running: str = ""

    @property
    def failures(self) -> list[Item]:
        """Those that ran and did not end well."""
        return [item for item in self.items if item.status in ("failed", "refused")]

    def record(self, item: Item) -> None:
        """In the place of one of the same name."""
        items = [other for other in self.items if other.name != item.name]
        self.items = sorted([*items, item], key=lambda each: (position(each.name), each.name))

    def record_benchmark(
        self, case: Case, side: str, samples: list[Sample], predicted: int | None
    ) -> None:
        """In the place of what was measured of this side before; other sides' samples stay."""
        kept: list[Sample] = []
        for result in self.benchmarks:
            if result["case"] == case.name:
                kept = [Sample(**sample) for sample in result["samples"]]
        every = [sample for sample in kept if sample.side != side] + samples
        order = list(SIDES)
        every.sort(key=lambda sample: order.index(sample.side))
        result = benchmark(case, every, str(self.machine["gpu"]), predicted)
        others = [other for other in self.benchmarks if other["case"] != case.name]
        names = list(CASES)
        self.benchmarks = sorted([*others, result], key=lambda each: names.index(each["case"]))

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "running": self.running,
            "items": [asdict(item) for item in self.items],
            "references": self.references,
            "benchmarks": self.benchmarks,
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> Report:
        """Throws KeyError, TypeError or ValueError if it is not what to_json() gave."""
        items = [Item(**item) for item in value["items"]]
        return Report(value["machine"], items, value["benchmarks"], value["references"])


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


def figures(case: Case, side: str, samples: list[Sample], gpu: str) -> Figures | None:
    """None where no run of this side has a step after its warm-up."""
    runs = [sample.metrics[sample.warmup :] for sample in samples if sample.side == side]
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


def benchmark(case: Case, samples: list[Sample], gpu: str, predicted: int | None) -> dict[str, Any]:
    sides = list(dict.fromkeys(sample.side for sample in samples))
    rows = [figures(case, side, samples, gpu) for side in sides]
    return {
        "case": case.name,
        "parameters": case.parameters,
        "seq": case.seq,
        "batch": case.batch,
        "flops": case.flops,
        "predicted_peak_bytes": predicted,
        "calls": len({sample.call for sample in samples}),
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
            SIDES[row["side"]],
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
    if result["calls"] > 1:
        lines.append(
            f"\nmeasured in {result['calls']} calls: drift of the machine is in the ratios"
        )
    return "\n".join(lines)


def render(report: Report) -> str:
    lines = [f"{name}: {value}" for name, value in report.machine.items()]
    lines.append("")
    width = max((len(item.name) for item in report.items), default=0)
    lines += [item_line(item, width) for item in report.items]
    if report.running:
        lines.append(f"running  {report.running}")
    if report.failures:
        lines.append(f"\nstderr of what failed: {FAILURES}")
    for result in report.benchmarks:
        if not result["sides"]:
            continue
        lines.append(
            f"\n{result['case']}: {result['parameters'] / 1e9:.2f} B parameters, "
            f"batch {result['batch']}, sequence {result['seq']}\n\n{table(result)}"
        )
    return "\n".join(lines) + "\n"


def item_line(item: Item, width: int = 0) -> str:
    detail = f"  {item.detail}" if item.detail else ""
    seconds = "" if item.seconds is None else f"  ({item.seconds:.0f} s)"
    return f"{item.status:<8} {item.name:<{width}}{detail}{seconds}".rstrip()


def render_failures(report: Report) -> str:
    """What FAILURES contains."""
    return "".join(
        f"==> {item.name}: {item.detail}\n{item.output.rstrip()}\n\n" for item in report.failures
    )
