"""Finds what code reads from outside of a model, beginning at classes, functions and objects."""

from __future__ import annotations

import builtins
import logging
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import is_dataclass
from functools import partial
from inspect import getattr_static
from operator import attrgetter, methodcaller
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from torch import Tensor, nn

from fsdp_mlir.modules.compute_loss import ComputeLoss
from fsdp_mlir.modules.containers import items_of
from fsdp_mlir.modules.hooks import HOOKS
from fsdp_mlir.modules.loggers import levels
from fsdp_mlir.modules.memos import Memo
from fsdp_mlir.modules.names import (
    DYNAMIC,
    NO_READING,
    WHOLE,
    chains,
    imported_by,
    names_held,
    names_in,
    namespace_in,
    passes_on,
    texts_in,
    used,
)
from fsdp_mlir.modules.place import (
    ABSENT,
    CONTAINERS,
    DATA,
    NAMESPACES,
    PLAIN,
    REFERENT,
    SCALARS,
    Code,
    Place,
    function_of,
    has_own_attributes,
    is_library,
    is_no_models,
    is_ours,
    is_part_of,
    is_users,
    methods_of,
    model_class,
    opened,
    read_by_methods,
    referent,
    slot_names,
)
from fsdp_mlir.modules.python_modules import MOST_DEPTH, MOST_ITEMS, PythonModules
from fsdp_mlir.modules.untaken import is_taken_from
from fsdp_mlir.support.errors import CaptureError

_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}
_CALLS = ("__call__", "_wrapped_call_impl", "_call_impl")
# What calling a module reads of it.
OF_CALLS = frozenset(
    {*nn.Module._wrapped_call_impl.__code__.co_names, *nn.Module._call_impl.__code__.co_names}
)
# What a tensor does without being called by name, and all that code may call of it.
_OPERATORS = frozenset(name for name in dir(Tensor) if name[:2] == "__" and name not in dir(object))
_OF_TENSORS = frozenset(dir(Tensor))
_OF_IMPORTS = {"modules", "path", "meta_path", "path_hooks", "path_importer_cache"}  # of sys
_MOST_ROUNDS = 1000


