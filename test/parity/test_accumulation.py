"""Accumulation gives FSDP2's numbers on every mesh, in mixed precision and with ignored parameters.

What is added when, and in which dtype, decides the last bits: shards in the parameters' dtype, or
in that of the reduction before an all-reduce; whole gradients in that of the reduction.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import (
    ADAMW_FUSED,
    BIN,
    GPT2,
    LLAMA,
    SGD,
    Captured,
    Case,
    Run,
    compile_plan,
    execute,
    run_plan,
)
from safetensors.torch import load_file
from test_mixed_precision import BF16, POLICIES
from test_parity import assert_equal_bits, assert_trained
from train_fsdp2 import compute_loss, load_weights, take_batch

Capture = Callable[..., Captured]
Reference = Callable[..., Run]

MODES: dict[str, dict[str, Any]] = {
    "all_reduced": {},
    "reduce_scattered": {"all_reduce_each_microbatch": False},
    "not_reduced": {"reduce_each_microbatch": False},
}
MESHES = {"2x1": (2, 1), "1x2": (1, 2), "2x2": (2, 2)}
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"": BF16}}


def training(mode: str, mesh: str | None = None, **further: Any) -> dict[str, Any]:
    result = {"gradient_accumulation_steps": 3, **MODES[mode], **further}
    if mesh:
        result["mesh"] = dict(zip(("replicate", "shard"), MESHES[mesh], strict=True))
    return result


def world_of(mesh: str) -> int:
    return MESHES[mesh][0] * MESHES[mesh][1]


def both(captured: Capture, reference: Reference, case: Case, stem: str) -> tuple[Run, Run]:
    return run_plan(captured(case.model, case.precision), case, stem), reference(case)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("mode", MODES)
def test_replicas(
    captured: Capture, reference: Reference, mode: str, mesh: str, precision: str
) -> None:
    case = Case(LLAMA, SGD, world_of(mesh), 5, training=training(mode, mesh))
    case = replace(case, precision=PRECISIONS[precision])
    ours, theirs = both(captured, reference, case, f"{mode}_{mesh}_{precision}")
    assert_trained(ours, case.steps)
    assert_equal_bits(ours, theirs)


def test_modes_differ_in_bf16(captured: Capture) -> None:
    """Equal numbers would mean that nothing is added in the dtype of the reduction."""
    case = Case(LLAMA, SGD, 2, 3, precision={"": BF16})
    runs = [
        run_plan(captured(LLAMA, case.precision), replace(case, training=training(m, "1x2")), m)
        for m in MODES
    ]
    name = "layers.0.attention.wq.weight"
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(runs[one].weights[name], runs[other].weights[name])


# What FSDP2 reduces in a step of three microbatches; the Llama has three units.
COUNTS = {"all_reduced": (9, 9), "reduce_scattered": (9, 3), "not_reduced": (3, 3)}


@pytest.mark.parametrize("mode", MODES)
def test_communication_count(captured: Capture, mode: str) -> None:
    case = Case(LLAMA, SGD, 4, training=training(mode, "2x2"))
    plan = json.loads(compile_plan(captured(LLAMA), case, f"count_{mode}").read_text())
    counts: Counter[str] = Counter()
    for instruction in plan["instructions"]:
        counts[next(iter(instruction))] += 1 if "when" in instruction else 3
    assert (counts["reduce_scatter"], counts["all_reduce"]) == COUNTS[mode]


# Division before and after the sums, copies to the host, parameters that stay gathered, clipping.
FURTHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp16": ({"": POLICIES["fp16"][""]}, {}),
    "divided": ({"": BF16}, {"gradient_divide_factor": 6.0, "force_sum_reduction_for_comms": True}),
    "offloaded": ({"": BF16}, {"cpu_offload": True}),
    "gathered": ({}, {"reshard_after_backward": False, "clip_grad_norm": 0.5}),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FURTHER)
def test_further_policies(captured: Capture, reference: Reference, name: str, mode: str) -> None:
    precision, further = FURTHER[name]
    case = Case(LLAMA, SGD, 4, 4, precision=precision, training=training(mode, "2x2", **further))
    ours, theirs = both(captured, reference, case, f"{name}_{mode}")
    assert_equal_bits(ours, theirs)
    if "clip_grad_norm" in further:
        assert ours.column("grad_norm") == theirs.column("grad_norm")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_mixed_precision_reduced_once(captured: Capture, reference: Reference, policy: str) -> None:
    case = Case(LLAMA, ADAMW_FUSED, 2, 5, training=training("not_reduced"))
    case = replace(case, precision=POLICIES[policy])
    ours, theirs = both(captured, reference, case, "whole")
    assert_trained(ours, case.steps)
    assert_equal_bits(ours, theirs)


@pytest.mark.parametrize("mode", MODES)
def test_one_rank(captured: Capture, reference: Reference, mode: str) -> None:
    case = Case(LLAMA, SGD, 1, 4, precision={"": BF16}, training=training(mode))
    assert_equal_bits(*both(captured, reference, case, f"one_{mode}"))


@pytest.mark.parametrize("mode", ["all_reduced", "not_reduced"])
def test_four_shards(captured: Capture, reference: Reference, mode: str) -> None:
    case = Case(LLAMA, ADAMW_FUSED, 4, 4, precision={"": BF16}, training=training(mode))
    assert_equal_bits(*both(captured, reference, case, f"four_{mode}"))


def first_gradient(captured: Captured, name: str, rank: int) -> torch.Tensor:
    """Of a parameter, in bfloat16, of a third of the loss of the rank's first batch."""
    model = captured.model.build()
    load_weights(model, str(captured.weights))
    model.to(torch.bfloat16)
    size = captured.model.batch
    batch = take_batch(load_file(captured.data), rank * size, size)
    (compute_loss(model, batch) / 3).backward()
    return model.get_parameter(name).grad


