"""Activations on the host between forward and backward: FSDP2's bits, and less memory."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import (
    ADAMW_FUSED,
    BIN,
    GPT2,
    GPT2_DROPOUT,
    LLAMA,
    LLAMA_29M,
    Captured,
    Case,
    Model,
    Run,
    compile_plan,
    execute,
    run_plan,
    train_plan,
)
from test_parity import assert_equal_bits, assert_trained

Capture = Callable[[Model], Captured]
Reference = Callable[..., Run]

MIB = 1 << 20
MODELS = {"llama": LLAMA, "gpt2": GPT2, "dropout": GPT2_DROPOUT}
TRAINING: dict[str, dict[str, Any]] = {
    "alone": {},
    "microbatches": {"gradient_accumulation_steps": 2},
    "parameters_too": {"cpu_offload": True},
    "not_overlapped": {"schedule": {"prefetch": "none"}},
    "fsdp2": {"schedule": "fsdp2"},
}


def blocks(model: Model) -> str:
    assert isinstance(model.units, str)
    return model.units


def offloaded(case: Case, **policy: Any) -> Case:
    entry = {"match": blocks(case.model), "min_bytes": 1, **policy}
    return replace(case, training={**case.training, "activation_offload": entry})


def kinds(plan: Path) -> Counter[str]:
    instructions = json.loads(plan.read_text())["instructions"]
    return Counter(next(iter(instruction)) for instruction in instructions)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_equals_fsdp2(captured: Capture, reference: Reference, model: Model, world: int) -> None:
    case = Case(model, ADAMW_FUSED, world=world, steps=6, eval_every=3)
    ours = run_plan(captured(model), offloaded(case), f"activations_{world}")
    assert_trained(ours, case.steps)
    assert_equal_bits(ours, reference(case))
    assert kinds(captured(model).directory / f"activations_{world}.plan.json")["offload_activation"]
    assert [line["allocator_calls"] for line in ours.metrics[2:]] == [0] * (case.steps - 2)


@pytest.mark.parametrize("training", TRAINING.values(), ids=TRAINING)
def test_with_other_policies(
    captured: Capture, reference: Reference, training: dict[str, Any]
) -> None:
    case = Case(LLAMA, ADAMW_FUSED, steps=6, training=training)
    theirs = {name: value for name, value in training.items() if name != "schedule"}
    ours = run_plan(captured(LLAMA), offloaded(case), "activations_training")
    assert_equal_bits(ours, reference(replace(case, training=theirs)))


@pytest.mark.parametrize("save", [[], ["aten::mm"]], ids=["full", "selective"])
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_beside_checkpointing(
    captured: Capture, reference: Reference, model: Model, save: list[str]
) -> None:
    """The blocks' inputs, and what `save` keeps, are on the host; the rest is made again."""
    if save and model is GPT2:
        save = ["aten::addmm"]
    policy = {"match": blocks(model)} | ({"save": save} if save else {})
    case = Case(model, ADAMW_FUSED, steps=6, checkpoint=policy)
    ours = run_plan(captured(model), offloaded(case), "activations_checkpoint")
    assert_equal_bits(ours, reference(case))
    plan = captured(model).directory / "activations_checkpoint.plan.json"
    assert kinds(plan)["offload_activation"]
    assert any(i.get("recompute") for i in json.loads(plan.read_text())["instructions"])


def stats(captured: Captured, case: Case, stem: str) -> str:
    command = [BIN / "fsdp-opt", captured.archive, "--world-size", case.world, "--emit", "stats"]
    return execute([*command, "--config", captured.directory / f"{stem}.yaml"]).stdout


def row(text: str, name: str) -> float:
    found = re.search(rf"^{name} +([\d.]+) MiB", text, re.MULTILINE)
    assert found, text
    return float(found[1]) * MIB


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.exhaustive  # for its time
def test_less_memory_as_predicted(captured: Capture, world: int) -> None:
    """The device's peak falls, and is what --emit stats says."""
    case = Case(LLAMA_29M, ADAMW_FUSED, world=world, steps=3)
    source = captured(LLAMA_29M)
    peaks, runs = [], []
    for stem, chosen in (("kept", case), ("offloaded", offloaded(case, min_bytes=1 << 16))):
        run = train_plan(source, compile_plan(source, chosen, stem), chosen)
        text = stats(source, chosen, stem)
        peaks.append(max(line["peak_bytes"] for line in run.metrics))
        assert abs(peaks[-1] / row(text, "peak bytes a rank") - 1) < 0.02
        runs.append(run)
    assert_equal_bits(runs[0], runs[1])
    assert peaks[1] < 0.9 * peaks[0]
    plan = json.loads((source.directory / "offloaded.plan.json").read_text())
    predicted = row(text, "host's bytes a rank")
    assert abs(predicted / plan["host_arena"]["bytes"] - 1) < 0.01
