"""Parameters sharded on another dimension than 0: the numbers of FSDP2's `shard_placement_fn`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from harness import (
    ADAMW,
    ADAMW_FUSED,
    GPT2,
    LLAMA,
    RESNET18,
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

Capture = Callable[..., Captured]
Reference = Callable[..., Run]

COLUMNS = [
    {"match": "**.w1.weight", "dim": 1},
    {"match": "**.attention.*.weight", "dim": 1},
    {"match": "tok_embeddings.weight", "dim": -1},
]
GPT2_COLUMNS = [{"match": "transformer.h.*.mlp.*.weight", "dim": 1}]
PLACEMENTS = {"llama": (LLAMA, COLUMNS), "gpt2": (GPT2, GPT2_COLUMNS)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("optimizer", [ADAMW_FUSED, ADAMW, SGD], ids=["fused", "adamw", "sgd"])
@pytest.mark.parametrize(("model", "placement"), PLACEMENTS.values(), ids=PLACEMENTS)
def test_columns(
    captured: Capture, reference: Reference, model: Model, placement: Any, optimizer: dict
) -> None:
    case = Case(model, optimizer, steps=8, training={"shard_placement": placement})
    plan = compile_plan(captured(model), case, "columns")
    dims = [p.get("shard_dim", 0) for p in json.loads(plan.read_text())["params"]]
    assert set(dims) == {0, 1}
    ours = train_plan(captured(model), plan, case)
    assert_trained(ours, case.steps)
    assert_equal_bits(ours, reference(case))


def test_four_dimensions(captured: Capture, reference: Reference) -> None:
    """Convolutions over their input channels and their columns, the middle and the last of their
    dimensions."""
    placement = [
        {"match": "net.layer1.**.conv*.weight", "dim": 1},
        {"match": "net.layer4.*.conv1.weight", "dim": -3},
        {"match": "net.fc.weight", "dim": 1},
    ]
    case = Case(RESNET18, {**SGD, "lr": 0.001}, steps=3, training={"shard_placement": placement})
    ours = run_plan(captured(RESNET18), case, "channels")
    assert_equal_bits(ours, reference(case))


TOGETHER: dict[str, dict[str, Any]] = {
    "clipping": {"clip_grad_norm": 0.5},
    "accumulation": {"gradient_accumulation_steps": 2, "reduce_each_microbatch": False},
    "shards_accumulated": {"gradient_accumulation_steps": 2},
    "replicas": {"mesh": {"replicate": 2, "shard": 1}},
}


@pytest.mark.parametrize("training", TOGETHER.values(), ids=TOGETHER)
def test_with_other_policies(captured: Capture, reference: Reference, training: dict) -> None:
    case = Case(LLAMA, SGD, steps=5, training={"shard_placement": COLUMNS, **training})
    ours = run_plan(captured(LLAMA), case, "columns_with")
    theirs = reference(case)
    assert_equal_bits(ours, theirs)
    if "clip_grad_norm" in training:
        assert ours.column("grad_norm") == theirs.column("grad_norm")


@pytest.mark.parametrize("mesh", [{"shard": 4}, {"replicate": 2, "shard": 2}], ids=["1d", "hsdp"])
def test_four_ranks(captured: Capture, reference: Reference, mesh: dict) -> None:
    training = {"shard_placement": COLUMNS, "mesh": mesh}
    case = Case(LLAMA, ADAMW_FUSED, world=4, steps=6, training=training)
    ours = run_plan(captured(LLAMA), case, f"columns_{len(mesh)}")
    assert_equal_bits(ours, reference(case))
    if mesh["shard"] == 2:  # more terms have an order, which depends on where they are
        rows = Case(LLAMA, ADAMW_FUSED, world=4, steps=6, training={"mesh": mesh})
        assert_equal_bits(ours, run_plan(captured(LLAMA), rows, f"rows_{len(mesh)}"))


def test_mixed_precision(captured: Capture, reference: Reference) -> None:
    """Columns are gathered in bfloat16, and their gradients reduced in float32."""
    precision = {"": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
    training = {"shard_placement": COLUMNS}
    case = Case(LLAMA, ADAMW_FUSED, steps=5, training=training, precision=precision)
    ours = run_plan(captured(LLAMA, precision), case, "columns_bf16")
    assert_equal_bits(ours, reference(case))
