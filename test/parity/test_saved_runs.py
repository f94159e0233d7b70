"""A run that is killed and goes on from its checkpoints has the bits of one that was not."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import (
    ADAMW_FUSED,
    BIN,
    GPT2,
    GPT2_DROPOUT,
    LLAMA,
    SGD,
    Captured,
    Case,
    Model,
    compile_plan,
    execute,
    read_run,
    run_command,
    run_nodes,
)
from safetensors.torch import load_file
from test_grad_scaler import FP16
from test_mixed_precision import NORMS
from test_training import OWN
from torch.distributed.checkpoint import HuggingFaceStorageReader

Capture = Callable[..., Captured]

STEPS = 6
LION = {
    "name": "plugin",
    "library": str(BIN.parent / "lib" / "liblion.so"),
    "lr": 1e-3,
    "options": {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
}
COSINE = {"warmup_steps": 2, "decay": "cosine", "total_steps": 5, "min_lr_ratio": 0.1}
SCALER = {"init_scale": 2.0**20, "growth_interval": 2}

CASES: dict[str, Case] = {
    "dropout": Case(
        GPT2_DROPOUT,
        ADAMW_FUSED,
        training={"gradient_accumulation_steps": 2, "lr_schedule": COSINE},
    ),
    "batch_norm": Case(NORMS, SGD),
    "loss_scaling": Case(LLAMA, SGD, precision=FP16, training={"grad_scaler": SCALER}),
    "plugin": Case(OWN, LION, world=3),
    "ignored": Case(LLAMA, ADAMW_FUSED, training={"ignore": ["**norm*.weight"]}),
    "replicas": Case(LLAMA, ADAMW_FUSED, world=4, training={"mesh": {"replicate": 2}}),
    "offload": Case(LLAMA, ADAMW_FUSED, training={"cpu_offload": True, "clip_grad_norm": 0.5}),
    "alone": Case(GPT2, {**ADAMW_FUSED, "amsgrad": True}, world=1),
}


class Runs:
    """Runs of one plan, which write beside each other in a folder."""

    def __init__(self, captured: Captured, case: Case, folder: Path) -> None:
        self.plan = compile_plan(captured, case, f"saved_{folder.name}")
        self.command = run_command(captured, self.plan, case)
        del self.command[2:4]  # the steps
        self.folder = folder
        self.metrics = folder / "metrics.jsonl"
        self.weights = folder / "weights.safetensors"

    def train(self, *words: Any, steps: int = STEPS, check: bool = True) -> Any:
        options = ["--metrics", self.metrics, "--save-weights", self.weights]
        return execute([*self.command, "--steps", steps, *options, *words], check=check)

    def whole(self) -> tuple[list[Any], bytes]:
        """The losses and weights of a run without checkpoints."""
        self.train()
        return self.result()

    def result(self) -> tuple[list[Any], bytes]:
        run = read_run(self.metrics, None)
        names = ("step", "rank_losses", "lr", "loss_scale", "skipped", "grad_norm")
        lines = [[line.get(name) for name in names] for line in run.metrics]
        return lines, self.weights.read_bytes()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_goes_on(captured: Capture, name: str, tmp_path: Path) -> None:
    case = CASES[name]
    runs = Runs(captured(case.model, case.precision), case, tmp_path)
    want = runs.whole()
    saves = ["--checkpoint", tmp_path / "saved", "--checkpoint-every", 2]
    # At the begin of step 4, and of 6: from checkpoints of steps 2 and 4.
    for at, words in ((4, []), (6, ["--checkpoint-async"])):
        options = [*saves, "--resume", "auto", *words]
        died = runs.train(*options, "--inject-fault", f"0:{at}:0:kill", check=False)
        assert died.returncode == 1, died.stderr
        assert "was killed by signal 9" in died.stderr
    done = runs.train(*saves, "--resume", "auto")
    assert "resumed: " in done.stderr
    assert "warning" not in done.stderr
    # Its metrics have the lines of all runs.
    assert runs.result() == want
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "step-2",
        "step-4",
        "step-6",
    ]


def flip(file: Path) -> None:
    """One bit in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_what_is_damaged_does_not_count(captured: Capture, tmp_path: Path) -> None:
    runs = Runs(captured(GPT2), Case(GPT2, ADAMW_FUSED), tmp_path)
    saved = tmp_path / "saved"
    words = ["--checkpoint", saved, "--resume", "auto", "--keep", 2]
    for steps in (2, 4, 5):
        runs.train(*words, steps=steps)
    flip(sorted((saved / "step-5").glob("*.safetensors"))[0])
    done = runs.train(*words)
    assert "this checkpoint is skipped" in done.stderr
    whole = sorted(path.name for path in saved.iterdir())
    assert whole[0] == "step-4" and whole[-1] == "step-6", whole


