"""What a step reads while it is recorded that is no part of it: files and the like, and the
variables of the environment that each process, run or job has of its own."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_PACKAGE = __name__.partition(".")[0]
# Audit events of Python, whose first argument says what is read. What a library opens natively has
# none.
_EVENTS = {"open", "os.listdir", "os.scandir", "sqlite3.connect", "subprocess.Popen"}
# Modules that read source code, which is described by its file.
_READ_CODE = {"importlib", "linecache", "zipimport"}
_PASSED = {"torch", "numpy", *sys.stdlib_module_names}

# What launchers and shells set for each process, run or job.
_OF_PROCESS = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "WORLD_SIZE", "HOSTNAME"),
    *("OMP_NUM_THREADS", "PWD", "OLDPWD", "SHLVL", "_", "TERM", "LINES", "COLUMNS", "TMPDIR"),
    *("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "FSDP_MLIR_CACHE"),
}
_OF_JOB = ("TORCHELASTIC_", "SLURM_", "PBS_", "LSB_", "SSH_", "XDG_", "KUBERNETES_", "PMI", "OMPI_")


def is_of_process(variable: str) -> bool:
    """Whether a variable of the environment differs from process to process, or run to run."""
    return variable in _OF_PROCESS or variable.startswith(_OF_JOB)


class _Recording:
    """What sees events and reads of variables; an audit hook stays as long as its process."""

    def __init__(self) -> None:
        self.thread = 0  # that records; none if zero
        self.found: list[str] = []
        self.installed = False

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.thread or event not in _EVENTS or threading.get_ident() != self.thread:
            return
        if not _writes(event, arguments) and _is_of_the_step(sys._getframe(1)):
            self.found.append(_named(arguments[0]))

    def read(self, variable: Any) -> None:
        if not self.thread or threading.get_ident() != self.thread:
            return
        if not isinstance(variable, str) or not is_of_process(variable):
            return
        if _is_of_the_step(sys._getframe(2)):
            self.found.append(f"${variable}")


_recording = _Recording()


@contextmanager
def noted() -> Iterator[list[str]]:
    """In the body, what Python code reads in this thread, except this package's and imports."""
    if not _recording.installed:
        sys.addaudithook(_recording.hook)
        _recording.installed = True
    outer = _recording.thread, _recording.found
    _recording.thread, _recording.found = threading.get_ident(), []
    kind = type(os.environ)
    get = kind.__getitem__

    def getitem(self: Any, variable: Any) -> Any:  # all ways to read a variable lead here
        _recording.read(variable)
        return get(self, variable)

    kind.__getitem__ = getitem  # type: ignore[method-assign]
    try:
        yield _recording.found
    finally:
        kind.__getitem__ = get  # type: ignore[method-assign]
        _recording.thread, _recording.found = outer


def _writes(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a file is opened only to be written."""
    if event != "open":
        return False
    _, mode, flags = arguments
    if isinstance(mode, str):
        return "r" not in mode and "+" not in mode
    return isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR) == os.O_WRONLY


def _is_of_the_step(frame: FrameType | None) -> bool:
    """Whether the nearest code outside of PyTorch and Python is not this package's."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _READ_CODE or package == _PACKAGE:
            return False
        if package not in _PASSED or package == "__main__":
            return True
        frame = frame.f_back
    return False


def _named(value: Any) -> str:
    return " ".join(str(os.fsdecode(value) if isinstance(value, bytes) else value).split())[:200]
