"""The reductions that the reference takes at three ranks and more change nothing but an order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import ADAMW_FUSED, LLAMA, Captured, Case, Run, run_reference
from test_mixed_precision import POLICIES
from test_parity import assert_equal_bits

Capture = Callable[..., Captured]
Reference = Callable[..., Run]


def test_groups_of_two_have_the_bits_of_gloo(captured: Capture, reference: Reference) -> None:
    """Two terms have one order: of a reduce-scatter, an all-reduce and a norm's."""
    training = {"mesh": {"replicate": 2, "shard": 2}, "clip_grad_norm": 0.5}
    case = Case(LLAMA, ADAMW_FUSED, 4, 3, precision=POLICIES["bf16"], training=training)
    archive = captured(LLAMA, case.precision)
    ordered = run_reference(archive, case, "ordered", rank_order=True)
    gloo = reference(case, comm="gloo")
    assert_equal_bits(ordered, gloo)
    assert ordered.column("grad_norm") == gloo.column("grad_norm")


def test_larger_groups_do_not(captured: Capture, reference: Reference) -> None:
    """Were this equal, the order would not be taken."""
    case = Case(LLAMA, ADAMW_FUSED, 4, 3, precision=POLICIES["bf16"])
    ordered, gloo = reference(case).weights, reference(case, comm="gloo").weights
    assert any(not torch.equal(ordered[name], weight) for name, weight in gloo.items())
