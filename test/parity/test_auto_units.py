"""`units: auto` finds the blocks that people wrap by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import yaml
from harness import (
    ADAMW_FUSED,
    BIN,
    GPT2,
    GPT2_DROPOUT,
    LLAMA,
    RESNET18,
    Captured,
    Case,
    Model,
    compile_plan,
    execute,
)

Capture = Callable[[Model], Captured]

RESNET50 = replace(RESNET18, factory="parity_models:resnet50")


@pytest.mark.parametrize(
    ("model", "chosen"),
    [
        (LLAMA, '2 modules "layers.*"'),
        (GPT2, '2 modules "transformer.h.*"'),
        (GPT2_DROPOUT, '2 modules "transformer.h.*"'),
        (RESNET18, '8 modules "net.layer*.*"'),
        (RESNET50, '16 modules "net.layer*.*"'),
    ],
    ids=["llama", "gpt2", "gpt2_dropout", "resnet18", "resnet50"],
)
def test_same_plan_as_by_hand(captured: Capture, model: Model, chosen: str) -> None:
    case = Case(model, ADAMW_FUSED)
    by_hand = compile_plan(captured(model), case, "by_hand")
    config = captured(model).directory / "auto.yaml"
    config.write_text(yaml.safe_dump({"units": "auto", "optimizer": case.optimizer}))
    plan = config.with_suffix(".plan.json")
    command = [BIN / "fsdp-opt", captured(model).archive, "--config", config]
    done = execute([*command, "--world-size", case.world, "--emit", "plan", "-o", plan])
    assert f": remark: chose as units: {chosen}\n" in done.stderr
    assert plan.read_bytes() == by_hand.read_bytes()
