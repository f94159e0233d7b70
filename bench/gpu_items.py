"""What bench/gpu.py can run, in items, and which of them a call picks. The standard library alone.

An item is what has a line of its own in the report, and a deadline of its own: a program of the
tests, or one side of a case of parity, of the trace or of the benchmark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gpu_cases import BENCHMARKS, PARITY, Case

SECTIONS = ("tests", "sanitizer", "parity", "trace", "bench")

SIDES = {
    "fsdp2": "FSDP2",
    "compile": "FSDP2 compiled",
    "fsdp-run": "fsdp-run",
    "graphs": "fsdp-run graphs",
    "unfused": "graphs, no kernels",
}
"""By the names that --sides takes, what the tables call them."""

# Seconds. A side of a benchmark has its deadline in every round, and no further round after one
# that hung: the five sides of a case take at most 8 minutes if all of them hang.
PROGRAMS = {"CudaTests": 120.0, "NcclTests": 150.0, "RuntimeTests": 400.0, "PlanTests": 60.0}
SANITIZER = 240.0
PARITY_SIDE = {"fsdp2": 120.0, "fsdp-run": 45.0, "graphs": 45.0, "unfused": 45.0}
TRACE = 60.0
BENCH_SIDE = {"fsdp2": 100.0, "compile": 130.0, "fsdp-run": 80.0, "graphs": 80.0, "unfused": 80.0}

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


class SelectionError(ValueError):
    """A name that is not there, or names that pick nothing."""


@dataclass(frozen=True)
class Planned:
    """An item before it runs. `means` is a key of ONE_GPU, `shard` the I/N of a program."""

    section: str
    name: str
    deadline: float
    program: str = ""
    shard: str = ""
    case: Case | None = None
    side: str = ""
    means: str = ""

    @property
    def options(self) -> str:
        """Those of bench/gpu.sh that pick it (and the same with other means)."""
        if self.program:
            return f"--tests {self.program}" + (f":{self.shard}" if self.shard else "")
        text = f"--only {self.section}"
        return f"{text} --cases {self.case.name} --sides {self.side}" if self.case else text

    @property
    def environment(self) -> Callable[[int], dict[str, str]]:
        return ONE_GPU[self.means] if self.means else lambda rank: {}

    @property
    def reference(self) -> str:
        """What the sides of a comparison have in common."""
        assert self.case
        return f"{self.case.name}, {self.means}" if self.means else self.case.name


def is_side(side: str, case: Case, on_gpu: bool) -> bool:
    """There are graphs on a GPU, and kernels in the plans that were captured for one."""
    return on_gpu and case.arch is not None if side == "unfused" else on_gpu or side != "graphs"


def everything(device: str) -> list[Planned]:
    """In the order in which it runs and is reported."""
    on_gpu = device == "cuda"
    # A plan that was captured for the CPU has other bits on a GPU: its RMSNorm is of several
    # operators.
    parity = [case for case in PARITY if on_gpu is bool(case.arch)]
    traced = [case for case in PARITY if on_gpu or case.arch is None]
    items = [Planned("tests", name, limit, name) for name, limit in PROGRAMS.items()]
    items.append(Planned("sanitizer", "compute-sanitizer", SANITIZER))
    for case in parity:
        for means in ONE_GPU if on_gpu and case.world > 1 else ("",):
            for side, limit in PARITY_SIDE.items():
                if is_side(side, case, on_gpu):
                    name = f"parity {case.name} {side}" + (f", {means}" if means else "")
                    item = Planned("parity", name, limit, case=case, side=side, means=means)
                    items.append(item)
    for case in traced:
        if case.world == 1:
            name = f"trace {case.name}"
            items.append(Planned("trace", name, TRACE, case=case, side="fsdp-run"))
    for case in BENCHMARKS if on_gpu else parity[:1]:
        for side, limit in BENCH_SIDE.items():
            if is_side(side, case, on_gpu):
                name = f"bench {case.name} {side}"
                items.append(Planned("bench", name, limit, case=case, side=side))
    return items


def position(name: str) -> int:
    """Of an item in the report, by its name: slices that ran in any order make one report."""
    known = sorted(
        (*everything("cuda"), *everything("cpu")), key=lambda item: SECTIONS.index(item.section)
    )
    names = [item.name for item in known]
    exact = [at for at, other in enumerate(names) if name == other]
    shards = [at for at, other in enumerate(names) if name.startswith(f"{other} ")]
    return (exact or shards or [len(names)])[0]


def pick(
    device: str,
    only: list[str] | None = None,
    tests: list[str] | None = None,
    cases: list[str] | None = None,
    sides: list[str] | None = None,
    deadline: float | None = None,
) -> list[Planned]:
    """None: all there are. Without `only`, the sections that the other arguments pick from.
    `tests` may name a shard, `RuntimeTests:2/4`. `deadline` replaces every item's own. Throws
    SelectionError."""
    check("--only", only, SECTIONS)
    items = everything(device)
    if only is not None:
        items = [item for item in items if item.section in only]
    elif tests or cases or sides:
        of_programs, of_cases = bool(tests), bool(cases or sides)
        items = [
            item
            for item in items
            if (of_programs and item.program) or (of_cases and item.case is not None)
        ]
    check("--cases", cases, (item.case.name for item in items if item.case))
    check("--sides", sides, (item.side for item in items if item.side))
    if cases:
        items = [item for item in items if not item.case or item.case.name in cases]
    if sides:
        items = [item for item in items if not item.side or item.side in sides]
    if tests:
        items = pick_tests(items, tests)
    if not items:
        raise SelectionError("expected --only, --cases and --sides that have an item in common")
    if deadline is not None:
        items = [replace(item, deadline=deadline) for item in items]
    return items


def pick_tests(items: list[Planned], tests: list[str]) -> list[Planned]:
    programs = {item.program: item for item in items if item.program}
    check("--tests", [name.partition(":")[0] for name in tests], programs)
    chosen = []
    for name in tests:
        program, _, shard = name.partition(":")
        item = programs[program]
        if shard:
            found = re.fullmatch(r"(\d+)/(\d+)", shard)
            if not found or not 1 <= int(found[1]) <= int(found[2]):
                raise SelectionError(f"--tests: expected a shard as {program}:1/4, got {name}")
            item = replace(item, name=f"{program} {shard}", shard=shard)
        chosen.append(item)
    return [*chosen, *(item for item in items if not item.program)]


def check(option: str, given: list[str] | None, known: Iterable[str]) -> None:
    names = list(dict.fromkeys(known))
    for name in given or []:
        if name not in names:
            there = f"one of {', '.join(names)}" if names else "none with these sections"
            raise SelectionError(f"{option}: expected {there}, got {name}")


def listing(items: list[Planned]) -> str:
    """A line an item: its deadline, its name, and the options that pick it alone."""
    width = max(len(item.name) for item in items)
    lines = [f"{'deadline':>8}  {'item':<{width}}  options"]
    lines += [f"{item.deadline:6g} s  {item.name:<{width}}  {item.options}" for item in items]
    return "\n".join(lines) + "\n"
