"""Other people's loops (examples/loops): the same lines and files with FSDP2 and compiled."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ROOT
from ranks import run_program
from safetensors.torch import load_file
from test_frontdoor import torchrun_over_gloo
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

LOOPS = ROOT / "examples" / "loops"

# Of a checkpoint and a script: runs it, whose compiled steps all must have a plan.
STRICT = """
import pathlib, runpy, sys
from fsdp_mlir.step import eager

def backward(*args, **kwargs):
    raise AssertionError("a step runs as FSDP2 does")

eager.backward = backward
_, checkpoint, script, *more = sys.argv
sys.argv = [script, checkpoint, "--compiled", *more]
sys.path[0] = str(pathlib.Path(script).parent)
runpy.run_path(script, run_name="__main__")
"""


def run_both(
    name: str, directory: Path, scripts: Path = LOOPS, world: int = 2, more: Sequence[str] = ()
) -> tuple[list[str], list[Path]]:
    """The sorted lines that both runs of a script print, and where each one saved."""
    script, strict = scripts / name, directory / "strict.py"
    strict.write_text(STRICT)
    saved = [directory / "fsdp2", directory / "compiled"]
    # Ours as users start and end it.
    runs = [
        run_program(script, world, saved[0], *more),
        torchrun_over_gloo(strict, world, saved[1], script, *more),
    ]
    assert "without a plan" not in runs[1].stderr
    # Two ranks may share a line; others are the libraries'.
    line = re.compile(r"rank \d: (?:(?!rank \d: ).)*")
    lines = [sorted(found.strip() for found in line.findall(run.stdout)) for run in runs]
    assert lines[0] == lines[1]
    return lines[0], saved


def values(lines: list[str], pattern: str) -> list[list[float]]:
    """The numbers that `pattern` finds in the lines, those of a line together."""
    found = (re.search(pattern, line) for line in lines)
    return [[float(value) for value in match.groups()] for match in found if match]


def assert_same(got: Any, want: Any, place: str = "") -> None:
    """Bit for bit."""
    assert type(got) is type(want), place
    if isinstance(want, Tensor):
        assert got.dtype == want.dtype and torch.equal(got, want), place
    elif isinstance(want, dict):
        assert list(got) == list(want), place
        for key, value in want.items():
            assert_same(got[key], value, f"{place}[{key!r}]")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), place
        for index, value in enumerate(want):
            assert_same(got[index], value, f"{place}[{index}]")
    else:
        assert got == want, place


def assert_same_files(read: Callable[[Path], Any], saved: list[Path]) -> dict[str, Any]:
    want, got = map(read, saved)
    assert_same(got, want)
    assert want
    return want


def read_dcp(path: Path) -> Any:
    file = path.with_suffix(".pt")
    dcp_to_torch_save(path, file)
    return torch.load(file)


@pytest.mark.exhaustive  # for its time
def test_nanogpt(tmp_path: Path) -> None:
    lines, saved = run_both("nanogpt.py", tmp_path)
    steps = values(lines, r"rank 0: iteration (\d+) loss (\S+) norm (\S+) lr (\S+)")
    losses = [loss for _, loss, _, _ in sorted(steps)]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5
    held_out = [loss for (loss,) in values(lines, r"held-out loss (\S+)")]
    assert len(held_out) == 8 and min(held_out) < max(held_out) - 0.5
    assert len([line for line in lines if "text '" in line or 'text "' in line]) == 2
    state = assert_same_files(torch.load, saved)
    assert state["model"].keys() >= {"head.weight", "tokens.weight", "blocks.1.out.bias"}
    assert state["optimizer"]["state"]["tokens.weight"]["step"] == 12


@pytest.mark.exhaustive  # for its time
def test_titan(tmp_path: Path) -> None:
    lines, saved = run_both("titan.py", tmp_path)
    steps = values(lines, r"rank 0: step (\d+) loss (\S+) grad_norm (\S+) lr (\S+)")
    losses = [loss for _, loss, _, _ in sorted(steps)]
    assert len(losses) == 10 and losses[4] < losses[0] - 0.5 and losses[-1] < losses[4] - 0.5
    for part in ("middle", "last"):
        assert_same_files(read_dcp, [folder / part for folder in saved])


def test_parallel(tmp_path: Path) -> None:
    lines, saved = run_both("parallel.py", tmp_path, world=4)
    steps = values(lines, r"rank \d: step (\d+) loss (\S+) grad_norm (\S+)")
    losses = [loss for _, loss, _ in sorted(steps)]
    assert len(losses) == 4 * 8 and losses[-1] < losses[0] - 0.5
    assert_same_files(read_dcp, saved)


@pytest.mark.exhaustive  # test_adapters.py trains and saves a model of transformers
def test_huggingface(tmp_path: Path) -> None:
    lines, saved = run_both("huggingface.py", tmp_path)
    steps = values(lines, r"rank \d: loss (\d) (\S+) \S+")
    assert [count for count, _ in sorted(steps)] == [3] * 6 + [4] * 12
    held_out = [loss for (loss,) in values(lines, r"held-out loss (\S+)")]
    assert len(held_out) == 6 and min(held_out) < max(held_out) - 0.5
    generated = {line for line in lines if "rank 0: generated" in line}
    assert len(generated) == 2
    assert_same_files(load_file, [folder / "model.safetensors" for folder in saved])


@pytest.mark.parametrize(
    ("variant", "file"),
    [
        ("loop", "torchtitan/models/moe/moe.py"),
        pytest.param("grouped", "torchtitan/models/moe/kernels.py", marks=pytest.mark.exhaustive),
        ("tensors", None),
    ],
)
def test_titans_experts(tmp_path: Path, variant: str, file: str | None) -> None:
    """Experts with sizes that follow from data run in Python, in the middle of the plan, and the
    line says where these are; grouped products whose sizes are tensors are calls of the plan."""
    script, saved = Path(__file__).with_name("titan_experts.py"), tmp_path / "state.pt"
    runs = [
        (run_program(script, 2, saved, variant, *words), torch.load(saved))
        for words in ([], ["--compiled"])
    ]
    (eager, state), (compiled, got) = runs
    lines = [sorted(re.findall(r"rank \d: [^\n]*", run.stdout)) for run, _ in runs]
    assert lines[0] == lines[1] and len(lines[0]) == 2 * (3 + 2)
    assert_same(got, state)
    assert state["layers.1.moe.experts.w2"].shape == (4, 64, 32)
    files = re.findall(
        r"'layers\.\d\.moe\.experts' of \w+ runs in Python, in the middle of the plan: "
        r"([^:\s]+):\d+: .* depends on the data",
        compiled.stderr,
    )
    assert files == ([file] * 2 if file else [])
    assert "without a plan" not in compiled.stderr + eager.stderr
