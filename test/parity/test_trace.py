"""`fsdp-run --trace`: what a step executed, by stream, and beside the simulated step."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from harness import (
    ADAMW_FUSED,
    BIN,
    LLAMA,
    Captured,
    Case,
    Model,
    compile_plan,
    execute,
    run_command,
)

ACCUMULATION = {
    "gradient_accumulation_steps": 2,
    "reduce_each_microbatch": False,
    "reshard_after_backward": False,
}
CASE = Case(LLAMA, ADAMW_FUSED, steps=3, training=ACCUMULATION)
STREAMS = ["compute", "all_gather", "reduce_scatter"]
MODES = {
    "serial": [],
    "threads": ["--streams", "threads"],
    "gloo": ["--comm", "gloo"],
    "gloo-threads": ["--comm", "gloo", "--streams", "threads"],
}

Event = dict[str, Any]


def runs(instruction: dict[str, Any], microbatch: int) -> bool:
    """Whether a microbatch of two executes it."""
    if instruction["phase"] == "optimizer" or instruction.get("when") == "last":
        return microbatch == 1
    return microbatch == 0 or instruction.get("when") != "first"


def events_of(path: Path, pid: int) -> list[Event]:
    trace = json.loads(path.read_text())
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid]


def assert_streams_in_order(events: list[Event]) -> None:
    """In nanoseconds, as the file has them."""
    streams = defaultdict(list)
    for event in events:
        begin, duration = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
        streams[event["tid"]].append((begin, begin + duration))
    for spans in streams.values():
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


@pytest.fixture(scope="module")
def plan(captured: Callable[[Model], Captured]) -> Path:
    return compile_plan(captured(LLAMA), CASE, "trace")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", MODES)
def test_has_every_execution_on_its_stream(
    captured: Callable[[Model], Captured], plan: Path, mode: str
) -> None:
    model = captured(LLAMA)
    trace, metrics = plan.with_name(f"trace_{mode}.json"), plan.with_name(f"trace_{mode}.jsonl")
    command = [*run_command(model, plan, CASE), *MODES[mode], "--nproc", 2, "--metrics", metrics]
    execute(command)
    without = [json.loads(line)["rank_losses"] for line in metrics.read_text().splitlines()]
    execute([*command, "--trace", trace])
    assert [json.loads(line)["rank_losses"] for line in metrics.read_text().splitlines()] == without

    instructions = json.loads(plan.read_text())["instructions"]
    want = Counter(
        (i, m, STREAMS.index(instruction.get("stream", "compute")))
        for i, instruction in enumerate(instructions)
        for m in (0, 1)
        if runs(instruction, m)
    )
    assert {stream for _, _, stream in want} == {0, 1, 2}
    for rank in (0, 1):
        events = events_of(trace, rank)
        got = Counter((e["args"]["instruction"], e["args"]["microbatch"], e["tid"]) for e in events)
        assert got == want
        assert_streams_in_order(events)
        assert any(e["dur"] > 0 for e in events if e["name"] == "all_gather layers.0")
        for event in events:
            assert event["cat"] == instructions[event["args"]["instruction"]]["phase"]

    # Beside the simulated step, which the compiler makes again.
    both = plan.with_name(f"trace_{mode}_both.json")
    config = plan.with_name("trace.yaml")
    compiler = [BIN / "fsdp-opt", model.archive, "--config", config, "--world-size", 2]
    execute([*compiler, "--emit", "trace", "--ranks", "1", "--measured", trace, "-o", both])
    names = {
        e["pid"]: e["args"]["name"]
        for e in json.loads(both.read_text())["traceEvents"]
        if e["name"] == "process_name"
    }
    assert sorted(names.values()) == ["rank 1 measured", "rank 1 planned"]
    for pid, name in names.items():
        events = events_of(both, pid)
        assert_streams_in_order(events)
        if name == "rank 1 measured":
            assert [{**e, "pid": 1} for e in events] == events_of(trace, 1)
        else:
            assert min(e["ts"] for e in events) == 0
            assert {e["name"] for e in events} <= {e["name"] for e in events_of(trace, 1)}

    # The parts of the step, planned and measured, add up to it.
    stats = execute([*compiler, "--emit", "stats", "--measured", trace]).stdout
    table = stats[stats.index("step 3 of rank 0") :].split("\n\n")[0].splitlines()[1:]
    rows = {line[:30].strip(): [float(x) for x in line[30:].split()[:2]] for line in table}
    step = rows.pop("step")
    for column in (0, 1):
        assert abs(sum(row[column] for row in rows.values()) - step[column]) < 0.001 * len(rows)
    other = json.loads(trace.read_text())["otherData"]
    assert abs(other["ranks"][0]["us"] * 1e-3 - step[1]) < 0.001
