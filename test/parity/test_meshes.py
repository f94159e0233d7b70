"""Meshes of two axes (HSDP) have the bits of FSDP2 on the same mesh."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import ADAMW_FUSED, GPT2, LLAMA, SGD, Captured, Case, Model, Run, run_plan
from test_parity import assert_equal_bits, assert_trained

Capture = Callable[[Model], Captured]
Reference = Callable[..., Run]


@pytest.mark.parametrize("optimizer", [ADAMW_FUSED, SGD], ids=["adamw_fused", "sgd"])
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_two_replicas_of_two_ranks(
    captured: Capture, reference: Reference, model: Model, optimizer: dict
) -> None:
    case = Case(model, optimizer, world=4, training={"mesh": {"replicate": 2, "shard": 2}})
    ours = run_plan(captured(model), case, f"hsdp_{optimizer['name']}")
    assert_trained(ours, case.steps)
    assert_equal_bits(ours, reference(case))


MESHES = {
    "whole_on_every_rank": {"replicate": 2, "shard": 1},
    "inferred_shards": {"replicate": 2},
    "inferred_replicas": {"replicate": -1, "shard": 2},
    "one_replica": {"replicate": 1},
}


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_two_ranks(captured: Capture, reference: Reference, mesh: dict[str, int]) -> None:
    case = Case(LLAMA, ADAMW_FUSED, steps=5, training={"mesh": mesh})
    ours = run_plan(captured(LLAMA), case, "mesh_" + "_".join(map(str, mesh.values())))
    assert_equal_bits(ours, reference(case))


@pytest.mark.parametrize(("replicate", "shard"), [(3, 2), (2, 3)])
def test_six_ranks(captured: Capture, reference: Reference, replicate: int, shard: int) -> None:
    """Sums of three terms on either axis, and shards of unequal sizes."""
    mesh = {"replicate": replicate, "shard": shard}
    training = {"mesh": mesh, "clip_grad_norm": 0.5}
    case = Case(LLAMA, ADAMW_FUSED, world=6, steps=3, training=training)
    ours = run_plan(captured(LLAMA), case, f"hsdp_{replicate}x{shard}")
    theirs = reference(case)
    assert_equal_bits(ours, theirs)
    assert ours.column("grad_norm") == theirs.column("grad_norm")


@pytest.mark.parametrize("reshard", ["true", "false"])
def test_reshard_after_forward(captured: Capture, reference: Reference, reshard: str) -> None:
    mesh = {"replicate": 2, "shard": 2}
    case = Case(LLAMA, ADAMW_FUSED, world=4, steps=5, reshard=reshard, training={"mesh": mesh})
    ours = run_plan(captured(LLAMA), case, f"hsdp_reshard_{reshard}")
    assert_equal_bits(ours, reference(case))


@pytest.mark.exhaustive  # test_gloo.py has two hosts
def test_replicas_on_nodes(captured: Capture, reference: Reference) -> None:
    """Each replica is started by a torchrun of its own, as on a host of its own."""
    case = Case(LLAMA, SGD, world=4, steps=5, training={"mesh": {"replicate": 2, "shard": 2}})
    ours = run_plan(captured(LLAMA), case, "nodes", nodes=2)
    assert_equal_bits(ours, reference(case))
