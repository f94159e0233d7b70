"""fsdp-opt for the plans of a process: one program, which makes each of them.

It takes a while to load PyTorch's library; so it is started before there is something to compile,
does that during a capture, and waits for further steps. It ends when none has come for a minute, or
with this process.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

from fsdp_mlir.support import build
from fsdp_mlir.support.errors import CompileError, warn

# In fsdp-opt's warning that the plan does not have FSDP2's bits (InsertAccumulation.cpp).
_OTHER_BITS = "differ by rounding"


class _Program:
    """A running `fsdp-opt --requests`."""

    def __init__(self, path: Path) -> None:
        self.version = _version()
        self._process = subprocess.Popen(
            [path, "--requests"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        # Lest it stays as a zombie when it has waited for long enough.
        threading.Thread(target=self._process.wait, name="fsdp-opt", daemon=True).start()

    def answer(self, request: str) -> tuple[int, str]:
        """The status of a run with these arguments, and what it wrote to stderr. EOFError or
        BrokenPipeError if the program has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(os.fsencode(request) + b"\0")
        self._process.stdin.flush()
        head = self._process.stdout.readline()
        if not head.endswith(b"\n"):
            raise EOFError
        status, size = map(int, head.split())
        text = self._process.stdout.read(size)
        if len(text) != size:
            raise EOFError
        return status, text.decode(errors="replace")

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        with suppress(OSError):  # what was not written to a program that has ended
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def leave(self) -> None:
        """In a process forked from the one that started it, which alone may ask it."""
        null = os.open(os.devnull, os.O_RDWR)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.dup2(null, pipe.fileno(), inheritable=False)
        os.close(null)
        self._process.returncode = 0


def _version() -> list[tuple[Path, int, int]]:
    paths = [build.built(name) for name in build.COMPILER]
    return [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in paths]


# A diagnostic at a parameter, which has no line in a file, or at nothing.
_OWN = "fsdp-opt: error: "

_lock = threading.Lock()
_running: _Program | None = None


def start() -> None:
    """Starts fsdp-opt if it does not run."""
    with _lock:
        _program()


def make_plan(folder: Path, world_size: int) -> list[str]:
    """Makes plan.json from the model.pt and policy.yaml in `folder`; returns fsdp-opt's warnings,
    which are shown. CompileError if the plan has not FSDP2's bits."""
    folder = folder.absolute()  # the program's own folder is where it was started
    archive, policy, plan = (
        # As LLVM reads arguments from a file.
        "".join(f"\\{each}" if each in " \t\n\\'\"" else each for each in str(folder / name))
        for name in ("model.pt", "policy.yaml", "plan.json")
    )
    arguments = f"{archive} --config {policy} --world-size {world_size} --emit plan -o {plan}"
    status, errors = _answer(arguments)
    lines = errors.splitlines()
    if status != 0:
        found = [line for line in lines if "error: " in line]
        raise CompileError(
            found[0].removeprefix(_OWN) if found else f"fsdp-opt ended with status {status}"
        )
    warned = [line.partition(": warning: ")[2] for line in lines if ": warning: " in line]
    for text in warned:
        if _OTHER_BITS in text:
            raise CompileError(text)
        warn(text)
    return warned


def _answer(arguments: str) -> tuple[int, str]:
    with _lock:
        for is_last in (False, True):
            try:
                return _program().answer(arguments)
            except (EOFError, BrokenPipeError):  # it has waited for long enough
                _close()
                if is_last:
                    raise CompileError("fsdp-opt ended before it had made a plan") from None
            except BaseException:  # the answer is still to come
                _close()
                raise
    raise AssertionError


def _program() -> _Program:
    global _running
    path = build.built("bin/fsdp-opt")
    if _running is not None and _running.version != _version():
        _close()
    if _running is None:
        _running = _Program(path)
    return _running


@atexit.register
def _close() -> None:
    global _running
    if _running is not None:
        _running.close()
    _running = None


def _leave() -> None:
    global _running, _lock
    if _running is not None:
        _running.leave()
    _running, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_leave)
