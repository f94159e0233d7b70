"""Runs a module's main(), or a script, as the ranks of one job.

Each rank is a process forked from one that has imported torch and the PRELOAD modules and done
nothing else, so that a job starts in a tenth of a second instead of several. It sees what torchrun
would set: RANK, WORLD_SIZE, MASTER_ADDR and so on; its arguments are sys.argv.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import multiprocessing
import os
import resource
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

# Modules imported before the fork; add to it before the first job. FSDP2 imports torch._dynamo at
# its first parameter, which takes longer than the job of a test.
PRELOAD = ["torch._dynamo", "train_fsdp2"]

_HERE = str(Path(__file__).resolve().parent)
_context = multiprocessing.get_context("forkserver")
_starting = threading.Lock()


class Ended(NamedTuple):
    """A rank that ended with `status`, or was killed (None), and what it wrote."""

    status: int | None
    stdout: str
    stderr: str


def run_ranks(
    module: str, args: list[Any], world: int, *, timeout: float = 600, attempts: int = 1
) -> None:
    """Runs `module`.main() with `args` in `world` ranks; the first that fails ends the others. A
    run in which a rank dies of a signal is made again while there are attempts left.
    """
    words = [str(word) for word in args]
    for left in reversed(range(attempts)):
        ranks = _run(module, words, world, timeout, together=True)
        if left == 0 or all(rank.status is None or rank.status >= 0 for rank in ranks):
            break
    _check(ranks, module, words)


def run_program(
    script: Path, world: int, *args: Any, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Runs a script with `args` as torchrun would; the first rank that fails ends the others.
    Returns what all of them wrote."""
    words = [str(word) for word in args]
    ranks = _run(str(script), words, world, timeout, together=True)
    _check(ranks, str(script), words)
    stdout, stderr = (
        "".join(texts) for texts in ([r.stdout for r in ranks], [r.stderr for r in ranks])
    )
    return subprocess.CompletedProcess([str(script), *words], 0, stdout, stderr)


def run_script(
    script: Path, world: int, *, timeout: float = 200, awaited: int | None = None
) -> tuple[list[int | None], list[str]]:
    """Runs a script that ends by os._exit in `world` ranks, of which none ends another, until the
    first `awaited` of them have ended.

    Returns the exit statuses (None of those that still ran) and what each wrote to stderr.
    """
    ranks = _run(str(script), [], world, timeout, together=False, awaited=awaited)
    return [rank.status for rank in ranks], [rank.stderr for rank in ranks]


def run_module(
    module: str,
    *args: Any,
    folder: Path,
    variables: Mapping[str, str] | None = None,
    file_bytes: int | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE` with `args` in a folder and with these variables of the environment; it
    may write files of `file_bytes` at most."""
    words = [str(word) for word in args]
    call = functools.partial(_enter_module, str(folder), dict(variables or {}), file_bytes)
    (ended,) = _run(module, words, 1, timeout, together=False, enter=call)
    assert ended.status is not None, f"still runs after {timeout} s: {module} {words}"
    return subprocess.CompletedProcess([module, *words], ended.status, ended.stdout, ended.stderr)


# Below those that systems give to connections: another one would take a free one of these.
_PORTS = range(20_000, 32_000)
_next_port = itertools.count(os.getpid() * 97)


def free_port() -> int:
    """A port that nobody listens at. Each process has an order of its own in which it takes
    them."""
    while True:
        port = _PORTS[next(_next_port) % len(_PORTS)]
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _environments(world: int) -> list[dict[str, str]]:
    """What torchrun would set, by rank; only its store is rank 0's."""
    common = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default"}
    common |= {f"{name}WORLD_SIZE": str(world) for name in ("", "LOCAL_", "ROLE_")}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
    common |= {"TORCHELASTIC_MAX_RESTARTS": "0"}
    return [
        common | {f"{name}RANK": str(rank) for name in ("", "LOCAL_", "ROLE_")}
        for rank in range(world)
    ]


def _run(
    program: str,
    words: list[str],
    world: int,
    timeout: float,
    *,
    together: bool,
    awaited: int | None = None,
    enter: Callable[[str], None] | None = None,
) -> list[Ended]:
    """Runs a module's main(), or a script, or what `enter` makes of `program`; `together`: the
    first that fails ends the others."""
    with _starting:  # the benchmark runs two jobs at once
        _start_server()
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as directory:
        outputs = [Path(directory) / str(rank) for rank in range(world)]
        ranks = [
            _context.Process(target=_enter, args=(program, words, environment, output, enter))
            for environment, output in zip(_environments(world), outputs, strict=True)
        ]
        for output in outputs:
            output.mkdir()
        for rank in ranks:
            rank.start()
        try:
            status = _wait(ranks, deadline, together, awaited)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        return [
            Ended(code, *((output / name).read_text() for name in ("1", "2")))
            for code, output in zip(status, outputs, strict=True)
        ]


def _wait(
    ranks: list[Any], deadline: float, together: bool, awaited: int | None
) -> list[int | None]:
    """The exit statuses when the awaited have ended, or one failed, or the deadline came."""
    while True:
        status = [rank.exitcode for rank in ranks]
        awaiting = zip(ranks[:awaited], status, strict=False)
        running = [rank.sentinel for rank, code in awaiting if code is None]
        if not running or (together and any(status)):
            return status
        if not connection.wait(running, max(deadline - time.monotonic(), 0)):
            return status


def _check(ranks: list[Ended], program: str, words: list[str]) -> None:
    status = [rank.status for rank in ranks]
    if any(code != 0 for code in status):
        output = "".join(f"{rank.stdout}{rank.stderr}" for rank in ranks)
        raise RuntimeError(
            f"ranks ended with {status} (None: still ran at the deadline, or when another failed): "
            f"{program} {' '.join(words)}\n{output}"
        )


@functools.cache
def _start_server() -> None:
    """Starts the process that ranks are forked from; its environment is theirs."""
    # Python 3.11 does not pass sys.path to the modules to preload, and passes over what it misses.
    path = os.pathsep.join([_HERE, *sys.path])
    with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
        _context.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()


def _enter(
    program: str,
    words: list[str],
    environment: dict[str, str],
    output: Path,
    enter: Callable[[str], None] | None,
) -> None:
    os.environ.update(environment)
    for descriptor in (1, 2):
        os.dup2(os.open(output / str(descriptor), os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = [program, *words]
    if enter is not None:
        enter(program)
    elif program.endswith(".py"):
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
    else:
        importlib.import_module(program).main()


def _enter_module(
    folder: str, variables: dict[str, str], file_bytes: int | None, module: str
) -> None:
    os.environ.update(variables)
    os.chdir(folder)
    sys.path.insert(0, folder)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
