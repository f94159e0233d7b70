"""What the code of libraries names that a step may call: any of it may have been patched."""

from __future__ import annotations

import builtins
import enum
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from fsdp_mlir.frontdoor.telling import Teller, Untold, name_of
from fsdp_mlir.modules.names import READERS, own_names, texts_in
from fsdp_mlir.modules.place import CONTAINERS, is_library

_MOST_FUNCTIONS = 20_000
_MOST_ITEMS = 64  # of containers that are described
_BUILTINS = vars(builtins)
# Of PyTorch, the modules whose functions compute; what they name elsewhere is described, but not
# followed. Nor is the standard library.
_FOLLOWED = ("torch.nn.", "torch.functional", "torch._tensor", "torch._jit_internal")
_NUMBERS = (bool, int, float, complex, type(None), enum.Enum, torch.dtype, torch.device)


class LibraryCode:
    """Follows functions to the functions, classes and settings that their names may mean in their
    modules; described in lines."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._seen: dict[int, Any] = {}
        self._waiting: list[FunctionType] = []
        self._modules: set[tuple[int, frozenset[str]]] = set()

    def lines(self, functions: Iterable[Any]) -> Iterator[str]:
        """Those of what is reached from some functions, which are described elsewhere."""
        for function in functions:
            self._follow(function)
        while self._waiting:
            if len(self._seen) > _MOST_FUNCTIONS:
                raise Untold("the code that the step may call is too much")
            yield from self._named_by(self._waiting.pop())

    def _follow(self, value: Any) -> None:
        """The code of something that may be called."""
        if isinstance(value, partial):
            value = value.func
        if isinstance(value, MethodType):
            self._follow_class(type(value.__self__))
            value = value.__func__
        if isinstance(value, FunctionType):
            if self._is_new(value) and _is_followed(value):
                self._waiting.append(value)
        elif not isinstance(value, ModuleType):
            self._follow_class(value if isinstance(value, type) else type(value))

    def _follow_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if not is_library(base) and self._is_new(base):
                for value in vars(base).values():
                    if isinstance(value, FunctionType):
                        self._follow(value)

    def _named_by(self, function: FunctionType) -> Iterator[str]:
        known, names = function.__globals__, _all_names(function.__code__)
        librarys = is_library(function)
        for name in sorted(names):
            if name in known:
                yield from self._member(known, name, names, librarys)
            elif isinstance(_BUILTINS.get(name), FunctionType):  # in place of one in C
                yield from self._member(_BUILTINS, name, names, True)
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            if isinstance(content, (FunctionType, MethodType, partial)):
                self._follow(content)

    def _member(
        self, names: dict[str, Any], name: str, used: frozenset[str], librarys: bool
    ) -> Iterator[str]:
        """A name of a module, and those of a module that it means. Data of other modules than the
        libraries' are described where code reads them (outside.py)."""
        value = names[name]
        label = f"{names.get('__name__')}.{name}"
        if isinstance(value, ModuleType):
            key = id(value), used
            if key not in self._modules:
                self._modules.add(key)
                inner = vars(value)
                for member in sorted(used & inner.keys()):
                    yield from self._member(inner, member, used, is_library(value))
            return
        if librarys and _is_plain(value):
            yield f"reads {label} {self._teller.of_library(value, label)}"
        elif callable(value) and self._is_told(value, librarys):
            yield f"calls {label} {self._teller.of_library(value, label)}"
            self._follow(value)
        elif librarys:
            yield f"holds {label} {name_of(type(value))}"

    def _is_told(self, value: Any, librarys: bool) -> bool:
        return librarys or isinstance(value, (FunctionType, MethodType, partial, type))

    def _is_new(self, value: Any) -> bool:
        new = id(value) not in self._seen
        self._seen[id(value)] = value
        return new


@lru_cache(maxsize=1 << 15)
def _all_names(code: CodeType) -> frozenset[str]:
    """At least those of `names_in`: with all texts, if some may be names of attributes. Too many
    only lengthen the description, and this takes a tenth of the time."""
    names = own_names(code)
    return frozenset(names if names.isdisjoint(READERS) else names | texts_in(code))


def _is_followed(function: FunctionType) -> bool:
    name = str(function.__globals__.get("__name__", ""))
    if not is_library(function) or name.startswith(_FOLLOWED):
        return True
    return name.partition(".")[0] not in {"torch", "numpy", *sys.stdlib_module_names}


def _is_plain(value: Any) -> bool:
    """Numbers and the like, and few of them. Texts are messages, or salted by each process."""
    if isinstance(value, dict):
        value = [*value, *value.values()] if len(value) <= _MOST_ITEMS else [object()]
    if type(value) in CONTAINERS:
        return len(value) <= _MOST_ITEMS and all(
            isinstance(item, (*_NUMBERS, str)) for item in value
        )
    return isinstance(value, _NUMBERS)
