"""A schedule never changes a bit: losses and weights are those of the default schedule.

The default schedule is compared with FSDP2 elsewhere (test_matrix.py). Combinations of how a model
is trained and how it is scheduled are drawn from a seed, which is printed, so that few of them have
nearly every pair of two options' values.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import (
    ADAMW_FUSED,
    BIN,
    LLAMA,
    Captured,
    Case,
    Model,
    Run,
    compile_plan,
    run_plan,
    write_config,
)

SEED = 7
OPTIONS: dict[str, list[Any]] = {
    "prefetch": ["latest_safe", "fsdp2", "none"],
    "reduce_scatters_in_flight": [1, 3, None, 100],
    "device": ["cpu", "h100"],
    "memory": ["policy", "auto"],
    "bucket": ["unit", "parameter", "saturation", "optimal"],
    "stage_checkpoints": [False, True],
    "fuse": ["none", "exact"],
    # Of the config, not of its schedule.
    "activation_offload": [None, {"match": "layers.*", "min_bytes": 1}],
}
TRAINING: dict[str, list[Any]] = {
    "mesh": [{}, {"mesh": {"replicate": 2}}, {"reshard_after_forward": 2}],
    "accumulation": [
        {},
        {"gradient_accumulation_steps": 2, "reduce_each_microbatch": False},
        {"gradient_accumulation_steps": 2, "reshard_after_backward": False},
    ],
    "offload": [{}, {"cpu_offload": True}],
    "checkpoint": [
        None,
        {"match": "layers.*"},
        {"match": "layers.0", "save": ["aten::mm"]},
    ],
    "clip": [{}, {"clip_grad_norm": 0.5}],
}
CASES = 9  # ways of training, each under SCHEDULES schedules
SCHEDULES = 3


Row = dict[str, int]  # of each option, the index of its value


def pairs(row: Row) -> set[tuple[str, int, str, int]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(sorted(row), 2)}


def draw(seed: int) -> tuple[list[tuple[Row, list[Row]]], float]:
    """Ways of training, each with its schedules, and the share of all pairs that they have.

    Of some that are drawn, the one with most new pairs is taken.
    """
    source = random.Random(seed)
    every = {**TRAINING, **OPTIONS}
    total = sum(len(every[a]) * len(every[b]) for a, b in itertools.combinations(sorted(every), 2))
    seen: set[tuple[str, int, str, int]] = set()

    def best(options: dict[str, list[Any]], given: Row) -> Row:
        rows = [
            {name: source.randrange(len(values)) for name, values in options.items()}
            for _ in range(300)
        ]
        for row in rows:
            if options is OPTIONS and OPTIONS["memory"][row["memory"]] == "auto":
                row["device"] = OPTIONS["device"].index("h100")
        row = max(rows, key=lambda row: len(pairs(row | given) - seen))
        seen.update(pairs(row | given))
        return row

    cases = []
    for _ in range(CASES):
        training = best(TRAINING, {})
        cases.append((training, [best(OPTIONS, training) for _ in range(SCHEDULES)]))
    return cases, len(seen) / total


DRAWN, COVERED = draw(SEED)


def case_of(row: Row) -> Case:
    chosen = {name: TRAINING[name][index] for name, index in row.items()}
    checkpoint = chosen.pop("checkpoint")
    training = {key: value for part in chosen.values() for key, value in part.items()}
    world = 4 if chosen["mesh"] else 2
    return Case(LLAMA, ADAMW_FUSED, world=world, steps=2, training=training, checkpoint=checkpoint)


def schedule_of(row: Row) -> dict[str, Any]:
    """None is an option that is not given."""
    chosen = {name: OPTIONS[name][index] for name, index in row.items()}
    return {name: value for name, value in chosen.items() if value is not None}


def with_options(case: Case, options: dict[str, Any]) -> Case:
    schedule = dict(options)
    training = {**case.training, "schedule": schedule}
    if offload := schedule.pop("activation_offload", None):
        training["activation_offload"] = offload
    return replace(case, training=training)


def least_memory(captured: Captured, case: Case, options: dict[str, Any], stem: str) -> int:
    """Bytes of the choice of `--emit pareto` that takes least, and a little more."""
    config = captured.directory / f"{stem}.pareto.yaml"
    options = {name: value for name, value in options.items() if name != "memory"}
    write_config(with_options(case, options), config)
    command = [BIN / "fsdp-opt", captured.archive, "--config", config, "--emit", "pareto"]
    output = subprocess.run(
        [*map(str, command), "--world-size", str(case.world)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    number, unit = output.splitlines()[1].split()[:2]
    return int(float(number) * 1.06 * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit])


def assert_same(ours: Run, other: Run) -> None:
    assert ours.rank_losses == other.rank_losses
    assert ours.weights.keys() == other.weights.keys()
    for name, weight in ours.weights.items():
        assert torch.equal(weight, other.weights[name]), name


@pytest.mark.one_in(4)
@pytest.mark.parametrize("number", range(CASES))
def test_schedules_keep_every_bit(captured: Callable[[Model], Captured], number: int) -> None:
    training, schedules = DRAWN[number]
    case = case_of(training)
    stem = f"schedule_{number}"
    model = captured(LLAMA)
    default = run_plan(model, case, stem)
    for row in schedules:
        options = schedule_of(row)
        if options["memory"] == "auto":
            options["memory_budget"] = least_memory(model, case, options, stem)
        print(f"seed {SEED}, {case.world} ranks, {case.training}, {case.checkpoint}: {options}")
        assert_same(default, run_plan(model, with_options(case, options), stem))


@pytest.mark.parametrize("reshard", [2, False])
def test_offloaded_units_kept_over_microbatches(
    captured: Callable[[Model], Captured], reshard: int | bool
) -> None:
    """The second microbatch copies shards for a gather that the first one alone performs."""
    training = {
        "reshard_after_forward": reshard,
        "gradient_accumulation_steps": 2,
        "cpu_offload": True,
    }
    case = Case(LLAMA, ADAMW_FUSED, world=4, steps=2, training=training)
    model = captured(LLAMA)
    kept = replace(case, training={**training, "reshard_after_backward": False})
    assert_same(run_plan(model, case, "schedule_freed"), run_plan(model, kept, "schedule_kept"))


def test_sample_has_most_pairs() -> None:
    print(f"seed {SEED}: {COVERED:.1%} of the pairs of two options' values")
    assert COVERED > 0.9
    used = {(name, row[name]) for _, rows in DRAWN for row in rows for name in row}
    used |= {(name, index) for row, _ in DRAWN for name, index in row.items()}
    every = {**TRAINING, **OPTIONS}
    assert used == {(name, i) for name, values in every.items() for i in range(len(values))}


def test_one_rank(captured: Callable[[Model], Captured]) -> None:
    case = Case(LLAMA, ADAMW_FUSED, world=1, steps=3)
    model = captured(LLAMA)
    options = {**schedule_of(DRAWN[0][1][0]), "memory": "policy"}
    scheduled = with_options(case, options)
    assert_same(run_plan(model, case, "schedule_one"), run_plan(model, scheduled, "schedule_one"))


def test_fsdp2_schedule(captured: Callable[[Model], Captured]) -> None:
    case = Case(LLAMA, ADAMW_FUSED, steps=3)
    model = captured(LLAMA)
    scheduled = replace(case, training={"schedule": "fsdp2"})
    assert_same(
        run_plan(model, case, "schedule_fsdp2"), run_plan(model, scheduled, "schedule_fsdp2")
    )


# Gathers take about as long as what hides them: neither units nor single parameters are best.
SLOW_LINKS = """
name: slow links
peak_flops: {float32: 2.0e10}
memory_bandwidth: 1.0e10
op_overhead: 2.0e-6
ranks_per_host: 8
collective_latency: 1.0e-6
within_host: {latency: 3.0e-5, bandwidth: 3.0e8}
between_hosts: {latency: 3.0e-5, bandwidth: 3.0e8}
host_link: {latency: 1.0e-5, bandwidth: 1.0e9}
"""


@pytest.mark.parametrize("world", [1, 2])
def test_optimal_buckets(captured: Callable[[Model], Captured], world: int) -> None:
    case = Case(LLAMA, ADAMW_FUSED, world=world, steps=3)
    model = captured(LLAMA)
    name = f"schedule_optimal_{world}"
    device = model.directory / "slow_links.yaml"
    device.write_text(SLOW_LINKS)

    def units(options: dict[str, Any]) -> list[Any]:
        scheduled = replace(case, training={"schedule": options})
        return json.loads(compile_plan(model, scheduled, name).read_text())["units"]

    default = run_plan(model, case, name)
    options = {"bucket": "optimal", "device": str(device)}
    assert_same(default, run_plan(model, replace(case, training={"schedule": options}), name))
    if world > 1:
        usual = [units({**options, "bucket": kind}) for kind in ("unit", "parameter", "saturation")]
        assert units(options) not in usual