def test_what_a_save_takes_is_in_the_metrics(captured: Capture, tmp_path: Path) -> None:
    runs = Runs(captured(GPT2), Case(GPT2, ADAMW_FUSED), tmp_path)
    words = ["--checkpoint", tmp_path / "saved", "--checkpoint-every", 20]
    runs.train(*words, steps=40)
    lines = read_run(runs.metrics, None).metrics
    (saved,) = [line for line in lines if "saved_step" in line]
    assert saved["saved_step"] == 20 and saved["saved"] and saved["step"] == 21
    files = sum(path.stat().st_size for path in (tmp_path / "saved" / "step-20").glob("*.safe*"))
    assert saved["save_bytes"] == files
    assert 0 < saved["save_ms"] <= saved["save_stall_ms"]
    assert saved["save_gb_per_s"] == pytest.approx(files / saved["save_ms"] * 1e-6, rel=1e-6)
    (slow,) = [line for line in lines if "save_slowdown" in line]
    assert slow["step"] == 30
    times = [line["step_ms"] for line in lines]
    want = sum(times[20:30]) / sum(times[10:20])
    assert slow["save_slowdown"] == pytest.approx(want, rel=0.05)  # step_ms has three digits


def test_the_checkpoints_of_another_run_stay(captured: Capture, tmp_path: Path) -> None:
    runs = Runs(captured(GPT2), Case(GPT2, ADAMW_FUSED), tmp_path)
    for folder, steps in (("other", 3), ("ours", 5)):
        runs.train("--checkpoint", tmp_path / folder, "--checkpoint-every", 1, steps=steps)
    words = ["--checkpoint", tmp_path / "other", "--resume", tmp_path / "ours" / "step-5"]
    done = runs.train(*words, "--keep", 2, check=False)
    assert done.returncode == 2 and "a checkpoint of another run" in done.stderr, done.stderr
    assert len(list((tmp_path / "other").iterdir())) == 3
    # A dry run finds the same, and another seed.
    dry = runs.train(*words, "--dry-run", check=False)
    assert dry.returncode == 2 and "a checkpoint of another run" in dry.stderr, dry.stderr
    seeded = Runs(captured(GPT2), Case(GPT2, ADAMW_FUSED, seed=1), tmp_path)
    words = ["--checkpoint", tmp_path / "ours", "--resume", "auto", "--dry-run"]
    dry = seeded.train(*words, check=False)
    assert dry.returncode == 2 and "expected --seed 0" in dry.stderr, dry.stderr


def test_a_rank_that_fails_while_another_commits(captured: Capture, tmp_path: Path) -> None:
    """What rank 0 may commit has the files of all."""
    runs = Runs(captured(GPT2), Case(GPT2, ADAMW_FUSED), tmp_path)
    saved = ["--checkpoint", tmp_path / "saved", "--resume", "auto"]
    # SIGURG does nothing, but makes the commit wait.
    beside = ["--checkpoint-every", 10, "--checkpoint-async", "--checkpoint-fault"]
    beside += ["commit:0:10:1:23", "--inject-fault", "1:13:0:throw"]
    failed = runs.train(*saved, *beside, steps=20, check=False)
    assert failed.returncode == 1 and "injected fault" in failed.stderr, failed.stderr
    again = runs.train(*saved, steps=12)
    assert "skipped" not in again.stderr


