"""Parameters, gradients and optimizer state on the host: FSDP2's bits with CPUOffloadPolicy."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
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
)
from test_parity import assert_equal_bits, assert_trained

Capture = Callable[..., Captured]
Reference = Callable[..., Run]

OFFLOAD: dict[str, Any] = {"cpu_offload": True}
TRAINING = {
    "alone": {},
    "clipped": {"clip_grad_norm": 0.5},
    "microbatches": {"gradient_accumulation_steps": 2},
    "microbatches_reduced_once": {
        "gradient_accumulation_steps": 2,
        "reduce_each_microbatch": False,
    },
    "replicas": {"mesh": {"replicate": 2}},
}


@pytest.mark.parametrize("training", TRAINING.values(), ids=TRAINING)
def test_equals_fsdp2(captured: Capture, reference: Reference, training: dict[str, Any]) -> None:
    case = Case(LLAMA, ADAMW_FUSED, steps=6, training={**OFFLOAD, **training}, eval_every=3)
    ours = run_plan(captured(LLAMA), case, "offload")
    assert_trained(ours, case.steps)
    assert_equal_bits(ours, reference(case))


@pytest.mark.parametrize("reshard", ["true", "false"])
def test_tied_and_resharded(captured: Capture, reference: Reference, reshard: str) -> None:
    case = Case(GPT2, SGD, steps=6, reshard=reshard, training=OFFLOAD)
    assert_equal_bits(run_plan(captured(GPT2), case, f"offload_{reshard}"), reference(case))


def test_one_unit(captured: Capture, reference: Reference) -> None:
    units = [{"match": "layers.0", "cpu_offload": True}, {"match": "layers.*"}]
    model = Model(LLAMA.factory, units, LLAMA.names, LLAMA.vocab, LLAMA.seq, LLAMA.batch)
    case = Case(model, ADAMW_FUSED, steps=6)
    assert_equal_bits(run_plan(captured(model), case, "offload_one"), reference(case))
    plan = json.loads(compile_plan(captured(model), case, "offload_one").read_text())
    kinds = Counter(next(iter(instruction)) for instruction in plan["instructions"])
    assert kinds["copy_to_device"] == 2 and kinds["copy_to_host"] == 1


@pytest.mark.parametrize("world", [1, 4])
def test_other_sizes(captured: Capture, reference: Reference, world: int) -> None:
    case = Case(LLAMA, ADAMW_FUSED, world=world, steps=6, training=OFFLOAD)
    ours, theirs = run_plan(captured(LLAMA), case, f"offload_world{world}"), reference(case)
    assert_equal_bits(ours, theirs)
