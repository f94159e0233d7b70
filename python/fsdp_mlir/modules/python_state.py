"""What a model keeps in Python: the attributes of its modules besides parameters and buffers."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fsdp_mlir.modules.outside import ABSENT, CONTAINERS, GENERATORS, SCALARS, Place, places

_MAX_DEPTH = 6
_MAX_SHARED = 1000  # elements of a container that no module of the model holds

# How a leaf compares: by value, as a tensor by identity, as any other object by identity.
Leaf = tuple[str, Any]


@dataclass
class PythonState:
    """The leaves of a model's attributes by path ("layers.0.calls", "cache['k'][1]"), and what it
    takes to restore the containers. Objects that are compared by identity are kept alive."""

    leaves: dict[str, Leaf] = field(default_factory=dict)
    _contents: list[tuple[Any, Any]] = field(default_factory=list)  # container, shallow copy
    _seen: dict[int, Any] = field(default_factory=dict)
    _outside: list[tuple[Place, Any]] = field(default_factory=list)  # with its value

    @staticmethod
    def of(model: nn.Module, loss: Callable[..., Any] | None = None) -> PythonState:
        """The current state, with that of a loss function and of what their code reads from outside
        (outside.py), such as globals. For parameters, buffers and submodules only their names
        count."""
        state = PythonState()
        for path, module in model.named_modules():
            state._add_module(f"{path}." if path else "", module)
        if isinstance(loss, nn.Module):
            for path, module in loss.named_modules():
                state._add_module(f"loss.{path}." if path else "loss.", module)
        for place in places(model, loss):
            state._add_place(place)
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
        for place, value in self._outside:
            if place.value() is not value:
                place.put(value)

    def changes(self, after: PythonState) -> list[str]:
        """The paths that differ, in order."""
        paths = dict.fromkeys([*self.leaves, *after.leaves])
        return [path for path in paths if self.leaves.get(path) != after.leaves.get(path)]

    def holds_computed(self, path: str) -> bool:
        """Whether a tensor that is not a parameter lies there, as in RNNs' list of their
        weights."""
        kind, value = self.leaves.get(path, ("none", None))
        return kind == "tensor" and not isinstance(self._seen[value], nn.Parameter)

    def held(self, identity: int) -> Any:
        """The tensor or object of a leaf that is compared by identity."""
        return self._seen[identity]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by their paths."""
        return {
            path: self._seen[value]
            for path, (kind, value) in self.leaves.items()
            if kind == "tensor"
        }

    def _add_place(self, place: Place) -> None:
        value = place.value()
        self._outside.append((place, value))
        path = place.label
        while path in self.leaves:  # a variable of another closure of one function
            path += "'"
        if value is not ABSENT and not (type(value) in CONTAINERS and len(value) > _MAX_SHARED):
            self._add(path, value, 0)

    def _add_module(self, prefix: str, module: nn.Module) -> None:
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
        if isinstance(value, SCALARS):
            self.leaves[path] = ("value", repr(value))
        elif isinstance(value, Tensor):
            self._identify(path, "tensor", value)
        elif isinstance(value, np.ndarray):
            digest = _digest(value.tobytes())
            self.leaves[path] = ("value", f"{value.dtype}{list(value.shape)} {digest}")
        elif isinstance(value, GENERATORS):
            self.leaves[path] = ("value", f"state {_digest(_generator_state(value))}")
        elif id(value) in self._seen or depth == _MAX_DEPTH:
            self._identify(path, "object", value)
        elif type(value) in CONTAINERS:  # subclasses may do more than hold items
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
    return all(_same_key(a[0], b[0]) and a[1] is b[1] for a, b in pairs)


def _same_key(left: Any, right: Any) -> bool:
    # Tensors are equal element by element; an optimizer's state has them as keys.
    return left is right or (not isinstance(left, Tensor) and bool(left == right))


def _has_own_attributes(value: Any) -> bool:
    """Whether to look inside: an object of the model's that is not a function, a class or a part of
    PyTorch."""
    if isinstance(value, (type, nn.Module, partial)) or callable(value):
        return False
    package = (type(value).__module__ or "").partition(".")[0]
    return hasattr(value, "__dict__") and package not in ("torch", "builtins")


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
