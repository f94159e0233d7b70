"""A recorded step: its calls, and the types and names of its values."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fsdp_mlir.errors import Location


@dataclass(frozen=True)
class Ref:
    """A tensor value of the graph, by its name without the per cent sign."""

    name: str


@dataclass(frozen=True)
class TensorType:
    """Shape and dtype of a value, and its strides in elements; None where it is contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    @staticmethod
    def of(tensor: Tensor) -> TensorType:
        strides = None if tensor.is_contiguous() else tensor.stride()
        return TensorType(tuple(tensor.shape), tensor.dtype, strides)


@dataclass(frozen=True)
class Origin:
    """The module (index into the table of module paths) and model source line that ran a call."""

    module: int = 0
    location: Location | None = None


@dataclass
class Node:
    """One call. `args` has every schema argument, tensors as Ref.

    `outs` is per schema return: a name, a list of names for a list of tensors. `types` is flat over
    `outs`; None where the call returned no tensor (an output that was not asked for).
    """

    func: OpOverload
    args: list[Any]
    outs: list[str | list[str]]
    types: list[TensorType | None]
    origin: Origin


@dataclass
class Trace:
    """The recorded step. `constants` are tensors that belong to neither parameters nor buffers."""

    nodes: list[Node] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    constant_index: dict[str, int] = field(default_factory=dict)  # by the names of their values
    literals: set[int] = field(default_factory=set)  # constants that the step itself made
    relies_on_values: bool = False  # of tensors from outside, which decided what was recorded
    backward_begin: int = 0
    # By id: functions of kernels whose calls stand in place of their operator's.
    kernels: dict[int, FunctionType] = field(default_factory=dict)


def split_arguments(func: OpOverload, values: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The values as positional and keyword arguments."""
    pairs = list(zip(func._schema.arguments, values, strict=True))
    positional = [value for formal, value in pairs if not formal.kwarg_only]
    return positional, {formal.name: value for formal, value in pairs if formal.kwarg_only}
