"""Ranks with memory of their own, over Gloo: FSDP2's bits at any world size.

Reductions go through the same calls of c10d on the same flat tensors, so that even with four ranks
the order of every sum is that of FSDP2.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from harness import (
    ADAMW_FUSED,
    LLAMA,
    Captured,
    Case,
    Run,
    compile_plan,
    run_plan,
    train_plan,
)
from test_matrix import MODELS, POLICIES, forget_statistics, make_case
from test_parity import assert_equal_bits

Capture = Callable[..., Captured]
Reference = Callable[..., Run]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_four_ranks(captured: Capture, reference: Reference, model: str, policy: str) -> None:
    case = make_case(model, policy, 4)
    run = run_plan(captured(case.model, case.precision), case, f"gloo_{policy}", comm="gloo")
    theirs = reference(case)
    forget_statistics(case, run, theirs)
    assert_equal_bits(run, theirs)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_other_worlds(captured: Capture, reference: Reference, world: int) -> None:
    case = Case(LLAMA, ADAMW_FUSED, world=world, steps=3)
    ours = run_plan(captured(LLAMA), case, f"gloo_{world}", comm="gloo")
    assert_equal_bits(ours, reference(case))


CASES: dict[str, dict[str, Any]] = {
    "replicas": {"training": {"mesh": {"replicate": 2, "shard": 2}}},
    "replicas_of_one": {"training": {"mesh": {"replicate": 4, "shard": 1}}},
    "groups": {"reshard": "2"},
    "device": {"training": {"schedule": {"device": "h100"}}},
    "device_gathered": {"reshard": "false", "training": {"schedule": {"device": "h100"}}},
    "device_replicas": {
        "training": {"schedule": {"device": "h100"}, "mesh": {"replicate": 2, "shard": 2}}
    },
    "device_groups": {"reshard": "2", "training": {"schedule": {"device": "h100"}}},
    "device_offloaded": {"training": {"schedule": {"device": "h100"}, "cpu_offload": True}},
    "device_microbatches": {
        "training": {"schedule": {"device": "h100"}, "gradient_accumulation_steps": 2}
    },
}


@pytest.mark.parametrize("name", CASES)
def test_schedules(captured: Capture, reference: Reference, name: str) -> None:
    """`device`: gathered parameters and buffers of collectives have places in the arena."""
    case = Case(LLAMA, ADAMW_FUSED, world=4, steps=3, **CASES[name])
    ours = run_plan(captured(LLAMA), case, f"gloo_{name}", comm="gloo")
    assert_equal_bits(ours, reference(case))


def test_flat_tensors_lie_in_the_arena(captured: Capture) -> None:
    """The same plan without their places needs so much more behind the arena."""
    case = Case(LLAMA, ADAMW_FUSED, world=4, steps=3, **CASES["device"])
    plan = compile_plan(captured(LLAMA), case, "gloo_flat")
    run = train_plan(captured(LLAMA), plan, case, comm="gloo")
    compiled = json.loads(plan.read_text())
    flat = []
    for instruction in compiled["instructions"]:
        if "reduce_scatter" in instruction:
            buffer = compiled["values"][instruction["buffer"]]
            flat.append(4 * buffer["shape"][0])
            del buffer["offset"]
    plan.write_text(json.dumps(compiled))
    without = train_plan(captured(LLAMA), plan, case, comm="gloo")
    assert_equal_bits(run, without)
    more = without.metrics[-1]["scratch_bytes"] - run.metrics[-1]["scratch_bytes"]
    assert more >= max(flat)


def test_hosts(captured: Capture, reference: Reference) -> None:
    """Two torchruns, of two ranks each."""
    case = Case(LLAMA, ADAMW_FUSED, world=4, steps=3)
    ours = run_plan(captured(LLAMA), case, "gloo_hosts", comm="gloo", nodes=2)
    assert_equal_bits(ours, reference(case))
