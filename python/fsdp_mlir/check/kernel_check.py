"""Whether the kernel of an operator that is not PyTorch's does what its schema and its fake kernel
say. A run checks the same of a plan's operators (KernelCheck.h); this is before there is a plan."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_mlir.record.graph import Node, TensorType, split_arguments
from fsdp_mlir.record.known import flat_tensors
from fsdp_mlir.support.errors import located
from fsdp_mlir.support.layouts import bytes_of


def checked_call(node: Node, values: list[Any]) -> Any:
    """Runs a recorded call on real tensors; CaptureError if it does not do what was recorded."""
    func = node.func

    def refuse(message: str) -> None:
        raise located(node.origin.location, f"operator '{func}' cannot be captured: {message}")

    operands = [
        (formal.name, tensor, formal.alias_info)
        for formal, value in zip(func._schema.arguments, values, strict=True)
        for tensor in flat_tensors(value)
    ]
    before = [(_layout(tensor), _bytes(tensor)) for _, tensor, _ in operands]
    generators = _generators()
    args, kwargs = split_arguments(func, values)
    made = func(*args, **kwargs)

    written = [tensor for _, tensor, alias in operands if alias is not None and alias.is_write]
    for (name, tensor, _), (layout, data) in zip(operands, before, strict=True):
        if _layout(tensor) != layout:
            refuse(f"it gives argument '{name}' another shape, strides or memory")
        if _bytes(tensor) != data and not any(_share(tensor, other) for other in written):
            refuse(
                f"it writes argument '{name}', expected a schema that says so, as Tensor(a!), or "
                "mutates_args of torch.library.custom_op"
            )
    if torch.Tag.nondeterministic_seeded not in func.tags and _generators() != generators:
        refuse("it draws random numbers, expected an operator with the tag nondeterministic_seeded")

    returns = func._schema.returns
    results = [made] if len(returns) == 1 else list(made or ())
    types = iter(node.types)
    seen: list[Tensor] = []
    for number, (result, formal) in enumerate(zip(results, returns, strict=True)):
        leaves = list(result) if isinstance(result, (list, tuple)) else [result]
        expected = node.outs[number]
        count = len(expected) if isinstance(expected, list) else 1
        if len(leaves) != count:
            refuse(f"its fake kernel gives a list of {count} tensors, its kernel of {len(leaves)}")
        for leaf in leaves:
            said = next(types)
            if _counted(_type(leaf)) != _counted(said):
                refuse(
                    f"its fake kernel gives {_described(said)} as result {number}, its kernel "
                    f"{_described(_type(leaf))}"
                )
            if not isinstance(leaf, Tensor):
                continue
            if formal.alias_info is None:
                for name, tensor, _ in operands:
                    if _share(leaf, tensor):
                        refuse(
                            f"result {number} shares memory with argument '{name}', expected new "
                            "memory, or a schema that says so, as Tensor(a)"
                        )
                if any(_share(leaf, other) for other in seen):
                    refuse(f"result {number} shares memory with another result")
            seen.append(leaf)
    return made


def _type(value: Any) -> TensorType | None:
    return TensorType.of(value) if isinstance(value, Tensor) else None


def _counted(type_: TensorType | None) -> Any:
    """What two tensors must have in common: strides of dimensions of one element do not count."""
    if type_ is None or 0 in type_.shape or type_.strides is None:
        return type_ and (type_.shape, type_.dtype, None)
    tensor = torch.empty_strided(type_.shape, type_.strides, dtype=type_.dtype, device="meta")
    kept = [s for size, s in zip(type_.shape, tensor.stride(), strict=True) if size > 1]
    return type_.shape, type_.dtype, kept


def _described(type_: TensorType | None) -> str:
    if type_ is None:
        return "nothing"
    strides = "" if type_.strides is None else f" of strides {list(type_.strides)}"
    return f"{str(type_.dtype).removeprefix('torch.')}{list(type_.shape)}{strides}"


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.data_ptr()


def _bytes(tensor: Tensor) -> bytes:
    return bytes_of(tensor).numpy().tobytes()


def _range(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _share(one: Tensor, other: Tensor) -> bool:
    """Whether they lie in the same memory, even as two storages."""
    (a, b), (c, d) = _range(one), _range(other)
    return a < d and c < b


def _generators() -> tuple[Any, ...]:
    numpy = np.random.get_state(legacy=False)
    return (
        torch.random.default_generator.get_state().numpy().tobytes(),
        random.getstate(),
        str(numpy),
    )
