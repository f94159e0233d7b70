"""Containers as they store their items, whatever their classes make of that."""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

import numpy as np
import xxhash

from fsdp_mlir.modules.place import ABSENT, CONTAINERS, SCALARS, built_in

_LONG = 1000  # items of a table


class Ordered(set[Any]):
    """A copy of a set, and the order of the items in that, which a copy does not have."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.order = list(items)
        super().__init__(self.order)


def in_order(items: Any) -> list[Any]:
    """The items of a set, or of the one that was copied."""
    if isinstance(items, Ordered):
        return items.order
    return list(built_in(type(items)).__iter__(items))


def items_of(container: Any) -> list[Any]:
    """What it holds as it is stored, of a dict the values: a subclass may have methods of its
    own."""
    kind = built_in(type(container))
    if kind is None:
        return list(container)
    return list(kind.values(container) if issubclass(kind, dict) else kind.__iter__(container))


def has_same_objects(container: Any, content: Any) -> bool:
    """Whether a container has the same objects in the same order as another one, or a copy."""
    kind, of_content = built_in(type(container)), built_in(type(content))
    if kind is None or of_content is None:
        return False
    if kind.__len__(container) != of_content.__len__(content):
        return False
    if kind in (set, frozenset):
        return all(map(is_, in_order(container), in_order(content)))
    mine, others = kind.__iter__(container), of_content.__iter__(content)
    return all(map(is_, mine, others)) and (
        not issubclass(kind, dict)
        or all(map(is_, kind.values(container), of_content.values(content)))
    )


def is_table(value: Any, kind: Any) -> bool:
    """Whether it holds many numbers, strings or the like, and nothing else."""
    if type(value) is not kind or kind in (set, frozenset) or kind.__len__(value) < _LONG:
        return False
    kinds = set(map(type, kind.__iter__(value)))
    if issubclass(kind, dict):
        kinds |= set(map(type, kind.values(value)))
    return kinds.issubset(SCALARS)


def is_other_order(left: list[Any], right: list[Any]) -> bool:
    """Whether these are the same keys in another order."""
    try:
        return left != right and len(left) == len(right) and set(left) == set(right)
    except Exception:  # keys that do not compare, such as tensors
        return False


def copied(container: Any, kind: Any) -> Any:
    """The items as they are stored, in a dict, set, list or deque."""
    if issubclass(kind, dict):
        return dict(kind.items(container))
    if kind is deque:
        return deque(deque.__iter__(container), container.maxlen)
    return Ordered(set.__iter__(container)) if kind is set else kind(kind.__iter__(container))


def changed(old: dict[Any, Any], new: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Names with their new values, where these differ."""
    for key in {**old, **new}:
        value = new.get(key, ABSENT)
        if value is not old.get(key, ABSENT):
            yield key, value


def items(content: Any) -> Iterable[tuple[Any, Any]]:
    """Of the copy of a container that has places for them."""
    if isinstance(content, dict):
        return content.items()
    return enumerate(content) if isinstance(content, (list, deque)) else ()


def item_at(items: Any, index: int, default: Any) -> Any:
    kind = built_in(type(items))
    return kind.__getitem__(items, index) if index < kind.__len__(items) else default


def digest_of(content: Any) -> str:
    """Of which objects a copy of a container holds."""
    held = [*content, *content.values()] if isinstance(content, dict) else content
    held = in_order(held) if isinstance(held, set) else held
    return digest(np.array(list(map(id, held)), np.int64).tobytes())


def digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def names_itself(key: Any) -> bool:
    """Whether the text of a key tells it from others."""
    if type(key) is tuple:
        return all(map(names_itself, key))
    return type(key) in SCALARS or isinstance(key, (enum.Enum, type))


def is_plain(container: Any) -> bool:
    """Whether it is all that it holds."""
    return type(container) in CONTAINERS or type(container) is Counter
