"""Runs the project's programs without their start, which takes longer than many a test's run.

A program is started once by each process of pytest, and forks for each run: the fork begins at
main(), in the environment in which this module was imported (unittests/Support/ForkServer.cpp).
"""

from __future__ import annotations

import atexit
import functools
import os
import select
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from pathlib import Path

_INT = struct.Struct("i")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


_ENVIRONMENT = _environment()


class ForkServer:
    """A started program. Threads may share it."""

    def __init__(self, program: Path, library: Path, loaded: Path | None) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        number = theirs.fileno()
        variables = {"LD_PRELOAD": str(library), "FORK_SERVER": str(number)}
        if loaded is not None:
            variables["FORK_SERVER_LOAD"] = str(loaded)
        with theirs:
            self._process = subprocess.Popen(
                [program],
                env=_ENVIRONMENT | variables,
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
            )
        atexit.register(self.close)

    def run(self, words: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
        """As subprocess.run(), with the output captured as text."""
        end = time.monotonic() + timeout
        text = "".join(f"{word}\0" for word in (os.getcwd(), *words)).encode()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            reads, writes = os.pipe()
            with open(reads, "rb", buffering=0) as status:
                with self._lock:
                    socket.send_fds(self._socket, [text], [out.fileno(), err.fileno(), writes])
                os.close(writes)
                (pid,) = _INT.unpack(status.read(_INT.size))
                if not select.select([status], [], [], max(end - time.monotonic(), 0))[0]:
                    os.kill(pid, signal.SIGKILL)
                    raise subprocess.TimeoutExpired(words, timeout)
                code = os.waitstatus_to_exitcode(*_INT.unpack(status.read(_INT.size)))
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(words, code, *texts)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def _server(program: Path) -> ForkServer | None:
    """That of a program of a build that has what it needs."""
    libraries = program.parent.parent / "lib"
    library, reader = libraries / "fork_server.so", libraries / "libFSDPCaptureReader.so"
    if not library.exists():
        return None
    return ForkServer(program, library, reader if program.name == "fsdp-opt" else None)


def run(words: list[str], timeout: float) -> subprocess.CompletedProcess[str] | None:
    """None where the program is to be started: one without a server, or in another environment
    than this module found."""
    program = Path(words[0])
    if program.name not in ("fsdp-opt", "fsdp-run", "fsdp-checkpoint"):
        return None
    if _environment() != _ENVIRONMENT or (server := _server(program)) is None:
        return None
    return server.run(words, timeout)
