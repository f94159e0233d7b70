"""Models with activation checkpointing of their own: FSDP2's bits, random numbers included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from harness import ADAMW_FUSED, GPT2_DROPOUT, SGD, Captured, Case, Model, Run, run_plan
from test_parity import assert_equal_bits

Capture = Callable[..., Captured]
Reference = Callable[..., Run]


def text_model(how: str) -> Model:
    names = "tokens,targets"
    return Model("checkpoint_models:Checkpointed", "blocks.*", names, 256, 16, 2, {"how": how})


HOW = ["plain", "nested", "fresh", "to_the_end", "selective", "sequential", "wrapper", "reentrant"]
MODELS = {how: text_model(how) for how in HOW}
MODELS["gpt2"] = replace(GPT2_DROPOUT, factory="checkpoint_models:gpt2_checkpointed")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_equals_fsdp2(captured: Capture, reference: Reference, model: Model) -> None:
    case = Case(model, ADAMW_FUSED, steps=4, seed=3)
    ours = run_plan(captured(model), case, "checkpointed")
    assert len(set(ours.column("loss"))) == case.steps
    assert_equal_bits(unwrapped(ours), reference(case))


def unwrapped(run: Run) -> Run:
    """Under the names that a checkpoint wrapper's own state_dict gives."""
    names = {name: name.replace("_checkpoint_wrapped_module.", "") for name in run.weights}
    return replace(run, weights={names[name]: tensor for name, tensor in run.weights.items()})


def test_mixed_precision(captured: Capture, reference: Reference) -> None:
    """What is computed again is cast again."""
    precision = {"": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
    case = Case(MODELS["gpt2"], SGD, steps=4, precision=precision)
    assert_equal_bits(run_plan(captured(case.model, precision), case, "bf16"), reference(case))
