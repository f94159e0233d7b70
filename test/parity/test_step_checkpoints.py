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
    "own": {"optimizer": ADAMW, "own": True},
    "config": {"config": {"name": "adamw", "lr": 1e-2}, "example": True},
    "outside": {"optimizer": {"name": "NAdam", "lr": 1e-2}},
    "rows": {"custom": "Rows"},
    "parts": {"custom": "Parts", "world": 3},
    "wholes": {"custom": "Wholes"},
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


@pytest.mark.one_in(5)
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


@pytest.mark.parametrize("name", ["rows", "wholes"])
def test_state_in_other_forms_at_other_numbers_of_ranks(name: str, tmp_path: Path) -> None:
    loops = Loops(CASES[name], tmp_path)
    want = loops.run("two", every=6)
    loops.run("three", world=3, folder=tmp_path / "more", load=str(loops.folder), saves_last=True)
    assert_same(loops.run("again", folder=tmp_path / "more"), want)


def test_state_of_each_rank_s_part_at_another_number(tmp_path: Path) -> None:
    loops = Loops(CASES["parts"], tmp_path)
    loops.run("three", every=6)
    for error in loops.errors("two", world=2):
        assert "step-6: 'optimizer.state." in error
        assert "momentum': each rank has its own: expected 3 ranks" in error


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


EXPERTS = {"own": [[0], [1]], "second": [[], [1]], "first": [[0], []], "both": [[0, 1], [1]]}


@pytest.mark.parametrize("name", EXPERTS)
def test_ranks_with_state_of_their_own(name: str, tmp_path: Path) -> None:
    """Each rank gets the entries that it had, not those of rank 0."""
    # Which cannot be fused, with tensors and DTensors in one group.
    optimizer = {**ADAMW, "fused": False}
    loops = Loops({"optimizer": optimizer, "experts": EXPERTS[name]}, tmp_path)
    at = str(loops.folder)
    first = loops.run("first", calls=[["train", 3], ["save", at], ["trained"], ["train", 6]])
    second = loops.run("second", calls=[["load", at], ["trained"], ["train", 6]], seed=1)
    for used, (_, path, had, want), (found, has, got) in zip(
        EXPERTS[name], first, second, strict=True
    ):
        assert found == path == f"{at}/step-3"
        experts = {part.split(".")[1] for part in had if "experts" in part}
        assert experts == {str(expert) for expert in used}
        assert (has, got) == (had, want)


@pytest.mark.parametrize("module", ["rank.0", "optimizer.state"])
def test_names_that_checkpoints_have(module: str, tmp_path: Path) -> None:
    loops = Loops({"optimizer": ADAMW, "module": module}, tmp_path)
    for (error,) in loops.run("first", calls=[["save", str(loops.folder)]]):
        assert f"'{module}.weight': a checkpoint has something else under names" in error
    assert not loops.folder.exists()


def test_other_names_of_ranks(tmp_path: Path) -> None:
    """Not all names that begin with "rank." are a rank's."""
    loops = Loops({"optimizer": ADAMW, "module": "rank.python"}, tmp_path)
    at = str(loops.folder)
    want = loops.run("first", calls=[["train", 2], ["save", at], ["train", 4]])
    got = loops.run("second", calls=[["load", at], ["train", 4]], seed=1)
    assert [(said[1], said[2]) for said in want] == [tuple(said) for said in got]


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    """Such a path is no reason to begin at the beginning."""
    for path in ("empty", "saved/step-3", "saved/other", "dcp", "model"):
        (tmp_path / path).mkdir(parents=True)
    for file in ("saved/step-3/shard.safetensors", "dcp/.metadata", "model/a.safetensors"):
        (tmp_path / file).write_text("")
    wrong = {
        "saved/step-3": "expected a checkpoint, got a folder without manifest.json",
        "saved/step-03": "expected a checkpoint, got no such folder",
        "none/step-400": "expected a checkpoint, got no such folder",
        "dcp": "got a checkpoint of torch.distributed.checkpoint; `fsdp-checkpoint convert`",
    }
    none = ["none", "empty", "saved/other", "model"]
    calls = [["load", str(tmp_path / path)] for path in (*wrong, *none)]
    calls += [["load", ""], ["save", ""]]
    for said in Loops({"optimizer": ADAMW}, tmp_path).run("first", calls=calls):
        for error, (path, why) in zip(said, wrong.items(), strict=False):
            assert f"{tmp_path / path}: " in error and why in error
        assert said[len(wrong) :] == [
            *(None for _ in none),
            "load: expected a folder, got ''",
            "save: expected a folder, got ''",
        ]


def test_folders_of_one_run(tmp_path: Path) -> None:
    """A run that continues may go on saving to each folder that it has saved to."""
    loops = Loops({"optimizer": ADAMW}, tmp_path)
    best, last, other = (str(tmp_path / name) for name in ("best", "last", "other"))
    calls = [["train", 1], ["save", best], ["train", 2], ["save", last]]
    loops.run("first", calls=calls)
    calls = [["load", last], ["train", 3], ["save", last], ["save", best]]
    # And after it has gone back.
    calls += [["load", f"{best}/step-1"], ["train", 2], ["save", best]]
    calls += [["load", f"{best}/step-3"], ["train", 4], ["save", last], ["save", best]]
    for said in loops.run("second", calls=calls):
        assert [said[at] for at in (0, 2, 3, 4)] == [
            f"{last}/step-2",
            f"{last}/step-3",
            f"{best}/step-3",
            f"{best}/step-1",
        ]
        # Of its own folder it continues from the newest.
        assert "step-3: a checkpoint of another run" in said[6]
        assert [said[at] for at in (7, 9, 10)] == [
            f"{best}/step-3",
            f"{last}/step-4",
            f"{best}/step-4",
        ]
    calls = [["train", 5], ["save", other], ["save", best], ["load", other], ["save", last]]
    for said in loops.run("third", calls=calls):
        assert said[1] == f"{other}/step-5"
        for error in (said[2], said[4]):
            assert "step-1: a checkpoint" in error or "step-2: a checkpoint" in error


def test_what_is_not_known_does_not_differ(tmp_path: Path) -> None:
    """Of a checkpoint of an older version, and of a step without a plan."""
    loops = Loops({"optimizer": ADAMW, "asks": True}, tmp_path)
    loops.run("first", every=6)
    got = Loops({"optimizer": ADAMW, "example": True}, tmp_path).run("second", steps=8)
    assert got["found"][1] == 6
    assert not [text for text in got["warnings"] if "the plan was" in text], got["warnings"]
