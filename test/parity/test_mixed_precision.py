"""Mixed precision gives FSDP2's numbers: the same casts, reductions and divisions.

The losses and the trained parameters are equal bit for bit. The reductions' dtypes matter at two
ranks already: a sum in bf16 rounds, an average in fp16 is divided before the sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import (
    ADAMW_FUSED,
    BIN,
    GPT2,
    GPT2_DROPOUT,
    LLAMA,
    LLAMA_29M,
    SGD,
    Captured,
    Case,
    Model,
    Run,
    execute,
    run_plan,
    write_config,
)
from test_evaluation import evaluations
from test_parity import assert_equal_bits, assert_trained

Capture = Callable[..., Captured]
Reference = Callable[..., Run]

BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
BF16_FP32 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
FP16 = {"param_dtype": "float16", "reduce_dtype": "float16"}
POLICIES: dict[str, dict[str, Any]] = {
    "bf16": {"": BF16},
    # Gradients are reduced in the parameters' own dtype (before PyTorch 2.15: in param_dtype).
    "bf16_reduce_default": {"": {"param_dtype": "bfloat16"}},
    "bf16_reduce_fp32": {"": BF16_FP32},
    "fp16": {"": FP16},
    "fp16_reduce_fp32": {"": {**FP16, "reduce_dtype": "float32"}},
    "bf16_reduce_fp16": {"": {**BF16, "reduce_dtype": "float16"}},
    "fp32_reduce_bf16": {"": {"reduce_dtype": "bfloat16"}},
    "fp32_reduce_fp16": {"": {"reduce_dtype": "float16"}},
}


def both(captured: Capture, reference: Reference, case: Case, stem: str) -> tuple[Run, Run]:
    return run_plan(captured(case.model, case.precision), case, stem), reference(case)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_two_ranks(captured: Capture, reference: Reference, model: Model, policy: str) -> None:
    case = Case(model, ADAMW_FUSED, steps=4, precision=POLICIES[policy])
    ours, theirs = both(captured, reference, case, policy)
    assert_trained(ours, case.steps)
    assert_equal_bits(ours, theirs)


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_output_of_the_root(captured: Capture, reference: Reference, model: Model) -> None:
    precision = {"": {**BF16_FP32, "output_dtype": "float32"}, model.units: BF16_FP32}
    case = Case(model, ADAMW_FUSED, steps=5, precision=precision)
    assert_equal_bits(*both(captured, reference, case, "output"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", ["bf16", "bf16_reduce_fp32", "fp16", "fp32_reduce_bf16"])
def test_one_rank(captured: Capture, reference: Reference, policy: str) -> None:
    case = Case(LLAMA, ADAMW_FUSED, world=1, steps=5, precision=POLICIES[policy])
    assert_equal_bits(*both(captured, reference, case, "world1"))


@pytest.mark.exhaustive  # for its time
def test_policies_differ(captured: Capture) -> None:
    """Equal numbers under different policies would mean that no cast is made."""
    runs = [
        run_plan(captured(LLAMA, p), Case(LLAMA, SGD, steps=5, precision=p), "differ")
        for p in ({}, *POLICIES.values())
        if p is not POLICIES["bf16_reduce_default"]
    ]
    name = "layers.0.attention.wq.weight"
    for one, other in itertools.combinations(runs, 2):
        assert not torch.equal(one.weights[name], other.weights[name])


UNITS: dict[str, dict[str, Any]] = {
    "one_unit_in_fp32": {
        "": BF16_FP32,
        "layers.1": {"param_dtype": "float32", "output_dtype": "bfloat16"},
    },
    "only_one_unit": {"layers.1": {**FP16, "output_dtype": "float32"}},
    "norm_in_fp32": {"": BF16_FP32, "norm": {"param_dtype": "float32", "output_dtype": "bfloat16"}},
    "two_dtypes": {"": BF16_FP32, "layers.0": {**FP16, "output_dtype": "float32"}},
    "inputs_not_cast": {"": BF16_FP32, "output": {**BF16, "cast_forward_inputs": False}},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", UNITS)
def test_policies_of_units(captured: Capture, reference: Reference, policy: str) -> None:
    case = Case(LLAMA, ADAMW_FUSED, steps=5, precision=UNITS[policy])
    assert_equal_bits(*both(captured, reference, case, "units"))


NORMS = Model("parity_models:norms", "*_norm", "tokens,targets", 256, 32, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_norms(captured: Capture, reference: Reference, dtype: str) -> None:
    """Buffers are never cast: PyTorch's BatchNorm on CPU needs its parameters in fp32 then."""
    precision = {
        "": {"param_dtype": dtype, "reduce_dtype": "float32"},
        "batch_norm": {"param_dtype": "float32", "output_dtype": dtype},
    }
    case = Case(NORMS, ADAMW_FUSED, steps=5, precision=precision)
    assert_equal_bits(*both(captured, reference, case, "norms"))


