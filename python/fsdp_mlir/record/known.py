"""Values that a step computes from literals alone, such as position ids and masks from `arange`.

Such tensors stay real during capture. Then what a model decides from them (`.item()`, `.all()` in a
branch) goes as in eager execution, and the same at every step; a model that looks whether its
tensors are fake takes its usual path. Only small integer and bool tensors are kept, so that capture
computes nothing expensive. They are computed on the CPU. If the step has such a tensor on another
device, the model sees it there, as a `Known` without data, which is not a fake tensor either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from fsdp_mlir.record.graph import split_arguments

aten = torch.ops.aten

# Larger values are not worth computing: 4 Mi elements.
_MAX_ELEMENTS = 1 << 22

_UNINITIALISED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}


def flat_tensors(value: Any) -> list[Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in flat_tensors(item)]
    return [value] if isinstance(value, Tensor) else []


class Known(Tensor):
    """A known value on a device that does not exist here."""

    @staticmethod
    def of(real: Tensor, device: torch.device) -> Known:
        made: Known = Tensor._make_wrapper_subclass(
            Known, real.shape, strides=real.stride(), dtype=real.dtype, device=device
        )
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()  # the method of Tensor takes no subclasses

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"'{func}' of a value of the captured step, outside of it")


class KnownValues:
    """The known tensors of one capture. They live as long as this object."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}
        self._reals: dict[int, Tensor] = {}  # by the id of a tensor in _tensors
        self._unknown: set[int] = set()  # storages that were written with unknown data

    def made(self, tensor: Tensor) -> bool:
        """Whether `tensor` is one of the known tensors, whether or not its value is still known."""
        return id(tensor) in self._tensors

    def forget(self, tensor: Tensor) -> None:
        """Marks the data of `tensor`, and of what shares its storage, as no longer known."""
        self._unknown.add(self._storage(tensor))

    def has(self, tensor: Tensor) -> bool:
        return self.made(tensor) and self._storage(tensor) not in self._unknown

    def real(self, tensor: Tensor) -> Tensor | None:
        """The data of `tensor` on the CPU, where it is known."""
        return self._reals[id(tensor)] if self.has(tensor) else None

    def _storage(self, tensor: Tensor) -> int:
        return self._reals[id(tensor)].untyped_storage()._cdata

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

    def compute(self, func: OpOverload, values: list[Any]) -> Any:
        """Runs the call, of which `values` are all schema arguments, on the data of its tensors,
        unseen by any mode; its results are known."""
        device = result_device(values)
        given = {id(self.data(tensor)): tensor for tensor in flat_tensors(values)}
        moved = tree_map_only(torch.device, lambda _: torch.device("cpu"), values)
        args, kwargs = split_arguments(func, tree_map_only(Tensor, self.data, moved))
        with _disable_current_modes():
            result = func(*args, **kwargs)

            def shown(real: Tensor) -> Tensor:
                if id(real) in given:
                    return given[id(real)]  # written in place
                tensor = real if device.type == "cpu" else Known.of(real, device)
                self._tensors[id(tensor)], self._reals[id(tensor)] = tensor, real
                return tensor

            return tree_map_only(Tensor, shown, result)

    def data(self, tensor: Tensor) -> Tensor:
        """That of a tensor that is made of known values; the tensor itself for another one."""
        return self._reals.get(id(tensor), tensor)


def result_device(values: list[Any]) -> torch.device:
    """The device of what a call makes, by its arguments."""
    for value in values:
        if isinstance(value, torch.device):
            return value
    return next((tensor.device for tensor in flat_tensors(values)), torch.device("cpu"))
