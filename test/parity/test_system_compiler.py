"""The runtime as the system's compiler builds it, without MLIR, trains to the same bits."""

from __future__ import annotations

from collections.abc import Callable

import harness
import pytest
from harness import ADAMW_FUSED, GPT2, LLAMA, SGD, Captured, Case, Model, compile_plan, train_plan
from test_parity import assert_equal_bits

# Under ThreadSanitizer (make build-tsan), and as it is released (make build-runtime).
pytestmark = pytest.mark.exhaustive
BUILDS = ["build-tsan", "build-runtime"]

BF16 = {"": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
CASES = {
    "llama": (LLAMA, ADAMW_FUSED, {}, {"clip_grad_norm": 1.0}),
    "llama_bf16": (LLAMA, ADAMW_FUSED, BF16, {"gradient_accumulation_steps": 2}),
    "gpt2": (GPT2, SGD, {}, {}),
}


@pytest.mark.parametrize("streams", ["serial", "threads"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("build", BUILDS)
def test_equal_bits(
    captured: Callable[..., Captured],
    monkeypatch: pytest.MonkeyPatch,
    build: str,
    case: str,
    streams: str,
) -> None:
    built = harness.ROOT / build / "bin"
    if not (built / "fsdp-run").exists():
        pytest.skip(f"needs {build}: make {build}")
    model: Model
    model, optimizer, precision, training = CASES[case]
    run = Case(model, optimizer, steps=4, precision=precision, training=training)
    files = captured(model, precision)
    plan = compile_plan(files, run, f"system_compiler_{case}")
    expected = train_plan(files, plan, run, streams=streams)
    monkeypatch.setattr(harness, "BIN", built)
    suppressed = harness.ROOT / "unittests/tsan.supp"
    monkeypatch.setenv("TSAN_OPTIONS", f"suppressions={suppressed}")
    assert_equal_bits(train_plan(files, plan, run, streams=streams), expected)
