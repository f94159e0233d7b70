"""What stays gathered after forward and after backward changes no bit, as in FSDP2."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from harness import (
    ADAMW_FUSED,
    GPT2,
    LLAMA,
    SGD,
    Captured,
    Case,
    Model,
    Run,
    compile_plan,
    run_plan,
    train_plan,
)
from test_parity import assert_equal_bits, assert_trained

Capture = Callable[[Model], Captured]
Reference = Callable[..., Run]

OWN = Model("parity_models:own_parameters", "layers.*", "tokens,targets", 256, 32, 2)


@pytest.mark.parametrize("size", ["1", "2"])
def test_trivial_sizes(captured: Capture, reference: Reference, size: str) -> None:
    """At two ranks 1 means false and 2 means true."""
    case = Case(LLAMA, ADAMW_FUSED, steps=5, reshard=size)
    plan = compile_plan(captured(LLAMA), case, f"reshard_{size}")
    layers = [u for u in json.loads(plan.read_text())["units"] if u["name"] != "(root)"]
    assert layers
    assert all(unit["reshard_after_forward"] == (size == "2") for unit in layers)
    assert '"keep"' not in plan.read_text()
    assert_equal_bits(train_plan(captured(LLAMA), plan, case), reference(case))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model", [LLAMA, GPT2, OWN], ids=["llama", "gpt2", "own_parameters"])
def test_groups_of_two(captured: Capture, reference: Reference, model: Model) -> None:
    """Four ranks, of which two neighbours keep a layer between them: FSDP2's bits, and ours
    without groups."""
    case = Case(model, ADAMW_FUSED, world=4, steps=8, reshard="2")
    plan = compile_plan(captured(model), case, "groups")
    assert '"keep": 2' in plan.read_text()
    assert '"group": 2' in plan.read_text()
    ours = train_plan(captured(model), plan, case)
    assert_trained(ours, case.steps)
    assert_equal_bits(ours, reference(case))
    assert_equal_bits(ours, run_plan(captured(model), replace(case, reshard="true"), "whole_axis"))


@pytest.mark.exhaustive  # of groups and replicas
def test_groups_in_replicas(captured: Capture, reference: Reference) -> None:
    """Eight ranks: groups of two within replicas of four."""
    training = {"mesh": {"replicate": 2, "shard": 4}}
    case = Case(LLAMA, SGD, world=8, steps=3, reshard="2", training=training)
    ours = run_plan(captured(LLAMA), case, "hsdp_groups")
    assert_equal_bits(ours, reference(case))
    assert_equal_bits(ours, run_plan(captured(LLAMA), replace(case, reshard="true"), "hsdp_axis"))


ACCUMULATION = {"gradient_accumulation_steps": 3, "reshard_after_backward": False}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("reduce_each", [True, False])
@pytest.mark.parametrize("reshard", ["default", "false"])
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_gathered_between_microbatches(
    captured: Capture, reference: Reference, model: Model, reshard: str, reduce_each: bool
) -> None:
    training = {**ACCUMULATION, "reduce_each_microbatch": reduce_each}
    case = Case(model, ADAMW_FUSED, steps=5, reshard=reshard, training=training)
    ours = run_plan(captured(model), case, f"stay_{reshard}_{reduce_each}")
    assert_equal_bits(ours, reference(case))


def test_groups_between_microbatches(captured: Capture, reference: Reference) -> None:
    case = Case(OWN, SGD, world=4, steps=5, reshard="2", training=ACCUMULATION)
    ours = run_plan(captured(OWN), case, "stay_groups")
    assert_equal_bits(ours, reference(case))
    resharded = replace(case, training={"gradient_accumulation_steps": 3}, reshard="true")
    assert_equal_bits(ours, run_plan(captured(OWN), resharded, "stay_axis"))
    assert torch.isfinite(torch.tensor(ours.rank_losses)).all()