class Search:
    """`own` are the modules of model and loss. If asked, also finds what else the code `reaches`:
    `held`, `modules`, `named` and the code of what containers hold."""

    def __init__(self, own: Iterable[nn.Module], *, reaches: bool) -> None:
        self._by_key: dict[tuple[int, str], Place] = {}
        self._seen: dict[int, Any] = {}
        self._functions: list[FunctionType] = []  # to be looked into
        self._objects: list[tuple[str, Any]] = []  # to be looked into; they may be a long chain
        self._modules: set[tuple[int, frozenset[str]]] = set()  # and the names in them
        self._reaches = reaches
        self._own = {id(module) for module in own}
        classes = {base for module in own for base in type(module).__mro__}
        self._of_modules = {function_of(each) for base in classes for each in vars(base).values()}
        self._held: dict[tuple[int, str], Place] = {}
        self._reached: dict[int, tuple[str, nn.Module]] = {}
        self._inside: dict[int, Any] = {}  # containers that were searched
        self._items = 0  # in them
        self._named: set[str] = set()  # by the code that was looked into
        self._named_outside: set[str] = set()  # by that which is not of the modules' classes
        self._got: set[str] = set()  # by objects such as operator.attrgetter
        self._wrappers: dict[int, FunctionType] = {}  # of libraries
        self._owners: dict[int, tuple[str, Any, dict[str, Any]]] = {}  # of methods
        self._passed: dict[int, tuple[str, Any]] = {}  # those that methods pass on
        self._tools: dict[int, tuple[str, Any]] = {}  # see _add_tool
        self._keys: dict[int, tuple[str, Any, Mapping[str, Any]]] = {}  # see named
        self._of_library: list[tuple[str, dict[str, Any], type]] = []  # see _add_parts
        self._python = PythonModules()
        self._known: tuple[int, ...] = ()  # how much of all this the last round began with

    def all(self) -> list[Place]:
        found = (self._named, self._got, self._reached, self._python.found, self._of_library)
        found = (*found, self._passed, self._named_outside, self._tools, self._owners)
        rounds = 0
        while self._functions or self._objects or self._known != tuple(map(len, found)):
            if (rounds := rounds + 1) > _MOST_ROUNDS:
                raise CaptureError("the code reaches other objects at each look, without an end")
            self._known = tuple(map(len, found))
            while self._functions or self._objects:
                if self._functions:
                    self._look_into(self._functions.pop())
                else:
                    self._look_into_object(*self._objects.pop())
            for label, module in list(self._reached.values()):
                self._look_into_module(label, module)
            for label, _, attributes in list(self._owners.values()):
                for name in sorted(self._got & attributes.keys()):
                    self._add(attributes, name, f"{label}.{name}")
            for label, owner in list(self._passed.values()):
                self._add_passed(label, owner)
            for label, tool in list(self._tools.values()):
                self._add_tool(label, tool)
            for parts in list(self._of_library):
                self._add_parts(*parts)
            for python in list(self._python.found.values()):
                self._add_members(python, self._named)
            for name in sorted(_OPERATORS | (self._named & _OF_TENSORS)):
                self._add_of_library(Tensor, name, f"Tensor.{name}", data=False)
        return list(self._by_key.values())

    def held(self) -> list[Place]:
        self.all()
        return list(self._held.values())

    def modules(self) -> list[tuple[str, nn.Module]]:
        self.all()
        return list(self._reached.values())

    def named(self) -> list[tuple[str, Any, Mapping[str, Any]]]:
        """Objects, classes and Python modules of which code may read attributes that are set later,
        with their attributes."""
        self.all()
        return list(self._keys.values())

    def got(self) -> set[str]:
        self.all()
        return self._got

    def names(self) -> frozenset[str] | None:
        """Those of attributes that the code that was found may read; None if it reads any."""
        self.all()
        return self._names()

    def _names(self) -> frozenset[str] | None:
        return None if self._named & DYNAMIC else OF_CALLS | self._named | self._got

    def seen(self) -> list[Any]:
        """Functions, classes and objects that were looked into."""
        self.all()
        return list(self._seen.values())

    def add_class(self, owner: type, skips: Callable[[Code], bool] = is_library) -> None:
        """The attributes of a class and its bases, except bases that `skips` accepts."""
        is_new = id(owner) not in self._seen and not skips(owner)
        for base in owner.__mro__:
            if skips(base):
                self._hold_methods(base)
            elif self._is_new(base):
                self._watch(base.__qualname__, base)
                for name in list(vars(base)):
                    self._add_member(base, name, skips)
        if is_new:
            self._add_inherited(owner)
        if type(owner) is not type:
            self.add_class(type(owner), skips)

    def _add_member(self, owner: type, name: str, skips: Callable[[Code], bool]) -> bool:
        """An attribute of a class, or the code of a method; whether it is one."""
        label = f"{owner.__qualname__}.{name}"
        function = function_of(vars(owner)[name])
        if function is not None:
            self._add_function(function, skips)
            self._hold(Place(owner, name, label))
        elif not name.startswith("__"):
            self._add(owner, name, label)
        return function is not None

    def _add_inherited(self, owner: type) -> None:
        """Data of the bases of a class that methods may set anew, then as its own: `cls.n += 1`."""
        own = set(vars(owner))
        members = [vars(base) for base in owner.__mro__ if not is_library(base)]
        functions = filter(None, (function_of(x) for each in members for x in each.values()))
        stored = set().union(*(used(each.__code__, {"STORE_ATTR"}) for each in functions))
        for each in members:
            for name in sorted(stored & each.keys() - own):
                if isinstance(each[name], DATA):
                    self._add(owner, name, f"{owner.__qualname__}.{name}")

    def _hold_methods(self, owner: type) -> None:
        """Those of a module's class that is not looked into, with the functions that they name."""
        if not self._reaches or not issubclass(owner, nn.Module) or not self._is_new(owner):
            return
        for name, value in list(vars(owner).items()):
            called = name in _CALLS if owner is nn.Module else not name.startswith("__")
            if called and callable(value):
                self._add_of_library(owner, name, f"{owner.__qualname__}.{name}")
                if isinstance(value, FunctionType):
                    for chain in sorted(chains(value.__code__)):
                        self._follow(value.__globals__, chain, data=False)

    def _hold(self, place: Place) -> None:
        if self._reaches:
            self._held.setdefault(place.key, place)

    def _watch(self, label: str, owner: Any) -> None:
        if id(owner) not in self._keys and hasattr(owner, "__dict__"):
            self._keys[id(owner)] = (label, owner, vars(owner))

    def add_object(self, label: str, value: Any) -> None:
        """Something that is neither data nor a class nor a Python module: a function, a method, a
        partial, or an object, which may be called."""
        if isinstance(value, weakref.ReferenceType) or type(value) in weakref.ProxyTypes:
            target = referent(value)
            if isinstance(target, (*DATA, type)):
                self._add({REFERENT: target}, REFERENT, f"{label}()")
            else:
                self.add_object(f"{label}()", target)
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, MethodType):
            self._add_method(label, value)
        elif isinstance(value, partial):
            self.add_object(label, value.func)
            items = {f"args[{i}]": item for i, item in enumerate(value.args)}
            for names in (value.keywords, items):
                for name in names:
                    self._add(names, name, f"{label}.{name}")
            self._hold(Place(value, "keywords", f"{label}.keywords"))
        elif isinstance(value, ComputeLoss):
            self.add_object(label, value.func)
        elif isinstance(value, nn.Module):
            self._reach(label, value)
        elif isinstance(value, (attrgetter, methodcaller)):
            self._got |= names_held(value)
        elif isinstance(value, BuiltinMethodType):  # such as that of a list
            if isinstance(value.__self__, DATA) or is_taken_from(value.__self__):
                self._add({"__self__": value.__self__}, "__self__", f"{label}.__self__")
        elif isinstance(value, logging.Logger):
            self._by_key |= {place.key: place for place in levels(label, value)}
        else:
            self._add_attributes(label, value)

    def _reach(self, label: str, module: nn.Module) -> None:
        """A module that neither model nor loss has. One that holds the model, such as a trainer,
        may hold more than its methods use: only what they name is reached."""
        if not self._reaches or id(module) in self._own:
            return
        inner = dict(module.named_modules())
        if any(id(each) in self._own for each in inner.values()):
            inner = {"": module}
        for path, each in inner.items():
            self._reached.setdefault(id(each), (f"{label}.{path}".rstrip("."), each))

    def _look_into_module(self, label: str, module: nn.Module) -> None:
        """One that was reached: of its class, the methods that a call runs and those that code
        names."""
        names = self._names()
        for base in type(module).__mro__:
            if is_no_models(base):
                self._hold_methods(base)
                continue
            for name in list(vars(base)):
                if names is None or name in names or name.startswith("__"):
                    self._add_member(base, name, is_no_models)
        attributes = vars(module)
        if names is None or is_no_models(model_class(type(module))):
            names = frozenset({*module._modules, *attributes})
        for name in module._modules.keys() & names:
            if (part := module._modules[name]) is not None:
                self._reach(f"{label}.{name}", part)
        for name in filter(is_users, attributes.keys() & names):
            if not isinstance(attributes[name], (*SCALARS, Tensor)):
                self._add(attributes, name, f"{label}.{name}")
        if callable(forward := attributes.get("forward")):
            self.add_object(f"{label}.forward", forward)
        for name in HOOKS:
            for hook in attributes[name].values():
                self.add_object(f"a hook of {name}", hook)

    def look_inside(self, label: str, value: Any, depth: int = 0) -> None:
        """The functions, objects and modules that containers hold, and objects of classes of the
        model's code."""
        value = opened(value)
        is_proxy = type(value) in weakref.ProxyTypes
        if self._reaches and is_proxy:
            self.add_object(label, value)
        if not self._reaches or is_proxy or isinstance(value, PLAIN):
            return
        if isinstance(value, ContextVar):
            value = value.get(None)
        if isinstance(value, type):
            self.add_class(value)
        elif not isinstance(value, CONTAINERS):
            if callable(value) or not is_library(type(value)):
                self.add_object(label, value)
            elif not has_own_attributes(value):
                self._tools[id(value)] = (label, value)
        elif depth < MOST_DEPTH and id(value) not in self._inside:
            self._inside[id(value)] = value
            items = items_of(value)
            if self._items + len(items) <= MOST_ITEMS:
                self._items += len(items)
                for index, item in enumerate(items):
                    self.look_inside(f"{label}[{index}]", item, depth + 1)

    def _add_method(self, label: str, method: MethodType) -> None:
        """What the method, and the methods of its class that it names, read from their object; not
        what the object keeps for others, such as the counters of a loop. If one of them passes the
        object on, also what other code names of it."""
        owner, attributes = method.__self__, getattr(method.__self__, "__dict__", None)
        if isinstance(owner, (type, nn.Module)) or not isinstance(attributes, dict):
            self._add_function(method.__func__)
            add = self.add_class if isinstance(owner, type) else partial(self.add_object, label)
            add(owner)
            return
        functions = self._methods_from(method.__func__, type(owner))
        names = set().union(*(names_in(each.__code__) for each in functions))
        # Another descriptor, such as what functools.lru_cache makes of a method, gets the object.
        members = [getattr_static(type(owner), name, None) for name in names]
        others = (each for each in members if function_of(each) is None)
        gives = any(hasattr(each, "__get__") and not isinstance(each, type) for each in others)
        if gives or any(passes_on(each.__code__) for each in functions):
            self._passed[id(owner)] = (label, owner)
        if names & DYNAMIC:
            self.add_object(label, owner)
        else:
            self._owners.setdefault(id(owner), (label, owner, attributes))
            self._add_named(label, owner, names)

    def _methods_from(self, function: FunctionType, owner: type) -> set[FunctionType]:
        """It and the methods of the class that these name, all of which are added."""
        waiting, found = [function], set()
        while waiting:
            function = waiting.pop()
            if function in found or is_library(function):
                continue
            found.add(function)
            self._add_function(function)
            waiting += self._add_methods(owner, names_in(function.__code__))
        return found

    def _add_methods(self, owner: type, names: Collection[str]) -> list[FunctionType]:
        """Members of a class with these names; those that are methods or properties."""
        found = []
        for base in owner.__mro__:
            if not is_library(base):
                self._watch(base.__qualname__, base)
            for name in sorted(vars(base).keys() & names):
                if (member := function_of(vars(base)[name])) is not None:
                    found.append(member)
                if not is_library(base):
                    self._add_member(base, name, is_library)
        return found

    def _add_named(self, label: str, owner: Any, names: Collection[str]) -> None:
        """Attributes of an object, which may be set later."""
        slots = set(slot_names(type(owner))).intersection(names)
        for name in sorted(names):
            place = owner if name in slots else vars(owner)
            self._add(place, name, f"{label}.{name}")

    def _add_passed(self, label: str, owner: Any) -> None:
        """Any code may have it; that of the model's modules is not expected to read all of it."""
        if not self._named_outside.isdisjoint(DYNAMIC | WHOLE):
            self.add_object(label, owner)
            return
        names = self._named | self._got
        special = {name for name in dir(type(owner)) if name[:2] == "__"} - NO_READING
        self._add_methods(type(owner), names | special)
        self._add_named(label, owner, names & {*vars(owner), *slot_names(type(owner))})
        self._watch(label, owner)

    def _add_attributes(self, label: str, value: Any) -> None:
        if isinstance(getattr(value, "__dict__", {}), dict) and self._is_new(value):
            self._objects.append((label, value))

    def _look_into_object(self, label: str, value: Any) -> None:
        attributes = getattr(value, "__dict__", {})
        slots = slot_names(type(value))
        self.find_modules(value)
        self._watch(label, value)
        whole = isinstance(value, (Mapping, *CONTAINERS)) or is_dataclass(value)
        named_only = not whole and not is_library(type(value))
        for name in () if is_library(type(value)) else slots:
            self._add(value, name, f"{label}.{name}", attribute=named_only)
        if is_library(type(value)):  # such as a namespace or a configuration: only its data
            self._of_library.append((label, attributes, type(value)))
            names = {name for name, item in attributes.items() if isinstance(item, DATA)}
            names -= {"__annotations__"}
            for item in attributes.values():  # what functools.cache or a cached_property wraps
                if isinstance(item, FunctionType):
                    self._add_function(item)
        else:
            self.add_class(type(value))
            named = {n for function in methods_of(type(value)) for n in names_in(function.__code__)}
            names = {*attributes, *named}  # an attribute may be set later
        for name in sorted(names.difference(slots)):
            self._add(attributes, name, f"{label}.{name}", attribute=named_only)

    def _add_parts(self, label: str, attributes: dict[str, Any], owner: type) -> None:
        """The objects in an object of a library's class that code names: all of a namespace, which
        may be a configuration; of others, which lead into the library, those that are not its."""
        is_namespace = issubclass(owner, NAMESPACES)
        any_name = is_namespace and not self._named.isdisjoint(DYNAMIC)
        for name, item in list(attributes.items()):
            is_part = is_part_of(owner, item)
            is_named = name in self._named or name in self._got
            follows = (is_namespace or is_part) if is_named else any_name and is_part
            if follows and not isinstance(item, DATA):
                self._add(attributes, name, f"{label}.{name}")

    def _add_tool(self, label: str, value: Any) -> None:
        """An object of PyTorch's in a container, such as an optimizer: the data that code names,
        and that which methods read that code names."""
        attributes = getattr(value, "__dict__", {})
        read = read_by_methods(type(value), (self._named | self._got) - NO_READING)
        for name in sorted(read & attributes.keys()):
            if isinstance(attributes[name], DATA):
                self._add(attributes, name, f"{label}.{name}")

    def _add_function(
        self, function: FunctionType, skips: Callable[[Code], bool] = is_library
    ) -> None:
        if not skips(function):
            if self._is_new(function):
                self._functions.append(function)
        elif function.__closure__ and id(function) not in self._wrappers:
            self._wrappers[id(function)] = function
            self._look_into_wrapper(function)

    def _look_into_wrapper(self, function: FunctionType) -> None:
        """A library's function, such as one of functools.singledispatch, or a decorator's: the
        functions that were given to it, and what it keeps of their calls."""
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            content = Place(cell, name, name).value()
            items = list(content.values())[:MOST_ITEMS] if type(content) is dict else [content]
            found = [item for item in items if isinstance(item, FunctionType)]
            if type(content) is dict and not all(map(is_library, found)):
                self._add(cell, name, f"{function.__qualname__}.{name}")
            for each in found:
                self._add_function(each)
            if isinstance(content, Memo):
                self._add(cell, name, f"{function.__qualname__}.{name}")

    def _look_into(self, function: FunctionType) -> None:
        names = set(names_in(function.__code__))
        self._named |= names
        if function not in self._of_modules:
            self._named_outside |= names
        known = function.__globals__
        for name in sorted(used(function.__code__, _GLOBAL) & known.keys()):
            self._add(known, name, f"{function.__module__}.{name}", names)
        for chain in sorted(chains(function.__code__)):
            self._follow(known, chain)
        for name in imported_by(function):
            self._add(cast(dict[str, Any], sys.modules), name, name, names)
            self._add_members(sys.modules[name], names)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            self._add(cell, name, f"{function.__qualname__}.{name}", names)
        # A function may set attributes of its own.
        own = used(function.__code__, {"STORE_ATTR"}) if function.__name__ in names else ()
        for name in sorted({*vars(function), *own} - {"__annotations__"}):
            self._add(vars(function), name, f"{function.__qualname__}.{name}")
        positional = {str(i): value for i, value in enumerate(function.__defaults__ or ())}
        for owner in (function.__kwdefaults__ or {}, positional):
            for name, value in owner.items():
                is_list = type(value) in (*CONTAINERS, Counter) and not isinstance(value, tuple)
                is_more = self._reaches and not isinstance(value, DATA)
                if is_list or is_more or is_taken_from(value):
                    self._add(owner, name, f"{function.__qualname__}, default {name}")
        if is_taken_from(function.__defaults__):
            self._add(
                function, "__defaults__", f"{function.__qualname__}.__defaults__", attribute=True
            )
        if namespace_in(function.__code__):
            for name in sorted(texts_in(function.__code__)):
                if name in known:
                    self._add(known, name, f"{function.__module__}.{name}", names)
                elif isinstance(module := sys.modules.get(name), ModuleType):
                    self._add_members(module, names)
        if names & {"environ", "getenv"}:
            self._add(vars(os.environ), "_data", "os.environ")

    def _add(
        self,
        owner: Any,
        name: str,
        label: str,
        names: Iterable[str] = (),
        *,
        attribute: bool = False,
    ) -> None:
        """The place and, if it is not data, what lies behind it. `names` are those of the code that
        names it."""
        place = Place(owner, name, label, attribute)
        value = opened(place.value())
        if type(value) in weakref.ProxyTypes:  # whose class is that of its object
            self._hold(place)
            self.add_object(label, value)
        elif isinstance(value, ModuleType):
            self._hold(place)
            if not names:
                self._python.found[id(value)] = value
            elif not is_library(value):
                self._add_members(value, names)
        elif isinstance(value, type):
            self._hold(place)
            self.add_class(value)
        elif isinstance(value, DATA) or value is ABSENT:
            self._by_key.setdefault(place.key, place)
            if not is_library(type(value)):  # such as a dict with methods of its own
                self.add_class(type(value))
            self.find_modules(value)
            self.look_inside(label, None if value is ABSENT else value)
        elif not is_ours(value):
            self._hold(place)
            is_own = isinstance(value, FunctionType) and not is_library(value)
            if is_own or is_taken_from(value):
                self._by_key.setdefault(place.key, place)
            self.add_object(label, value)

    def _add_members(self, module: ModuleType, names: Iterable[str]) -> None:
        """What code with these names reads of a module of Python."""
        names, held = frozenset(names), vars(module)
        if (id(module), names) in self._modules:  # one may hold itself
            return
        self._modules.add((id(module), names))
        members = names & held.keys()
        is_librarys = is_library(module)
        if not is_librarys:
            self._watch(module.__name__, module)
        if names & DYNAMIC and not is_librarys:
            values = {name for name, value in held.items() if isinstance(value, SCALARS)}
            members |= {name for name in values if not name.startswith("__")}
        for name in sorted(members):
            if is_librarys:
                self._add_of_library(held, name, f"{module.__name__}.{name}")
            else:
                self._add(held, name, f"{module.__name__}.{name}", names)

    def _follow(self, known: dict[str, Any], chain: Sequence[str], *, data: bool = True) -> None:
        """What code reads by a chain of names that ends in a module of a library."""
        if len(chain) == 1:
            if chain[0] not in known and chain[0] in vars(builtins):
                self._add_of_library(vars(builtins), chain[0], chain[0])
            return
        owner = known.get(chain[0])
        for name in chain[1:-1]:
            owner = vars(owner).get(name) if isinstance(owner, ModuleType) else None
        if isinstance(owner, ModuleType) and is_library(owner) and chain[-1] in vars(owner):
            label = f"{owner.__name__}.{chain[-1]}"
            self._add_of_library(vars(owner), chain[-1], label, data=data)

    def _add_of_library(self, owner: Any, name: str, label: str, *, data: bool = True) -> None:
        """The place, and what lies behind it if that is not the library's: it may be replaced."""
        place = Place(owner, name, label, library=True)
        value = place.value()
        if isinstance(value, DATA):
            if data and (owner is not vars(sys) or name not in _OF_IMPORTS):
                self._by_key.setdefault(place.key, place)
            return
        self._hold(place)
        if isinstance(value, type):
            self.add_class(value)
        elif isinstance(value, (FunctionType, MethodType, partial)) or not (
            value is ABSENT or is_library(type(value)) or is_ours(value)
        ):
            self.add_object(label, value)

    def find_modules(self, value: Any) -> None:
        """Those of Python that it holds."""
        self._python.find(value)

    def _is_new(self, value: Any) -> bool:
        """Objects that were seen are kept alive, so that no other object takes their ids."""
        new = id(value) not in self._seen
        self._seen[id(value)] = value
        return new
