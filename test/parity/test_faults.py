"""Faults of ranks that torchrun started: nobody outlives it, and who ends says where it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import ADAMW_FUSED, LLAMA, Captured, Case, Model, compile_plan, run_command
from ranks import free_port
from test_bad_input import children, nothing_left, wait_for_step

__all__ = ["nothing_left"]  # a fixture of every test here

LIMIT_S = 60
CASE = Case(LLAMA, ADAMW_FUSED, steps=1000000)


@pytest.fixture(scope="module")
def llama(captured: Callable[[Model], Captured]) -> Captured:
    return captured(LLAMA)


@pytest.fixture(scope="module")
def command(llama: Captured) -> list[str]:
    plan = compile_plan(llama, CASE, "faults")
    return [str(word) for word in run_command(llama, plan, CASE)]


def torchrun(command: list[str], stderr: Path, *options: str) -> subprocess.Popen[str]:
    """Its ranks write what they have to say to the file."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--no-python", *options]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    with stderr.open("wb") as file:
        return subprocess.Popen([*launcher, *command], stderr=file, text=True)


def ended(pids: list[int]) -> bool:
    """Whether the processes end in bounded time."""
    limit = time.monotonic() + LIMIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("comm", ["shm", "gloo"])
def test_ranks_end_with_torchrun(command: list[str], comm: str, tmp_path: Path) -> None:
    metrics, stderr = tmp_path / "metrics.jsonl", tmp_path / "stderr"
    words = [*command, "--comm", comm, "--metrics", str(metrics)]
    with torchrun(words, stderr, "--nproc-per-node", "2") as process:
        wait_for_step(metrics, process)
        ranks = children(process.pid)
        process.kill()
        assert ended(ranks)
    said = [line for line in stderr.read_text().splitlines() if "fsdp-run: error" in line]
    assert len(said) >= 1
    assert re.search(r"rank \d: .*at step \d+", said[0]), said


def test_ranks_that_have_not_met_end_with_torchrun(command: list[str], tmp_path: Path) -> None:
    """The other of two nodes never comes; torchrun itself does not wait for it."""
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    # A launcher that has one rank, behind a shell as torchrun may have it, and sleeps.
    script = (
        "import os, subprocess, sys, time\n"
        f"env = os.environ | {environment!r}\n"
        "shell = ['sh', '-c', '\"$@\"; exit $?', 'sh', *sys.argv[1:]]\n"
        "print(subprocess.Popen(shell, env=env).pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    stderr = tmp_path / "stderr"
    with (
        stderr.open("wb") as file,
        subprocess.Popen(
            [sys.executable, "-c", script, *command], stdout=subprocess.PIPE, stderr=file
        ) as launcher,
    ):
        assert launcher.stdout is not None
        shell = int(launcher.stdout.readline())
        while not (ranks := children(shell)):
            time.sleep(0.05)
        time.sleep(2)  # the rank waits by now; earlier it must end too
        launcher.kill()
        assert ended([shell, *ranks])
    assert "is gone before the ranks had met" in stderr.read_text()


@pytest.mark.parametrize("comm", ["shm", "gloo"])
def test_a_death_under_torchrun_is_told(command: list[str], comm: str, tmp_path: Path) -> None:
    metrics, stderr = tmp_path / "metrics.jsonl", tmp_path / "stderr"
    words = [*command, "--comm", comm, "--metrics", str(metrics)]
    with torchrun(words, stderr, "--nproc-per-node", "2") as process:
        wait_for_step(metrics, process)
        ranks = children(process.pid)
        os.kill(ranks[1], signal.SIGKILL)
        process.wait(timeout=LIMIT_S)
        assert ended(ranks)
    assert process.returncode != 0
    said = [line for line in stderr.read_text().splitlines() if "fsdp-run: error" in line]
    assert len(said) == 1, said
    assert re.search(r"rank 0: .*step \d+", said[0]), said
