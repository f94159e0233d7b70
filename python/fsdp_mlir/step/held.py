"""Numbers that a step reads where code holds them, such as an attribute of the model that a loop
changes from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fsdp_mlir.modules.place import Lent


class Held(Lent):
    """The numbers in its places."""

    @property
    def values(self) -> dict[str, Any]:
        return {name: place.value() for name, place in self._places.items()}

    def put(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Puts those of `values` in their places, until `restore`; returns the others."""
        for name in self._places:
            self.lend(name, values[name])
        return {name: value for name, value in values.items() if name not in self._places}

    def seal(self, make: Callable[[str], Any]) -> None:
        """Puts what `make` gives of their names in the places."""
        for name in self._lent:
            self.lend(name, make(name))

    def assigned(self) -> dict[str, Any]:
        """What is in places that have something else since `put`, or `seal`, by their names."""
        now = {name: self._places[name].value() for name in self._lent}
        return {name: value for name, value in now.items() if value is not self._lent[name]}
