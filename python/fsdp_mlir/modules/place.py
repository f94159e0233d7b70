"""Places that hold what code reads, and the kinds of what they hold."""

from __future__ import annotations

import argparse
import array
import ctypes
import enum
import gc
import os
import random
import sys
import sysconfig
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from types import (
    CellType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_mlir.modules.names import names_in

SCALARS = (
    *(bool, int, float, complex, str, bytes, type(None), enum.Enum),
    *(torch.dtype, torch.device, torch.Size),
)
CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, frozenset, deque)
# Of bytes that may be written in place; memory that they point to is not theirs.
BUFFERS = (
    *(bytearray, array.array, memoryview),
    *(ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union),
)
POINTERS = (ctypes._Pointer, ctypes._CFuncPtr)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
DATA = (*SCALARS, *CONTAINERS, *BUFFERS, *GENERATORS, Tensor, np.ndarray, ContextVar)
# Without a module of Python or code in it.
PLAIN = (*SCALARS, *GENERATORS, Tensor, np.ndarray)
NAMESPACES = (SimpleNamespace, argparse.Namespace)
_NO_MODELS = {"torch", "numpy", *sys.stdlib_module_names}
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_SITES = ("site-packages", "dist-packages")
_RECORDS = "*.dist-info/RECORD"
_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"
# Of the package, what a model's code may be.
_MODELS = tuple(f"{_PACKAGE}{name}{os.sep}" for name in ("models", "integrations"))
_NUMBERS = (bool, int, float, complex)
_BUILT_IN = {dict, OrderedDict, list, tuple, set, frozenset, deque}
# Of mappings; the classes of views of an OrderedDict are others.
_VIEWS = {MappingProxyType} | {
    type(view)
    for each in ({}, OrderedDict())
    for view in (each.keys(), each.values(), each.items())
}
# Attributes of every module, of hooks for instance.
OF_MODULES = frozenset(vars(nn.Module()))
Code = FunctionType | ModuleType | type


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
REFERENT = "()"  # the name of what a weak reference leads to


def opened(value: Any) -> Any:
    """The mapping behind a view of it, such as a read-only proxy; anything else as it is. What is
    in a class is its own."""
    while type(value) in _VIEWS:
        behind = gc.get_referents(value)[0]
        if isinstance(behind, dict) and "__module__" in behind:
            break
        value = behind
    return value


@lru_cache(maxsize=4096)
def built_in(kind: type) -> Any:
    """Of a class of containers, the base whose methods give the items as they are stored; None for
    other classes. A subclass may compute what its own methods return."""
    if issubclass(kind, torch.Size):
        return None
    return next((base for base in kind.__mro__ if base in _BUILT_IN), None)


def bytes_of(buffer: Any) -> bytes:
    try:
        return memoryview(buffer).tobytes()
    except ValueError:  # it was released
        return b""


def size_of(buffer: Any) -> int:
    """In bytes."""
    try:
        return memoryview(buffer).nbytes
    except ValueError:
        return 0


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

    @property
    def is_referent(self) -> bool:
        """Whether it is that of a weak reference, which is no place to put anything."""
        return self.name == REFERENT

    def holds(self, value: Any) -> bool:
        """Whether it is what value() gave."""
        return is_same(self.value(), value)

    def put(self, value: Any) -> None:
        """Sets it to what value() gave."""
        name = "cell_contents" if isinstance(self.owner, CellType) else self.name
        if isinstance(self.owner, dict):
            remove, assign = self.owner.__delitem__, self.owner.__setitem__
        # Without what a class does then.
        elif isinstance(self.owner, type):
            remove = partial(type.__delattr__, self.owner)
            assign = partial(type.__setattr__, self.owner)
        else:
            remove = partial(object.__delattr__, self.owner)
            assign = partial(object.__setattr__, self.owner)
        if value is not ABSENT:
            assign(name, value)
        elif self.value() is not ABSENT:
            remove(name)


class Lent:
    """Places, by their names, that have something else until `restore`."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = dict(places)
        self._before: dict[str, Any] = {}
        self._lent: dict[str, Any] = {}

    def lend(self, name: str, value: Any) -> None:
        """A second forward of a step may do so again."""
        self._before.setdefault(name, self._places[name].value())
        self._lent[name] = value
        self._places[name].put(value)

    def restore(self) -> None:
        for name, value in self._before.items():
            self._places[name].put(value)
        self._before.clear()
        self._lent.clear()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Does so at the end of the body."""
        try:
            yield
        finally:
            self.restore()


def is_same(now: Any, value: Any) -> bool:
    """Whether a place has the same value at two looks. A part of a type that is written in C may be
    a number that is made at each, and cannot be set."""
    return now is value or (
        type(now) is type(value) and type(now) in _NUMBERS and repr(now) == repr(value)
    )


