"""Plain Python data as JSON: what a checkpoint keeps of a loop, and nothing executable."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fsdp_mlir.support.layouts import bytes_of

_TUPLE, _DICT, _COUNTER = "$tuple", "$dict", "$counter"
_BYTES, _FLOAT, _TENSOR = "$bytes", "$float", "$tensor"
_NUMBER, _ARRAY = "$number", "$array"

# Kinds of NumPy's dtypes of which the bytes and the dtype's text are all: no objects, no fields.
_KINDS = "biufcmMSU"


def encoded(value: Any, where: str) -> Any:
    """JSON of plain data, from which `decoded` makes the same data; ValueError for anything
    else."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if abs(value) < float("inf") else {_FLOAT: repr(value)}
    if type(value) in (list, tuple):
        items = [encoded(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if type(value) is list else {_TUPLE: items}
    if isinstance(value, Mapping):
        if not isinstance(value, Counter) and all(
            type(key) is str and not key.startswith("$") for key in value
        ):
            return {key: encoded(item, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = [
            [encoded(key, f"a key of {where}"), encoded(item, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return {_COUNTER if isinstance(value, Counter) else _DICT: pairs}
    if type(value) is bytes:
        return {_BYTES: b64encode(value).decode()}
    if type(value) in (Tensor, nn.Parameter):
        plain = value.detach().resolve_conj().resolve_neg().cpu()
        data = bytes_of(plain).numpy().tobytes()
        dtype = str(plain.dtype).removeprefix("torch.")
        return {_TENSOR: [dtype, list(plain.shape), b64encode(data).decode()]}
    if isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind in _KINDS:
        data, dtype = b64encode(value.tobytes()).decode(), value.dtype.str
        if type(value) is value.dtype.type:
            return {_NUMBER: [dtype, data]}
        if type(value) is np.ndarray:
            return {_ARRAY: [dtype, list(value.shape), data]}
    raise ValueError(
        f"{where}: expected None, numbers, text, bytes, tensors, arrays, and lists, tuples and "
        f"dicts of these, got '{_full_name(type(value))}'"
    )


def _full_name(kind: type) -> str:
    name = kind.__qualname__
    return name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}"


def decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or (key := next(iter(value))) not in _DECODERS:
        return {key: decoded(item) for key, item in value.items()}
    return _DECODERS[key](value[key])


def _tensor(parts: list[Any]) -> Tensor:
    dtype, shape, text = parts
    data = bytearray(b64decode(text))
    made = getattr(torch, dtype)
    return (
        torch.frombuffer(data, dtype=made).view(shape) if data else torch.empty(shape, dtype=made)
    )


def _array(parts: list[Any]) -> np.ndarray:
    dtype, shape, text = parts
    return np.ndarray(shape, dtype, buffer=bytearray(b64decode(text)))


def _number(parts: list[Any]) -> np.generic:
    dtype, text = parts
    return _array([dtype, (), text])[()]


def _pairs(pairs: list[Any]) -> dict[Any, Any]:
    return {decoded(key): decoded(item) for key, item in pairs}


_DECODERS = {
    _TUPLE: lambda items: tuple(decoded(items)),
    _DICT: _pairs,
    _COUNTER: lambda pairs: Counter(_pairs(pairs)),
    _BYTES: b64decode,
    _FLOAT: float,
    _TENSOR: _tensor,
    _NUMBER: _number,
    _ARRAY: _array,
}
