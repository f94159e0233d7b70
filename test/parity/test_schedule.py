"""A schedule never changes a bit: losses and weights are those of the default schedule.

The default schedule is compared with FSDP2 elsewhere (test_matrix.py). Combinations of options are
drawn from a seed, which is printed; every option is in some combination.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import ADAMW_FUSED, BIN, LLAMA, Captured, Case, Model, Run, run_plan, write_config

SEED = 7
OPTIONS: dict[str, list[Any]] = {
    "prefetch": ["latest_safe", "fsdp2", "none"],
    "reduce_scatters_in_flight": [1, 2, 3, 100],
    "device": ["cpu", "h100"],
    "memory": ["policy", "auto"],
    "bucket": ["unit", "parameter", "saturation"],
}
MESHES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (4, {"mesh": {"replicate": 2}}),
    (2, {"gradient_accumulation_steps": 2, "reduce_each_microbatch": False}),
    (2, {"cpu_offload": True}),
    (4, {"reshard_after_forward": 2, "clip_grad_norm": 0.5}),
]


def draw(seed: int, count: int) -> list[dict[str, Any]]:
    """`count` combinations; each value of each option is in one at least."""
    source = random.Random(seed)
    columns = {}
    for name, values in OPTIONS.items():
        column = [values[i % len(values)] for i in range(count)]
        source.shuffle(column)
        columns[name] = column
    combinations = [{name: columns[name][i] for name in OPTIONS} for i in range(count)]
    for options in combinations:
        if options["memory"] == "auto":
            options["device"] = "h100"
    return combinations


def least_memory(captured: Captured, case: Case, options: dict[str, Any], stem: str) -> int:
    """Bytes of the choice of `--emit pareto` that takes least, and a little more."""
    config = captured.directory / f"{stem}.pareto.yaml"
    options = {name: value for name, value in options.items() if name != "memory"}
    write_config(replace(case, training={**case.training, "schedule": options}), config)
    command = [BIN / "fsdp-opt", captured.archive, "--config", config, "--emit", "pareto"]
    output = subprocess.run(
        [*map(str, command), "--world-size", str(case.world)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    number, unit = output.splitlines()[1].split()[:2]
    assert unit == "MiB"
    return int(float(number) * 1.06 * 2**20)


def assert_same(ours: Run, other: Run) -> None:
    assert ours.rank_losses == other.rank_losses
    assert ours.weights.keys() == other.weights.keys()
    for name, weight in ours.weights.items():
        assert torch.equal(weight, other.weights[name]), name


@pytest.mark.parametrize("mesh", range(len(MESHES)))
def test_schedules_keep_every_bit(captured: Callable[[Model], Captured], mesh: int) -> None:
    world, training = MESHES[mesh]
    case = Case(LLAMA, ADAMW_FUSED, world=world, steps=3, training=training)
    model = captured(LLAMA)
    default = run_plan(model, case, f"schedule_{mesh}")
    for options in draw(SEED + mesh, 4):
        if options["memory"] == "auto":
            options["memory_budget"] = least_memory(model, case, options, f"schedule_{mesh}")
        print(f"seed {SEED + mesh}, {world} ranks, {training}: {options}")
        scheduled = replace(case, training={**training, "schedule": options})
        assert_same(default, run_plan(model, scheduled, f"schedule_{mesh}"))


def test_fsdp2_schedule(captured: Callable[[Model], Captured]) -> None:
    case = Case(LLAMA, ADAMW_FUSED, steps=3)
    model = captured(LLAMA)
    scheduled = replace(case, training={"schedule": "fsdp2"})
    assert_same(
        run_plan(model, case, "schedule_fsdp2"), run_plan(model, scheduled, "schedule_fsdp2")
    )
