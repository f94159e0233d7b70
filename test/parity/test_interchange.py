"""Checkpoints of torch.distributed.checkpoint and of Hugging Face, by fsdp-checkpoint: what
PyTorch wrote is read and written here, and loaded by PyTorch, bit for bit."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import (
    ADAMW,
    BIN,
    GPT2,
    LLAMA,
    Captured,
    Case,
    Model,
    compile_plan,
    execute,
    read_run,
    reference_args,
    run_command,
)
from ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

TOOL = BIN / "fsdp-checkpoint"
NAMES = {"0.weight": "embed.weight", "{}.weight": "net.{}.w", "{}.bias": "net.{}.b", "scale": "s"}


def run(*words: Any) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in (TOOL, *words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def convert(source: Path, to: Path, form: str, *more: Any) -> str:
    done = run("convert", source, to, "--to", form, *more)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def whole(folder: Path) -> dict[str, Any]:
    """All that a DCP checkpoint has, in its nested form."""
    path = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, path)
    return torch.load(path)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """What FSDP2 saved ("theirs") and fsdp-checkpoint made of it ("ours"), and what differs."""
    folder = tmp_path_factory.mktemp("checkpoint")
    run_ranks("interchange_ranks", [TOOL, folder, folder / "found"], 2)
    return folder, [json.loads((folder / f"found.{rank}").read_text()) for rank in range(2)]


def test_fsdp2_goes_on(saved: tuple[Path, list[Any]]) -> None:
    for differs, count in saved[1]:
        assert differs == []
        assert count > 80


def test_everything_is_there(saved: tuple[Path, list[Any]]) -> None:
    theirs, ours = whole(saved[0] / "theirs"), whole(saved[0] / "ours")
    assert theirs["dataloader"] == {"dp_rank_0": b"\x00\xff", "dp_rank_1": b"\x00\xff\x00\xff"}

    def compare(a: Any, b: Any) -> None:
        assert type(a) is type(b)
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for key in a:
                compare(a[key], b[key])
        elif isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))
        else:
            assert a == b

    compare(theirs, ours)
    assert ours["optimizer"]["param_groups.0.weight.betas"] == (0.8, 0.95)


def test_older_torch_reads_it(saved: tuple[Path, list[Any]]) -> None:
    """Protocol 2, five tensor properties, classes of PyTorch 2.0, and items without code."""
    folder = saved[0] / "ours"
    text = (folder / ".metadata").read_bytes()
    code = [(op.name, argument) for op, argument, _ in pickletools.genops(text)]
    assert code[0] == ("PROTO", 2)
    assert all(op.proto <= 2 for op, _, _ in pickletools.genops(text))
    named = {argument for name, argument in code if name == "GLOBAL"}
    known = "torch.distributed.checkpoint.metadata "
    assert {name.removeprefix(known) for name in named if name.startswith(known)} == {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "_MEM_FORMAT_ENCODING",
    }
    states = []

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = super().find_class(module, name)
            if name != "TensorProperties":
                return found

            class Properties(found):
                def __setstate__(self, state: tuple[Any, ...]) -> None:
                    states.append(state)
                    super().__setstate__(state)

            return Properties

    metadata = Unpickler(io.BytesIO(text)).load()
    assert states and {len(state) for state in states} == {5}
    for place in metadata.storage_data.values():
        data = (folder / place.relative_path).read_bytes()
        item = data[place.offset : place.offset + place.length]
        torch.load(io.BytesIO(item), weights_only=True)


def test_hugging_face(saved: tuple[Path, list[Any]], tmp_path: Path) -> None:
    names = tmp_path / "names.json"
    names.write_text(json.dumps(NAMES))
    theirs = whole(saved[0] / "theirs")
    model = {name: value for name, value in theirs.items() if isinstance(value, torch.Tensor)}
    output = convert(saved[0] / "theirs", tmp_path / "hf", "huggingface", "--name-map", names)
    assert f"left out: the optimizer's state, {len(theirs['optimizer'])} items\n" in output
    assert "left out: train_state.step\n" in output and "optimizer." not in output
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    read = {}
    for file in set(index["weight_map"].values()):
        read |= load_file(tmp_path / "hf" / file)
    renamed = {"0.weight": "embed.weight", "scale": "s"} | {
        f"{i}.{kind}": f"net.{i}.{kind[0]}" for i in (1, 2) for kind in ("weight", "bias")
    }
    assert read.keys() == index["weight_map"].keys() == set(renamed.values())
    for name, tensor in model.items():
        assert bits(read[renamed[name]]) == bits(tensor)
    # PyTorch's own reader, and the way back.
    state = {name: torch.zeros_like(tensor) for name, tensor in read.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "hf")), no_dist=True)
    assert {name: bits(t) for name, t in state.items()} == {n: bits(t) for n, t in read.items()}
    convert(tmp_path / "hf", tmp_path / "back", "dcp", "--name-map", names)
    back = whole(tmp_path / "back")
    assert {name: bits(t) for name, t in back.items()} == {n: bits(t) for n, t in model.items()}


def test_show_and_verify(saved: tuple[Path, list[Any]]) -> None:
    done = run("show", saved[0] / "theirs")
    assert done.returncode == 0
    assert "\n1.weight: float32[5, 3] in 2 chunks\n" in done.stdout
    assert "\nlr_scheduler.last_epoch = 3\n" in done.stdout
    assert "\noptimizer.param_groups.0.weight.betas = [0.8,0.95]\n" in done.stdout
    assert ": whole: dcp: " in run("verify", saved[0] / "ours").stdout


def test_bad_input_is_one_line(saved: tuple[Path, list[Any]], tmp_path: Path) -> None:
    def check(message: str, *words: Any) -> None:
        done = run(*words)
        assert done.returncode == 2
        assert done.stderr.startswith("fsdp-checkpoint: error: ")
        assert done.stderr.count("\n") == 1 and message in done.stderr

    check("not there", "verify", tmp_path / "none")
    check("expected a checkpoint", "verify", tmp_path)
    theirs = saved[0] / "theirs"
    check("expected a new or empty folder", "convert", theirs, saved[0] / "ours", "--to", "dcp")
    check("--to", "convert", theirs, tmp_path / "x", "--to", "zip")
    (tmp_path / "names.json").write_text(json.dumps({"0.weight": "w"}))
    words = ["convert", theirs, tmp_path / "x", "--to", "huggingface"]
    check('no name for tensor "', *words, "--name-map", tmp_path / "names.json")
    assert not (tmp_path / "x").exists()
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        broken = tmp_path / f"without{name}"
        shutil.copytree(theirs, broken)
        (broken / name).unlink()
        check(str(broken / name), "verify", broken)


def test_nothing_is_executed(saved: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """A pickle that PyTorch would run."""

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "harm",))

    broken = tmp_path / "broken"
    shutil.copytree(saved[0] / "theirs", broken)
    (broken / ".metadata").write_bytes(pickle.dumps(Harm()))
    done = run("verify", broken)
    assert done.returncode == 2 and "that is not expected here" in done.stderr
    assert not (tmp_path / "harm").exists()


# A schedule, so that options of the optimizer depend on the step; GPT-2's weights are tied.
SCHEDULE = {"lr_schedule": {"warmup_steps": 4, "decay": "cosine", "total_steps": 10}}


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_either_goes_on(captured: Callable[..., Captured], tmp_path: Path, model: Model) -> None:
    """FSDP2 from fsdp-run's checkpoint, and fsdp-run from FSDP2's, as one run would."""
    made = captured(model)
    case = Case(model, ADAMW, steps=6, training=SCHEDULE, seed=3)
    plan = compile_plan(made, case, f"interchange{tmp_path.name}")

    def theirs(name: str, *more: Any) -> Any:
        files = [tmp_path / f"{name}.jsonl", tmp_path / f"{name}.safetensors"]
        words = [*reference_args(made, case, "fsdp2"), "--metrics", files[0]]
        run_ranks("train_fsdp2", [*words, "--save-weights", files[1], *more], 2, attempts=2)
        return read_run(*files)

    def ours(name: str, *more: Any) -> Any:
        files = [tmp_path / f"{name}.jsonl", tmp_path / f"{name}.safetensors"]
        words = [*run_command(made, plan, case), "--metrics", files[0], "--save-weights", files[1]]
        done = execute([*words, *more])
        # What the converted checkpoint does not say does not differ.
        assert " was 0" not in done.stderr and " was ," not in done.stderr
        return read_run(*files)

    reference = theirs("whole", "--save-checkpoint", tmp_path / "dcp", "--save-after", 3)
    options = ["--plan", plan, "--seed", case.seed]
    said = convert(tmp_path / "dcp", tmp_path / "native", "native", *options)
    assert f"assumed: {3 * 2 * model.batch} samples were taken" in said
    assert "param_groups" not in said and "left out" not in said
    mine = ours("mine", "--resume", tmp_path / "native/step-3")

    whole = ours("ours", "--checkpoint", tmp_path / "run", "--checkpoint-every", 3)
    convert(tmp_path / "run/step-3", tmp_path / "back", "dcp", "--plan", plan)
    other = theirs("other", "--load-checkpoint", tmp_path / "back")

    assert whole.rank_losses == reference.rank_losses
    for run in (mine, other):
        assert run.rank_losses == reference.rank_losses[3:]
        assert run.column("lr") == reference.column("lr")[3:]
    for run in (mine, whole, other):
        for name, tensor in run.weights.items():
            assert bits(tensor) == bits(reference.weights[name])
