"""What a model keeps in Python: the attributes of its modules besides parameters and buffers."""

from __future__ import annotations

import io
import itertools
import os
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import xxhash
from torch import Tensor, nn

from fsdp_mlir.modules.outside import places_and_memos, slot_names
from fsdp_mlir.modules.place import ABSENT, CONTAINERS, GENERATORS, SCALARS, Place
from fsdp_mlir.support.errors import CaptureError

_MAX_DEPTH = 6
_MAX_SHARED = 1000  # elements of a container that no module of the model holds


class _TooManyLeavesError(Exception):
    pass


class _Untaken:
    """Stands for an iterator, of which a capture must take nothing: most cannot be wound back."""

    def __init__(self, name: object, iterator: Iterator[Any]) -> None:
        self._named = f"'{name}', a {type(iterator).__name__}"

    def __iter__(self) -> _Untaken:
        return self

    def __next__(self) -> Any:
        raise CaptureError(
            f"the step takes an item from {self._named}, which a captured step does not do; give "
            "it as an input"
        )

    def __getattr__(self, attribute: str) -> Any:
        raise CaptureError(f"'{attribute}' of {self._named}: a captured step uses no iterators")


# What a step leaves in Python, as a call that puts it there.
Left = Callable[[], None]

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
    _slots: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)  # object, attributes
    _generators: list[tuple[Any, Any]] = field(default_factory=list)  # with its state
    _memos: list[tuple[Any, int]] = field(default_factory=list)  # of functools, with its misses
    _most: int | None = None  # leaves

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
        read, memos = places_and_memos(model, loss)
        for place in read:
            state._add_place(place)
        state._memos = [(memo, memo.cache_info().misses) for memo in memos]
        return state

    @staticmethod
    def inside(path: str, value: Any, most: int) -> PythonState | None:
        """What a value at `path` holds; None if that is more than `most` leaves. Generators, and
        arrays of more than a megabyte, are compared by identity."""
        state = PythonState(_most=most)
        try:
            state._add(path, value, 0)
        except _TooManyLeavesError:
            return None
        return state

    def restore(self) -> None:
        """Puts every attribute, container and generator back as it was, and empties memos of calls
        that have others than before; tensors keep their data."""
        for container, content in self._contents:
            _refill(container, content)
        for owner, attributes in self._slots:
            for name in _in_slots(owner):
                if name not in attributes:
                    delattr(owner, name)
            for name, value in attributes.items():
                if getattr(owner, name, ABSENT) is not value:
                    object.__setattr__(owner, name, value)
        for place, value in self._outside:
            if not place.holds(value):
                place.put(value)
        for generator, before in self._generators:
            _set_state(generator, before)
        for memo, misses in self._memos:
            if memo.cache_info().misses != misses:
                memo.cache_clear()

    @contextmanager
    def untaken(self) -> Iterator[None]:
        """In the body, a forward that takes an item from an iterator among the attributes fails
        with a CaptureError."""
        lent = []
        for container, content in self._contents:
            for key, value in _items(content):
                if _is_iterator(value):
                    get = container.get if isinstance(container, dict) else partial(_at, container)
                    lent.append((container.__setitem__, get, key, value))
        for owner, attributes in self._slots:
            for name, value in attributes.items():
                if _is_iterator(value):
                    put, get = partial(object.__setattr__, owner), partial(getattr, owner)
                    lent.append((put, get, name, value))
        guards = [_Untaken(key, value) for _, _, key, value in lent]
        try:
            for (put, _, key, _), guard in zip(lent, guards, strict=True):
                put(key, guard)
            yield
        finally:
            for (put, get, key, value), guard in zip(lent, guards, strict=True):
                if get(key, None) is guard:
                    put(key, value)

    def changes(self, after: PythonState) -> list[str]:
        """The paths that differ, in order."""
        paths = dict.fromkeys([*self.leaves, *after.leaves])
        return [path for path in paths if self.leaves.get(path) != after.leaves.get(path)]

    def left(self, after: PythonState) -> list[Left]:
        """How to put in place what a step has changed, if `after` is the state after it: plain
        values, and tensors and objects that were there before."""
        known = {**self._seen, **{id(container): container for container, _ in self._contents}}
        before = {id(container): content for container, content in self._contents}
        found: list[Left] = []
        for container, content in after._contents:
            old = before.get(id(container))
            if old is None:  # which one of the others may hold
                found.append(partial(_refill, container, content))
            elif isinstance(container, dict):
                found += _changed(partial(_set_item, container), old, content, known)
            elif not _same_items(enumerate(old), enumerate(content)) and _is_left(content, known):
                found.append(partial(_refill, container, content))
        slots = {id(owner): attributes for owner, attributes in self._slots}
        for owner, attributes in after._slots:
            if id(owner) in slots:
                found += _changed(partial(_set_slot, owner), slots[id(owner)], attributes, known)
        places = {place.key: value for place, value in self._outside}
        for place, value in after._outside:
            old = places.get(place.key, ABSENT)
            if value is not old and _is_left(value, known):
                found.append(partial(place.put, value))
        return found

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
        if place.owner is vars(os.environ):
            value = dict(value)  # which is not put back: the process has a copy of its own
        else:
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
        if self._most is not None and len(self.leaves) >= self._most:
            raise _TooManyLeavesError
        if self._most is not None and _is_costly(value):
            self._identify(path, "object", value)
        elif isinstance(value, SCALARS):
            self.leaves[path] = ("value", repr(value))
        elif isinstance(value, Tensor):
            self._identify(path, "tensor", value)
        elif isinstance(value, np.ndarray):
            digest = _digest(value.tobytes())
            self.leaves[path] = ("value", f"{value.dtype}{list(value.shape)} {digest}")
        elif isinstance(value, GENERATORS):
            before = _state_of(value)
            self.leaves[path] = ("value", f"state {_digest(_bytes(before))}")
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._generators.append((value, before))
        elif isinstance(value, ContextVar):
            self.leaves[path] = ("type", type(value))
            self._add(f"{path}.get()", value.get(ABSENT), depth)
        elif id(value) in self._seen or depth == _MAX_DEPTH:
            self._identify(path, "object", value)
        elif type(value) in (*CONTAINERS, Counter):  # subclasses may do more than hold items
            self._add_container(path, value, depth)
        elif _has_own_attributes(value):
            self._seen[id(value)] = value
            attributes = dict(getattr(value, "__dict__", {}))
            if attributes:
                self._contents.append((vars(value), dict(attributes)))
            if slots := _in_slots(value):
                self._slots.append((value, slots))
            self.leaves[path] = ("type", type(value))
            for name, member in (attributes | slots).items():
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


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, dict):
        # Not Counter's update, which adds, nor dict's of an OrderedDict, which has an order of its
        # own.
        kind = OrderedDict if isinstance(container, OrderedDict) else dict
        if not _same_items(kind.items(container), content.items()):
            kind.clear(container)
            kind.update(container, content)
    elif isinstance(container, set):
        if container != content:
            container.clear()
            container.update(content)
    elif not _same_items(enumerate(container), enumerate(content)):
        container.clear()
        container.extend(content)


