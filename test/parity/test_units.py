"""How parameters become units, against the same `fully_shard` calls of FSDP2 at two ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from harness import (
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

Capture = Callable[[Model], Captured]
Reference = Callable[..., Run]

UNITS = {
    "list": [{"match": "layers.*"}, {"match": ["norm", "output"]}],
    "list_of_layers": [{"match": ["layers.0", "layers.1"], "reshard_after_forward": False}],
    "class": [{"class": "Block"}],
    "nested": [{"match": "layers.*"}, {"match": "layers.*.feed_forward"}],
    "norms": [{"match": "**norm*"}, {"match": "layers.*", "reshard_after_forward": False}],
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("units", UNITS.values(), ids=UNITS)
def test_units(captured: Capture, reference: Reference, units: list[dict]) -> None:
    model = replace(LLAMA, units=units)
    case = Case(model, ADAMW_FUSED, steps=5)
    ours = run_plan(captured(model), case, "units")
    assert_equal_bits(ours, reference(case))


IGNORED = {
    "embedding": ["tok_embeddings.weight"],
    "norms": ["**norm*.weight"],
    "a_whole_unit": ["layers.0.**"],
}


@pytest.mark.parametrize("patterns", IGNORED.values(), ids=IGNORED)
def test_ignored_parameters(captured: Capture, reference: Reference, patterns: list[str]) -> None:
    """They stay whole and are stepped with the rank's own gradient, so the ranks' copies differ."""
    case = Case(LLAMA, ADAMW_FUSED, steps=5, training={"ignore": patterns})
    ours = run_plan(captured(LLAMA), case, "ignored")
    assert_equal_bits(ours, reference(case))


@pytest.mark.parametrize("units", ["lm_head", ["transformer.h.*", "lm_head"]], ids=["own", "list"])
def test_ignored_unit(captured: Capture, reference: Reference, units: str | list[str]) -> None:
    """A module all of whose parameters are ignored may be among the units, and is none."""
    model = replace(GPT2, units=[{"match": units}])
    case = Case(model, ADAMW_FUSED, steps=4, training={"ignore": ["lm_head.weight"]})
    ours = run_plan(captured(model), case, "ignored_unit")
    assert_equal_bits(ours, reference(case))


def test_tied_across_units(captured: Capture, reference: Reference) -> None:
    """FSDP2 refuses these units and asks to group them; here they are grouped, to the same bits
    as when the root has both."""
    model = replace(GPT2, units=[{"match": "transformer.h.*"}, {"match": "lm_head"}])
    ours = run_plan(captured(model), Case(model, ADAMW_FUSED, steps=5), "tied")
    assert_equal_bits(ours, reference(Case(GPT2, ADAMW_FUSED, steps=5)))


@pytest.mark.parametrize("units", ["used", "unused"])
def test_unused_parameters(captured: Capture, reference: Reference, units: str) -> None:
    """A unit that nothing uses is neither gathered nor reduced; unused parameters of a used one
    are gathered only."""
    model = Model("parity_models:PartlyUsed", units, "tokens,targets", 256, 8, 2)
    case = Case(model, SGD)
    ours = run_plan(captured(model), case, f"partly_{units}")
    assert_trained(ours, case.steps)
    assert_equal_bits(ours, reference(case))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("optimizer", [ADAMW_FUSED, SGD], ids=["adamw_fused", "sgd"])
def test_mutated_buffers(captured: Capture, reference: Reference, optimizer: dict) -> None:
    """BatchNorm's running statistics are each rank's own; those of rank 0 are saved."""
    case = Case(RESNET18, {**optimizer, "lr": 0.001}, steps=6)
    plan = compile_plan(captured(RESNET18), case, f"resnet_{optimizer['name']}")
    ours = train_plan(captured(RESNET18), plan, case)
    assert_trained(ours, case.steps)
    theirs = reference(case)
    assert ours.weights["net.bn1.num_batches_tracked"] == case.steps
    assert_equal_bits(ours, theirs)
