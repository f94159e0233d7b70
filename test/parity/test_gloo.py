"""Ranks with memory of their own, over Gloo: FSDP2's bits at any world size.

Reductions go through the same calls of c10d on the same flat tensors, so that even with four ranks
the order of every sum is that of FSDP2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from harness import (
    ADAMW,
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


def products() -> Iterator[Any]:
    """Every policy on one model, the default on each; the others are exhaustive."""
    for p, policy in enumerate(POLICIES):
        for m, model in enumerate(MODELS):
            runs = p % len(MODELS) == m or policy == "default"
            yield pytest.param(model, policy, marks=[] if runs else [pytest.mark.exhaustive])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("model, policy", products())
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


@pytest.mark.one_in(5)
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
    del compiled["digest"]  # the plan is another one
    plan.write_text(json.dumps(compiled))
    without = train_plan(captured(LLAMA), plan, case, comm="gloo")
    assert_equal_bits(run, without)
    more = without.metrics[-1]["scratch_bytes"] - run.metrics[-1]["scratch_bytes"]
    assert more >= max(flat)


FP16 = {"": {"param_dtype": "float16", "reduce_dtype": "float32"}}
SCALER = {"init_scale": 3e6, "growth_factor": 3.0, "backoff_factor": 0.3, "growth_interval": 2}
ONE_UNIT = replace(LLAMA, units=[{"match": "layers.0", "cpu_offload": True}, {"match": "layers.*"}])
ALL = {"cpu_offload": True}
OFFLOADED: dict[str, dict[str, Any]] = {
    "all": {"training": {**ALL, "clip_grad_norm": 0.5}},
    "one_unit": {"model": ONE_UNIT, "training": {"clip_grad_norm": 0.5}},
    "microbatches": {"training": {**ALL, "gradient_accumulation_steps": 2}},
    "replicas": {"training": {**ALL, "mesh": {"replicate": 2, "shard": 2}}},
    "scaler": {"precision": FP16, "steps": 8, "training": {**ALL, "grad_scaler": SCALER}},
    "scaler_and_clipping": {
        "model": ONE_UNIT,
        "precision": FP16,
        "steps": 8,
        "training": {"clip_grad_norm": 0.5, "grad_scaler": SCALER},
    },
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("optimizer", [ADAMW, ADAMW_FUSED], ids=["adamw", "fused"])
@pytest.mark.parametrize("name", OFFLOADED)
def test_offload(
    captured: Capture, reference: Reference, name: str, optimizer: dict[str, Any]
) -> None:
    """Parameters of all units or one on the host; the gradient scaler skips some steps."""
    case = Case(
        **{"model": LLAMA, "optimizer": optimizer, "world": 4, "steps": 3, **OFFLOADED[name]}
    )
    archive, theirs = captured(case.model, case.precision), reference(case)
    ours = run_plan(archive, case, f"gloo_{name}", comm="gloo")
    assert_equal_bits(ours, theirs)
    if case.precision:
        assert ours.column("loss_scale") == theirs.column("loss_scale")
        assert set(ours.column("skipped")) == {True, False}


@pytest.mark.parametrize("name", ["one_unit", "scaler_and_clipping"])
def test_offload_on_threads(captured: Capture, reference: Reference, name: str) -> None:
    """A thread for each stream: events alone order copies and what takes them."""
    case = Case(
        **{"model": LLAMA, "optimizer": ADAMW_FUSED, "world": 2, "steps": 3, **OFFLOADED[name]}
    )
    archive = captured(case.model, case.precision)
    ours = run_plan(archive, case, f"gloo_{name}_threads", comm="gloo", streams="threads")
    assert_equal_bits(ours, reference(case))


def test_hosts(captured: Capture, reference: Reference) -> None:
    """Two torchruns, of two ranks each."""
    case = Case(LLAMA, ADAMW_FUSED, world=4, steps=3)
    ours = run_plan(captured(LLAMA), case, "gloo_hosts", comm="gloo", nodes=2)
    assert_equal_bits(ours, reference(case))
