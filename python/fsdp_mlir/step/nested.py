"""Values that hold tensors: lists, tuples, mappings, dataclasses, and classes that
`torch.utils._pytree` knows.

An input may be one. Its tensors are then inputs of the step, and its form is a part of the step:
the containers with their keys, and the numbers, strings and None in them.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from enum import Enum
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree

_PLAIN = (bool, int, float, complex, str, bytes, NoneType, torch.dtype, torch.device, torch.Size)
_DEEPEST = 20  # of containers in each other; a cycle has no end


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A container taken apart: how to say where each part is, and how to put others together."""

    form: str
    names: list[str]
    values: list[Any]
    build: Callable[[list[Any]], Any]


def named_leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    """What is no container in `value`, by names such as `batch['x'][0]`, in order."""
    return list(_leaves(name, value, 0))


def rebuilt(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same containers, made anew, with those tensors in place of the ones in `value`."""
    return _made_anew("", value, lambda _, x: next(tensors) if isinstance(x, Tensor) else x)


def _made_anew(name: str, value: Any, leaf: Callable[[str, Any], Any]) -> Any:
    """The same containers with what `leaf` gives for each leaf of that name."""

    def build(value: Any, depth: int, path: str) -> Any:
        parts = None if isinstance(value, Tensor) else _parts(value, depth)
        if parts is None:
            return leaf(path, value)
        pairs = zip(parts.names, parts.values, strict=True)
        return parts.build([build(each, depth + 1, path + key) for key, each in pairs])

    return build(value, 0, name)


@dataclasses.dataclass(frozen=True)
class Content:
    """What a value held: its leaves, and each container in it with the names of its parts."""

    leaves: list[tuple[str, Any]]
    containers: list[tuple[str, Any, tuple[str, ...]]]

    @staticmethod
    def by(name: str, value: Any) -> Content:
        return Content(named_leaves(name, value), list(_containers(name, value, 0)))

    def is_as(self, other: Content) -> bool:
        """Whether both have the same objects in the same places."""
        pairs = zip(self.leaves, other.leaves, strict=False)
        lengths = [[len(each.leaves), len(each.containers)] for each in (self, other)]
        others = zip(self.containers, other.containers, strict=False)
        return (
            lengths[0] == lengths[1]
            and all(a[0] == b[0] and a[1] is b[1] for a, b in pairs)
            and all(a[0] == b[0] and a[1] is b[1] and a[2] == b[2] for a, b in others)
        )

    def without(self, name: str, keys: Sequence[str]) -> Content:
        """The same if code takes these keys out of the mapping `name`, which may be one of a class
        of its own that holds its items in an attribute."""
        items = {f"[{key!r}]" for key in keys}
        own = re.compile(rf"{re.escape(name)}(\.\w+)*")
        below = re.compile(rf"{own.pattern}({'|'.join(map(re.escape, items)) or '(?!)'})")
        left = [
            (path, held, tuple(x for x in names if not (own.fullmatch(path) and x in items)))
            for path, held, names in self.containers
        ]
        return Content([leaf for leaf in self.leaves if not below.match(leaf[0])], left)


def keys_taken(name: str, all_keys: Any, before: Content, after: Any) -> tuple[str, ...] | None:
    """The keys that code has taken out of a mapping that held `before`, as by pop(); `all_keys` is
    a mapping with all of them. None if it has changed in another way."""
    gone: list[str] = []
    if isinstance(all_keys, MutableMapping):
        gone = [key for key in all_keys if key not in after]
        if not all(isinstance(key, str) and _is_leaf(all_keys[key]) for key in gone):
            return None  # code may also have changed a container that it took out
    return tuple(gone) if before.without(name, gone).is_as(Content.by(name, after)) else None


def shares(batches: Sequence[Mapping[str, Any]], names: Sequence[str]) -> bool:
    """Whether a container with the items of one of these inputs comes again among the batches."""
    found = [
        (held, name in names and "[" not in path.removeprefix(name))
        for batch in batches
        for name, value in batch.items()
        for path, held, _ in _containers(name, value, 0)
    ]
    count = Counter(id(held) for held, _ in found)
    return any(count[id(held)] > 1 for held, has_items in found if has_items)


def _containers(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    parts = None if isinstance(value, Tensor) else _parts(value, depth)
    if parts is not None:
        yield name, value, tuple(parts.names)
        for key, each in zip(parts.names, parts.values, strict=True):
            yield from _containers(name + key, each, depth + 1)


def repetitions(named: Mapping[str, Any]) -> dict[str, str]:
    """The tensors in these values that are the same object as an earlier one: their names, and its
    name."""
    first: dict[int, str] = {}
    found = {}
    for name, value in named.items():
        for path, leaf in named_leaves(name, value):
            if isinstance(leaf, Tensor) and first.setdefault(id(leaf), path) != path:
                found[path] = first[id(leaf)]
    return found


def sharing(named: Mapping[str, Any]) -> dict[str, str]:
    """The tensors in these values that have the memory of an earlier one, by other objects, as in
    `repetitions`."""
    first: dict[int, tuple[int, str]] = {}
    found = {}
    for name, value in named.items():
        for path, leaf in named_leaves(name, value):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
                storage = leaf.untyped_storage()._cdata
                identity, earlier = first.setdefault(storage, (id(leaf), path))
                if identity != id(leaf):
                    found[path] = earlier
    return found


def form(
    value: Any, of_tensor: Callable[[Tensor], Any], name: str = "", unread: Set[str] = frozenset()
) -> Any:
    """What two values that are alike but for the data of tensors have in common. Of an object that
    cannot be a part of a step, only the class, and of what is `unread`, as named by `pattern`."""

    def told(value: Any, depth: int, path: str) -> Any:
        if isinstance(value, Tensor):
            return of_tensor(value)
        parts = _parts(value, depth)
        if parts is not None:
            pairs = zip(parts.names, parts.values, strict=True)
            return parts.form, tuple(told(each, depth + 1, path + key) for key, each in pairs)
        if is_plain(value) and not _is_among(path, value, unread):
            return _class(value), repr(value)
        return (_class(value),)

    return told(value, 0, name)


def pattern(path: str) -> str:
    """The name of a leaf without its places in lists."""
    return re.sub(r"\[\d+\]", "[]", path)


def _is_among(path: str, value: Any, unread: Set[str]) -> bool:
    """None and True, which code compares by `is`, are not."""
    return bool(unread) and type(value) in (str, bytes, int, float) and pattern(path) in unread


def replaced(name: str, value: Any, unread: Set[str], make: Callable[[str, Any], Any]) -> Any:
    """The same containers, made anew, with what `make` gives for the name and value of each leaf
    that is `unread`."""

    def leaf(path: str, value: Any) -> Any:
        return make(pattern(path), value) if _is_among(path, value, unread) else value

    return _made_anew(name, value, leaf)


def is_plain(value: Any) -> bool:
    """Whether it is a number, a string or the like, and nothing more: its text tells all of it."""
    return type(value) in _PLAIN or isinstance(value, (Enum, np.generic))


def _leaves(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    parts = None if isinstance(value, Tensor) else _parts(value, depth)
    if parts is None:
        yield name, value
        return
    for key, each in zip(parts.names, parts.values, strict=True):
        yield from _leaves(name + key, each, depth + 1)


def _parts(value: Any, depth: int) -> _Parts | None:
    """None for what is no container that is known."""
    if is_plain(value) or depth > _DEEPEST:
        return None
    node = _pytree.SUPPORTED_NODES.get(_pytree._get_node_type(value))
    if node is not None:
        values, context = node.flatten_fn(value)
        text = _told(context)
        if text is None:
            return None
        keys = list(value) if isinstance(value, Mapping) else range(len(values))
        names = [f"[{key!r}]" for key in keys]
        if len(names) != len(values):
            names = [f"[{index}]" for index in range(len(values))]
        unflatten = node.unflatten_fn
        return _Parts(
            f"{_class(value)} {text}", names, values, lambda parts: unflatten(parts, context)
        )
    if _is_its_attributes(value):
        names = list(vars(value))

        def build(parts: list[Any]) -> Any:
            made = object.__new__(type(value))
            vars(made).update(zip(names, parts, strict=True))
            return made

        form = f"{_class(value)} {names}"
        return _Parts(form, [f".{name}" for name in names], list(vars(value).values()), build)
    return None


def _is_its_attributes(value: Any) -> bool:
    """Whether a dataclass or mapping, such as the batches of transformers, holds nothing besides
    its attributes, with which another one can be made."""
    kind = type(value)
    if not dataclasses.is_dataclass(kind) and not isinstance(value, Mapping):
        return False
    if isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
        return False
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        return False
    try:
        object.__new__(kind)
    except TypeError:  # its memory is that of a dict or the like
        return False
    return True


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) or _parts(value, 0) is None


def _class(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _told(context: Any) -> str | None:
    """Keys and other data of a container, if they are the same in every process."""
    if is_plain(context):
        return f"{_class(context)} {context!r}"
    if isinstance(context, type):
        return f"{context.__module__}.{context.__qualname__}"
    if type(context) in (list, tuple):
        texts = [_told(each) for each in context]
        return None if None in texts else str(texts)
    return None
