"""Runs a module's main(), or a script, as the ranks of one job.

Each rank is a process forked from one that has imported torch and the PRELOAD modules and done
nothing else, so that a job starts in a tenth of a second instead of several. It sees what torchrun
would set: RANK, WORLD_SIZE, MASTER_ADDR and so on; its arguments are sys.argv.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import threading
import time
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

# Modules imported before the fork; add to it before the first job.
PRELOAD = ["train_fsdp2"]

_HERE = str(Path(__file__).resolve().parent)
_context = multiprocessing.get_context("forkserver")
_starting = threading.Lock()


def run_ranks(
    module: str, args: list[Any], world: int, *, timeout: float = 300, attempts: int = 1
) -> None:
    """Runs `module`.main() with `args` in `world` ranks; the first that fails ends the others. A
    run in which a rank dies of a signal is made again while there are attempts left.
    """
    words = [str(word) for word in args]
    for left in reversed(range(attempts)):
        status, output = _run_once(module, words, world, timeout)
        if left == 0 or all(code >= 0 for code in status):
            break
    if any(status):
        raise RuntimeError(f"ranks ended with {status}: {module} {' '.join(words)}\n{output}")


def run_script(
    script: Path, world: int, *, timeout: float = 200
) -> tuple[list[int | None], list[str]]:
    """Runs a script that ends by os._exit in `world` ranks, of which none ends another.

    Returns their exit statuses (None after the timeout) and what each wrote to stderr.
    """
    with _starting:
        _start_server()
    deadline = time.monotonic() + timeout
    environments = _environments(world)
    with tempfile.TemporaryDirectory() as directory:
        outputs = [Path(directory) / str(rank) for rank in range(world)]
        ranks = [
            _context.Process(target=_enter_script, args=(str(script), environment, str(output)))
            for environment, output in zip(environments, outputs, strict=True)
        ]
        for rank in ranks:
            rank.start()
        try:
            for rank in ranks:
                rank.join(max(deadline - time.monotonic(), 0))
            status = [rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        return status, [output.read_text() if output.exists() else "" for output in outputs]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environments(world: int) -> list[dict[str, str]]:
    """What torchrun would set, by rank."""
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [common | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(world)]


def _run_once(module: str, words: list[str], world: int, timeout: float) -> tuple[list[int], str]:
    """Exit status of the ranks that ended by themselves, and the output of all."""
    with _starting:  # the benchmark runs two jobs at once
        _start_server()
    deadline = time.monotonic() + timeout
    with tempfile.NamedTemporaryFile("w+") as output:
        ranks = [
            _context.Process(
                target=_enter,
                args=(module, words, environment, output.name),
            )
            for environment in _environments(world)
        ]
        for rank in ranks:
            rank.start()
        status: list[int] = []
        try:
            running = ranks
            while running and not any(status):
                left = deadline - time.monotonic()
                if not connection.wait([rank.sentinel for rank in running], max(left, 0)):
                    raise RuntimeError(f"expected an end in {timeout} s of: {module} {words}")
                for rank in running:
                    rank.join(0)
                running = [rank for rank in ranks if rank.exitcode is None]
                status = [rank.exitcode for rank in ranks if rank.exitcode is not None]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        output.seek(0)
        return status, output.read()


@functools.cache
def _start_server() -> None:
    """Starts the process that ranks are forked from; its environment is theirs."""
    # Python 3.11 does not pass sys.path to the modules to preload, and passes over what it misses.
    path = os.pathsep.join([_HERE, *sys.path])
    with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
        _context.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()


def _enter(module: str, words: list[str], environment: dict[str, str], output: str) -> None:
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = [module, *words]
    importlib.import_module(module).main()


def _enter_script(script: str, environment: dict[str, str], output: str) -> None:
    os.environ.update(environment)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
