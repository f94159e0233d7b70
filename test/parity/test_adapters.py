"""The loops of other libraries (examples/adapters), run by these with FSDP2 and compiled."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import BIN, ROOT, execute
from ranks import run_program
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_loops import assert_same, assert_same_files, read_dcp, run_both, values

ADAPTERS = ROOT / "examples" / "adapters"


def test_transformers_trainer(tmp_path: Path) -> None:
    lines, saved = run_both("hf_trainer.py", tmp_path, ADAPTERS)
    history: dict[str, list[dict[str, float]]] = {}
    for line in lines:
        if match := re.match(r"rank 0: (\w+) (\{.*\})$", line):
            history.setdefault(match[1], []).append(json.loads(match[2]))
    trained = {
        name: sorted((x for x in entries if "grad_norm" in x), key=lambda x: x["step"])
        for name, entries in history.items()
    }
    assert [len(trained[name]) for name in ("whole", "resumed", "own_loss")] == [4, 4, 6]
    assert trained["whole"] == trained["resumed"]  # with what the checkpoint has of the first
    assert trained["own_loss"][-1]["loss"] < trained["own_loss"][0]["loss"]
    for name in ("whole", "whole/checkpoint-2", "whole/checkpoint-4", "resumed", "own_loss"):
        assert_same_files(load_file, [folder / name / "model.safetensors" for folder in saved])
    for name in ("optimizer.bin", "scheduler.pt", "pytorch_model_fsdp.bin"):
        assert_same_files(
            torch.load, [folder / "whole" / "checkpoint-4" / name for folder in saved]
        )


@pytest.mark.exhaustive  # test_transformers_trainer goes through its Accelerator
def test_accelerate(tmp_path: Path) -> None:
    lines, saved = run_both("accelerate_loop.py", tmp_path, ADAPTERS)
    losses = values(lines, r"rank \d: loss (\S+) norm")
    norms = values(lines, r"rank \d: loss \S+ norm ([\d.]+) lr \S+")
    assert len(losses) == 24 and len(norms) == 8
    held_out = [loss for (loss,) in values(lines, r"rank 0: epoch \d held-out loss (\S+)")]
    assert len(held_out) == 2 and held_out[1] < held_out[0] - 0.1
    assert_same_files(load_file, [folder / "model.safetensors" for folder in saved])
    for epoch in ("0", "1"):
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            assert_same_files(read_dcp, [folder / epoch / name for folder in saved])
        want, got = (torch.load(folder / epoch / "scheduler.bin") for folder in saved)
        assert_same(got, want)


@pytest.mark.exhaustive
def test_fabric_and_tensorboard(tmp_path: Path) -> None:
    lines, saved = run_both("fabric_loop.py", tmp_path, ADAPTERS)
    losses = [loss for (loss,) in values(lines, r"rank \d: step \d+ \{'loss': ([\d.]+)")]
    assert len(losses) == 24 and min(losses) < max(losses) - 0.5
    assert_same_files(read_dcp, [folder / "saved" for folder in saved])
    want, got = (scalars(folder / "logs") for folder in saved)
    assert (
        got.keys()
        == want.keys()
        == {f"train/{x}" for x in ("loss", "grad_norm", "lr")} | {"time/step"}
    )
    assert all(got[name] == want[name] for name in want if name != "time/step")
    assert len(want["train/loss"]) == len(got["time/step"]) == 12
    assert all(seconds > 0 for _, seconds in got["time/step"])


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by tag, of TensorBoard's files."""
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.mark.exhaustive
def test_lightning_trainer(tmp_path: Path) -> None:
    lines, saved = run_both("lightning_trainer.py", tmp_path, ADAPTERS)
    losses = values(lines, r"rank \d: loss (\S+) (\S+)")
    assert len(losses) == len(values(lines, r"rank \d: norm (\S+)")) == 24
    held_out = values(lines, r"rank \d: held-out loss (\S+)")
    assert len(held_out) == 8 and max(held_out)[0] < max(losses)[0] - 0.5
    assert_same_files(read_dcp, [folder / "saved" for folder in saved])


def in_order(value: Any) -> Any:
    """With the keys of dictionaries in their order, as `fsdp-checkpoint` writes them."""
    if not isinstance(value, dict):
        return value
    return {key: in_order(value[key]) for key in sorted(value)}


@pytest.mark.exhaustive  # for its time
def test_torchtitan(tmp_path: Path) -> None:
    lines, saved = run_both("titan_trainer.py", tmp_path, ADAPTERS)
    losses = values(lines, r"rank \d: step (\d) loss (\S+) lr (\S+)")
    assert len(losses) == 32 and len(values(lines, r"rank \d: step (\d) norms")) == 16
    first, last = ([loss for step, loss, _ in losses if step == number] for number in (1, 8))
    assert max(last) < min(first) - 0.5
    for step in ("step-4", "step-8"):
        theirs, ours = (folder / "checkpoint" / step for folder in saved)
        assert_same_files(read_dcp, [theirs, ours])
        # With its optimizer, schedule and data, in the form of `fsdp-checkpoint`.
        written = tmp_path / step
        execute([BIN / "fsdp-checkpoint", "convert", theirs, written, "--to", "dcp"])
        assert_same_files(lambda path: in_order(read_dcp(path)), [theirs, written])


@pytest.mark.exhaustive
def test_torchtitan_over_tensor_parallelism(tmp_path: Path) -> None:
    """With sequence and loss parallelism, as its Trainer makes them."""
    more = ["--tensor-parallel", "2"]
    lines, saved = run_both("titan_trainer.py", tmp_path, ADAPTERS, 4, more)
    losses = values(lines, r"rank \d: step (\d) loss (\S+) lr (\S+)")
    assert len(losses) == 64 and len(values(lines, r"rank \d: step (\d) norms")) == 32
    assert_same_files(read_dcp, [folder / "checkpoint" / "step-8" for folder in saved])


@pytest.mark.exhaustive
def test_torchtitan_resumes_what_is_rewritten(tmp_path: Path) -> None:
    """Its Trainer goes on from its own checkpoint and from what `fsdp-checkpoint` makes of it."""
    script, step = ADAPTERS / "titan_trainer.py", Path("checkpoint") / "step-4"
    theirs, ours = (tmp_path / name for name in ("theirs", "ours"))
    run_program(script, 2, theirs)
    ours.joinpath("checkpoint").mkdir(parents=True)
    execute([BIN / "fsdp-checkpoint", "convert", theirs / step, ours / step, "--to", "dcp"])
    shutil.rmtree(theirs / "checkpoint" / "step-8")
    printed = [run_program(script, 2, folder).stdout for folder in (theirs, ours)]
    pattern = r"rank \d: step \d (?:loss|norms) (?:(?!rank \d: ).)*"
    want, got = (sorted(x.strip() for x in re.findall(pattern, text)) for text in printed)
    assert got == want and len(want) == 24
    assert {line.split()[3] for line in want} == {"5", "6", "7", "8"}
    assert_same_files(read_dcp, [folder / "checkpoint" / "step-8" for folder in (theirs, ours)])