def test_metrics_behind_a_link(captured: Capture, tmp_path: Path) -> None:
    runs = Runs(captured(GPT2), Case(GPT2, ADAMW_FUSED), tmp_path)
    want = runs.whole()
    words = ["--checkpoint", tmp_path / "saved", "--resume", "auto"]
    runs.train(*words, steps=3)
    runs.metrics.rename(tmp_path / "lines.jsonl")
    runs.metrics.symlink_to(tmp_path / "lines.jsonl")
    runs.train(*words)
    assert runs.result() == want


def hashes(checkpoint: Path) -> dict[tuple[str, str], str]:
    """Of the chunks of a checkpoint."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    return {
        (name, str(offsets)): value
        for file in manifest["files"]
        for name, offsets, _, _, _, value in file["chunks"]
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["dropout", "replicas", "offload", "ignored", "loss_scaling"])
def test_copies_beside_the_next_step(captured: Capture, name: str, tmp_path: Path) -> None:
    """A plan that stages checkpoints saves what one that stops for that does."""
    case = CASES[name]
    staged = replace(case, training={**case.training, "schedule": {"stage_checkpoints": True}})
    model = captured(case.model, case.precision)
    want = Runs(model, case, tmp_path).whole()
    runs = Runs(model, staged, tmp_path)
    assert '"stage_state"' in runs.plan.read_text()
    ways: dict[str, list[Any]] = {
        "stops": [],
        "beside": ["--checkpoint-async"],
        "threads": ["--checkpoint-async", "--streams", "threads"],
    }
    for way, words in ways.items():
        runs.train("--checkpoint", tmp_path / way, "--checkpoint-every", 1, *words)
        assert runs.result() == want, way
    for step in range(1, STEPS + 1):
        saved = [hashes(tmp_path / way / f"step-{step}") for way in ways]
        assert saved[0] == saved[1] == saved[2], step


@pytest.mark.parametrize("ways", [("shm", 0), ("gloo", 0), ("shm", 1), ("gloo", 2)])
@pytest.mark.exhaustive  # for its time
def test_each_way_to_start(captured: Capture, ways: tuple[str, int], tmp_path: Path) -> None:
    comm, nodes = ways
    runs = Runs(captured(GPT2_DROPOUT), CASES["dropout"], tmp_path)
    want = runs.whole()
    for steps in (2, STEPS):
        words = ["--comm", comm, "--checkpoint", tmp_path / "saved"]
        words += ["--resume", "auto", "--checkpoint-every", 2]
        if nodes:
            options = ["--metrics", runs.metrics, "--save-weights", runs.weights]
            run_nodes([*runs.command, "--steps", steps, *options, *words], nodes, 2)
        else:
            runs.train(*words, steps=steps)
    assert runs.result() == want


@pytest.mark.exhaustive  # test_limits.py has a restart under torchrun
def test_torchrun_restarts(captured: Capture, tmp_path: Path) -> None:
    """A restart goes on by itself, here to the next death: rank 1's in the save of step 4."""
    runs = Runs(captured(GPT2_DROPOUT), CASES["dropout"], tmp_path)
    want = runs.whole()
    runs.metrics.unlink()
    words = ["--metrics", runs.metrics, "--save-weights", runs.weights, "--steps", STEPS]
    words += ["--checkpoint", tmp_path / "saved", "--checkpoint-every", 2, "--resume", "auto"]
    words += ["--checkpoint-fault", "stage:1:4:1:9"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone"]
    launcher += ["--nproc-per-node", 2, "--max-restarts", 1]
    # The fault is there again after the restart, too, which is the last one.
    died = execute([*launcher, *runs.command, *words], check=False)
    assert died.returncode != 0
    assert died.stderr.count("resumed: ") == 1
    done = execute([*launcher, *runs.command, *words[:-2]])
    assert "step-2, after step 2" in done.stderr
    assert runs.result() == want


def gathered(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, put together; all but those of single ranks."""
    manifest = json.loads((folder / "manifest.json").read_text())
    whole = {
        name: torch.empty(spec["shape"], dtype=getattr(torch, spec["dtype"]))
        for name, spec in manifest["tensors"].items()
    }
    for file in manifest["files"]:
        tensors = load_file(folder / file["name"])
        for name, offsets, sizes, *_ in file["chunks"]:
            box = tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))
            whole[name][box] = tensors[name]
    return {name: tensor for name, tensor in whole.items() if not name.startswith("rank.")}


def test_other_world_sizes(captured: Capture, tmp_path: Path) -> None:
    """2 -> 1 -> 3 -> 2 ranks: the tensors stay, and training goes on at the same sample."""
    worlds = {}
    for world in (1, 2, 3):
        (tmp_path / f"{world}").mkdir()
        case = Case(LLAMA, ADAMW_FUSED, world=world)
        worlds[world] = Runs(captured(LLAMA), case, tmp_path / f"{world}")
    worlds[2].train("--checkpoint", tmp_path / "a", steps=4)
    want = gathered(tmp_path / "a" / "step-4")
    assert any("exp_avg_sq" in name for name in want)
    for old, was, new, world in (("a", 2, "b", 1), ("b", 1, "c", 3), ("c", 3, "d", 2)):
        options = ["--resume", tmp_path / old / "step-4", "--checkpoint", tmp_path / new]
        done = worlds[world].train(*options, steps=4)
        assert f"the world size was {was}, is {world}" in done.stderr
        got = gathered(tmp_path / new / "step-4")
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
        manifest = json.loads((tmp_path / new / "step-4" / "manifest.json").read_text())
        assert manifest["samples"] == 4 * 2 * LLAMA.batch
    # One rank goes on with the samples that two would have taken.
    done = worlds[1].train("--resume", tmp_path / "d" / "step-4", steps=6)
    assert [line["step"] for line in read_run(worlds[1].metrics, None).metrics] == [5, 6]


def test_dcp_reads_the_folder(captured: Capture, tmp_path: Path) -> None:
    runs = Runs(captured(GPT2), Case(GPT2, ADAMW_FUSED), tmp_path)
    runs.train("--checkpoint", tmp_path / "saved")
    want = load_file(runs.weights)
    folder = tmp_path / "saved" / f"step-{STEPS}"
    names = [name for name in gathered(folder) if not name.startswith("optimizer.")]
    state = {name: torch.zeros_like(want[name]) for name in names if name in want}
    state |= {
        f"optimizer.state.{name}.{kind}": torch.zeros_like(want[name])
        for name, kind in itertools.product(
            ["transformer.wte.weight", "transformer.ln_f.weight"], ["exp_avg", "exp_avg_sq"]
        )
    }
    state["optimizer.state.transformer.wte.weight.step"] = torch.zeros(())
    state["rank.1.rng.cpu"] = torch.zeros(torch.get_rng_state().numel(), dtype=torch.uint8)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    whole = gathered(folder)
    for name, tensor in state.items():
        if name in want:
            assert torch.equal(tensor, want[name]), name
        elif name in whole:
            assert torch.equal(tensor, whole[name]), name
    assert state["optimizer.state.transformer.wte.weight.step"] == STEPS
    assert state["rank.1.rng.cpu"].any()


@pytest.fixture(scope="module")
def saved(captured: Capture, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Checkpoints of steps 2 and 4."""
    runs = Runs(captured(LLAMA), Case(LLAMA, ADAMW_FUSED), tmp_path_factory.mktemp("saved"))
    runs.train("--checkpoint", runs.folder / "saved", "--checkpoint-every", 2, steps=4)
    return runs


def copied(saved: Runs, to: Path) -> list[Any]:
    shutil.copytree(saved.folder / "saved", to)
    return ["--checkpoint", to, "--resume", "auto"]


def test_a_damaged_one_is_skipped(saved: Runs, tmp_path: Path) -> None:
    options = copied(saved, tmp_path / "saved")
    file = tmp_path / "saved" / "step-4" / "shard-00002-model-00001-of-00001.safetensors"
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)
    done = saved.train(*options, steps=4)
    warnings = [line for line in done.stderr.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert file.name in warnings[0]
    assert "this checkpoint is skipped" in warnings[0]
    assert "step-2, after step 2" in done.stderr
    # The damaged one is replaced.
    assert "after step 4" in saved.train(*options, steps=4).stderr
    for step in (2, 4):
        (tmp_path / "saved" / f"step-{step}" / "manifest.json").write_text("{}")
    failed = saved.train(*options, check=False)
    assert failed.returncode == 2
    assert "none of its 2 checkpoints is valid" in failed.stderr


def refused(runs: Runs, *words: Any) -> str:
    failed = runs.train(*words, check=False)
    errors = [line for line in failed.stderr.splitlines() if "error" in line]
    assert failed.returncode == 2, failed.stderr
    assert len(errors) == 1, failed.stderr
    assert "resumed: " not in failed.stderr
    return errors[0]


def test_other_runs_are_refused(saved: Runs, captured: Capture, tmp_path: Path) -> None:
    newest = saved.folder / "saved" / "step-4"
    for name in ("model", "optimizer"):
        (tmp_path / name).mkdir()
    model = Runs(captured(GPT2), Case(GPT2, ADAMW_FUSED), tmp_path / "model")
    assert 'no tensor "transformer.wte.weight"' in refused(model, "--resume", newest)
    optimizer = Runs(captured(LLAMA), Case(LLAMA, SGD), tmp_path / "optimizer")
    error = refused(optimizer, "--resume", newest)
    assert "optimizer.state." in error
    assert "momentum_buffer" in error
    seeded = Runs(captured(LLAMA), Case(LLAMA, ADAMW_FUSED, seed=1), tmp_path)
    assert "expected --seed 0" in refused(seeded, "--resume", newest)


def test_folders_that_are_refused(saved: Runs, tmp_path: Path) -> None:
    options = copied(saved, tmp_path / "saved")
    assert "a checkpoint of another run" in refused(saved, "--checkpoint", tmp_path / "saved")
    words = ["--resume", tmp_path / "saved" / "step-2", "--checkpoint", tmp_path / "saved"]
    assert "step-4: a checkpoint of another run" in refused(saved, *words)
    assert "manifest.json" in refused(saved, "--resume", tmp_path)
    assert "expected --checkpoint" in refused(saved, "--resume", "auto")
    assert "--keep" in refused(saved, *options, "--keep", 1)
    (tmp_path / "file").write_text("")
    assert "file" in refused(saved, "--checkpoint", tmp_path / "file")


def test_no_weights_are_read(captured: Capture, tmp_path: Path) -> None:
    """A resumed run needs none, and one that finds nothing begins at the beginning."""
    model: Model = LLAMA
    (tmp_path / "model").mkdir()
    copy = Captured(model, tmp_path / "model")
    for file in captured(model).directory.glob("*"):
        if file.name in ("model.pt", "model.safetensors", "batches.safetensors"):
            shutil.copy(file, copy.directory)
    runs = Runs(copy, Case(model, ADAMW_FUSED), tmp_path)
    options = ["--checkpoint", tmp_path / "saved", "--resume", "auto"]
    done = runs.train(*options, steps=1)
    assert "resumed" not in done.stderr
    copy.weights.unlink()
    assert "resumed" in runs.train(*options, steps=2).stderr


def test_names_that_checkpoints_have(saved: Runs, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    tree = json.loads(saved.plan.read_text())
    del tree["digest"]  # the plan is another one
    name, text = tree["params"][0]["name"], json.dumps(tree)
    for other in ("rank.0.weight", "optimizer.state.weight"):
        plan.write_text(text.replace(f'"{name}"', f'"{other}"'))
        words = [BIN / "fsdp-run", plan, "--checkpoint", tmp_path / "saved"]
        done = execute(words, check=False)
        assert done.returncode == 2
        assert f"'{other}': a checkpoint has something else under names" in done.stderr
