"""Values that a step computes from literals alone, such as position ids and masks from `arange`.

Such tensors stay real during capture. Then what a model decides from them (`.item()`, `.all()` in a
branch) goes as in eager execution, and the same at every step; a model that looks whether its
tensors are fake takes its usual path. Only small integer and bool tensors are kept, so that
capture computes nothing that costs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

# Larger values are not worth computing: 4 Mi elements.
_MAX_ELEMENTS = 1 << 22

_UNINITIALISED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}


def flat_tensors(value: Any) -> list[Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in flat_tensors(item)]
    return [value] if isinstance(value, Tensor) else []


class KnownValues:
    """The real tensors of one capture. They are alive as long as this object is."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}
        self._unknown: set[int] = set()  # storages that were written with unknown data

    def add(self, result: Any) -> None:
        for tensor in flat_tensors(result):
            self._tensors[id(tensor)] = tensor

    def made(self, tensor: Tensor) -> bool:
        """Whether `tensor` is one of the real tensors, be its value still known or not."""
        return id(tensor) in self._tensors

    def forget(self, tensor: Tensor) -> None:
        """The data of `tensor`, and of what shares its storage, is no longer known."""
        self._unknown.add(tensor.untyped_storage()._cdata)

    def has(self, tensor: Tensor) -> bool:
        return self.made(tensor) and tensor.untyped_storage()._cdata not in self._unknown

    def real(self, tensor: Tensor) -> Tensor | None:
        """`tensor` where its data is known."""
        return tensor if self.has(tensor) else None

    def can_compute(self, func: OpOverload, values: list[Any]) -> bool:
        """Whether the call's result follows from known values. Its dtype is not looked at."""
        return (
            torch.Tag.nondeterministic_seeded not in func.tags
            and func.overloadpacket not in _UNINITIALISED
            and all(self.has(tensor) for tensor in flat_tensors(values))
        )

    @staticmethod
    def worth_keeping(result: Any) -> bool:
        tensors = flat_tensors(result)
        return bool(tensors) and all(
            not tensor.is_floating_point()
            and not tensor.is_complex()
            and tensor.numel() <= _MAX_ELEMENTS
            for tensor in tensors
        )

    @staticmethod
    def compute(func: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Runs the call on real tensors, unseen by any mode."""
        with _disable_current_modes():
            return func(*args, **kwargs)
