"""Graphs in which units are reused, unused, or run without a gradient: FSDP2's bits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fsdp_mlir.support.errors import CaptureError
from harness import (
    ADAMW_FUSED,
    LLAMA,
    SGD,
    Captured,
    Case,
    Model,
    Run,
    compile_plan,
    run_plan,
    run_reference,
)
from test_parity import assert_equal_bits

Capture = Callable[[Model], Captured]
Reference = Callable[..., Run]


def text_model(factory: str, units: object, **kwargs: object) -> Model:
    return Model(f"corner_models:{factory}", units, "tokens,targets", 256, 16, 2, dict(kwargs))


MODELS = {
    "ignored_output": text_model("IgnoredOutput", [{"match": ["first"]}, {"match": ["second"]}]),
    "reused": text_model("Reused", "blocks.*"),
    "reused_frozen": text_model("Reused", "blocks.*", frozen=[1]),
    "reused_all_frozen": text_model("Reused", "blocks.*", frozen=[0, 1, 2]),
    "shared": text_model("Shared", "blocks.*"),
    "recurrent": text_model("Recurrent", "blocks.*"),
    "two_forwards": text_model("Preference", "blocks.*"),
    "float64": replace(LLAMA, factory="corner_models:llama_float64"),
    "grouped_with_unused": Model(
        "parity_models:PartlyUsed", [{"match": ["used", "unused"]}], "tokens,targets", 256, 16, 2
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("reshard", ["default", "false"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_equals_fsdp2(captured: Capture, reference: Reference, model: Model, reshard: str) -> None:
    case = Case(model, ADAMW_FUSED, steps=6, reshard=reshard)
    ours = run_plan(captured(model), case, f"corner_{reshard}")
    assert len(set(ours.column("loss"))) == case.steps  # every step changes the parameters
    assert_equal_bits(ours, reference(case))


@pytest.mark.parametrize(
    ("world", "bucket"), [(1, "unit"), (2, "unit"), (1, "parameter"), (2, "parameter")]
)
def test_gradient_that_is_a_part(
    captured: Capture, reference: Reference, world: int, bucket: str
) -> None:
    """One rank keeps the memory of a gradient that it has nothing to reduce with, if it is all; a
    reduction keeps the memory of the part that it reads."""
    model = replace(text_model("ClassToken", "blocks.*"), batch=1)
    case = Case(model, ADAMW_FUSED, world=world, steps=6)
    ours = replace(case, training={"schedule": {"bucket": bucket}})
    run = run_plan(captured(model), ours, f"part_{world}_{bucket}")
    assert_equal_bits(run, reference(case))


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_without_elements(captured: Capture, world: int) -> None:
    """FSDP2 fails on them. They have no memory and change nothing, offloaded or not."""
    model = text_model("EmptyWeight", "blocks.*")
    case = Case(model, ADAMW_FUSED, world=world, steps=4)
    offloaded = replace(case, training={"cpu_offload": True})
    runs = [
        run_plan(captured(model), each, f"empty_{world}_{number}")
        for number, each in enumerate((case, offloaded))
    ]
    assert_equal_bits(*runs)
    assert runs[0].weights["empty"].shape == (0, 16)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"name": "adam", "lr": 0.01, "betas": [0.9, 0.95], "amsgrad": True},
        {"name": "adamw", "lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.3},
        {"name": "sgd", "lr": 0.1, "momentum": 0.9, "foreach": True},
        {"name": "adamw", "lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.3, "foreach": True},
    ],
    ids=lambda optimizer: optimizer["name"] + ("_foreach" if "foreach" in optimizer else ""),
)
def test_parameters_in_bfloat16(
    captured: Capture, reference: Reference, optimizer: dict[str, Any]
) -> None:
    """Numbers are multiplied as they are, not as the dtype of the tensor has them."""
    case = Case(text_model("ScaledInPlace", "blocks.*"), optimizer, steps=12)
    ours = run_plan(captured(case.model), case, f"bfloat16_{len(str(optimizer))}")
    assert_equal_bits(ours, reference(case))


def test_weights_read_outside_of_their_unit(captured: Capture) -> None:
    """Autograd casts such a gradient to the dtype of the reduction, since it comes before the
    unit's backward, and leaves the others as they are."""
    precision = {"": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
    model = text_model("WeightRead", "blocks.*")
    case = Case(model, ADAMW_FUSED, steps=6, reshard="false", precision=precision)
    archive = captured(model, precision, case.reshard)
    wanted = run_reference(archive, case, "weight_read_by_fsdp2", mode="fsdp2")
    assert_equal_bits(run_plan(archive, case, "weight_read"), wanted)
    with pytest.raises(CaptureError, match="is used outside of the forward of its unit"):
        captured(model, precision)


def test_shared_modules_have_one_set_of_parameters(captured: Capture) -> None:
    model = MODELS["shared"]
    case = Case(model, SGD)
    plan = json.loads(compile_plan(captured(model), case, "shared").read_text())
    aliases = {param["name"]: param["aliases"] for param in plan["params"]}
    assert aliases.pop("embed.weight") == ["output.weight"]
    first = [f"norm.{k}" for k in ("weight", "bias")]
    first += [f"{layer}.{k}" for layer in ("up", "down") for k in ("weight", "bias")]
    assert aliases == {
        **{f"blocks.0.{name}": [f"blocks.2.{name}"] for name in first},
        **{f"blocks.1.{name}": [] for name in first},
    }
    assert [unit["name"] for unit in plan["units"]] == ["(root)", "blocks.0+blocks.2", "blocks.1"]


@pytest.mark.parametrize("model", ["reused", "two_forwards"])
def test_checkpointed(captured: Capture, reference: Reference, model: str) -> None:
    case = Case(MODELS[model], SGD, steps=6, checkpoint={"match": "blocks.*"})
    ours = run_plan(captured(case.model), case, "corner_checkpoint")
    assert_equal_bits(ours, reference(case))


def test_four_ranks(captured: Capture, reference: Reference) -> None:
    case = Case(MODELS["reused_frozen"], SGD, world=4, steps=6)
    assert_equal_bits(run_plan(captured(case.model), case, "corner_four"), reference(case))


@pytest.mark.parametrize(
    ("schedule", "ahead"),
    [
        ({"prefetch": "none", "reduce_scatters_in_flight": 1}, 0),
        ("fsdp2", 1),
    ],
)
def test_what_is_whole_at_once(captured: Capture, schedule: Any, ahead: int) -> None:
    """In forward the root's parameters and one layer's, with FSDP2's prefetching the next one's
    too; in backward also the gradients of one layer and of those being reduced; the optimizer has
    shards alone."""
    case = Case(LLAMA, ADAMW_FUSED, reshard="true", training={"schedule": schedule})
    plan = json.loads(compile_plan(captured(LLAMA), case, "whole").read_text())
    root = [unit["name"] for unit in plan["units"]].index("(root)")
    unit_of = {}  # of each whole gradient's value
    for instruction in plan["instructions"]:
        for value in instruction.get("ins", []) if "reduce_scatter" in instruction else []:
            unit_of[value] = instruction["reduce_scatter"]
    params: set[int] = set()
    grads: set[int] = set()
    most: dict[str, tuple[int, int]] = {}
    for instruction in plan["instructions"]:
        phase = instruction["phase"]
        if "all_gather" in instruction:
            params.add(instruction["all_gather"])
        params.discard(instruction.get("reshard", -1))
        if "reduce_scatter" not in instruction:
            grads |= {out for out in instruction.get("outs", []) if out in unit_of}
        layers = {unit_of[value] for value in grads} - {root}
        before = most.get(phase, (0, 0))
        most[phase] = (max(before[0], len(params - {root})), max(before[1], len(layers)))
        if "optimizer_step" in instruction:
            assert not params and not grads
        grads -= set(instruction.get("frees", []))
    gathered = 1 + ahead
    assert most == {"forward": (gathered, 0), "backward": (gathered, 2), "optimizer": (0, 0)}


@pytest.mark.parametrize(("reshard", "forward", "backward"), [("true", 3, 2), ("false", 3, 0)])
def test_communication_count(captured: Capture, reshard: str, forward: int, backward: int) -> None:
    """An all-gather a unit in forward, one a resharded unit in backward, a reduce-scatter a unit.

    The Llama has two layers and the root, which stays gathered.
    """
    case = Case(LLAMA, ADAMW_FUSED, reshard=reshard)
    plan = json.loads(compile_plan(captured(LLAMA), case, f"count_{reshard}").read_text())
    kinds = Counter(
        (next(iter(instruction)), instruction["phase"]) for instruction in plan["instructions"]
    )
    assert kinds["all_gather", "forward"] == forward
    assert kinds["all_gather", "backward"] == backward
    assert kinds["reduce_scatter", "backward"] == 3
