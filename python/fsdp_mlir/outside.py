"""Data that a model's code reads and that is not the model's: attributes of classes, globals, what
functions close over, a loss function's own attributes, of objects found so their data.

Names are found in the code of the model's own methods and of the functions that these name; code
of the standard library and of installed packages is not looked into.
"""

from __future__ import annotations

import enum
import functools
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum)
_DATA = (*_PLAIN, tuple, list, dict, set, frozenset, torch.dtype, torch.device, Tensor, np.ndarray)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


@dataclass(frozen=True)
class Place:
    """A name in a namespace; `key` tells it from others, `label` is for messages."""

    key: tuple[int, str]
    label: str
    namespace: Mapping[str, Any]

    def value(self) -> Any:
        return self.namespace.get(self.key[1], ABSENT)


def places(model: nn.Module, loss: Any) -> list[Place]:
    """Those that the modules of `model` and a loss function read."""
    found = _Places()
    for module in model.modules():
        found.add_class(type(module))
    if isinstance(loss, nn.Module):
        for module in loss.modules():
            found.add_class(type(module))
    elif loss is not None:
        found.add_callable(loss)
    return found.all()


class _Cell(Mapping[str, Any]):
    """A variable of an enclosing function."""

    def __init__(self, name: str, cell: Any) -> None:
        self._name = name
        self._cell = cell

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError as error:  # empty
            raise KeyError(name) from error

    def __iter__(self) -> Iterator[str]:
        return iter((self._name,))

    def __len__(self) -> int:
        return 1


class _Places:
    def __init__(self) -> None:
        self._by_key: dict[tuple[int, str], Place] = {}
        self._seen: dict[int, Any] = {}
        self._functions: list[FunctionType] = []  # to be looked into

    def all(self) -> list[Place]:
        while self._functions:
            self._look_into(self._functions.pop())
        return list(self._by_key.values())

    def add_class(self, owner: type) -> None:
        for base in owner.__mro__:
            if not self._is_new(base) or _is_library(base):
                continue
            for name, value in list(vars(base).items()):
                if isinstance(value, property):
                    value = value.fget
                function = getattr(value, "__func__", value)
                if isinstance(function, FunctionType):
                    self.add_function(function)
                elif not name.startswith("__"):
                    self._add(id(base), f"{base.__qualname__}.{name}", vars(base), name, ())

    def add_callable(self, value: Any) -> None:
        """A loss function: a function, a method, a partial, or an object with attributes."""
        if isinstance(value, FunctionType):
            self.add_function(value)
        elif isinstance(value, MethodType):
            self.add_function(value.__func__)
            self._add_object("(loss)", value.__self__)
        elif isinstance(value, functools.partial):
            self.add_callable(value.func)
            for name in value.keywords:
                self._add(id(value), f"(loss).{name}", value.keywords, name, ())
        else:
            self._add_object("(loss)", value)

    def add_function(self, function: FunctionType) -> None:
        if self._is_new(function) and not _is_library(function):
            self._functions.append(function)

    def _look_into(self, function: FunctionType) -> None:
        names = set(_names(function.__code__))
        known = function.__globals__
        for name in sorted(names & known.keys()):
            self._add(id(known), f"{function.__module__}.{name}", known, name, names)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            label = f"{function.__qualname__}.{name}"
            self._add(id(cell), label, _Cell(name, cell), name, names)

    def _add_object(self, label: str, value: Any) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(value, nn.Module) or not self._is_new(value) or attributes is None:
            return
        if _is_library(type(value)):  # such as a namespace or a configuration: its data alone
            for name in [name for name, item in attributes.items() if isinstance(item, _DATA)]:
                self._add(id(value), f"{label}.{name}", attributes, name, ())
            return
        self.add_class(type(value))
        named = {n for function in _methods(type(value)) for n in _names(function.__code__)}
        for name in sorted({*attributes, *named}):  # an attribute may be set later
            self._add(id(value), f"{label}.{name}", attributes, name, ())

    def _add(
        self,
        owner: int,
        label: str,
        namespace: Mapping[str, Any],
        name: str,
        names: Iterable[str],
    ) -> None:
        """The place and, where it is no data, what lies behind it. `names` are those of the code
        that names it."""
        place = Place((owner, name), label, namespace)
        value = place.value()
        if isinstance(value, ModuleType):
            if not _is_library(value):
                for member in sorted({*names} & vars(value).keys()):
                    self._add(id(value), f"{label}.{member}", vars(value), member, ())
        elif isinstance(value, type):
            self.add_class(value)
        elif isinstance(value, FunctionType):
            if not _is_library(value):
                self._by_key.setdefault(place.key, place)
                self.add_function(value)
        elif isinstance(value, _DATA) or value is ABSENT:
            self._by_key.setdefault(place.key, place)
        elif not callable(value):
            self._add_object(label, value)

    def _is_new(self, value: Any) -> bool:
        """What was seen is kept, so that no other object takes its id."""
        new = id(value) not in self._seen
        self._seen[id(value)] = value
        return new


def _methods(owner: type) -> Iterator[FunctionType]:
    for base in owner.__mro__:
        if not _is_library(base):
            yield from (value for value in vars(base).values() if isinstance(value, FunctionType))


def _names(code: CodeType) -> Iterator[str]:
    """The names in a function's code, and in that of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_library(value: FunctionType | ModuleType | type) -> bool:
    """Of the standard library, of an installed package, or built in."""
    if isinstance(value, FunctionType):
        file: str | None = value.__code__.co_filename
    else:
        module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
        if getattr(module, "__name__", "") == "__main__":
            return False
        file = getattr(module, "__file__", None)
    return file is None or file.startswith(_LIBRARIES)
