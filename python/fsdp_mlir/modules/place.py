"""Places that hold what code reads, and the kinds of what they hold."""

from __future__ import annotations

import enum
import random
import sys
import sysconfig
from collections import OrderedDict, defaultdict, deque
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

SCALARS = (
    *(bool, int, float, complex, str, bytes, type(None), enum.Enum),
    *(torch.dtype, torch.device, torch.Size),
)
CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, frozenset, deque)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
DATA = (*SCALARS, *CONTAINERS, *GENERATORS, Tensor, np.ndarray, ContextVar)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_NUMBERS = (bool, int, float, complex)
Code = FunctionType | ModuleType | type


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


@dataclass(frozen=True)
class Place:
    """A name in a namespace or a class, the variable of a cell, or a slot of an object; `label` is
    for messages."""

    owner: Any
    name: str
    label: str
    attribute: bool = False  # of an object that code reads by its attributes, such as a trainer
    library: bool = False  # of a module or a class of a library, which a patch may replace

    @property
    def key(self) -> tuple[int, str]:
        """Identifies the place, as long as it exists."""
        return id(self.owner), self.name

    def value(self) -> Any:
        if isinstance(self.owner, CellType):
            try:
                return self.owner.cell_contents
            except ValueError:
                return ABSENT
        if not isinstance(self.owner, (dict, type)):
            return getattr(self.owner, self.name, ABSENT)
        names = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        return names.get(self.name, ABSENT)

    def holds(self, value: Any) -> bool:
        """Whether it is what value() gave. A part of a type that is written in C may be a number
        that is made at each look, and cannot be set."""
        now = self.value()
        return now is value or (
            type(now) is type(value) and type(now) in _NUMBERS and repr(now) == repr(value)
        )

    def put(self, value: Any) -> None:
        """Sets it to what value() gave."""
        name = "cell_contents" if isinstance(self.owner, CellType) else self.name
        if isinstance(self.owner, dict):
            remove, assign = self.owner.__delitem__, self.owner.__setitem__
        else:
            remove, assign = partial(delattr, self.owner), partial(setattr, self.owner)
        if value is ABSENT:
            remove(name)
        else:
            assign(name, value)


def is_library(value: Code) -> bool:
    """Of the standard library, of an installed package, or built in."""
    if isinstance(value, FunctionType):
        file: str | None = value.__code__.co_filename
    else:
        module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
        if getattr(module, "__name__", "") == "__main__":
            return False
        file = getattr(module, "__file__", None)
        if file is None and module is not None and getattr(module, "__spec__", module) is None:
            return False  # made by code, and not imported
    return file is None or file.startswith(_LIBRARIES)