def test_dropout(captured: Capture, reference: Reference) -> None:
    case = Case(GPT2_DROPOUT, ADAMW_FUSED, steps=5, seed=7, precision=POLICIES["bf16"])
    assert_equal_bits(*both(captured, reference, case, "dropout"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", ["bf16", "bf16_reduce_fp32", "fp16"])
def test_four_ranks(captured: Capture, reference: Reference, policy: str) -> None:
    case = Case(LLAMA, ADAMW_FUSED, world=4, steps=5, precision=POLICIES[policy])
    ours, theirs = both(captured, reference, case, "world4")
    again = run_plan(captured(LLAMA, case.precision), case, "world4")
    assert_equal_bits(again, ours)
    assert_equal_bits(ours, theirs)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", ["bf16", "bf16_reduce_fp32", "fp16", "fp32_reduce_fp16"])
@pytest.mark.parametrize("shards", [1, 2])
def test_replicas(captured: Capture, reference: Reference, policy: str, shards: int) -> None:
    mesh = {"mesh": {"replicate": 2, "shard": shards}}
    world = 2 * shards
    case = Case(LLAMA, ADAMW_FUSED, world, 5, precision=POLICIES[policy], training=mesh)
    assert_equal_bits(*both(captured, reference, case, f"replicas{world}"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("save", [None, ["aten::mm"]], ids=["full", "selective"])
@pytest.mark.parametrize("policy", ["bf16", "fp16_reduce_fp32"])
def test_recomputation(
    captured: Capture, reference: Reference, policy: str, save: list[str] | None
) -> None:
    """Casts are computed again too; the bits are those without checkpoints."""
    checkpoint = {"match": "layers.*"} | ({"save": save} if save else {})
    case = Case(LLAMA, ADAMW_FUSED, steps=5, precision=POLICIES[policy], checkpoint=checkpoint)
    ours, theirs = both(captured, reference, case, "recompute")
    assert_equal_bits(ours, theirs)
    kept = run_plan(captured(LLAMA, case.precision), replace(case, checkpoint=None), "kept")
    assert_equal_bits(ours, kept)


def test_evaluation(captured: Capture, reference: Reference) -> None:
    case = Case(LLAMA, ADAMW_FUSED, steps=4, precision=POLICIES["bf16"], eval_every=2)
    ours, theirs = both(captured, reference, case, "evaluation")
    assert_equal_bits(ours, theirs)
    assert evaluations(ours) == evaluations(theirs)


@pytest.mark.parametrize("cast", [True, False])
def test_inputs_from_outside(captured: Capture, reference: Reference, cast: bool) -> None:
    """A tensor that the model makes itself is cast on its way into a unit, or is not."""
    model = Model("corner_models:ExternalInputs", (), "tokens,targets", 256, 16, 2)
    precision = {"second": {**BF16, "cast_forward_inputs": cast}, "": BF16}
    case = Case(replace(model, units="first"), SGD, steps=4, precision=precision)
    ours, theirs = both(captured, reference, case, f"outside_{cast}")
    assert_equal_bits(ours, theirs)


FORCED = {"force_sum_reduction_for_comms": True}
HSDP = {"mesh": {"replicate": 2, "shard": 2}}
DIVISIONS: dict[str, tuple[str | None, dict[str, Any], int]] = {
    "forced": (None, FORCED, 2),
    "factor": (None, {"gradient_divide_factor": 3.0, **FORCED}, 2),
    "factor_of_the_shards": ("bf16", {"gradient_divide_factor": 2.0}, 2),
    "one_rank": (None, {"gradient_divide_factor": 3.0}, 1),
    "one_rank_forced": (None, {"gradient_divide_factor": 3.0, **FORCED}, 1),
    "fp16": ("fp16", {"gradient_divide_factor": 8.0}, 2),
    "replicas": ("bf16", {"gradient_divide_factor": 2.0, **HSDP}, 4),
    "replicas_forced": ("bf16", {"gradient_divide_factor": 6.0, **FORCED, **HSDP}, 4),
    "replicas_fp16": ("fp16", {"gradient_divide_factor": 8.0, **HSDP}, 4),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", DIVISIONS)
def test_division(captured: Capture, reference: Reference, name: str) -> None:
    policy, training, world = DIVISIONS[name]
    precision = POLICIES[policy] if policy else {}
    case = Case(LLAMA, SGD, world, 4, precision=precision, training=training)
    assert_equal_bits(*both(captured, reference, case, "division"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("training", [{}, HSDP], ids=["shards", "replicas"])
@pytest.mark.parametrize("comm", ["shm", "gloo"])
def test_factor_of_ones_own(
    captured: Capture, reference: Reference, comm: str, training: dict[str, Any]
) -> None:
    """PREMUL_SUM, which FSDP2 asks of NCCL and cannot of Gloo: with a power of two it has the bits
    of a sum that is divided."""
    world = 4 if training else 2
    case = Case(LLAMA, SGD, world, 4, training={"gradient_divide_factor": 8.0, **training})
    divided = replace(case, training={**case.training, **FORCED})
    ours = run_plan(captured(LLAMA), case, f"premultiplied_{comm}", comm=comm)
    assert_equal_bits(ours, reference(divided))


def test_division_of_units(captured: Capture, reference: Reference) -> None:
    """Every unit by a factor of its own, or by none."""
    units = [
        {"match": "layers.0", "gradient_divide_factor": 5.0},
        {"match": "layers.1", "gradient_divide_factor": None},
        {"match": "norm", "gradient_divide_factor": 2.0, "force_sum_reduction_for_comms": False},
    ]
    case = Case(
        replace(LLAMA, units=units),
        SGD,
        steps=4,
        training={"gradient_divide_factor": 3.0, **FORCED},
    )
    ours, theirs = both(captured, reference, case, "division_of_units")
    assert_equal_bits(ours, theirs)
    same = run_plan(captured(LLAMA), replace(case, model=LLAMA), "division_of_all")
    assert not torch.equal(
        ours.weights["layers.0.attention.wo.weight"], same.weights["layers.0.attention.wo.weight"]
    )


GROUPED: tuple[dict[str, Any], ...] = (
    {"match": ["norm", "output"], "mixed_precision": {**BF16_FP32, "output_dtype": "float32"}},
    {"class": "Block"},
)


def test_units_of_lists_and_classes(captured: Capture, reference: Reference) -> None:
    model = replace(LLAMA, units=GROUPED)
    case = Case(model, ADAMW_FUSED, steps=5, precision={"": BF16})
    assert_equal_bits(*both(captured, reference, case, "grouped"))


@pytest.mark.exhaustive
def test_29_million_parameters(captured: Capture, reference: Reference) -> None:
    # Short sequences: without AVX-512 a product in bfloat16 takes fifty times as long.
    model = replace(LLAMA_29M, seq=32, batch=1)
    case = Case(model, ADAMW_FUSED, steps=3, precision=POLICIES["bf16_reduce_fp32"])
    assert_equal_bits(*both(captured, reference, case, "plan"))


@pytest.mark.parametrize("at_capture", [{}, {"": BF16}], ids=["without", "with"])
def test_another_policy_than_the_captured_one(
    captured: Capture, at_capture: dict[str, Any]
) -> None:
    model = captured(LLAMA, at_capture)
    asked = {} if at_capture else {"": BF16}
    config = model.directory / "other.yaml"
    write_config(Case(LLAMA, ADAMW_FUSED, precision=asked), config)
    done = execute(
        [BIN / "fsdp-opt", model.archive, "--config", config, "--emit", "plan"], check=False
    )
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert "was captured with " in errors[0]
    assert errors[0].endswith("; capture the model with this config")


def test_groups_after_forward(captured: Capture, reference: Reference) -> None:
    """What groups of two keep after forward is in param_dtype."""
    case = Case(LLAMA, SGD, world=4, steps=3, reshard="2", precision=POLICIES["bf16_reduce_fp32"])
    whole = replace(case, reshard="default")
    ours, theirs = both(captured, reference, case, "groups")
    assert_equal_bits(ours, run_plan(captured(LLAMA, case.precision), whole, "whole"))
    assert_equal_bits(ours, theirs)
