"""The two command lines: `python -m fsdp_mlir.capture` and `python -m fsdp_mlir.text`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from fsdp_mlir import text, tokens
from fsdp_mlir.capture import cli
from fsdp_mlir.models.llama import llama_debug
from fsdp_mlir.support import files, policy_schema
from fsdp_mlir.support.errors import CaptureError
from graphs import Captured, assert_same_step
from ranks import run_module
from safetensors.torch import load_file

LLAMA = ["--model", "fsdp_mlir.models.llama:llama_debug"]
INPUTS = ["--inputs", "tokens=int64[2,16]<256", "targets=int64[2,16]<256"]


def test_capture_command(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    options = [*LLAMA, "--kwargs", '{"seed": 5}', *INPUTS, "-o", path]
    result = run_module("fsdp_mlir.capture", *options, folder=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"{path}: 21 params" in result.stdout
    captured = Captured.load(path)
    assert [(e["name"], e["low"], e["high"]) for e in captured.record["inputs"]] == [
        ("tokens", 0, 256),
        ("targets", 0, 256),
    ]
    tokens = torch.randint(0, 256, (2, 16))
    assert_same_step(llama_debug(seed=5), captured, {"tokens": tokens, "targets": tokens})


def test_meta_and_eval(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    assert cli.main([*LLAMA, *INPUTS, "--meta", "--eval", "-o", str(path)]) == 0
    record = Captured.load(path).record
    assert record["weights"] is None and record["training"] is False


def test_loss_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    loss = ["--loss", "torch:mean", "--inputs", "tokens=int64[2,16]<256"]
    assert cli.main([*LLAMA, *loss, "-o", str(path)]) == 0
    assert "aten::mean" in Captured.load(path).ops()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere:model", *INPUTS], "cannot import 'nowhere'"),
        (["--model", "torch", *INPUTS], "expected package.module:name, got 'torch'"),
        (["--model", "torch:nothing", *INPUTS], "module 'torch' has no 'nothing'"),
        (["--model", "torch:pi", *INPUTS], "'torch:pi' is not callable"),
        (["--model", "builtins:dict", *INPUTS], "expected a torch.nn.Module, got 'dict'"),
        ([*LLAMA, "--kwargs", "{", *INPUTS], "--kwargs is not JSON"),
        (
            [*LLAMA, "--kwargs", '{"nope": 1}', *INPUTS],
            "'fsdp_mlir.models.llama:llama_debug' failed",
        ),
        ([*LLAMA, "--inputs", "tokens"], "input 'tokens': expected name=dtype"),
        ([*LLAMA, "--inputs", "t=int63[2]"], "expected a real dtype, got 'int63'"),
        ([*LLAMA, "--inputs", "t=float32[2]<3"], "'<' is for integers"),
        ([*LLAMA, "--inputs", "t=int64[2]<3", "t=int64[2]<3"], "input 't' is given twice"),
        ([*LLAMA, "--inputs", "tokens=int64[2,16]<256"], "is no loss"),
        ([*LLAMA, *INPUTS, "--loss", "torch:none"], "module 'torch' has no 'none'"),
        ([*LLAMA, *INPUTS, "--config", "none.yaml"], "cannot read 'none.yaml'"),
        ([*LLAMA, *INPUTS, "--config", "/dev/zero"], "cannot read '/dev/zero': expected at most"),
        (
            [*LLAMA, *INPUTS, "--kwargs", '{"dim": 64, "dim": 32}'],
            "--kwargs: key 'dim' is given twice",
        ),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert cli.main([*arguments, "-o", str(tmp_path / "model.pt")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["capture", "text", "tokens"])
@pytest.mark.parametrize("taken", ["folder", "pipe", "no folder"])
def test_outputs_are_files(
    command: str, taken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is read or written: a device or a folder is not replaced, none is made."""
    output = tmp_path / "model.pt"
    if taken == "folder":
        output.mkdir()
        got = "expected a regular file, got a folder"
    elif taken == "pipe":
        os.mkfifo(output)
        got = "expected a regular file, got a pipe or a device"
    else:
        output = tmp_path / "none" / "model.pt"
        got = f"no folder '{output.parent}'"
    before = list(tmp_path.iterdir())
    options = ["-o", str(output)]
    if command == "capture":
        assert cli.main([*LLAMA, *INPUTS, *options]) == 1
    elif command == "text":
        assert text.main(options) == 2
    else:
        flat = ["none.txt", "--tokenizer", "none.json", "--format", "flat"]
        assert tokens.main([*flat, *options]) == 2
    error = capsys.readouterr().err
    assert error.endswith(f"error: {output}: cannot be written: {got}\n") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["fsdp.yaml", "link.yaml", "fsdp.pt"])
