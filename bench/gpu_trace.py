"""Whether what `fsdp-run --trace` measured keeps the order that the plan says."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

# Microseconds: a GPU's events tell times apart to half of one.
TOLERANCE = 2.0


def disorder(trace: Path, plan: Path) -> str | None:
    """The first instruction that begins before the one before it on its stream, or one whose event
    it waits for, has ended; None where there is none. Of a plan with one microbatch."""
    instructions: list[dict[str, Any]] = json.loads(plan.read_text())["instructions"]
    ranks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event["ph"] == "X":
            ranks[event["pid"]].append(event)
    if not ranks:
        return "expected events, got none"
    for rank, events in sorted(ranks.items()):
        if len(events) != len(instructions):
            return f"rank {rank}: expected {len(instructions)} events, got {len(events)}"
        stream_ends: dict[int, float] = defaultdict(float)
        complete: dict[int, float] = {}
        for number, (event, instruction) in enumerate(zip(events, instructions, strict=True)):
            waits = [complete[wait] for wait in instruction.get("waits", [])]
            after = max([stream_ends[event["tid"]], *waits])
            if event["ts"] < after - TOLERANCE:
                return (
                    f"rank {rank}: instruction {number}, {event['name']}, begins at "
                    f"{event['ts']:.1f} us: expected {after:.1f} us or later"
                )
            end = event["ts"] + event["dur"]
            stream_ends[event["tid"]] = end
            if "records" in instruction:
                complete[instruction["records"]] = end
    return None
