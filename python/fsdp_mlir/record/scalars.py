"""Python numbers and dtypes among a call's arguments, in a form that TorchScript has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_mlir.record.graph import Ref
from fsdp_mlir.support.errors import Location, located

aten = torch.ops.aten

# Comparisons and fills: their result's dtype does not come from the scalar.
_BOOL_RESULT = {
    aten.eq,
    aten.ne,
    aten.lt,
    aten.le,
    aten.gt,
    aten.ge,
    aten.masked_fill,
    aten.fill,
    aten.full_like,
    aten.constant_pad_nd,
    aten.scatter,
    aten.index_fill,
}

# Of PyTorch's wrapped numbers.
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def kinds_of(schema_type: Any) -> str:
    """The kinds of a schema type, with those of its element."""
    kind: str = schema_type.kind()
    if kind in ("OptionalType", "ListType"):
        return f"{kind} {kinds_of(schema_type.getElementType())}"
    return kind


def with_scalars(
    func: OpOverload, args: list[Any], result: Any, location: Location | None
) -> tuple[OpOverload, list[Any]]:
    """Gives every Python number a form that TorchScript has.

    A number where the schema has a tensor stands for PyTorch's wrapped number: the overload that
    takes it as Scalar makes the same wrapped number. A bool where the schema has a Scalar becomes
    an int, if the result's dtype stays the same.
    """
    schema = func._schema
    wrapped = _wrapped(func, args)
    if any(wrapped):
        overload = _scalar_overload(func, wrapped)
        if overload is None:
            raise located(
                location,
                f"'{func}' takes a Python number for a tensor, and has no overload with a Scalar "
                "there; pass a tensor",
            )
        func = overload
        schema = func._schema
    for position, formal in enumerate(schema.arguments):
        value = args[position]
        if "NumberType" in kinds_of(formal.type) and isinstance(value, bool):
            args[position] = int(value)
            _keep_bool(func, args, result, location)
    return func, args


def numbers_as_tensors(func: OpOverload, args: list[Any]) -> list[tuple[int, torch.dtype]]:
    """The positions of numbers that stand for a tensor where no overload takes a Scalar, as in
    `torch.add(0.3, x)`, and the dtypes of tensors without dimensions that give the same result.

    That is the wrapped number's own dtype, which ATen computes with, where such a tensor does not
    decide the result's."""
    wrapped = _wrapped(func, args)
    others = [arg for arg in args if isinstance(arg, Tensor)]
    if not others or not any(wrapped) or _scalar_overload(func, wrapped) is not None:
        return []
    found = []
    for position, number in enumerate(args):
        if wrapped[position]:
            dtype = torch.result_type(others[0], number)
            if others[0].dim() and dtype == others[0].dtype:
                dtype = _DTYPES.get(type(number), dtype)
            found.append((position, dtype))
    return found


def _wrapped(func: OpOverload, args: list[Any]) -> list[bool]:
    return [
        formal.type.kind() == "TensorType" and isinstance(value, (bool, int, float, complex))
        for formal, value in zip(func._schema.arguments, args, strict=True)
    ]


def takes_numbers_alone(func: OpOverload, args: list[Any]) -> bool:
    """Whether numbers stand for all tensors that the schema has, as in `torch.div(7, 2)`."""
    kinds = [kinds_of(formal.type) for formal in func._schema.arguments]
    tensors = [arg for kind, arg in zip(kinds, args, strict=True) if "TensorType" in kind]
    return bool(tensors) and all(isinstance(arg, (bool, int, float, complex)) for arg in tensors)


def rounds_number(func: OpOverload, args: list[Any]) -> bool:
    """Whether the overload for Scalar gives other bits: that of `mul_` alone rounds the number to
    the dtype of the tensor before it multiplies."""
    if func is not aten.mul_.Tensor or args[0].dtype not in (torch.bfloat16, torch.float16):
        return False
    number = args[1]
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return False
    with _disable_current_modes():
        rounded = torch.tensor(number, dtype=args[0].dtype).float()
        return bool(rounded != torch.tensor(number, dtype=torch.float32))


def _keep_bool(func: OpOverload, args: list[Any], result: Any, location: Location | None) -> None:
    if not isinstance(result, Tensor) or result.dtype != torch.bool:
        return  # an int and a bool promote alike once another operand has a number's dtype
    names = [formal.name for formal in func._schema.arguments]
    if "dtype" in names:
        args[names.index("dtype")] = torch.bool
    elif func._schema.is_mutable or func.overloadpacket in _BOOL_RESULT:
        return
    else:
        raise located(
            location,
            f"'{func}' with a bool scalar on a bool tensor cannot be captured; use torch.where "
            "or a bool tensor",
        )


def _scalar_overload(func: OpOverload, wrapped: list[bool]) -> OpOverload | None:
    """The overload of `func` that takes Scalar exactly where `wrapped` says, else as it was."""
    packet = func.overloadpacket
    formals = func._schema.arguments
    for overload in packet.overloads():
        candidate: OpOverload = getattr(packet, overload)
        others = candidate._schema.arguments
        if len(others) == len(formals) and all(
            other.name == formal.name
            and (kinds_of(other.type) == "NumberType" if scalar else other.type == formal.type)
            for other, formal, scalar in zip(others, formals, wrapped, strict=True)
        ):
            return candidate
    return None


def fix_dtype(func: OpOverload, args: list[Any], result: Any) -> None:
    """Makes the dtype of a factory call that takes the default dtype explicit, as the default may
    change later."""
    names = [formal.name for formal in func._schema.arguments]
    if "dtype" in names and isinstance(result, Tensor) and not _has_ref(args):
        at = names.index("dtype")
        args[at] = result.dtype if args[at] is None else args[at]


def _has_ref(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_ref(item) for item in value)
    return isinstance(value, Ref)