def test_tied_parameters(captured: Capture, reference: Reference) -> None:
    """FSDP2 adds the two gradients of the first microbatch in the dtype of the reduction, those of
    later ones in autograd's, bfloat16; ours adds all in one. So what the first step subtracts from
    the tied parameter may differ by the rounding of one sum a rank, 2^-8 of it, and of the update
    in float32; nothing else may. `fsdp-opt` warns of it."""
    policy = POLICIES["bf16_reduce_fp32"]
    case = Case(GPT2, SGD, 2, 1, precision=policy, training=training("not_reduced"))
    ours, theirs = both(captured, reference, case, "tied")
    archive, config = captured(GPT2, policy).archive, captured(GPT2, policy).directory / "tied.yaml"
    command = [BIN / "fsdp-opt", archive, "--config", config, "--world-size", 2, "-o", os.devnull]
    warnings = execute(command).stderr
    assert warnings.count("warning: ") == 1
    assert 'used more than once: "transformer.wte.weight"' in warnings
    tied = ("transformer.wte.weight", "lm_head.weight")
    bound = 2**-22 * theirs.weights[tied[0]].abs()
    for rank in range(case.world):
        gradient = first_gradient(captured(GPT2, policy), tied[0], rank)
        bound += SGD["lr"] / case.world * 2**-8 * gradient.abs()
    for name in tied:
        difference = (ours.weights.pop(name) - theirs.weights.pop(name)).abs()
        assert (difference <= bound).all()
    assert_equal_bits(ours, theirs)


IGNORED = {
    "embedding": ["tok_embeddings.weight"],
    "norms": ["**norm*.weight"],
    "a_whole_unit": ["layers.0.**"],
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("mode", ["all_reduced", "not_reduced"])
@pytest.mark.parametrize("patterns", IGNORED.values(), ids=IGNORED)
def test_ignored_parameters(
    captured: Capture, reference: Reference, patterns: list[str], mode: str
) -> None:
    """Their gradients are added by each rank."""
    case = Case(LLAMA, ADAMW_FUSED, 2, 5, training=training(mode, ignore=patterns))
    assert_equal_bits(*both(captured, reference, case, f"ignored_{mode}"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", MODES)
def test_ignored_parameters_on_replicas(captured: Capture, reference: Reference, mode: str) -> None:
    case = Case(LLAMA, SGD, 4, 4, training=training(mode, "2x2", ignore=["**norm*.weight"]))
    assert_equal_bits(*both(captured, reference, case, f"ignored_replicas_{mode}"))