def _changed(
    put: Callable[[Any, Any], None], old: dict[Any, Any], new: dict[Any, Any], known: dict[int, Any]
) -> Iterator[Left]:
    for key in {**old, **new}:
        value = new.get(key, ABSENT)
        if value is not old.get(key, ABSENT) and _is_left(value, known):
            yield partial(put, key, value)


def _set_item(container: dict[Any, Any], key: Any, value: Any) -> None:
    if value is ABSENT:
        container.pop(key, None)
    else:
        container[key] = value


def _set_slot(owner: Any, name: str, value: Any) -> None:
    if value is not ABSENT:
        object.__setattr__(owner, name, value)
    elif hasattr(owner, name):
        delattr(owner, name)


def _is_left(value: Any, known: dict[int, Any], depth: int = 0) -> bool:
    """Whether a step that computes nothing in Python leaves the same: a plain value, or what was
    there before. A tensor that the step has made is not."""
    if value is ABSENT or isinstance(value, (*SCALARS, np.ndarray)) or id(value) in known:
        return True
    if depth == _MAX_DEPTH:
        return False
    if isinstance(value, dict) and type(value) in (*CONTAINERS, Counter):
        value = [*dict.keys(value), *dict.values(value)]
    if type(value) in CONTAINERS:
        return all(_is_left(item, known, depth + 1) for item in value)
    if isinstance(value, Tensor) or not _has_own_attributes(value):
        return False
    members = {**getattr(value, "__dict__", {}), **_in_slots(value)}
    return all(_is_left(item, known, depth + 1) for item in members.values())


def _items(content: Any) -> Iterable[tuple[Any, Any]]:
    """Of a container that has places for them."""
    if isinstance(content, dict):
        return dict.items(content)
    return enumerate(content) if isinstance(content, (list, deque)) else ()


def _at(items: Any, index: int, default: Any) -> Any:
    return items[index] if index < len(items) else default


def _is_iterator(value: Any) -> bool:
    """Whether that is its whole state, unlike that of a file or of an object of the model's."""
    own = isinstance(value, (io.IOBase, Tensor)) or callable(value) or _has_own_attributes(value)
    return isinstance(value, Iterator) and not own


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
    return package not in ("torch", "builtins") and (
        hasattr(value, "__dict__") or bool(slot_names(type(value)))
    )


def _in_slots(value: Any) -> dict[str, Any]:
    names = slot_names(type(value))
    found = {name: getattr(value, name, ABSENT) for name in names}
    return {name: member for name, member in found.items() if member is not ABSENT}


def _is_costly(value: Any) -> bool:
    """To be compared by its data in each step."""
    return isinstance(value, GENERATORS) or (
        isinstance(value, np.ndarray) and value.nbytes > 1 << 20
    )


def _digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)[:8]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _bytes(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, Tensor) else repr(state).encode()
