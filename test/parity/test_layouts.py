"""Layouts, masks and complex numbers: FSDP2's bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsdp_mlir
import pytest
import torch
from harness import BIN, SGD, Captured, Case, Model, Run, compile_plan, execute, run_plan
from layout_models import CLASSES, PIXELS
from safetensors.torch import load_file, save_file
from test_parity import assert_equal_bits

Capture = Callable[[Model], Captured]
Reference = Callable[..., Run]


def image_model(factory: str) -> Model:
    return Model(
        f"layout_models:{factory}", "blocks.*", "images,labels", CLASSES, 0, 4, pixels=PIXELS
    )


def assert_trains(ours: Run, theirs: Run, steps: int) -> None:
    assert len(set(ours.column("loss"))) == steps
    assert_equal_bits(ours, theirs)


@pytest.mark.parametrize("factory", ["ChannelsLast", "TransposedLoss", "Masked", "Complex"])
def test_equals_fsdp2(captured: Capture, reference: Reference, factory: str) -> None:
    case = Case(image_model(factory), SGD, steps=4)
    assert_trains(run_plan(captured(case.model), case, "layouts"), reference(case), case.steps)


def test_inputs_have_the_layout_of_the_example(
    captured: Capture, reference: Reference, tmp_path: Path
) -> None:
    """FSDP2 is given images in channels_last; fsdp-run reads them row-major from a file."""
    case = Case(image_model("ChannelsLast"), SGD, steps=4)
    theirs = reference(case)
    data = captured(case.model).data
    example = {name: tensor[: case.model.batch] for name, tensor in load_file(data).items()}
    example["images"] = example["images"].contiguous(memory_format=torch.channels_last)
    model = replace(case.model, factory="layout_models:ConvNet")
    ours = Captured(model, tmp_path)
    fsdp_mlir.capture(model.build(), kwargs=example, path=ours.archive)
    ours.data.write_bytes(data.read_bytes())
    assert_trains(run_plan(ours, replace(case, model=model), "layouts"), theirs, case.steps)


def test_an_assertion_stops_the_run(captured: Capture, tmp_path: Path) -> None:
    case = Case(image_model("Masked"), SGD, steps=2)
    model = captured(case.model)
    plan = compile_plan(model, case, "asserted")
    data = load_file(model.data)
    data["images"][case.model.batch * 2, 0, 0, 0] = torch.inf  # rank 0, step 2
    save_file(data, tmp_path / "batches.safetensors")
    command = [BIN / "fsdp-run", plan, "--nproc", 2, "--steps", 2]
    done = execute([*command, "--data", tmp_path / "batches.safetensors"], check=False)
    assert done.returncode != 0
    assert "rank 0: step 2: aten::_assert_async" in done.stderr
    assert "an assertion of the model does not hold: " in done.stderr
    assert "layout_models.py:" in done.stderr
