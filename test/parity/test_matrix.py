"""Every policy on every kind of model at 1, 2 and 4 ranks has FSDP2's bits.

What a policy does in detail has a test file of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from harness import ADAMW_FUSED, GPT2, LLAMA, RESNET18, SGD, Captured, Case, Model, Run, run_plan
from test_parity import assert_equal_bits

Capture = Callable[..., Captured]
Reference = Callable[..., Run]

MODELS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "resnet18": RESNET18,
    "embedding_heavy": Model(
        "corner_models:EmbeddingHeavy", "blocks.*", "tokens,targets", 4096, 32, 2
    ),
}
LAYERS = {"llama": "layers.*", "gpt2": "transformer.h.*", "resnet18": "net.layer*.*"}


@dataclass(frozen=True)
class Policy:
    """What differs from the default case."""

    case: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    checkpoint: bool = False


BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
FP16 = {"param_dtype": "float16", "reduce_dtype": "float32"}
POLICIES = {
    "default": Policy(),
    "gathered": Policy({"reshard": "false"}),
    "replicas": Policy(training={"mesh": {"replicate": -1, "shard": 1}}),
    "bfloat16": Policy({"precision": {"": BF16}}),
    "scaled": Policy({"precision": {"": FP16}}, {"grad_scaler": {"init_scale": 2.0**10}}),
    "microbatches": Policy(training={"gradient_accumulation_steps": 2}),
    "clipped": Policy(training={"clip_grad_norm": 0.5}),
    "checkpointed": Policy(checkpoint=True),
    "offloaded": Policy(training={"cpu_offload": True}),
}


def make_case(model: str, policy: str, world: int) -> Case:
    chosen = POLICIES[policy]
    optimizer = {**SGD, "lr": 0.001} if model == "resnet18" else ADAMW_FUSED
    case = Case(MODELS[model], optimizer, world=world, steps=3, training=chosen.training)
    case = replace(case, **chosen.case)
    if model == "resnet18" and case.precision:
        # BatchNorm has no kernel for parameters in bfloat16 and statistics in float32.
        case = replace(case, precision={"": {"reduce_dtype": "bfloat16"}})
    if chosen.checkpoint:
        case = replace(case, checkpoint={"match": LAYERS.get(model, "blocks.*")})
    return case


def forget_statistics(case: Case, *runs: Run) -> None:
    """PyTorch's recomputation updates the statistics of BatchNorm twice, ours does not."""
    if case.model is not RESNET18 or not case.checkpoint:
        return
    for run in runs:
        for name in [n for n in run.weights if re.search("running_|num_batches", n)]:
            del run.weights[name]


WORLDS = [1, 2, 4]


def products() -> Iterator[Any]:
    """Every policy on every model at one number of ranks, the default at each; the others are
    exhaustive."""
    for m, model in enumerate(MODELS):
        for p, policy in enumerate(POLICIES):
            for w, world in enumerate(WORLDS):
                runs = (m + p) % len(WORLDS) == w or policy == "default"
                marks = [] if runs else [pytest.mark.exhaustive]
                yield pytest.param(model, policy, world, marks=marks)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("model, policy, world", products())
def test_equals_fsdp2(
    captured: Capture, reference: Reference, model: str, policy: str, world: int
) -> None:
    case = make_case(model, policy, world)
    ours = run_plan(captured(case.model, case.precision), case, f"matrix_{policy}_{world}")
    theirs = reference(case)
    forget_statistics(case, ours, theirs)
    assert_equal_bits(ours, theirs)
