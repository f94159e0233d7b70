"""Modules of Python that containers and objects hold as values, such as a configuration."""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

from torch import nn

from fsdp_mlir.modules.containers import items_of
from fsdp_mlir.modules.place import CONTAINERS, PLAIN, opened

MOST_ITEMS = 2000  # of containers that are searched
MOST_DEPTH = 6


class PythonModules:
    """Those that were `found`, by their ids."""

    def __init__(self) -> None:
        self.found: dict[int, ModuleType] = {}
        self._searched: dict[int, Any] = {}

    def find(self, value: Any, depth: int = 0) -> None:
        """Those in a value."""
        value = opened(value)
        if type(value) in weakref.ProxyTypes:
            return
        if isinstance(value, ModuleType):
            self.found[id(value)] = value
        elif isinstance(value, (*PLAIN, nn.Module, type)):
            return
        elif depth < MOST_DEPTH and id(value) not in self._searched and not callable(value):
            self._searched[id(value)] = value
            held = value if isinstance(value, CONTAINERS) else getattr(value, "__dict__", None)
            items = items_of(held) if isinstance(held, CONTAINERS) else []
            if len(self._searched) + len(items) <= MOST_ITEMS:
                for item in items:
                    self.find(item, depth + 1)
