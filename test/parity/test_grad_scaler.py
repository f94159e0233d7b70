"""The gradient scaler gives the numbers of torch.amp.GradScaler with FSDP2.

Scales, skipped steps, losses and parameters are equal bit for bit. The scales are so large that
some steps overflow in float16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from harness import ADAMW, ADAMW_FUSED, GPT2, LLAMA, SGD, Captured, Case, Model, Run, run_plan
from test_parity import assert_equal_bits

Capture = Callable[..., Captured]
Reference = Callable[..., Run]

FP16 = {"": {"param_dtype": "float16", "reduce_dtype": "float32"}}
FP16_REDUCE = {"": {"param_dtype": "float16"}}
# No powers of two: dividing is not multiplying by the reciprocal.
SCALER = {
    "init_scale": 3e6,
    "growth_factor": 3.0,
    "backoff_factor": 0.3,
    "growth_interval": 2,
}


def compare(captured: Capture, reference: Reference, case: Case) -> Run:
    ours = run_plan(captured(case.model, case.precision), case, "scaled")
    theirs = reference(case)
    assert ours.column("loss_scale") == theirs.column("loss_scale")
    assert_equal_bits(ours, theirs)
    return ours


def assert_skips_and_steps(run: Run) -> None:
    """Some steps overflow, some do not; the scale falls and grows."""
    assert set(run.column("skipped")) == {True, False}
    scales = run.column("loss_scale")
    changes = [after - before for before, after in itertools.pairwise(scales)]
    assert min(changes) < 0 < max(changes)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("optimizer", [ADAMW, ADAMW_FUSED, SGD], ids=["adamw", "fused", "sgd"])
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_equals_fsdp2(
    captured: Capture, reference: Reference, model: Model, optimizer: dict[str, Any], world: int
) -> None:
    training = {"grad_scaler": SCALER}
    case = Case(model, optimizer, world, steps=10, precision=FP16, training=training)
    assert_skips_and_steps(compare(captured, reference, case))


TOGETHER: dict[str, dict[str, Any]] = {
    "clipping": {"clip_grad_norm": 0.5},
    "microbatches": {"gradient_accumulation_steps": 2},
    "replicas": {"mesh": {"replicate": 2, "shard": 1}},
    "offload": {"cpu_offload": True},
    "schedule": {"lr_schedule": {"warmup_steps": 4}},
}


@pytest.mark.parametrize("training", TOGETHER.values(), ids=TOGETHER)
def test_with_other_policies(captured: Capture, reference: Reference, training: dict) -> None:
    training = {"grad_scaler": SCALER, **training}
    case = Case(LLAMA, ADAMW_FUSED, steps=8, precision=FP16, training=training)
    ours = compare(captured, reference, case)
    assert_skips_and_steps(ours)
    if "clip_grad_norm" in training:
        # Of a skipped step it is not finite, which JSON cannot say.
        norms = zip(ours.metrics, reference(case).column("grad_norm"), strict=True)
        assert all(line["grad_norm"] == norm for line, norm in norms if not line["skipped"])


def test_reduction_in_float16(captured: Capture, reference: Reference) -> None:
    training = {"grad_scaler": {"init_scale": 2.0**20, "growth_interval": 3}}
    case = Case(LLAMA, ADAMW, steps=12, precision=FP16_REDUCE, training=training)
    assert_skips_and_steps(compare(captured, reference, case))


def test_defaults(captured: Capture, reference: Reference) -> None:
    case = Case(LLAMA, ADAMW, steps=4, precision=FP16, training={"grad_scaler": True})
    assert compare(captured, reference, case).column("loss_scale")[0] == 65536


@pytest.mark.parametrize("mesh", [{"shard": 4}, {"replicate": 2, "shard": 2}], ids=["1d", "hsdp"])
def test_four_ranks(captured: Capture, reference: Reference, mesh: dict[str, int]) -> None:
    training = {"grad_scaler": SCALER, "mesh": mesh}
    case = Case(LLAMA, ADAMW_FUSED, world=4, steps=8, precision=FP16, training=training)
    assert_skips_and_steps(compare(captured, reference, case))


def test_powers_of_two_change_no_bits(captured: Capture) -> None:
    """In float32 nothing is lost by scaling with powers of two."""
    plain = Case(LLAMA, ADAMW_FUSED, steps=5)
    scaled = Case(LLAMA, ADAMW_FUSED, steps=5, training={"grad_scaler": True})
    assert_equal_bits(
        run_plan(captured(LLAMA), scaled, "powers"), run_plan(captured(LLAMA), plain, "plain")
    )
