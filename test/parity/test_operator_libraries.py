"""Operators of other libraries, in C++ and in Python: FSDP2's bits, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from harness import (
    ADAMW_FUSED,
    BIN,
    SGD,
    Captured,
    Case,
    Model,
    Run,
    compile_plan,
    execute,
    run_plan,
)
from test_frontdoor import ADAMW, LAYERS, assert_same
from test_parity import assert_equal_bits
from test_training import compare

Capture = Callable[..., Captured]
Reference = Callable[..., Run]

LIBRARY = str(BIN.parent / "lib" / "libexample_operators.so")
MODEL = Model(
    *("operator_models:Operators", "layers.*", "tokens,targets", 256, 32, 2), operators=(LIBRARY,)
)
IN_PYTHON = replace(MODEL, factory="operator_models:in_python")


@pytest.mark.parametrize("world", [1, 2])
def test_library_in_fsdp_run(captured: Capture, reference: Reference, world: int) -> None:
    case = Case(MODEL, {**ADAMW_FUSED, "lr": 0.01}, world=world, steps=6, eval_every=3)
    compare(captured, reference, case, f"operators_{world}")


def test_with_all_that_makes_calls_again(captured: Capture, reference: Reference) -> None:
    """Gates are recomputed, but not the noise, in each of two microbatches."""
    training = {"gradient_accumulation_steps": 2, "clip_grad_norm": 0.5}
    case = Case(MODEL, SGD, steps=4, training=training)
    theirs = reference(case)
    for checkpoint in (None, {"match": "layers.*"}):
        stem = f"operators_{checkpoint is None}"
        ours = run_plan(captured(MODEL), replace(case, checkpoint=checkpoint), stem)
        assert_equal_bits(ours, theirs)


@pytest.mark.parametrize("model", ["Operators", "in_python"])
@pytest.mark.parametrize("world", [1, 2])
def test_in_the_python_process(model: str, world: int, tmp_path: Path) -> None:
    case = {"calls": LAYERS, "optimizer": ADAMW, "model": f"operator_models:{model}"}
    assert_same(case, world, tmp_path)


# --- what fsdp-run refuses


def refusal(plan: Path, *options: str) -> str:
    done = execute([BIN / "fsdp-run", plan, "--steps", 1, *options], check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("fsdp-run: error: ")
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) < 600
    return done.stderr


@pytest.fixture(scope="module")
def plan(captured: Capture) -> Path:
    return compile_plan(captured(MODEL), Case(MODEL, SGD, world=1), "refused")


def test_operator_without_its_library(plan: Path) -> None:
    assert (
        'no C++ kernel of operator "example::gated" in the libraries that are loaded; expected '
        "--load with the library that registers it"
    ) in refusal(plan)


def test_operator_in_python(captured: Capture) -> None:
    plan = compile_plan(captured(IN_PYTHON), Case(IN_PYTHON, SGD, world=1), "in_python")
    text = refusal(plan, "--load", LIBRARY)
    assert 'no C++ kernel of operator "parity::arctan" in the libraries' in text
    assert "operator_models.py:" in text


def test_library_that_cannot_be_loaded(plan: Path, tmp_path: Path) -> None:
    none, text = tmp_path / "none.so", tmp_path / "text.so"
    text.write_text("text\nand more")
    assert f"--load {none}: cannot open the library: No such file" in refusal(
        plan, "--load", str(none)
    )
    assert f"--load {text}: cannot load the library: " in refusal(plan, "--load", str(text))
    lion = str(BIN.parent / "lib" / "liblion.so")
    assert "expected a library that registers operators with TORCH_LIBRARY" in refusal(
        plan, "--load", lion
    )


def change(plan: Path, other: Path, words: dict[str, str]) -> None:
    """Writes a plan with other words, and without the hash of its own."""
    text = plan.read_text()
    for old, new in words.items():
        text = text.replace(old, new)
    other.write_text(re.sub(r',\s*"digest": "[^"]*"', "", text))


def test_schema_of_another_version_of_the_library(plan: Path, tmp_path: Path) -> None:
    other = tmp_path / "plan.json"
    change(plan, other, {"float slope=1.": "float slope=2."})
    text = refusal(other, "--load", LIBRARY)
    assert 'expected the schema "example::gated(Tensor x, Tensor gate, *, float slope=2.' in text


def test_operator_of_pytorch_that_is_no_computation(plan: Path, tmp_path: Path) -> None:
    """With a schema beside it, as those of libraries have."""
    other = tmp_path / "plan.json"
    name = "_c10d_functional::wait_tensor"
    schema = "example::jitter(Tensor x, float scale, *, Generator? generator=None) -> Tensor"
    change(
        plan, other, {schema: f"{name}(Tensor tensor) -> Tensor", '"example::jitter"': f'"{name}"'}
    )
    assert (
        f'a plan may not call "{name}": it communicates with ranks that the plan does not have; '
        "only the Python process that captured it can run it"
    ) in refusal(other, "--load", LIBRARY)
