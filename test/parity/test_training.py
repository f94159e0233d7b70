"""Clipping, optimizers, schedules and accumulation give FSDP2's numbers.

Losses, total norms, learning rates and final parameters are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import (
    ADAMW,
    ADAMW_FUSED,
    BIN,
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

Capture = Callable[[Model], Captured]
Reference = Callable[..., Run]

OWN = Model("parity_models:own_parameters", "layers.*", "tokens,targets", 256, 32, 2)


def compare(
    captured: Capture, reference: Reference, case: Case, stem: str, mode: str = "fsdp2"
) -> Run:
    """Both sides of `case`, equal in every bit of every column they share."""
    ours = run_plan(captured(case.model), case, stem)
    theirs = reference(case, mode)
    assert_trained(ours, case.steps)
    assert_equal_bits(ours, theirs)
    assert ours.column("lr") == theirs.column("lr")
    if "clip_grad_norm" in case.training:
        assert ours.column("grad_norm") == theirs.column("grad_norm")
    return ours


# --- clipping


@pytest.mark.one_in(5)
@pytest.mark.parametrize("norm_type", [1, 2, "inf"])
@pytest.mark.parametrize("model", [LLAMA, OWN], ids=["llama", "own_parameters"])
def test_clipping(
    captured: Capture, reference: Reference, model: Model, norm_type: float | str
) -> None:
    clipping = {"max_norm": {1: 20.0, 2: 0.5, "inf": 0.02}[norm_type], "norm_type": norm_type}
    case = Case(model, SGD, steps=8, training={"clip_grad_norm": clipping})
    ours = compare(captured, reference, case, f"clip_{norm_type}")
    assert max(ours.column("grad_norm")) > clipping["max_norm"]  # something is clipped


def test_norm_below_the_maximum(captured: Capture, reference: Reference) -> None:
    case = Case(LLAMA, ADAMW_FUSED, steps=3, training={"clip_grad_norm": 1000.0})
    compare(captured, reference, case, "clip_never")


def test_clipping_at_one_rank(captured: Capture, reference: Reference) -> None:
    case = Case(OWN, SGD, world=1, steps=5, training={"clip_grad_norm": 0.5})
    compare(captured, reference, case, "clip_one_rank")


def test_clipping_with_ignored_parameters(captured: Capture, reference: Reference) -> None:
    """FSDP2's clip_grad_norm_ takes no mixture of DTensors and plain tensors; neither does ours."""
    training = {"clip_grad_norm": 1.0, "ignore": ["layers.*.scale"]}
    case = Case(OWN, SGD, steps=1, training=training)
    with pytest.raises(RuntimeError, match="expected no ignored parameter in a model whose grad"):
        compile_plan(captured(OWN), case, "clip_ignored")
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        reference(case)


def test_clipping_uneven_and_empty_shards(captured: Capture, reference: Reference) -> None:
    case = Case(OWN, SGD, world=4, steps=8, training={"clip_grad_norm": 0.5})
    compare(captured, reference, case, "clip_world4")


def test_infinity_norm_of_empty_shards(captured: Capture, reference: Reference) -> None:
    """FSDP2 fails on empty shards; Gloo itself gives the same bits. One rank has none and sees the
    same first batches. A quarter of a loss gives exactly a quarter of its gradients, but these are
    added in another order: three sums are rounded, of up to five times the result."""
    clipping = {"clip_grad_norm": {"max_norm": 0.02, "norm_type": "inf"}}
    case = Case(OWN, SGD, world=4, steps=1, training=clipping)
    four = run_plan(captured(OWN), case, "inf4")
    assert_equal_bits(four, run_plan(captured(OWN), case, "inf4_gloo", comm="gloo"))
    accumulating = {**clipping, "gradient_accumulation_steps": 4}
    one = reference(Case(OWN, SGD, world=1, steps=1, training=accumulating))
    assert four.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=2**-20)
    for name, weight in one.weights.items():
        assert torch.allclose(four.weights[name], weight, rtol=2**-20, atol=1e-7)


# --- optimizers

ADAM = {**ADAMW, "name": "adam", "weight_decay": 0.01}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": ADAM,
    "adam_fused": {**ADAM, "fused": True},
    "adam_foreach": {**ADAM, "foreach": True},
    "adam_amsgrad": {**ADAM, "amsgrad": True},
    "adamw_foreach": {**ADAMW, "foreach": True},
    "sgd": {"name": "sgd", "lr": 0.05},
    "sgd_foreach": {**SGD, "foreach": True, "weight_decay": 0.01},
    "sgd_nesterov": {**SGD, "nesterov": True},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer(captured: Capture, reference: Reference, optimizer: str) -> None:
    compare(captured, reference, Case(OWN, OPTIMIZERS[optimizer], steps=8), optimizer)


