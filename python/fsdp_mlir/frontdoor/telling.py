"""Values as text that any process would write alike, or Untold."""

from __future__ import annotations

import hashlib
import logging
import marshal
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.hooks import RemovableHandle

from fsdp_mlir.modules import loggers
from fsdp_mlir.modules.hooks import HOOKS
from fsdp_mlir.modules.place import (
    ABSENT,
    BUFFERS,
    CONTAINERS,
    GENERATORS,
    POINTERS,
    SCALARS,
    built_in,
    bytes_of,
    is_library,
)
from fsdp_mlir.support.errors import CompileError

_MAX_DEPTH = 60
_OWN = (f"{__name__.rpartition('.')[0]}.", "_runtime")
# Describing it must take less time than a capture.
_MAX_ITEMS = 10_000
_MOST_VALUES = 200_000
_MAX_BYTES = 1 << 24
ADDRESS = " at 0x"
_BUILT_IN = (bool, int, float, str, bytes, dict, list, tuple, set, frozenset)
_MOST_OFTEN = (FunctionType, tuple, list, dict)
_DESCRIPTORS = (
    *(GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType),
)
# What is described in another way than by what it holds.
_OTHERS = (
    *(type, *SCALARS, Tensor, np.ndarray, *BUFFERS, *POINTERS, MethodType, partial, property),
    *(staticmethod, classmethod, BuiltinFunctionType, *_DESCRIPTORS, ModuleType, CustomOpDef),
    *(OpOverload, OpOverloadPacket, *GENERATORS, logging.Logger, RemovableHandle, weakref.ref),
    nn.Module,
)


class Untold(CompileError):
    """Something that decides the step is known only by its identity."""


HASHED = ", which may depend on hashes of strings: they differ unless PYTHONHASHSEED is set"


def check_order(path: str, items: Iterable[str]) -> None:
    """Untold for the order of a set that each process has for itself. `items` as by repr."""
    found = list(items)
    hashed = sys.flags.hash_randomization and any("'" in each or '"' in each for each in found)
    if len(found) > 1 and hashed:
        raise Untold(f"'{path}' is a set{HASHED}")


