"""What code is told that asks whether a tensor is a fake one, as it does to find out whether it is
traced: that it is not. What it would do otherwise is not what the step does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

_PACKAGES = ("torch", __name__.partition(".")[0])
_FOLDERS = tuple(f"{Path(sys.modules[name].__file__ or '').parent}/" for name in _PACKAGES)


class _Kind(type):
    """PyTorch's own code, and this package's, sees the class that the other stands for."""

    def __instancecheck__(cls, value: Any) -> bool:
        asks = sys._getframe(1).f_code.co_filename
        return asks.startswith(_FOLDERS) and isinstance(value, FakeTensor)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, FakeTensor)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is FakeTensor

    def __hash__(cls) -> int:
        return hash(FakeTensor)


class _NoFakeTensor(metaclass=_Kind):
    """It has the other's name, too."""

    __module__, __qualname__ = FakeTensor.__module__, FakeTensor.__qualname__


_NoFakeTensor.__name__ = FakeTensor.__name__


@contextmanager
def no_fakes() -> Iterator[None]:
    """In the body, no tensor is a fake one for a model's code that asks for that class by name."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch._subclasses, "FakeTensor", _NoFakeTensor))
        for module in _modules(len(sys.modules), _Last(sys.modules[next(reversed(sys.modules))])):
            if module.__dict__.get("FakeTensor") is FakeTensor:
                stack.enter_context(patch.object(module, "FakeTensor", _NoFakeTensor))
        yield


@dataclass(frozen=True, eq=False)
class _Last:
    """What was imported last, which need not be hashable. It is kept, and so its id is its own."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Last) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@lru_cache(maxsize=1)
def _modules(count: int, last: _Last) -> list[ModuleType]:
    """Those of others that have the name, of so many of which `last` was imported last: there are
    thousands, and a step is recorded several times."""
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and "FakeTensor" in module.__dict__
        and name.partition(".")[0] not in _PACKAGES
    ]
