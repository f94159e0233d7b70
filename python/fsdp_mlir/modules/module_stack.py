"""Tracks which module of a model is running."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp_mlir.modules.sharding import class_name


class ModuleStack:
    """The path of the module whose `forward` runs, through PyTorch's global module hooks.

    `paths` is the table that indices point into; "" (the root, index 0) is first. `classes` has
    the class name of each.
    """

    def __init__(self, model: nn.Module) -> None:
        self.paths = [""]
        self.classes = [class_name(model)]
        self._index = {id(model): 0}
        for path, module in model.named_modules():
            if id(module) not in self._index:
                self._index[id(module)] = len(self.paths)
                self.paths.append(path)
                self.classes.append(class_name(module))
        self._stack: list[int] = []
        self._handles: list[Any] = []

    @property
    def current(self) -> int | None:
        return self._stack[-1] if self._stack else None

    def __enter__(self) -> ModuleStack:
        hooks = nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, _args: Any) -> None:
        self._stack.append(self._index.get(id(module), self.current or 0))

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._stack:
            self._stack.pop()
