"""What a step reads of its process while it is recorded: files and the like, which are no part of
it, and variables of the environment."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest import mock

from fsdp_mlir.support import build

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


EVERY = "*"  # in place of a variable's name


@dataclass
class Reads:
    """`others`: files and the like, and the variables that each process, run or job has of its own.
    `variables`: the names of all variables; EVERY if code looked which there are."""

    others: list[str] = field(default_factory=list)
    variables: set[str] = field(default_factory=set)

    def add(self, variable: str) -> None:
        self.variables.add(variable)
        if is_of_process(variable):
            self.others.append(f"${variable}")


class _Recording:
    """What the thread that records reads."""

    def __init__(self) -> None:
        self.thread = 0  # that records; none if zero
        self.reads = Reads()

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if threading.get_ident() != self.thread or _writes(event, arguments):
            return
        if _is_of_the_step(sys._getframe(1)):
            self.reads.others.append(_named(arguments[0]))

    def read(self, variable: Any) -> None:
        """By the caller of the caller."""
        if threading.get_ident() == self.thread and _is_of_the_step(sys._getframe(2)):
            self.reads.add(os.fsdecode(variable) if isinstance(variable, bytes) else str(variable))


_recording = _Recording()


@contextmanager
def noted() -> Iterator[Reads]:
    """In the body, what Python code reads in this thread, except this package's and imports."""
    outer = _recording.thread, _recording.reads
    _recording.thread, _recording.reads = threading.get_ident(), Reads()
    audit = build.runtime().audit
    kind = type(os.environ)
    get, iterate, count = kind.__getitem__, kind.__iter__, kind.__len__

    def getitem(self: Any, variable: Any) -> Any:  # all ways to read a variable lead here
        _recording.read(variable)
        return get(self, variable)

    def iter_(self: Any) -> Any:
        _recording.read(EVERY)
        return iterate(self)

    def len_(self: Any) -> int:
        _recording.read(EVERY)
        return count(self)

    seen = {"__getitem__": getitem, "__iter__": iter_, "__len__": len_}
    audit(sorted(_EVENTS), _recording.hook)
    try:
        with mock.patch.multiple(kind, **seen):
            yield _recording.reads
    finally:
        _recording.thread, _recording.reads = outer
        if not _recording.thread:
            audit([], None)


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
