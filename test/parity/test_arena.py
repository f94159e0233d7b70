"""A rank executes in the memory that the plan lays out: what fsdp-opt predicts is what it takes,
and a steady step allocates nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import (
    ADAMW,
    ADAMW_FUSED,
    BIN,
    GPT2,
    GPT2_DROPOUT,
    LLAMA,
    LLAMA_29M,
    RESNET18,
    SGD,
    Captured,
    Case,
    Model,
    compile_plan,
    execute,
    run_command,
    train_plan,
)

Capture = Callable[..., Captured]
MIB = 1 << 20
PRECISION = {"": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}


def predicted_bytes(captured: Captured, plan: Path, world: int, *options: Any) -> float:
    """What --emit stats says a rank takes at most."""
    stats = execute(
        [
            BIN / "fsdp-opt",
            captured.archive,
            "--config",
            plan.with_name(plan.name.replace(".plan.json", ".yaml")),
            "--world-size",
            world,
            "--emit",
            "stats",
            *options,
        ]
    )
    found = re.search(r"^peak bytes a rank +([\d.]+) MiB$", stats.stdout, re.MULTILINE)
    assert found, stats.stdout
    return float(found[1]) * MIB


def assert_no_allocations(metrics: list[dict[str, Any]]) -> None:
    assert [line["allocator_calls"] for line in metrics[2:]] == [0] * (len(metrics) - 2)
    assert metrics[0]["arena_bytes"] > 0


@pytest.mark.one_in(4)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("model", [LLAMA, GPT2, GPT2_DROPOUT], ids=["llama", "gpt2", "dropout"])
@pytest.mark.parametrize("optimizer", [ADAMW_FUSED, ADAMW, SGD], ids=["fused", "adamw", "sgd"])
def test_a_steady_step_allocates_nothing(
    captured: Capture, model: Model, world: int, optimizer: dict[str, Any]
) -> None:
    case = Case(model, optimizer, world=world, steps=6)
    source = captured(model)
    assert_no_allocations(
        train_plan(source, compile_plan(source, case, "arena"), case, save=False).metrics
    )


@pytest.mark.parametrize(
    "change",
    [
        {"eval_every": 1},
        {"training": {"gradient_accumulation_steps": 3}},
        {"training": {"clip_grad_norm": 0.5, "grad_scaler": True}},
        {"precision": PRECISION},
        {"checkpoint": {"match": "layers.*"}},
        {"training": {"mesh": {"replicate": 2}}, "world": 4},
    ],
    ids=["evaluation", "accumulation", "scaled", "bf16", "checkpoint", "hsdp"],
)
def test_nor_does_what_a_step_can_have(captured: Capture, change: dict[str, Any]) -> None:
    case = replace(Case(LLAMA, ADAMW_FUSED, steps=6), **change)
    source = captured(LLAMA, case.precision or None)
    assert_no_allocations(
        train_plan(source, compile_plan(source, case, "arena"), case, save=False).metrics
    )


def test_takes_what_is_predicted(captured: Capture) -> None:
    case = Case(LLAMA_29M, ADAMW_FUSED, steps=3)
    source = captured(LLAMA_29M)
    plan = compile_plan(source, case, "predicted")
    metrics = train_plan(source, plan, case, save=False).metrics
    predicted = predicted_bytes(source, plan, case.world)
    assert metrics[-1]["peak_bytes"] == pytest.approx(predicted, rel=0.02)
    assert_no_allocations(metrics)


@pytest.mark.parametrize("world", [1, 2])
def test_takes_what_is_predicted_with_measured_scratch(captured: Capture, world: int) -> None:
    """Convolutions need scratch, which nobody can know but who has measured it."""
    case = Case(RESNET18, {**SGD, "lr": 0.001}, world=world, steps=4)
    source = captured(RESNET18)
    plan = compile_plan(source, case, f"scratch_{world}")
    profile = plan.with_suffix(".profile.json")
    execute([*run_command(source, plan, case), "--nproc", world, "--profile", profile])
    metrics = train_plan(source, plan, case, save=False).metrics
    predicted = predicted_bytes(source, plan, world, "--profile", profile)
    scratch = json.loads(profile.read_text())["scratch_bytes"]
    assert scratch > 0  # how much depends on the kernels that oneDNN has for this CPU
    assert metrics[-1]["peak_bytes"] == pytest.approx(predicted, rel=0.02)
    assert_no_allocations(metrics)
