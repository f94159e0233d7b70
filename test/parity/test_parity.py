"""Training under a plan gives FSDP2's numbers.

Every rank's loss at every step and the final parameters are equal bit for bit (losses carry 9
significant digits, which identify an fp32 value), at any number of ranks: over shared memory, too,
gradients are added in the order that Gloo has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from harness import (
    ADAMW,
    ADAMW_FUSED,
    GPT2,
    GPT2_DROPOUT,
    LLAMA,
    LLAMA_29M,
    SGD,
    Captured,
    Case,
    Model,
    Run,
    run_plan,
)

Capture = Callable[[Model], Captured]
Reference = Callable[..., Run]

OPTIMIZERS = {"adamw_fused": ADAMW_FUSED, "adamw": ADAMW, "sgd_momentum": SGD}


def assert_equal_bits(ours: Run, theirs: Run) -> None:
    assert ours.rank_losses == theirs.rank_losses
    assert ours.weights.keys() == theirs.weights.keys()
    different = [n for n, w in theirs.weights.items() if not torch.equal(w, ours.weights[n])]
    assert not different


def assert_trained(run: Run, steps: int) -> None:
    """Equality of two runs that learn nothing would prove nothing."""
    losses = [line["loss"] for line in run.metrics]
    assert len(losses) == steps
    assert min(losses[-3:]) < losses[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_two_ranks(captured: Capture, reference: Reference, model: Model, optimizer: str) -> None:
    case = Case(model, OPTIMIZERS[optimizer])
    ours = run_plan(captured(model), case, optimizer)
    assert_trained(ours, case.steps)
    assert_equal_bits(ours, reference(case))


def test_dropout_at_equal_seeds(captured: Capture, reference: Reference) -> None:
    case = Case(GPT2_DROPOUT, ADAMW_FUSED, seed=7)
    ours = run_plan(captured(GPT2_DROPOUT), case, "seed7")
    assert_equal_bits(ours, reference(case))
    other = run_plan(captured(GPT2_DROPOUT), replace(case, seed=8), "seed8")
    assert other.rank_losses != ours.rank_losses


@pytest.mark.parametrize("reshard", ["true", "false"])
def test_reshard_after_forward(captured: Capture, reference: Reference, reshard: str) -> None:
    case = Case(LLAMA, ADAMW_FUSED, reshard=reshard)
    ours = run_plan(captured(LLAMA), case, f"reshard_{reshard}")
    assert_equal_bits(ours, reference(case))


FROZEN = {"embedding": "tok*", "norms": "*norm*", "a_whole_unit": "layers.0.*"}


@pytest.mark.parametrize("pattern", FROZEN.values(), ids=FROZEN)
def test_frozen_parameters(captured: Capture, reference: Reference, pattern: str) -> None:
    model = replace(LLAMA, factory="parity_models:frozen_llama", kwargs={"pattern": pattern})
    case = Case(model, ADAMW_FUSED, steps=5)
    ours = run_plan(captured(model), case, "frozen")
    assert_equal_bits(ours, reference(case))


@pytest.mark.parametrize("mode", ["fsdp2", "single"])
def test_one_rank(captured: Capture, reference: Reference, mode: str) -> None:
    case = Case(LLAMA, ADAMW_FUSED, world=1)
    ours = run_plan(captured(LLAMA), case, "world1")
    assert_equal_bits(ours, reference(case, mode))


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_uneven_shards(captured: Capture, reference: Reference, model: Model, world: int) -> None:
    case = Case(model, ADAMW_FUSED, world=world)
    ours = run_plan(captured(model), case, f"world{world}")
    again = run_plan(captured(model), case, f"world{world}")
    assert_equal_bits(again, ours)
    assert_equal_bits(ours, reference(case))


@pytest.mark.exhaustive  # for its time
def test_29_million_parameters(captured: Capture, reference: Reference) -> None:
    case = Case(LLAMA_29M, ADAMW_FUSED, steps=4)
    assert_equal_bits(run_plan(captured(LLAMA_29M), case, "plan"), reference(case))


def test_ranks_started_by_torchrun(captured: Capture, reference: Reference) -> None:
    case = Case(LLAMA, ADAMW_FUSED)
    ours = run_plan(captured(LLAMA), case, "torchrun", nodes=1)
    assert_equal_bits(ours, reference(case))