def is_library(value: Code) -> bool:
    """Of the standard library, of an installed package or this one, or built in."""
    if isinstance(value, FunctionType):
        file: str | None = value.__code__.co_filename
    else:
        module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
        if getattr(module, "__name__", "") == "__main__":
            return False
        file = getattr(module, "__file__", None)
        if file is None and module is not None and getattr(module, "__spec__", module) is None:
            return False  # made by code, and not imported
    return file is None or is_librarys(file)


@lru_cache(maxsize=1 << 14)
def is_librarys(file: str) -> bool:
    if file.startswith(_PACKAGE):
        return not file.startswith(_MODELS)
    return file.startswith(_LIBRARIES) or _is_installed(file)


def _is_installed(file: str) -> bool:
    """Whether it was installed elsewhere, as by `pip install --user` or `--target`."""
    for folder in {each for each in sys.path if os.path.isabs(each)}:
        inside = file.removeprefix(f"{folder}{os.sep}")
        if inside != file and (
            Path(folder).name in _SITES or inside.replace(os.sep, "/") in _installed(folder)
        ):
            return True
    return False


@cache
def _installed(folder: str) -> frozenset[str]:
    """The files there that packages have brought: beside them may be a user's own."""
    records = [record.read_text(errors="replace") for record in Path(folder).glob(_RECORDS)]
    lines = (line for record in records for line in record.splitlines())
    return frozenset(line.partition(",")[0] for line in lines)


def model_class(kind: type) -> type:
    """The class of which FSDP2 has made that; the class itself if it has not."""
    return kind.__bases__[-1] if FSDPModule in kind.__bases__ else kind


def is_no_models(value: Code) -> bool:
    """Of PyTorch, NumPy or the standard library, but no class that FSDP2 has made of another one:
    a loop may set its attributes."""
    if isinstance(value, type) and model_class(value) is not value:
        return False
    return (getattr(value, "__module__", None) or "").partition(".")[0] in _NO_MODELS


def is_ours(value: Any) -> bool:
    """An object of this package, such as the compiled step, which a trainer may hold."""
    package = type(value).__module__.partition(".")[0]
    return package == __name__.partition(".")[0] and not isinstance(value, nn.Module)


def is_part_of(owner: type, item: Any) -> bool:
    """Whether an attribute of an object of that class, a library's, is part of a configuration: a
    namespace, an object of the model's code, or one that has a base with the owner."""
    kind = type(item)
    shared = {base for base in owner.__mro__ if not is_no_models(base)} & {*kind.__mro__}
    return issubclass(kind, NAMESPACES) or bool(shared) or not (callable(item) or is_library(kind))


def is_users(attribute: str) -> bool:
    """Of a module: neither nn.Module's nor what FSDP2 keeps there."""
    return attribute not in OF_MODULES and not attribute.startswith("__composable_api_")


def function_of(member: Any) -> FunctionType | None:
    """That of a method or a property of a class."""
    member = member.fget if isinstance(member, property) else member
    member = getattr(member, "__func__", member)
    return member if isinstance(member, FunctionType) else None


@lru_cache(maxsize=1024)
def slot_names(owner: type) -> tuple[str, ...]:
    """Of attributes that objects of a class have outside of `__dict__`."""
    found = [
        name
        for base in owner.__mro__
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType) and name != "__dict__"  # as SimpleNamespace's
    ]
    return tuple(found)


def has_own_attributes(value: Any) -> bool:
    """Whether to look inside: an object of the model's that is not a function, a class or a part of
    PyTorch."""
    if isinstance(value, (type, nn.Module, partial, *POINTERS)) or callable(value):
        return False
    package = (type(value).__module__ or "").partition(".")[0]
    return package not in ("torch", "builtins") and (
        hasattr(value, "__dict__") or bool(slot_names(type(value)))
    )


def referent(reference: Any) -> Any:
    """The object of a weak reference or a proxy; None if it is gone."""
    if isinstance(reference, weakref.ReferenceType):
        return reference()
    try:
        return reference.__dir__.__self__
    except (ReferenceError, AttributeError):
        return None


def methods_of(owner: type) -> Iterator[FunctionType]:
    for base in owner.__mro__:
        if not is_library(base):
            yield from (value for value in vars(base).values() if isinstance(value, FunctionType))


def read_by_methods(owner: type, names: Set[str]) -> set[str]:
    """These names, and those in methods of a class that they name, and so on."""
    waiting, read = names, set[str]()
    while new := waiting - read:
        read |= new
        members = [vars(base)[x] for base in owner.__mro__ for x in new & vars(base).keys()]
        functions = [each for each in map(function_of, members) if each is not None]
        waiting = set().union(*(names_in(each.__code__) for each in functions))
    return read


def is_costly(value: Any) -> bool:
    """To be compared by its data in each step."""
    if isinstance(value, BUFFERS):
        return size_of(value) > 1 << 20
    return isinstance(value, GENERATORS) or (
        isinstance(value, np.ndarray) and value.nbytes > 1 << 20
    )
