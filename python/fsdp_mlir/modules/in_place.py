"""Data that forward may write in place, and copies of it, by which that is undone: arrays, buffers,
files, context variables and the environment; and the state of generators."""

from __future__ import annotations

import array
import contextlib
import ctypes
import io
import os
import random
from contextvars import Context, ContextVar
from typing import Any

import numpy as np
from torch import Tensor

from fsdp_mlir.modules.place import ABSENT, bytes_of, size_of

_MOST_COPIED = 1 << 26  # bytes of an array or a buffer
_IN_MEMORY = (io.StringIO, io.BytesIO)


def copied(owner: Any) -> Any:
    """For `put`; ABSENT if that cannot put it back."""
    if owner is os.environ:
        return dict(vars(owner)["_data"])
    if isinstance(owner, ContextVar):
        return owner.get(ABSENT)
    if isinstance(owner, np.ndarray):
        return owner.copy() if owner.flags.writeable and owner.nbytes <= _MOST_COPIED else ABSENT
    if isinstance(owner, io.IOBase):
        return position(owner)
    # Bytes of ctypes that refer to other objects do not keep these alive.
    is_too_much = size_of(owner) > _MOST_COPIED or getattr(owner, "_objects", None)
    return ABSENT if is_too_much else bytes_of(owner)


def is_same(one: Any, other: Any) -> bool:
    """Whether two copies of one owner are."""
    if isinstance(one, np.ndarray):
        return one is other or (
            isinstance(other, np.ndarray)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.tobytes() == other.tobytes()
        )
    return one is other or (isinstance(one, (bytes, tuple, dict)) and bool(one == other))


def put(owner: Any, copy: Any) -> None:
    """Makes the data that of the copy, if it differs."""
    if is_same(now := copied(owner), copy):
        return
    if owner is os.environ:
        _put_environment(now, copy)
    elif isinstance(owner, ContextVar):
        # One that was not set cannot be unset, but has its default in a fresh context.
        with contextlib.suppress(LookupError):
            owner.set(Context().run(owner.get) if copy is ABSENT else copy)
    elif copy is ABSENT or now is ABSENT:
        return
    elif isinstance(owner, np.ndarray):
        if (owner.dtype, owner.shape) == (copy.dtype, copy.shape):
            owner[...] = copy
    elif isinstance(owner, io.IOBase):
        _put_position(owner, copy)
    else:
        # A view that was released, or a bytearray that has another size and is looked at.
        with contextlib.suppress(ValueError, TypeError, BufferError):
            _put_bytes(owner, copy)


def position(file: io.IOBase) -> Any:
    """Where it is read next, and its data if that is in memory; ABSENT if it is not to be read, or
    does not tell."""
    try:
        if file.readable() and file.seekable():
            return file.tell(), file.getvalue() if isinstance(file, _IN_MEMORY) else None
    except (OSError, ValueError):  # between two lines of an iteration, or closed
        pass
    return ABSENT


def _put_position(file: io.IOBase, copy: tuple[int, Any]) -> None:
    where, data = copy
    if isinstance(file, _IN_MEMORY) and file.getvalue() != data:
        file.seek(0)
        file.truncate()
        file.write(data)
    file.seek(where)


def _put_environment(now: dict[Any, Any], copy: dict[Any, Any]) -> None:
    """By os.environ, as the process has a copy of its own."""
    for key in now.keys() | copy.keys():
        name = os.environ.decodekey(key)
        if key not in copy:
            del os.environ[name]
        elif now.get(key) != copy[key]:
            os.environ[name] = os.environ.decodevalue(copy[key])


def _put_bytes(buffer: Any, data: bytes) -> None:
    if isinstance(buffer, bytearray):
        buffer[:] = data
    elif isinstance(buffer, array.array):
        buffer[:] = array.array(buffer.typecode, data)
    elif isinstance(buffer, memoryview):
        if not buffer.readonly:
            buffer.cast("B")[:] = data
    elif len(data) == ctypes.sizeof(buffer):
        ctypes.memmove(ctypes.addressof(buffer), data, len(data))


def state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def bytes_of_state(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, Tensor) else repr(state).encode()
