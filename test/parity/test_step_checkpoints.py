"""`step.save` and `step.load`: a loop in Python that is killed goes on with the same bits."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import BIN
from ranks import run_ranks
from test_frontdoor import ADAMW, SGD

CASES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": ADAMW, "example": True},
    "groups": {"optimizer": {**ADAMW, "amsgrad": True}, "groups": {"weight_decay": 0.1}},
    "accumulation": {
        "optimizer": {**SGD, "momentum": 0.9},
        "options": {"gradient_accumulation_steps": 2},
    },
    "scaler": {
        "optimizer": ADAMW,
        "options": {"grad_scaler": {"init_scale": 64.0, "growth_interval": 2}},
    },
    "manual": {"optimizer": ADAMW, "manual": True},
    "config": {"config": {"name": "adamw", "lr": 1e-2}, "example": True},
    "outside": {"optimizer": {"name": "NAdam", "lr": 1e-2}},
    "eager": {"optimizer": ADAMW, "asks": True},
    "replicas": {"optimizer": ADAMW, "replicas": 2, "world": 4},
    "three": {"optimizer": ADAMW, "world": 3},
}
STEPS = 6


class Loops:
    """Runs of one case, whose checkpoints are in one folder."""

    def __init__(self, case: dict[str, Any], tmp_path: Path) -> None:
        self.case = case
        self.tmp_path = tmp_path
        self.folder = tmp_path / "saved"

    def run(self, name: str, *, folder: Path | None = None, **more: Any) -> Any:
        case = {**self.case, "steps": STEPS, **more}
        path, out = self.tmp_path / f"{name}.json", self.tmp_path / name
        path.write_text(json.dumps(case))
        world = case.get("world", 2)
        run_ranks("step_checkpoint_ranks", [path, folder or self.folder, out], world)
        if errors := sorted(self.tmp_path.glob(f"{name}.error.*")):
            raise ValueError([path.read_text() for path in errors])
        return torch.load(out, weights_only=False)

    def errors(self, name: str, **more: Any) -> list[str]:
        with pytest.raises(ValueError) as raised:
            self.run(name, **more)
        assert len(raised.value.args[0]) == 2
        return list(raised.value.args[0])

    def killed(self, name: str, **more: Any) -> None:
        with pytest.raises(RuntimeError, match="-9"):
            self.run(name, **more)


def assert_same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got["model"], want["model"], rtol=0, atol=0)
    torch.testing.assert_close(
        got["optimizer"]["state"], want["optimizer"]["state"], rtol=0, atol=0
    )
    assert got["optimizer"]["param_groups"] == want["optimizer"]["param_groups"]


@pytest.mark.parametrize("name", CASES)
def test_a_killed_loop_goes_on(name: str, tmp_path: Path) -> None:
    loops = Loops(CASES[name], tmp_path)
    want = loops.run("whole", folder=tmp_path / "none")
    assert want["found"] is None
    loops.killed("first", every=2, kill=3)
    loops.killed("second", every=2, kill=5, seed=1)
    got = loops.run("third", every=2, background=True, seed=2)
    world = CASES[name].get("world", 2)
    assert got["found"] == (str(tmp_path / "saved" / "step-4"), 4, 8 * world, world)
    assert not [text for text in got["warnings"] if "bits" in text], got["warnings"]
    for had, has in zip(want["losses"], got["losses"], strict=True):
        assert {number: had[number] for number in (4, 5)} == has
    assert_same(got, want)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "step-2",
        "step-4",
        "step-6",
    ]


def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    loops = Loops({"optimizer": ADAMW}, tmp_path)
    want = loops.run("two", every=6)
    at = loops.folder
    for name, world in (("one", 1), ("three", 3), ("again", 2)):
        other = tmp_path / f"at_{name}"
        got = loops.run(name, world=world, folder=other, load=str(at), saves_last=True)
        assert got["found"][1] == STEPS
        assert any("the world size was" in text for text in got["warnings"])
        assert_same(got, want)
        at = other


def test_before_the_first_step(tmp_path: Path) -> None:
    """The first step of SGD is another one than those that find its momentum."""
    sgd = {**SGD, "momentum": 0.9, "dampening": 0.5}
    scaled = {"grad_scaler": {"init_scale": 64.0}}
    loops = Loops({"optimizer": sgd, "example": True, "options": scaled}, tmp_path)
    want = loops.run("whole", folder=tmp_path / "none")
    loops.run("first", steps=0, saves_last=True)
    got = loops.run("second", seed=1)
    assert got["found"][:2] == (str(loops.folder / "step-0"), 0)
    assert got["losses"] == want["losses"]
    assert_same(got, want)
    for error in loops.errors("same", steps=0, saves_last=True):
        assert "step-0: already exists; expected another step" in error


def test_fsdp_run_goes_on_and_back(tmp_path: Path) -> None:
    loops = Loops({"optimizer": ADAMW, "example": True}, tmp_path)
    want = loops.run("loop", every=3, path=str(tmp_path / "plan"), seed=5)
    command = [BIN / "fsdp-run", tmp_path / "plan" / "plan.json", "--seed", "5", "--steps", "9"]
    weights = tmp_path / "weights.safetensors"
    command += ["--resume", loops.folder / "step-6", "--checkpoint", tmp_path / "theirs"]
    done = subprocess.run(
        [*map(str, command), "--save-weights", str(weights)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "after step 6" in done.stderr
    # Only the data are others.
    assert "differ in bits" in done.stderr and "the plan was" not in done.stderr, done.stderr
    assert want["found"] is None
    got = loops.run("back", folder=tmp_path / "theirs", steps=9)
    assert got["found"][1:] == (9, 3 * 2 * 2 + 24, 2)
    from safetensors.torch import load_file

    for name, tensor in load_file(weights).items():
        torch.testing.assert_close(got["model"][name], tensor, rtol=0, atol=0)


def test_what_is_damaged_or_another_s(tmp_path: Path) -> None:
    loops = Loops({"optimizer": ADAMW}, tmp_path)
    loops.run("first", every=2, keep=2)
    assert sorted(path.name for path in loops.folder.iterdir()) == ["step-4", "step-6"]
    # Another model, and another optimizer, change nothing.
    for error in loops.errors("wider", width=24, steps=8):
        assert "expected float32[64, 24], got float32[64, 20]" in error
    for error in loops.errors("stubborn", width=24, steps=8, stubborn=True, saves_last=True):
        assert "a checkpoint of another run" in error
    for error in loops.errors("scaled", options={"grad_scaler": True}, example=True):
        assert "expected a loss scaler, as the step has it, got no one" in error
    for error in loops.errors("sgd", optimizer={**SGD, "momentum": 0.9}, example=True):
        assert "expected a checkpoint of SGD, got one of AdamW" in error
    for error in loops.errors("late sgd", optimizer={**SGD, "momentum": 0.9}):
        assert "expected a checkpoint of SGD, got one of AdamW" in error
    # Into a folder of others nothing is saved.
    for error in loops.errors("new", load=str(tmp_path / "none"), every=2):
        assert "a checkpoint of another run" in error
    # What is no plain data, on one rank, ends the call on both.
    errors = loops.errors("odd", folder=tmp_path / "odd", every=2, odd=1)
    assert "extra['odd']: expected None, numbers" in errors[1] and "rank 1: " in errors[0]
    assert not (tmp_path / "odd").exists()
    file = sorted((loops.folder / "step-6").glob("*.safetensors"))[1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    got = loops.run("older", every=2)
    assert got["found"][1] == 4
    assert any("this checkpoint is skipped" in text for text in got["warnings"])
    # What was damaged has been replaced.
    got = loops.run("newer", steps=8)
    assert got["found"][1] == 6
    for path in loops.folder.glob("step-*/manifest.json"):
        path.write_text("{")
    for error in loops.errors("none"):
        assert "none of its 2 checkpoints is valid" in error
