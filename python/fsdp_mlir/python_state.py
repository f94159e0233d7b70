"""What a model keeps in Python: the attributes of its modules beside parameters and buffers."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import inspect
import itertools
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_SCALARS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_MAX_DEPTH = 6
# Looked into; what derives from them may do more than hold its members.
_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, frozenset, deque)
_MAX_SHARED = 1000  # elements of a container that a class or a Python module holds

# How a leaf compares: by value, as a tensor by identity, as any other object by identity.
Leaf = tuple[str, Any]


@dataclass
class PythonState:
    """The leaves of a model's attributes by path ("layers.0.calls", "cache['k'][1]"), and what
    it takes to put the containers back. Objects that are compared by identity stay alive."""

    leaves: dict[str, Leaf] = field(default_factory=dict)
    _contents: list[tuple[Any, Any]] = field(default_factory=list)  # container, shallow copy
    _seen: dict[int, Any] = field(default_factory=dict)
    _shared: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)  # globals
    _of_classes: list[tuple[type, str, Any]] = field(default_factory=list)

    @staticmethod
    def of(model: nn.Module, loss: Callable[..., Any] | None = None) -> PythonState:
        """The state now, with that of a loss function: its attributes, or what it closes over.

        Parameters, buffers and submodules count by name: that they are there. The attributes of
        the modules' classes and the globals that their methods name belong to it.
        """
        state = PythonState()
        for path, module in model.named_modules():
            state._add_module(f"{path}." if path else "", module)
        if isinstance(loss, nn.Module):
            for path, module in loss.named_modules():
                state._add_module(f"loss.{path}." if path else "loss.", module)
        elif inspect.isfunction(loss):
            state._add_globals(loss)
        elif loss is not None:
            state._add_class(type(loss))
        if inspect.isfunction(loss):
            cells = zip(loss.__code__.co_freevars, loss.__closure__ or (), strict=True)
            for name, cell in cells:
                with contextlib.suppress(ValueError):  # one that is empty yet
                    state._add(f"loss.{name}", cell.cell_contents, 0)
        elif hasattr(loss, "__dict__") and not isinstance(loss, nn.Module):
            state._contents.append((vars(loss), dict(vars(loss))))
            for name, value in vars(loss).items():
                state._add(f"loss.{name}", value, 0)
        return state

    def restore(self) -> None:
        """Puts every attribute and container back as it was; tensors keep their data."""
        for container, content in self._contents:
            if isinstance(container, dict):
                if _same_items(container.items(), content.items()):
                    continue
                container.clear()
                container.update(content)
            elif isinstance(container, set):
                if container != content:
                    container.clear()
                    container.update(content)
            elif not _same_items(enumerate(container), enumerate(content)):
                container.clear()
                container.extend(content)
        for owner, name, value in self._shared:
            if owner.get(name) is not value:
                owner[name] = value
        for owner_class, name, value in self._of_classes:
            if vars(owner_class).get(name) is not value:
                setattr(owner_class, name, value)

    def changes(self, after: PythonState) -> list[str]:
        """The paths that differ, in order."""
        paths = dict.fromkeys([*self.leaves, *after.leaves])
        return [path for path in paths if self.leaves.get(path) != after.leaves.get(path)]

    def holds_computed(self, path: str) -> bool:
        """Whether a tensor lies there that is no parameter, as in RNNs' list of their weights."""
        kind, value = self.leaves.get(path, ("none", None))
        return kind == "tensor" and not isinstance(self._seen[value], nn.Parameter)

    def _add_class(self, owner: type) -> None:
        """Data among the attributes of a class and its bases, and of the globals they name."""
        for base in owner.__mro__:
            if id(base) in self._seen or _is_library(base.__module__):
                continue
            self._seen[id(base)] = base
            for name, value in list(vars(base).items()):
                if inspect.isfunction(value):
                    self._add_globals(value)
                elif not name.startswith("__") and _is_data(value):
                    self._of_classes.append((base, name, value))
                    self._add(f"{base.__qualname__}.{name}", value, 0)

    def _add_globals(self, function: FunctionType) -> None:
        """Data among the globals that a function names."""
        module, names = function.__module__, function.__globals__
        for name in function.__code__.co_names:
            path = f"{module}.{name}"
            if path not in self.leaves and _is_data(names.get(name)) and name in names:
                self._shared.append((names, name, names[name]))
                self._add(path, names[name], 0)

    def _add_module(self, prefix: str, module: nn.Module) -> None:
        self._add_class(type(module))
        attributes = vars(module)
        self._contents.append((attributes, dict(attributes)))
        for name, value in list(attributes.items()):
            if name in ("_parameters", "_buffers", "_modules"):
                self._contents.append((value, dict(value)))
                for member in value:
                    self.leaves[f"{prefix}{member}"] = ("member", value[member] is None)
            else:
                self._add(f"{prefix}{name}", value, 0)

    def _add(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, (enum.Enum, *_SCALARS)):
            self.leaves[path] = ("value", repr(value))
        elif isinstance(value, Tensor):
            self._identify(path, "tensor", value)
        elif isinstance(value, np.ndarray):
            digest = _digest(value.tobytes())
            self.leaves[path] = ("value", f"{value.dtype}{list(value.shape)} {digest}")
        elif isinstance(value, _GENERATORS):
            self.leaves[path] = ("value", f"state {_digest(_generator_state(value))}")
        elif id(value) in self._seen or depth == _MAX_DEPTH:
            self._identify(path, "object", value)
        elif type(value) in _CONTAINERS:
            self._add_container(path, value, depth)
        elif _has_own_attributes(value):
            self._seen[id(value)] = value
            self._contents.append((vars(value), dict(vars(value))))
            self.leaves[path] = ("type", type(value))
            for name, member in list(vars(value).items()):
                self._add(f"{path}.{name}", member, depth + 1)
        else:
            self._identify(path, "object", value)

    def _add_container(self, path: str, value: Any, depth: int) -> None:
        self._seen[id(value)] = value
        self.leaves[path] = ("type", type(value))
        if isinstance(value, dict):
            members: Iterator[tuple[str, Any]] = ((f"[{k!r:.40}]", v) for k, v in value.items())
        elif isinstance(value, (set, frozenset)):
            members = ((f"{{{member!r:.40}}}", member) for member in value)
        else:
            members = ((f"[{i}]", member) for i, member in enumerate(value))
        for name, member in members:
            self._add(path + name, member, depth + 1)
        if not isinstance(value, (tuple, frozenset)):
            self._contents.append((value, value.copy()))

    def _identify(self, path: str, kind: str, value: Any) -> None:
        self._seen[id(value)] = value
        self.leaves[path] = (kind, id(value))


def _same_items(left: Iterable[tuple[Any, Any]], right: Iterable[tuple[Any, Any]]) -> bool:
    """Whether these are the same keys, and the same objects, in the same order."""
    pairs = itertools.zip_longest(left, right, fillvalue=(None, None))
    return all(a[0] == b[0] and a[1] is b[1] for a, b in pairs)


def _is_data(value: Any) -> bool:
    """A number, a tensor or a container of moderate size, as a count or a cache is."""
    if type(value) in _CONTAINERS:
        return len(value) <= _MAX_SHARED
    return isinstance(value, (bool, int, float, complex, Tensor, np.ndarray)) or value is None


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "builtins")


def _has_own_attributes(value: Any) -> bool:
    """Whether to look inside: an object of the model's, no function, class or part of PyTorch."""
    if isinstance(value, (type, nn.Module, partial)) or callable(value):
        return False
    return hasattr(value, "__dict__") and not _is_library(type(value).__module__ or "")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def _generator_state(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return repr(generator.getstate()).encode()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state).encode()
    return repr(generator.get_state()).encode()
