"""The errors of the package, and where in the model's source it arose."""

from __future__ import annotations

import dis
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

from fsdp_mlir.support.formulas import Formula

_TORCH = str(Path(torch.__file__).parent) + os.sep
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_MODELS = _PACKAGE + "models" + os.sep
_WRAPPERS = (_TORCH + "_compile.py", _TORCH + "_dynamo" + os.sep)
_CALLERS: set[str] = set()

Location = tuple[str, int]

# A place in code.
Where = tuple[CodeType, int]

# How the error of a step that stops begins; the model's line follows.
STOPS = "the data decide otherwise than those that the step was captured with: "


class CaptureError(RuntimeError):
    """A model, or its arguments, cannot be captured. The message is one line. Of an integer that
    cannot be read, `most` is a bound of its magnitude, if one is known. `casts`: a call of `float`
    or `int` could not read it. `within`: the modules whose calls it has left, the innermost first,
    if somebody asks for them. Of a truth value, `expected` is what it probably is, or what an
    assertion demands."""

    most: int | None = None
    casts = False
    expected: bool | None = None
    within: tuple[torch.nn.Module, ...] = ()


class FirstStepError(CaptureError):
    """The step makes a tensor once that each later step reads: it can be captured after that."""


class EvaluationError(CaptureError):
    """Forward in eval mode does what a compiled evaluation does not: no plan has it."""


class CountedError(CaptureError):
    """Each step changes numbers that its code holds, or appends to lists; `keys` are those of their
    places. `path`: of the first, which is the same in each message."""

    def __init__(self, message: str, keys: Collection[tuple[int, str]], path: str) -> None:
        super().__init__(message)
        self.keys, self.path = keys, path


class DrawnError(CaptureError):
    """A random draw alone decides it."""


class NumberError(CaptureError):
    """A step takes a number that follows from what it is given, of the value `name`, for more than
    an operand. `truth(names, formula)` is the truth value of a formula over such values, on which
    the step relies from then on; None if it cannot. `where`: the place in the code that reads the
    number."""

    def __init__(
        self, message: str, name: str, truth: Callable[[Sequence[str], Formula], bool | None]
    ) -> None:
        super().__init__(message)
        self.name, self.truth = name, truth
        self.where: Where | None = None

    def forget(self) -> None:
        """The recording has ended."""
        self.truth = lambda *_: None


class AssumesError(CaptureError):
    """The step assumes something, and the plan that was asked for cannot be put back."""


class AssertsError(CaptureError):
    """An assertion would end a step that could have gone another way."""


class BreakError(CaptureError):
    """A module that runs in Python does not do what it was seen to do. `learned`: what it does is
    known now, and another recording has it."""

    learned = False


class OtherwiseError(CaptureError):
    """An example decides otherwise than it was guessed; `known` are the truth values so far."""

    def __init__(self, error: CaptureError, known: Sequence[bool], *, evaluating: bool) -> None:
        super().__init__(str(error))
        self.known, self.evaluating = known, evaluating


class CompileError(RuntimeError):
    """The arguments of `compile` cannot become a step. The message is one line."""


def calls_the_model(file: str) -> None:
    """Declares that code in this file calls the model: no caller of that code belongs to the
    model."""
    _CALLERS.add(file)


class SourceMap:
    """Finds the model source line of a Python frame: that of the innermost frame outside PyTorch
    and capture.

    The package's own models count as model source. Answers per file are cached.
    """

    def __init__(self) -> None:
        self._skip: dict[str, bool] = {}

    def is_model(self, code: CodeType) -> bool:
        name = code.co_filename
        skip = self._skip.get(name)
        if skip is None:
            skip = is_ours(name) or name.startswith((_TORCH, "<")) or name.endswith("contextlib.py")
            self._skip[name] = skip
        return not skip

    def frame(self, frame: FrameType | None) -> Location | None:
        """(file, line) of `frame` or of its nearest caller in model source."""
        while frame is not None:
            if frame.f_code.co_filename in _CALLERS:
                return None  # past the call of the model: the rest is capture's caller
            if self.is_model(frame.f_code):
                return frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back
        return None

    def traceback(self, traceback: TracebackType | None) -> Location | None:
        """(file, line) of the innermost frame of an exception that is in model source."""
        found: Location | None = None
        while traceback is not None:
            if self.is_model(traceback.tb_frame.f_code):
                found = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
            traceback = traceback.tb_next
        return found


def model_frame() -> FrameType:
    """The innermost frame outside the recorder and its wrappers: the code that runs a captured
    call."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        is_ours(frame.f_code.co_filename) or frame.f_code.co_filename.startswith(_WRAPPERS)
    ):
        frame = frame.f_back
    return frame


def expects_errors() -> bool:
    """Whether the model's code that runs now is in the body of a `try` with handlers."""
    frame: FrameType | None = model_frame()
    while frame is not None and not is_ours(frame.f_code.co_filename):
        if not in_torch(frame.f_code.co_filename):
            entries = dis._parse_exception_table(frame.f_code)  # type: ignore[attr-defined]
            if any(e.start <= frame.f_lasti < e.end and not e.lasti for e in entries):
                return True
        frame = frame.f_back
    return False


def warn(text: str) -> None:
    """A warning at the line that called this package."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def is_ours(file: str) -> bool:
    """Whether a source file is this package's, and not one of its models."""
    return file.startswith(_PACKAGE) and not file.startswith(_MODELS)


def source_of(thing: object) -> Location | None:
    """(file, line) where a function, a class or a module's `forward` is defined."""
    if isinstance(thing, torch.nn.Module):
        thing = type(thing).forward
    try:
        return inspect.getsourcefile(thing) or "", inspect.getsourcelines(thing)[1]  # type: ignore[arg-type]
    except (OSError, TypeError):
        return None


def short_path(path: str) -> str:
    """`path` relative to the working folder or to the import root that holds it."""
    for root in [os.getcwd(), *sorted((p for p in sys.path if p), key=len, reverse=True)]:
        prefix = os.path.join(os.path.abspath(root), "")
        if (
            prefix != os.sep
            and path.startswith(prefix)
            and "site-packages" not in path[len(prefix) :]
        ):
            return path[len(prefix) :]
    return path


def in_torch(path: str) -> bool:
    """Whether a source file is PyTorch's."""
    return path.startswith(_TORCH)


def prefixed(location: Location | None, message: str) -> str:
    """The message in one line, which starts with `file:line: ` where the location is known."""
    prefix = f"{short_path(location[0])}:{location[1]}: " if location else ""
    return prefix + " ".join(message.split())


def located(location: Location | None, message: str) -> CaptureError:
    """A CaptureError that starts with `file:line: ` where the location is known."""
    return CaptureError(prefixed(location, message))
