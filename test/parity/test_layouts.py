"""Layouts, masks and assertions: FSDP2's bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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


@pytest.mark.parametrize("factory", ["ChannelsLast", "TransposedLoss", "Masked"])
def test_equals_fsdp2(captured: Capture, reference: Reference, factory: str) -> None:
    case = Case(image_model(factory), SGD, steps=4)
    assert_trains(run_plan(captured(case.model), case, "layouts"), reference(case), case.steps)


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