class Teller:
    """Describes values as text. Modules of the model, which are described one by one, are given by
    name; what was told before, by a number."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = {id(module): name for name, module in modules.items()}
        self._hooks = {
            id(vars(module).get(key)): f"{name}.{key}"
            for name, module in modules.items()
            for key in HOOKS
        }
        self._known: dict[int, tuple[int, Any]] = {}  # kept alive, so that their ids stay theirs
        self._classes: dict[type, str] = {}
        self._lenient = False
        self._values = 0

    def of_library(self, value: Any, path: str) -> str:
        """The same for what a library holds: of its own objects that cannot be described, only the
        class."""
        self._lenient = True
        try:
            return self.told(value, path)
        finally:
            self._lenient = False

    def told(self, value: Any, path: str = "a value", depth: int = 0) -> str:
        """`path` is for the error."""
        tell: Callable[[Any], str] = partial(self.told, path=path, depth=depth + 1)
        self._values += 1
        if depth > _MAX_DEPTH or self._values > _MOST_VALUES:
            raise Untold(f"'{path}' holds too much, or is nested too deep")
        if isinstance(value, type):
            return self.class_(value, path)
        if type(value).__module__.startswith(_OWN):  # a step, which a trainer holds
            return name_of(type(value))
        if type(value) in SCALARS:
            return f"{type(value).__name__} {value!r}"
        if _is_compound(type(value)):
            return self._compound(value, path, tell)
        if isinstance(value, SCALARS):
            base = next(kind for kind in type(value).__mro__ if kind in SCALARS)
            text = base.__repr__(value)
            return f"{tell(type(value))} {text} {tell(getattr(value, '__dict__', None))}"
        if isinstance(value, Tensor):
            attributes = vars(value) if type(value) is Tensor else {}
            return f"{_tensor(value)} {tell(attributes) if attributes else ''}"
        if isinstance(value, np.ndarray):
            if value.nbytes > _MAX_BYTES:
                return self._refused(f"'{path}' holds an array of {value.nbytes} bytes", value)
            return f"array {value.dtype}{value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        if isinstance(value, BUFFERS):
            data = bytes_of(value)
            return f"{tell(type(value))} {len(data)} {hashlib.sha256(data).hexdigest()}"
        if isinstance(value, POINTERS):
            return self._refused(f"'{path}' is a pointer", value)
        if isinstance(value, MethodType):
            return f"{tell(value.__func__)} of {tell(value.__self__)}"
        if isinstance(value, partial):
            return f"partial {tell(value.func)} {tell(value.args)} {tell(value.keywords)}"
        if isinstance(value, property):
            return f"property {tell((value.fget, value.fset, value.fdel))}"
        if isinstance(value, (staticmethod, classmethod)):
            return f"{type(value).__name__} {tell(value.__func__)}"
        if isinstance(value, BuiltinFunctionType):
            owner = value.__self__
            of = "" if owner is None or isinstance(owner, ModuleType) else tell(owner)
            return f"{value.__module__}.{value.__qualname__} {of}"
        if isinstance(value, _DESCRIPTORS):
            return f"{name_of(value.__objclass__)}.{value.__name__}"
        if isinstance(value, ModuleType):  # what it holds is described where code reads it
            return f"module {value.__name__}"
        if isinstance(value, CustomOpDef):
            # What it does is described for steps that call it: plan_cache.
            return f"operator {value._qualname}"
        if isinstance(value, (OpOverload, OpOverloadPacket)):
            return f"operator {value}"
        if isinstance(value, GENERATORS):
            return name_of(type(value))
        if isinstance(value, logging.Logger):
            return f"logger {loggers.shown(value)}"
        if isinstance(value, RemovableHandle):
            hooks = value.hooks_dict_ref()
            where = self._hooks.get(id(hooks)) or tell(list((hooks or {}).values()))
            at = list(hooks or ()).index(value.id) if value.id in (hooks or ()) else None
            return f"{tell(type(value))} {where} {at}"
        if isinstance(value, weakref.ref):
            return f"reference {tell(value())}"
        if isinstance(value, nn.Module):
            if id(value) not in self._modules:
                text = f"'{path}' is a module that the model does not hold as one"
                return self._refused(text, value)
            return f"module {self._modules[id(value)]}"
        return self._compound(value, path, tell)

    def _compound(self, value: Any, path: str, tell: Callable[[Any], str]) -> str:
        """A function, or an object with what it holds."""
        if id(value) in self._known:
            return f"#{self._known[id(value)][0]}"
        self._known[id(value)] = len(self._known), value
        if isinstance(value, FunctionType):
            return self._function(value, path, tell)
        return self._object(value, path, tell)

    def _refused(self, text: str, value: Any) -> str:
        if self._lenient:
            return name_of(type(value))
        raise Untold(text)

    def _function(self, function: FunctionType, path: str, tell: Callable[[Any], str]) -> str:
        lenient, self._lenient = self._lenient, self._lenient and is_library(function)
        try:
            parts = tuple(map(_content, function.__closure__ or ()))
            inside = tell((function.__defaults__, function.__kwdefaults__, parts))
        finally:
            self._lenient = lenient
        return f"{name_of(function)} {_code(function.__code__)} {inside}"

    def _object(self, value: Any, path: str, tell: Callable[[Any], str]) -> str:
        lenient = self._lenient
        self._lenient = lenient and is_library(type(value))
        try:
            return f"{tell(type(value))} {self._held(value, path, tell)}"
        finally:
            self._lenient = lenient

    def _held(self, value: Any, path: str, tell: Callable[[Any], str]) -> str:
        """What an object holds. Its __repr__ may leave out some of that."""
        if type(value) is object:  # holds nothing, and is compared by identity
            return ""
        held = []
        if isinstance(value, (dict, *CONTAINERS)) and len(value) > _MAX_ITEMS:
            return self._refused(f"'{path}' holds {len(value)} items", value)
        if isinstance(value, deque):
            held.append(f"at most {value.maxlen}")
        kind = built_in(type(value))
        if isinstance(value, dict):
            held += [f"{tell(key)}: {tell(item)}" for key, item in kind.items(value)]
        elif isinstance(value, (set, frozenset)):
            if not self._lenient:
                check_order(path, map(repr, kind.__iter__(value)))
            # What the items of a library's hold cannot be numbered: their order may be another one.
            told = [Teller({}).told(item, path) for item in kind.__iter__(value)]
            held += sorted(told) if self._lenient else told
        elif isinstance(value, CONTAINERS):
            held += [tell(item) for item in kind.__iter__(value)]
        slots = _slots(type(value))
        attributes = getattr(value, "__dict__", None)
        named = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        held += [f"{name} {tell(item)}" for name, item in {**named, **(attributes or {})}.items()]
        if attributes is None and not slots and not isinstance(value, CONTAINERS):
            text = repr(value)  # of a type that is not written in Python
            if ADDRESS in text:
                return self._refused(f"'{path}' holds a {name_of(type(value))}", value)
            held.append(text)
        return f"({', '.join(held)})"

    def class_(self, kind: type, path: str = "a class") -> str:
        """A class by its name, and by its and its bases' code and numbers."""
        if kind not in self._classes:
            self._classes[kind] = name_of(kind)  # which its own methods may close over
            lines = [line for base in kind.__mro__ for line in self._members(base, path)]
            if not is_library(type(kind)):
                lines.append(self.class_(type(kind), path))
            digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
            self._classes[kind] = f"{name_of(kind)} {digest[:16]}"
        return self._classes[kind]

    def _members(self, base: type, path: str) -> Iterator[str]:
        yield name_of(base)
        if base in (object, type, *_BUILT_IN):
            return
        lenient, librarys = self._lenient, is_library(base)
        for name, value in sorted(vars(base).items()):
            if base is RemovableHandle and name == "next_id":
                continue  # how many hooks this process has registered
            self._lenient = lenient or librarys
            try:
                yield f"{name} {self._member(name, value, f'{path}.{name}')}"
            finally:
                self._lenient = lenient

    def _member(self, name: str, value: Any, path: str) -> str:
        """Of a class. Its other data is described where code reads it."""
        if isinstance(value, SCALARS):
            return "" if name.startswith("__") else repr(value)
        value = value.fget if isinstance(value, property) else value
        value = getattr(value, "__func__", value)
        if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, partial)):
            return self.told(value, path)
        if isinstance(value, _DESCRIPTORS):
            return f"{name_of(value.__objclass__)}.{value.__name__}"
        if not isinstance(value, type) and callable(value) and not is_library(type(value)):
            return self.told(value, path)
        return name_of(value) if isinstance(value, type) else name_of(type(value))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _tensor(value: Tensor) -> str:
    layout = value.stride() if value.layout == torch.strided else value.layout
    return (
        f"{name_of(type(value))} {value.dtype}{list(value.shape)} {layout} {value.device.type} "
        f"{value.requires_grad} {value.is_leaf}"
    )


@lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[str, ...]:
    """As getattr takes them."""
    return tuple(name for base in kind.__mro__ for name in _own_slots(base))


def _own_slots(base: type) -> list[str]:
    slots = vars(base).get("__slots__", ())
    names = {*([slots] if isinstance(slots, str) else slots)} - {"__dict__", "__weakref__"}
    private = f"_{base.__name__.lstrip('_')}"
    return [
        f"{private}{name}" if name[:2] == "__" and name[-2:] != "__" else name
        for name in sorted(names)
    ]


@lru_cache(maxsize=4096)
def _is_compound(kind: type) -> bool:
    """Whether values of a class are described by what they hold, without a look at the value."""
    return kind in _MOST_OFTEN or not issubclass(kind, (*_OTHERS, *weakref.ProxyTypes))


def name_of(value: Any) -> str:
    """A function's or a class's; empty for what has none."""
    name = getattr(value, "__qualname__", "")
    return f"{value.__module__}.{name}" if isinstance(name, str) and name else ""


@lru_cache(maxsize=1 << 16)
def _code(code: CodeType) -> str:
    try:
        data = marshal.dumps(code, 0)  # of this version: any process writes the same
    except ValueError:  # a constant that no compiler makes
        parts = (code.co_code, code.co_names, code.co_varnames, code.co_freevars)
        data = repr((parts, tuple(map(_constant, code.co_consts)))).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _code(value)
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
