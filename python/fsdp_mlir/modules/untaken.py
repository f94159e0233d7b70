"""Stand-ins for iterators, of which a capture must take nothing: most cannot be wound back."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import BuiltinMethodType, MethodWrapperType
from typing import Any

from torch import Tensor

from fsdp_mlir.modules.containers import item_at, items
from fsdp_mlir.modules.in_place import position
from fsdp_mlir.modules.place import ABSENT, SCALARS, Place, built_in, has_own_attributes
from fsdp_mlir.support.errors import CaptureError

_MOST_DEPTH = 4
_MOST_ITEMS = 1000  # of a tuple


class _Untaken:
    """Stands for an iterator, or for a method of one."""

    def __init__(self, name: object, iterator: Any) -> None:
        self._named = f"'{name}', a {type(iterator).__name__}"

    def __iter__(self) -> _Untaken:
        return self

    def __next__(self) -> Any:
        raise CaptureError(
            f"the step takes an item from {self._named}, which a captured step does not do; give "
            "it as an input"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return next(self)

    def __getattr__(self, attribute: str) -> Any:
        raise CaptureError(f"'{attribute}' of {self._named}: a captured step uses no iterators")


def guarded(name: object, value: Any, depth: int = 0) -> Any:
    """What stands for a value that is an iterator or leads to one by what cannot be changed: a
    partial, a tuple or a bound method. The value itself if it does not."""
    if is_iterator(value):
        return _Untaken(name, value)
    if isinstance(value, (BuiltinMethodType, MethodWrapperType)):
        return _Untaken(name, owner) if is_iterator(owner := value.__self__) else value
    if depth == _MOST_DEPTH:
        return value
    if type(value) is tuple and len(value) <= _MOST_ITEMS:
        items = tuple(guarded(f"{name}[{i}]", item, depth + 1) for i, item in enumerate(value))
        return items if _differ(items, value) else value
    if type(value) is partial:
        function = guarded(name, value.func, depth + 1)
        args = guarded(f"{name}.args", value.args, depth + 1)
        keywords = {key: guarded(key, item, depth + 1) for key, item in value.keywords.items()}
        if (
            function is not value.func
            or args is not value.args
            or _differ(keywords.values(), value.keywords.values())
        ):
            return partial(function, *args, **keywords)
    return value


def is_taken_from(value: Any) -> bool:
    """Whether code may take from it what it does not put back: an iterator, what leads to one, or a
    file that is read."""
    if isinstance(value, io.IOBase):
        return position(value) is not ABSENT
    return guarded("", value) is not value


def is_iterator(value: Any) -> bool:
    """Whether that is its whole state, unlike that of a file or of an object of the model's."""
    own = isinstance(value, (io.IOBase, Tensor)) or callable(value) or has_own_attributes(value)
    return isinstance(value, Iterator) and not own


def _differ(items: Any, others: Any) -> bool:
    return any(a is not b for a, b in zip(items, others, strict=True))


@contextmanager
def standing_in(
    contents: Iterable[tuple[Any, Any]],
    slots: Iterable[tuple[Any, Mapping[str, Any]]],
    places: Iterable[tuple[Place, Any]],
) -> Iterator[None]:
    """In the body, they are in the place of what containers, slots of objects and places have; each
    of these comes with what it has."""
    lent: list[tuple[Callable[[Any], None], Callable[[], Any], Any, Any]] = []

    def lend(name: Any, value: Any, put: Any, get: Any) -> None:
        if (guard := guarded(name, value)) is not value:
            lent.append((put, get, value, guard))

    for container, content in contents:
        kind = built_in(type(container))
        for key, value in items(content):
            if type(value) in SCALARS:
                continue
            get = partial(kind.get if isinstance(container, dict) else item_at, container, key)
            lend(key, value, partial(kind.__setitem__, container, key), partial(get, None))
    for owner, attributes in slots:
        for name, value in attributes.items():
            put = partial(object.__setattr__, owner, name)
            lend(name, value, put, partial(getattr, owner, name, None))
    for place, value in places:
        lend(place.label, value, place.put, place.value)
    try:
        for put, _, _, guard in lent:
            put(guard)
        yield
    finally:
        for put, get, value, guard in lent:
            if get() is guard:
                put(value)