def test_an_output_is_no_input(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under whatever name; nor are the weights beside it."""
    config = tmp_path / ("fsdp.safetensors" if name == "fsdp.pt" else "fsdp.yaml")
    config.write_text("units: auto\n")
    (tmp_path / "link.yaml").symlink_to(config)
    options = ["--config", str(config), "-o", str(tmp_path / name)]
    assert cli.main([*LLAMA, *INPUTS, *options]) == 1
    assert f"cannot be written: it is the input '{config}'" in capsys.readouterr().err
    assert config.read_text() == "units: auto\n"


def test_a_pipe_that_nobody_writes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PIPE_WAIT_SECONDS", 0)
    os.mkfifo(tmp_path / "fsdp.yaml")
    with pytest.raises(CaptureError, match=r"fsdp.yaml': a pipe that nobody writes to$"):
        policy_schema.read(tmp_path / "fsdp.yaml")
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        file.write("units: auto\n")
    assert policy_schema.read(Path(f"/dev/fd/{reader}")) == {"units": "auto"}
    os.close(reader)


def test_weights_are_not_the_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.safetensors"
    assert cli.main([*LLAMA, *INPUTS, "-o", str(path)]) == 1
    assert f"'{path}': expected another suffix" in capsys.readouterr().err
    assert not path.exists()


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "store" / "b.safetensors")
    for _ in range(2):
        assert text.main(["--seq", "8", "--samples", "1", "-o", str(tmp_path / "link")]) == 0
        (tmp_path / "store" / "b.safetensors").touch()
    assert load_file(tmp_path / "link")["tokens"].shape == (1, 8)


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "b.safetensors"
    done = run_module("fsdp_mlir.text", "-o", path, folder=tmp_path, file_bytes=4096)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"{path}: cannot be written: " in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "bounds"),
    [
        ("--seq", "1000000000000", "least 1 and at most 134217728"),
        ("--samples", "0", "least 1 and at most 524288"),
        ("--samples", "600000", "least 1 and at most 524288"),
        ("--shift", "-5", "least 0 and at most 256"),
        ("--shift", "9999999", "least 0 and at most 256"),
        ("--vocab", "100000000", "least 1 and at most 16777216"),
    ],
)
def test_text_numbers(
    option: str, value: str, bounds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        text.main([option, value, "-o", str(tmp_path / "b.safetensors")])
    message = f"error: {option}: expected at {bounds}, got {value}\n"
    assert capsys.readouterr().err.endswith(message)
    assert list(tmp_path.iterdir()) == []


def test_example_inputs_hold_the_range() -> None:
    name, value = cli.parse_input("ids=int32[3,4]<17")
    assert (name, value.dtype, list(value.shape)) == ("ids", torch.int32, [3, 4])
    assert (int(value.min()), int(value.max())) == (0, 16)
    assert cli.parse_input("mask=bool[2]")[1].dtype == torch.bool
    assert torch.equal(cli.parse_input("x=bfloat16[8]")[1], cli.parse_input("x=bfloat16[8]")[1])
    with pytest.raises(CaptureError, match="at least 1"):
        cli.parse_input("ids=int64[2]<0")


def test_text_command(tmp_path: Path) -> None:
    path = tmp_path / "batches.safetensors"
    options = ["--seq", "32", "--samples", "5", "--vocab", "4096", "-o", str(path)]
    assert text.main(options) == 0
    batches = load_file(path)
    assert sorted(batches) == ["targets", "tokens"]
    assert batches["tokens"].dtype == torch.int64 and list(batches["tokens"].shape) == [5, 32]
    assert torch.equal(batches["tokens"].flatten()[1:], batches["targets"].flatten()[:-1])
    first = path.read_bytes()
    assert text.main(options) == 0 and path.read_bytes() == first


def test_text_is_text() -> None:
    tokens, targets = text.batches(seq=64, samples=3, vocab=256, shift=0)
    assert bytes(tokens.flatten().tolist()) == text.corpus()[:192]
    assert torch.equal(tokens, targets)


def test_words_spread_over_the_vocabulary() -> None:
    tokens = text.encode(text.corpus(), 4096)
    assert tokens.min() >= 0 and tokens.max() < 4096
    assert len(set(tokens.tolist())) > 2000


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--inputs", "x=float32[999999999999,999999]"], "'x=float32[999999999999,999999]': no"),
        (
            ["--inputs", "x=float32[99999999999999999999]"],
            "'x=float32[99999999999999999999]': no",
        ),
        (["--inputs", "x=int64[2]<99999999999999999999"], "'x=int64[2]<99999999999999999999': no"),
        (["--kwargs", '{"dim": -1}', *INPUTS], "'fsdp_mlir.models.llama:llama_debug' failed: "),
        (["--kwargs", "[" * 99999, *INPUTS], "--kwargs is not JSON: "),
        (["--inputs", "tokens=int64[2,16]<256", "targets=int64[2,15]<256"], ""),
        (["--model", f"{__name__}:exits", *INPUTS], f"'{__name__}:exits' failed: SystemExit: 3"),
        (["--model", f"{__name__}:talks", *INPUTS], f"'{__name__}:talks' failed: OSError: aaa"),
    ],
    ids=["huge", "overflow", "bound", "size", "nested", "shapes", "exits", "talks"],
)
def test_one_line(options: list[str], message: str, tmp_path: Path) -> None:
    """Whatever fails, the command says it in one line, and writes nothing."""
    options = [*LLAMA, *options, "-o", str(tmp_path / "model.pt")]
    done = run_module("fsdp_mlir.capture", *options, folder=Path(__file__).parent)
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and len(lines[0]) < 1000, done.stderr
    assert message in lines[0]
    assert not list(tmp_path.iterdir())


def exits() -> None:
    sys.exit(3)


def talks() -> None:
    raise OSError("a" * 9999)
