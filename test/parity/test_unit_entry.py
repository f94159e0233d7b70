"""FSDP2's autograd function at the entry of a unit: gradients are summed in the unit first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from harness import ADAMW_FUSED, SGD, Captured, Case, Model, Run, compile_plan, run_plan
from test_parity import assert_equal_bits

Capture = Callable[..., Captured]
Reference = Callable[..., Run]


def text_model(factory: str, units: object, **kwargs: object) -> Model:
    names = "tokens,targets"
    return Model(f"unit_entry_models:{factory}", units, names, 256, 16, 2, dict(kwargs))


MODELS = {
    "memory": text_model("Decoder", "blocks.*"),
    "by_keyword": text_model("Decoder", "blocks.*", how="keyword"),
    "in_containers": text_model("Decoder", "blocks.*", how="nested"),
    "one_input_twice": text_model("Decoder", "blocks.*", how="twice"),
    "inner_units": text_model("Decoder", [{"match": "blocks.*"}, {"match": "blocks.*.k"}]),
    "several_modules": text_model("Decoder", [{"match": ["blocks.0", "blocks.2", "enc"]}]),
    "class": text_model("Decoder", [{"class": "Block"}]),
    "unread": text_model("Unread", "block"),
    "norms": text_model("Residual", [{"match": "norms.*"}, {"match": "layers.*"}]),
    "norm_and_layer": text_model(
        "Residual", [{"match": [f"norms.{i}", f"layers.{i}"]} for i in range(3)]
    ),
    "attention": text_model("Attention", "attention"),
    "t5": text_model("t5", [{"match": "net.*.block.*"}]),
    "t5_layers": text_model("t5", [{"match": "net.decoder.block.*.layer.*"}]),
    "bart": text_model("bart", [{"match": "net.model.*.layers.*"}]),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_equals_fsdp2(captured: Capture, reference: Reference, model: Model) -> None:
    case = Case(model, ADAMW_FUSED, steps=4)
    ours = run_plan(captured(model), case, "entry")
    assert len(set(ours.column("loss"))) == case.steps
    assert_equal_bits(ours, reference(case))


CALLED_TWICE = {
    "at_first_alone": text_model("Recurrent", "blocks.*"),
    "at_last_alone": text_model("Recurrent", "blocks.*", first=False, last=True),
    "whole": text_model("Recurrent", "blocks.*", first=False),
    "of_data": text_model("Recurrent", "blocks.*", given="data"),
    "of_a_leaf": text_model("Recurrent", "blocks.*", first=False, given="leaf"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("schedule", [{}, {"bucket": "parameter"}], ids=["", "buckets"])
@pytest.mark.parametrize("model", CALLED_TWICE.values(), ids=CALLED_TWICE)
def test_called_twice(
    captured: Capture, reference: Reference, model: Model, schedule: dict[str, str]
) -> None:
    """From three ranks on the order of a sum depends on what is reduced together."""
    case = Case(model, {**SGD, "lr": 1.0}, world=5, steps=5)
    planned = replace(case, training={"schedule": schedule} if schedule else {})
    assert_equal_bits(run_plan(captured(model), planned, f"twice{len(schedule)}"), reference(case))


@pytest.mark.parametrize("name", CALLED_TWICE)
def test_called_twice_and_reduced_once(captured: Capture, name: str) -> None:
    once = {"gradient_accumulation_steps": 2, "reduce_each_microbatch": False}
    case = Case(CALLED_TWICE[name], SGD, training=once)
    with pytest.raises(RuntimeError, match=r'unit "blocks.[01]" is called several times in'):
        compile_plan(captured(case.model), case, "once")


def test_called_twice_without_a_unit_at_capture(captured: Capture) -> None:
    case = Case(CALLED_TWICE["at_first_alone"], SGD)
    whole = replace(case.model, units="output")
    with pytest.raises(RuntimeError, match="was not one at capture, and what a unit does with inp"):
        compile_plan(captured(whole), case, "unknown")


def test_mixed_precision(captured: Capture, reference: Reference) -> None:
    precision = {"": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
    case = Case(MODELS["norms"], SGD, steps=4, precision=precision)
    assert_equal_bits(run_plan(captured(case.model, precision), case, "bf16"), reference(case))


@pytest.mark.parametrize(
    ("units", "fault"),
    [
        ("blocks.*.k", "was one at capture and is not one now"),
        ([{"match": ["blocks.0", "enc"]}], "was not one at capture"),
    ],
)
def test_other_units_than_those_of_the_capture(
    captured: Capture, units: object, fault: str
) -> None:
    case = Case(replace(MODELS["memory"], units=units), SGD)
    with pytest.raises(
        RuntimeError, match=f'{fault}, and what a unit does with input "mem" of "blocks.0"'
    ):
        compile_plan(captured(MODELS["memory"]), case, "other")


def test_units_that_make_no_difference(captured: Capture, reference: Reference) -> None:
    """Any units go with a capture in which no module needs an entry."""
    captured_as = text_model("Decoder", "enc", how="once")
    case = Case(replace(captured_as, units="blocks.*"), SGD, steps=3)
    ours = run_plan(captured(captured_as), case, "indifferent")
    assert_equal_bits(ours, reference(case))
