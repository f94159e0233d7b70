"""One fsdp-opt makes the plans of a process, and may end between two of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import fsdp_mlir
import pytest
import torch
from fsdp_mlir.frontdoor import compiler
from fsdp_mlir.support import build
from fsdp_mlir.support.errors import CompileError


class Net(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


@pytest.fixture(autouse=True)
def none_runs() -> Iterator[None]:
    compiler._close()
    yield
    compiler._close()


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("with a space")
    (folder / "policy.yaml").write_text("units: []\noptimizer: {name: sgd, lr: 0.1}\n")
    files = {"config": folder / "policy.yaml", "path": folder / "model.pt"}
    fsdp_mlir.capture(Net(), (torch.ones(2, 4),), **files)
    return folder


def process() -> int:
    compiler.start()
    assert compiler._running is not None
    return compiler._running._process.pid


def test_it_loads_pytorch_before_there_is_a_capture() -> None:
    maps, deadline = Path(f"/proc/{process()}/maps"), time.monotonic() + 60
    while "libtorch_cpu" not in maps.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_plans_of_one_process(captured: Path) -> None:
    first, plan = process(), captured / "plan.json"
    compiler.make_plan(captured, 2)
    of_two = plan.read_text()
    compiler.make_plan(captured, 3)
    assert plan.read_text() != of_two
    with pytest.raises(CompileError, match=r"elsewhere.*model.pt: cannot be read"):
        compiler.make_plan(captured / "elsewhere", 2)
    compiler.make_plan(captured, 2)
    assert plan.read_text() == of_two
    assert process() == first


def test_a_folder_by_a_relative_path(captured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may change its own folder while the program waits."""
    first, plan = process(), captured / "plan.json"
    plan.unlink(missing_ok=True)
    monkeypatch.chdir(captured.parent)
    compiler.make_plan(Path(captured.name), 2)
    assert plan.exists() and process() == first


def test_it_ended_meanwhile(captured: Path) -> None:
    first = process()
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{first}").exists():  # nor does a zombie stay
        assert time.monotonic() < deadline
        time.sleep(0.02)
    compiler.make_plan(captured, 2)
    assert process() != first


def test_it_always_ends(captured: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken, reader = (tmp_path / name for name in build.COMPILER)
    for path in (broken, reader):
        path.parent.mkdir()
        path.touch()
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("FSDP_MLIR_BUILD", str(tmp_path))
    with pytest.raises(CompileError, match="fsdp-opt ended before it had made a plan"):
        compiler.make_plan(captured, 2)


def test_a_forked_process_has_its_own(captured: Path) -> None:
    """And does not keep that of the other alive."""
    first = process()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            compiler.make_plan(captured, 2)
            os.write(writes, str(process()).encode())
            compiler._close()
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert int(os.read(reads, 20)) != first
        assert process() == first
        compiler.make_plan(captured, 2)
        running = compiler._running
        assert running is not None and running._process.stdin is not None
        running._process.stdin.close()
        assert running._process.wait(timeout=60) == 0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
