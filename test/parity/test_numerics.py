"""PyTorch's global settings that decide bits: a plan has them, and fsdp-run sets them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fsdp_mlir import CaptureError
from fsdp_mlir.support.numerics import SETTINGS, numerics
from harness import BIN, RESNET18, SGD, Captured, Case, Run, compile_plan, execute, train_plan
from test_parity import assert_equal_bits

# oneDNN's convolutions have other bits than ATen's own.
CASE = Case(replace(RESNET18, factory="parity_models:resnet18_without_mkldnn"), SGD, steps=3)


@pytest.fixture
def settings() -> Iterator[None]:
    """What a test sets ends with it."""
    yield
    torch._C._set_mkldnn_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


def test_equal_bits(
    captured: Callable[..., Captured], reference: Callable[..., Run], settings: None
) -> None:
    files = captured(CASE.model)
    plan = compile_plan(files, CASE, "numerics")
    assert json.loads(plan.read_text())["captured_for"]["numerics"] == {"mkldnn.enabled": "off"}
    ours, theirs = train_plan(files, plan, CASE), reference(CASE)
    assert_equal_bits(ours, theirs)


def test_capture_and_compiler_know_the_same_settings(tmp_path: Path) -> None:
    def refused(name: str, value: str) -> list[str]:
        path = tmp_path / "module.mlir"
        path.write_text(
            f'module attributes {{fsdp.captured_for = {{device = "cpu", torch = "2.15.0", '
            f'numerics = {{{name} = "{value}"}}}}}} {{}}\n'
        )
        done = execute([BIN / "fsdp-opt", path], check=False)
        assert done.returncode != 0
        expected = re.search(r"Captured-2: expected (.*?)(, got| for )", done.stderr)
        assert expected is not None, done.stderr
        return re.findall(r'"(.*?)"', expected[1])

    assert refused("rounding", "up") == list(SETTINGS)
    for name, (_, default) in SETTINGS.items():
        assert refused(f'"{name}"', "maybe")[0] == default


def test_settings_have_their_names(settings: None) -> None:
    assert numerics() == {}
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    assert numerics() == {
        "deterministic_algorithms": "warn",
        "float32_matmul_precision": "medium",
    }
    torch.use_deterministic_algorithms(True)
    assert numerics()["deterministic_algorithms"] == "on"


def test_a_precision_without_a_name(monkeypatch: pytest.MonkeyPatch, settings: None) -> None:
    precision = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(CaptureError, match=r"^float32_matmul_precision: expected precisions"):
            numerics()
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision
