"""A recorded step: its calls, and the types and names of its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch._ops import OpOverload

from fsdp_mlir.support.errors import Location
from fsdp_mlir.support.formulas import Formula, value_of
from fsdp_mlir.support.layouts import bytes_of


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

    `outs` has an entry per schema return: a name, or a list of names for a list of tensors. `types`
    is flat over `outs`; None where the call returned no tensor (an output that was not asked for,
    or a number).
    """

    func: OpOverload
    args: list[Any]
    outs: list[str | list[str]]
    types: list[TensorType | None]
    origin: Origin


@dataclass(frozen=True)
class Reliance:
    """What decided a shape or a way in the step: the results `names` of `calls` on tensors from
    outside, given by name. `form` is what the step follows from. Calls that draw begin where a step
    finds PyTorch's generator."""

    outside: tuple[str, ...]
    calls: tuple[Node, ...]
    names: tuple[str, ...]
    written: frozenset[str] = frozenset()  # of `outside`, by the calls
    by_count: bool = False  # of what is not zero, in the only one
    formula: Formula | None = None  # by the places in `names`: its truth value alone
    form: str = ""

    @property
    def draws(self) -> bool:
        return any(torch.Tag.nondeterministic_seeded in node.func.tags for node in self.calls)

    def found(self, sources: Mapping[str, Tensor], generator: Tensor | None = None) -> list[Tensor]:
        """The values, of these tensors. `generator`: the state of PyTorch's, if it is not as it is
        now, which it stays."""
        with _generator(generator) if self.draws else nullcontext():
            return self._found(sources)

    def _found(self, sources: Mapping[str, Tensor]) -> list[Tensor]:
        values: dict[str, Any] = {each: sources[each].detach().cpu() for each in self.outside}
        values |= {each: values[each].clone() for each in self.written}
        for node in self.calls:
            args, kwargs = split_arguments(node.func, _filled(node.args, values))
            result = node.func(*args, **kwargs)
            made = [result] if len(node.outs) == 1 else list(result)
            for out, each in zip(node.outs, made, strict=True):
                names = [out] if isinstance(out, str) else out
                values |= zip(names, [each] if isinstance(out, str) else each, strict=True)
        return [values[name] for name in self.names]

    def truth(self, values: Sequence[Tensor]) -> bool:
        """That of the formula. Raises what the calculation does."""
        assert self.formula is not None
        return bool(value_of(self.formula, {at: x.item() for at, x in enumerate(values)}))

    def form_of(self, values: Sequence[Tensor]) -> str:
        """What the step follows from."""
        if self.formula is not None:
            try:
                return str(self.truth(values))
            except (ArithmeticError, ValueError) as error:
                return type(error).__name__
        [value] = values
        if self.by_count:
            return str(int(value.count_nonzero()))
        return xxhash.xxh3_128_hexdigest(bytes_of(value).numpy())

    def holds(self, sources: Mapping[str, Tensor], generator: Tensor | None = None) -> bool:
        """Whether these tensors give the same."""
        return self.form_of(self.found(sources, generator)) == self.form


@contextmanager
def _generator(state: Tensor | None) -> Iterator[None]:
    """PyTorch's generator, in this state at first; it is put back after the body."""
    generator = torch.default_generator
    before = generator.get_state()
    if state is not None:
        generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


# Those of a step, and of its evaluation.
ReliedOn = tuple[tuple[Reliance, ...], tuple[Reliance, ...]]


def _filled(value: Any, values: dict[str, Any]) -> Any:
    if isinstance(value, Ref):
        return values[value.name]
    if isinstance(value, (list, tuple)):
        return [_filled(item, values) for item in value]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value


@dataclass
class Trace:
    """The recorded step. `constants` are tensors that belong to neither parameters nor buffers."""

    nodes: list[Node] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    constant_index: dict[str, int] = field(default_factory=dict)  # by the names of their values
    literals: set[int] = field(default_factory=set)  # constants that the step itself made
    relied_on: list[Reliance] = field(default_factory=list)
    backward_begin: int = 0
    count: int = 0  # of the values that are named v0, v1, …
    # By id: functions of kernels whose calls replace those of their operator.
    kernels: dict[int, FunctionType] = field(default_factory=dict)


def written_arguments(func: OpOverload, values: Sequence[Any]) -> list[Any]:
    """Those of all schema arguments whose memory a call writes. Batch normalisation in training
    writes its running statistics, which its schema lacks."""
    unannotated: tuple[str, ...] = ()
    if func is torch.ops.aten.native_batch_norm.default and values[5]:
        unannotated = ("running_mean", "running_var")
    elif not func._schema.is_mutable:
        return []
    return [
        value
        for formal, value in zip(func._schema.arguments, values, strict=True)
        if (formal.alias_info is not None and formal.alias_info.is_write)
        or formal.name in unannotated
    ]


def all_arguments(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The value of every schema argument, defaults filled in."""
    return [
        kwargs[formal.name]
        if formal.name in kwargs
        else args[position]
        if position < len(args)
        else formal.default_value
        for position, formal in enumerate(func._schema.arguments)
    ]


def split_arguments(func: OpOverload, values: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The values as positional and keyword arguments."""
    pairs = list(zip(func._schema.arguments, values, strict=True))
    positional = [value for formal, value in pairs if not formal.kwarg_only]
    return positional, {formal.name: value for formal, value in pairs if formal.kwarg_only}
