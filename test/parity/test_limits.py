"""Signals, limits and deadlines of fsdp-run, and what it says of itself, with real processes.

No rank outlives a test, and a hang ends it by the timeout of the process that is waited for.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    ADAMW_FUSED,
    BIN,
    LLAMA,
    Captured,
    Case,
    Model,
    compile_plan,
    execute,
    run_command,
)
from ranks import free_port
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_bad_input import children, nothing_left, wait_for_step
from test_faults import ended, torchrun

__all__ = ["nothing_left"]  # a fixture of every test here

LIMIT_S = 60
STOPPED, STOPPED_AT_ONCE = 143, 130
ENDLESS = Case(LLAMA, ADAMW_FUSED, steps=1000000)
COMMS = ["shm", "gloo"]


@pytest.fixture(scope="module")
def llama(captured: Callable[[Model], Captured]) -> Captured:
    return captured(LLAMA)


@pytest.fixture(scope="module")
def plan(llama: Captured) -> Path:
    return compile_plan(llama, ENDLESS, "limits")


@pytest.fixture(scope="module")
def command(llama: Captured, plan: Path) -> list[str]:
    return [str(word) for word in run_command(llama, plan, ENDLESS)]


@contextmanager
def training(
    command: list[str], tmp_path: Path, *options: str
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run with two forked ranks, in a process group of its own, that has done a step; ended if
    the test has not."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    words = [*command, "--nproc", "2", "--metrics", str(metrics), *options]
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            wait_for_step(metrics, process)
            yield process, children(process.pid)
        finally:
            process.kill()


def steps_done(tmp_path: Path) -> int:
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    return int(json.loads(lines[-1])["step"])


@pytest.mark.parametrize("name", ["TERM", "INT"])
@pytest.mark.parametrize("comm", COMMS)
def test_a_signal_stops_after_a_step(
    command: list[str], comm: str, name: str, tmp_path: Path
) -> None:
    weights = tmp_path / "weights.safetensors"
    options = ["--comm", comm, "--save-weights", str(weights)]
    with training(command, tmp_path, *options) as (process, _):
        process.send_signal(signal.Signals[f"SIG{name}"])
        stderr = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == STOPPED
    assert f"stopped by {name} after step {steps_done(tmp_path)};" in stderr
    assert not weights.exists()  # they are not the final ones


def test_a_signal_to_the_whole_group(command: list[str], tmp_path: Path) -> None:
    with training(command, tmp_path) as (process, _):
        os.killpg(process.pid, signal.SIGTERM)
        stderr = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == STOPPED
    assert f"stopped by TERM after step {steps_done(tmp_path)};" in stderr


def test_a_signal_to_one_rank_stops_all(command: list[str], tmp_path: Path) -> None:
    with training(command, tmp_path) as (process, ranks):
        os.kill(ranks[1], signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == STOPPED


@pytest.mark.parametrize("comm", COMMS)
def test_usr1_goes_on(command: list[str], comm: str, tmp_path: Path) -> None:
    with training(command, tmp_path, "--comm", comm) as (process, _):
        process.send_signal(signal.SIGUSR1)
        before = steps_done(tmp_path)
        while steps_done(tmp_path) < before + 2:
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == STOPPED


def test_a_second_signal_ends_at_once(command: list[str], tmp_path: Path) -> None:
    for second, wait_s in ((signal.SIGINT, 0.2), (signal.SIGTERM, 1.2)):
        with training(command, tmp_path) as (process, ranks):
            os.kill(ranks[1], signal.SIGSTOP)  # the step does not end
            process.terminate()
            time.sleep(wait_s)  # or the two are one
            process.send_signal(second)
            stderr = process.communicate(timeout=LIMIT_S)[1]
        assert process.returncode == STOPPED_AT_ONCE
        assert f"stopped by {second.name.removeprefix('SIG')} at once" in stderr


def test_a_signal_that_is_passed_on_is_one(command: list[str], tmp_path: Path) -> None:
    """As a process group and a shell in it may send TERM twice."""
    with training(command, tmp_path) as (process, ranks):
        os.kill(ranks[1], signal.SIGSTOP)  # the step does not end between them
        process.terminate()
        time.sleep(0.2)
        process.terminate()
        time.sleep(0.2)
        os.kill(ranks[1], signal.SIGCONT)
        stderr = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == STOPPED
    assert "stopped by TERM after step" in stderr


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_passes_the_deadline(
    command: list[str], comm: str, victim: int, tmp_path: Path
) -> None:
    with training(command, tmp_path, "--comm", comm, "--deadline", "1.5") as (process, ranks):
        os.kill(ranks[victim], signal.SIGSTOP)
        stderr = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 1
    errors = [line for line in stderr.splitlines() if "error" in line]
    assert len(errors) == 1, errors
    assert re.search(
        rf"rank {1 - victim}: rank {victim}, which is stopped \(pid {ranks[victim]}\), "
        r"has not moved for 1.5 s at step \d+.*; this rank was waiting in \w+",
        errors[0],
    ), errors


def test_a_stop_that_does_not_come_about(command: list[str], tmp_path: Path) -> None:
    """A rank that is stopped while the others are asked to stop: the deadline ends that."""
    with training(command, tmp_path, "--deadline", "1.5") as (process, ranks):
        os.kill(ranks[0], signal.SIGSTOP)
        process.terminate()
        stderr = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 1
    assert "rank 0, which is stopped" in stderr


@pytest.mark.parametrize("comm", COMMS)
def test_a_stopped_rank_under_torchrun(command: list[str], comm: str, tmp_path: Path) -> None:
    metrics, stderr = tmp_path / "metrics.jsonl", tmp_path / "stderr"
    words = [*command, "--comm", comm, "--metrics", str(metrics), "--deadline", "2"]
    with torchrun(words, stderr, "--nproc-per-node", "2") as process:
        wait_for_step(metrics, process)
        ranks = children(process.pid)
        os.kill(ranks[1], signal.SIGSTOP)
        process.wait(timeout=LIMIT_S)
        assert ended(ranks)
    assert process.returncode != 0
    said = [line for line in stderr.read_text().splitlines() if "fsdp-run: error" in line]
    assert len(said) == 1, said
    assert re.search(r"rank 0: rank 1, which .*, has not moved for 2 s.* at step \d+", said[0]), (
        said
    )


def test_torchrun_is_stopped(command: list[str], tmp_path: Path) -> None:
    metrics, stderr = tmp_path / "metrics.jsonl", tmp_path / "stderr"
    with torchrun(
        [*command, "--metrics", str(metrics)], stderr, "--nproc-per-node", "2"
    ) as process:
        wait_for_step(metrics, process)
        ranks = children(process.pid)
        process.terminate()
        process.wait(timeout=LIMIT_S)
        assert ended(ranks)
    assert f"stopped by TERM after step {steps_done(tmp_path)};" in stderr.read_text()


def test_torchrun_restarts(command: list[str], tmp_path: Path) -> None:
    """The second attempt finds the store of the first one, and reads nothing of it."""
    metrics, stderr = tmp_path / "metrics.jsonl", tmp_path / "stderr"
    words = [*command, "--comm", "gloo", "--metrics", str(metrics)]
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    with torchrun(words, stderr, *options) as process:
        wait_for_step(metrics, process)
        first = children(process.pid)
        os.kill(first[1], signal.SIGKILL)
        assert ended(first)
        metrics.unlink()
        wait_for_step(metrics, process)
        second = children(process.pid)
        process.terminate()
        process.wait(timeout=LIMIT_S)
        assert ended(second)
    assert f"stopped by TERM after step {steps_done(tmp_path)};" in stderr.read_text()


# --- other launchers


def slurm(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def open_mpi(rank: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
    }


def pmi(rank: int) -> dict[str, str]:
    return {"PMI_SIZE": "2", "PMI_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}


def start(command: list[str], variables: dict[str, str], *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, *options], env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("launcher", [slurm, open_mpi, pmi])
def test_variables_of_other_launchers(
    command: list[str], launcher: Callable[[int], dict[str, str]]
) -> None:
    port = {"MASTER_PORT": str(free_port())}
    words = [*command, "--max-steps", "2"]
    words.remove("--steps")
    words.remove(str(ENDLESS.steps))
    ranks = [start(words, launcher(rank) | port) for rank in range(2)]
    outputs = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "step:  2" in outputs[0]
    assert outputs[1] == ""


def test_variables_that_contradict_each_other(command: list[str]) -> None:
    torch_like = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    done = execute(command, env={**os.environ, **slurm(1), **torch_like}, check=False)
    assert done.returncode == 2
    assert "RANK=0 and SLURM_PROCID=1: expected equal ranks" in done.stderr


def test_a_rank_that_never_starts(command: list[str]) -> None:
    port = {"MASTER_PORT": str(free_port())}
    with start(command, slurm(0) | port, "--deadline", "1") as process:
        stderr = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 1
    assert stderr.count("\n") == 1
    assert "rank 0: the ranks did not find each other: rank 1 has not come in 1 s" in stderr


def test_a_signal_while_ranks_are_awaited(command: list[str]) -> None:
    port = {"MASTER_PORT": str(free_port())}
    with start(command, slurm(0) | port) as process:
        blocked = 0
        while not blocked >> (signal.SIGTERM - 1) & 1:  # it listens from then on
            status = Path(f"/proc/{process.pid}/status").read_text()
            blocked = int(re.search(r"SigBlk:\s*(\w+)", status)[1], 16)  # type: ignore[index]
        process.terminate()
        stderr = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == STOPPED
    assert "rank 0: stopped by TERM before the ranks had met" in stderr


# --- limits, and what people watch


def test_time_limit(command: list[str]) -> None:
    done = execute(
        [*command, "--nproc", "2", "--time-limit", "0:00:02"], timeout=LIMIT_S, check=False
    )
    assert done.returncode == STOPPED
    assert re.search(r"stopped by --time-limit after step \d+;", done.stderr)


@pytest.mark.parametrize("value", ["0", "-1", "1:00", "0:60:00", "1e3", "nan", "1:2:3:4"])
def test_durations_that_are_none(command: list[str], value: str) -> None:
    done = execute([*command, f"--time-limit={value}"], check=False)
    assert done.returncode == 2
    assert f'--time-limit: expected seconds, or HH:MM:SS, got "{value}"' in done.stderr


def read_scalars(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard_and_utilization(llama: Captured, plan: Path, tmp_path: Path) -> None:
    metrics, folder = tmp_path / "metrics.jsonl", tmp_path / "events" / "run"
    words = run_command(llama, plan, Case(LLAMA, ADAMW_FUSED, steps=3))
    words += ["--nproc", 2, "--metrics", metrics, "--tensorboard", folder, "--peak-flops", "1e11"]
    done = execute(words)
    assert re.search(r"tflops: \S+  mfu: \S+%  eta: 0:00:0\d", done.stderr), done.stderr
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    events = read_scalars(folder)
    for tag, values in {
        "loss_metrics/global_avg_loss": [line["loss"] for line in lines],
        "throughput(tps)": [line["tokens_per_s"] for line in lines],
        "lr": [line["lr"] for line in lines],
        "tflops": [line["tflops"] for line in lines],
        "mfu(%)": [100 * line["mfu"] for line in lines],
    }.items():
        written = [(event.step, event.value) for event in events.Scalars(tag)]
        # In float32, from 9 digits or the like.
        assert written == [(i + 1, pytest.approx(x, rel=1e-4)) for i, x in enumerate(values)], tag


@pytest.fixture(scope="module")
def broken_weights(llama: Captured, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("broken") / "weights.safetensors"
    weights = load_file(llama.weights)
    next(iter(weights.values())).view(-1)[0] = torch.nan
    save_file(weights, path)
    return path


@pytest.mark.parametrize("comm", COMMS)
def test_halt_on_nonfinite(
    llama: Captured, plan: Path, broken_weights: Path, comm: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    words: list[Any] = run_command(llama, plan, Case(LLAMA, ADAMW_FUSED, steps=20))
    words += ["--nproc", 2, "--weights", broken_weights, "--save-weights", out, "--comm", comm]
    done = execute([*words, "--halt-on-nonfinite"], check=False)
    assert done.returncode == 1
    assert re.search(r"error: rank \d: step \d+: rank \d: the \w+ .*", done.stderr), done.stderr
    assert not out.exists()


def test_dry_run(llama: Captured, plan: Path, tmp_path: Path) -> None:
    words = run_command(llama, plan, Case(LLAMA, ADAMW_FUSED, steps=3))
    words += ["--nproc", 2, "--dry-run", "--save-weights", tmp_path / "weights.safetensors"]
    words += ["--metrics", tmp_path / "metrics.jsonl", "--tensorboard", tmp_path / "events"]
    done = execute(words)
    assert done.stderr == ""
    for line in [
        "ranks            2 on cpu by shm",
        "tokens a step    128",
        f"data             {llama.data} (safetensors, 22 samples), in order; 5.5 steps an epoch",
        f"weights          {llama.weights}",
    ]:
        assert line in done.stdout.splitlines()
    assert list(tmp_path.iterdir()) == []


DRY_ERRORS = {
    "world_size": (["--nproc", "3"], "the plan is for world size 2, got --nproc 3"),
    "metrics": (["--metrics", "/nowhere/metrics"], "/nowhere/metrics: cannot write: No such"),
    "weights": (["--weights", "/nowhere/weights"], "/nowhere/weights"),
    "data": (["--data", "/nowhere/data"], "/nowhere/data"),
}


@pytest.mark.parametrize("name", DRY_ERRORS)
def test_dry_run_finds(plan: Path, name: str) -> None:
    options, message = DRY_ERRORS[name]
    done = execute([BIN / "fsdp-run", plan, "--dry-run", *options], check=False)
    assert done.returncode == 2
    assert message in done.stderr
