"""Numbers that a step reads where code holds them, such as an attribute of the model that a loop
changes from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fsdp_mlir.modules.place import Place


class Held:
    """The numbers in `places`, by their names."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = dict(places)
        self._before: dict[str, Any] = {}
        self._put: dict[str, Any] = {}

    @property
    def values(self) -> dict[str, Any]:
        return {name: place.value() for name, place in self._places.items()}

    def put(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Puts those of `values` in their places, until `restore`; returns the others."""
        for name, place in self._places.items():
            self._before.setdefault(name, place.value())
            self._put[name] = values[name]
            place.put(values[name])
        return {name: value for name, value in values.items() if name not in self._places}

    def seal(self, make: Callable[[str], Any]) -> None:
        """Puts what `make` gives of their names in the places."""
        for name in self._put:
            self._put[name] = make(name)
            self._places[name].put(self._put[name])

    def assigned(self) -> dict[str, Any]:
        """What is in places that have something else since `put`, or `seal`, by their names."""
        now = {name: self._places[name].value() for name in self._put}
        return {name: value for name, value in now.items() if value is not self._put[name]}

    def restore(self) -> None:
        for name, value in self._before.items():
            self._places[name].put(value)
        self._before.clear()
        self._put.clear()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Does so at the end of the body."""
        try:
            yield
        finally:
            self.restore()
