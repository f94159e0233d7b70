"""Evaluations between steps give FSDP2's losses in eval mode, and leave training as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from harness import (
    ADAMW_FUSED,
    GPT2_DROPOUT,
    LLAMA,
    RESNET18,
    SGD,
    Captured,
    Case,
    Model,
    Run,
    run_plan,
)
from test_parity import assert_equal_bits

Capture = Callable[[Model], Captured]
Reference = Callable[..., Run]


def evaluations(run: Run) -> list[list[float]]:
    return [line["rank_eval_losses"] for line in run.metrics if "rank_eval_losses" in line]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "model", [LLAMA, GPT2_DROPOUT, RESNET18], ids=["llama", "gpt2_dropout", "resnet18"]
)
def test_equals_fsdp2(captured: Capture, reference: Reference, model: Model, world: int) -> None:
    optimizer = {**SGD, "lr": 0.001} if model.pixels else ADAMW_FUSED
    case = Case(model, optimizer, world=world, steps=6, eval_every=2)
    ours, theirs = run_plan(captured(model), case, "evaluation"), reference(case)
    assert_equal_bits(ours, theirs)
    assert len(evaluations(ours)) == 3
    assert evaluations(ours)[0] != evaluations(ours)[-1]
    assert evaluations(ours) == evaluations(theirs)
    without = run_plan(captured(model), replace(case, eval_every=0), "no_evaluation")
    assert ours.rank_losses == without.rank_losses


def test_four_ranks(captured: Capture, reference: Reference) -> None:
    case = Case(LLAMA, ADAMW_FUSED, world=4, steps=4, eval_every=2, reshard="false")
    ours, theirs = run_plan(captured(LLAMA), case, "evaluation4"), reference(case)
    assert_equal_bits(ours, theirs)
    assert evaluations(ours) == evaluations(theirs)


def test_checkpointed_and_meshed(captured: Capture, reference: Reference) -> None:
    """The evaluation recomputes nothing and is the same on every replica."""
    case = Case(
        LLAMA,
        ADAMW_FUSED,
        steps=4,
        eval_every=4,
        training={"mesh": {"replicate": 2}},
        checkpoint={"match": "layers.*"},
    )
    ours, theirs = run_plan(captured(LLAMA), case, "evaluation_hsdp"), reference(case)
    assert evaluations(ours) == evaluations(theirs)
