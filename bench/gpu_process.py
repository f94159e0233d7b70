"""Runs programs under a deadline, each in a process group of its own. The standard library alone.

Groups and not sessions: who ends the session that called ends what runs here too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

INTERVAL = 0.05
# What a killed process may take to go; one that waits in the driver never does.
GOES_WITHIN = 10.0


class RunFailed(Exception):
    """An exit status was not 0, with the last error line that was written, or the deadline is
    over."""

    by_signal = False


class Deadline:
    """Of an item: all runs that the item needs share it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def is_over(self) -> bool:
        return time.monotonic() > self._end

    def error(self, what: str = "") -> RunFailed:
        return RunFailed(f"hung: deadline of {self.seconds:g} s{what}")


def last_line(text: str, status: int) -> str:
    """The last line that names an error, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or [f"exit status {status}"])[-1][:300]


def tail(path: Path, size: int = 1 << 16) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")


def start(
    stack: contextlib.ExitStack,
    command: Sequence[Any],
    env: Mapping[str, str],
    stdout: IO[bytes] | int,
    stderr: IO[bytes] | int,
) -> subprocess.Popen[bytes]:
    """A process that `stack` ends. Signals wait meanwhile: they leave none that nobody ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        process = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            process_group=0,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
        )
        stack.callback(end, process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Leaves it unreaped, so that its group's number stays its own until end()."""
    state = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return state is not None


def end(process: subprocess.Popen[bytes]) -> int:
    """Kills what is left of the group. The exit status; of a process that cannot be killed, that
    of a killed one."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GOES_WITHIN)
    return -signal.SIGKILL if process.returncode is None else process.returncode


def run_program(
    command: Sequence[Any], deadline: Deadline, log: Path, env: Mapping[str, str] | None = None
) -> int:
    """The exit status; what the program wrote is in `log`. Throws RunFailed by the deadline."""
    with log.open("wb") as file, contextlib.ExitStack() as stack:
        process = start(stack, command, env or {}, file, subprocess.STDOUT)
        while not has_exited(process):
            if deadline.is_over():
                raise deadline.error()
            time.sleep(INTERVAL)
        return end(process)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_ranks(
    command: Sequence[Any],
    world: int,
    env: Callable[[int], dict[str, str]],
    deadline: Deadline,
    log: Path,
) -> None:
    """Runs a command as each of `world` ranks, each as if alone on a host with this GPU. Adds what
    all wrote on stderr to `log`. Throws RunFailed by the first that fails or by the deadline; the
    others are killed then."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        ranks: list[subprocess.Popen[bytes]] = []
        logs: list[IO[bytes]] = [
            stack.enter_context(tempfile.TemporaryFile()) for _ in range(world)
        ]
        stack.callback(append_logs, log, command, logs)
        for rank in range(world):
            own = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            texts = {name: str(value) for name, value in own.items()} | env(rank)
            ranks.append(start(stack, command, texts, subprocess.DEVNULL, logs[rank]))
        done: set[int] = set()
        while len(done) < world:
            for rank, process in enumerate(ranks):
                if rank in done or not has_exited(process):
                    continue
                done.add(rank)
                if status := end(process):
                    line = last_line(text_of(logs[rank]), status)
                    error = RunFailed(f"rank {rank}: {line}")
                    error.by_signal = status < 0
                    raise error
            if len(done) < world and deadline.is_over():
                left = [str(rank) for rank in range(world) if rank not in done]
                raise deadline.error(f"; still ran: rank {', '.join(left)}")
            time.sleep(INTERVAL)


def text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def append_logs(log: Path, command: Sequence[Any], logs: list[IO[bytes]]) -> None:
    with log.open("a") as file:
        file.write(f"$ {' '.join(map(str, command))}\n")
        for rank, written in enumerate(logs):
            file.write(f"--- rank {rank}\n{text_of(written)}")