@pytest.mark.parametrize("nesterov", [False, True])
def test_fused_sgd(captured: Capture, reference: Reference, nesterov: bool) -> None:
    """DTensor has no rule for the fused kernel of SGD, so FSDP2 cannot run it: one rank without
    FSDP2 is the reference. The kernel is element-wise, as the others are."""
    optimizer = {**SGD, "fused": True, "nesterov": nesterov, "weight_decay": 0.01}
    case = Case(OWN, optimizer, world=1, steps=8)
    compare(captured, reference, case, f"sgd_fused_{nesterov}", "single")


@pytest.mark.parametrize("fused", [False, True])
def test_parameter_groups(captured: Capture, reference: Reference, fused: bool) -> None:
    groups = [
        {"match": "**.bias", "weight_decay": 0.0},
        {"match": "layers.*.scale", "lr": 0.01, "betas": [0.8, 0.9]},
    ]
    optimizer = {**ADAMW, "fused": fused, "groups": groups}
    grouped = compare(captured, reference, Case(OWN, optimizer, steps=8), f"groups_{fused}")
    plain = reference(Case(OWN, {**ADAMW, "fused": fused}, steps=8))
    assert not torch.equal(grouped.weights["layers.0.scale"], plain.weights["layers.0.scale"])


SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {"warmup_steps": 3, "decay": "cosine", "total_steps": 9, "min_lr_ratio": 0.1},
    "linear": {"warmup_steps": 2, "decay": "linear", "total_steps": 10},
    "constant": {"warmup_steps": 4, "decay": "constant"},
    "without_warmup": {"decay": "cosine", "total_steps": 7, "min_lr_ratio": 0.25},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule(captured: Capture, reference: Reference, schedule: str) -> None:
    """Twelve steps: the decay ends before the run does."""
    case = Case(OWN, ADAMW_FUSED, steps=12, training={"lr_schedule": SCHEDULES[schedule]})
    ours = compare(captured, reference, case, f"schedule_{schedule}")
    assert len(set(ours.column("lr"))) > 3


def test_plugin(captured: Capture, reference: Reference) -> None:
    library = BIN.parent / "lib" / "liblion.so"
    options = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    groups = [{"match": "**.bias", "lr": 2e-4, "options": {"weight_decay": 0.0}}]
    optimizer = {"name": "plugin", "library": str(library), "lr": 1e-3, "options": options}
    compare(captured, reference, Case(OWN, optimizer, steps=8), "plugin")
    theirs = [{**group, **group["options"]} for group in groups]
    for group in theirs:
        del group["options"]
    ours = run_plan(captured(OWN), Case(OWN, {**optimizer, "groups": groups}), "plugin_groups")
    assert_equal_bits(ours, reference(Case(OWN, {**optimizer, "groups": theirs})))


# --- accumulation


@pytest.mark.one_in(3)
@pytest.mark.parametrize("reduce_each", [True, False])
@pytest.mark.parametrize("reshard", ["default", "false"])
def test_accumulation(
    captured: Capture, reference: Reference, reshard: str, reduce_each: bool
) -> None:
    training = {"gradient_accumulation_steps": 3, "reduce_each_microbatch": reduce_each}
    case = Case(LLAMA, ADAMW, steps=6, reshard=reshard, training=training)
    compare(captured, reference, case, f"accumulate_{reshard}_{reduce_each}")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("reduce_each", [True, False])
@pytest.mark.parametrize("world", [1, 4])
def test_accumulation_at_other_sizes(
    captured: Capture, reference: Reference, world: int, reduce_each: bool
) -> None:
    training = {"gradient_accumulation_steps": 2, "reduce_each_microbatch": reduce_each}
    case = Case(OWN, SGD, world=world, steps=8, training=training)
    compare(captured, reference, case, f"accumulate{world}_{reduce_each}")


def test_everything_together(captured: Capture, reference: Reference) -> None:
    training = {
        "clip_grad_norm": 0.5,
        "gradient_accumulation_steps": 2,
        "lr_schedule": SCHEDULES["cosine"],
    }
    optimizer = {**ADAMW, "groups": [{"match": "**.bias", "weight_decay": 0.0}]}
    case = Case(replace(OWN, units="layers.*"), optimizer, steps=10, training=training)
    compare(captured, reference, case, "together")
