"""Reads of a tensor's data that no dispatch mode sees.

A tensor that the model keeps elsewhere than among its parameters and buffers is a real one until
its first call. `tolist` and the like read its memory at once, and what they gave would become part
of the step, as if it were the same in every step. While a step is recorded, they ask first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from fsdp_mlir.support.errors import SourceMap

# PyTorch itself uses these for messages, and to tell tensors apart: what it learns is no data.
_OF_TORCH_TOO = {"__repr__", "__format__", "data_ptr"}

_READS = {
    "tolist",
    "numpy",
    "__array__",
    "__deepcopy__",
    "__reduce_ex__",
    "__dlpack__",
    *_OF_TORCH_TOO,
}

# Which a fake tensor refuses by itself, with another message.
_REFUSED = {"numpy", "__array__", "__dlpack__"}

Check = Callable[[Tensor, str, FrameType], None]


@contextmanager
def asking(mode: TorchDispatchMode, sources: SourceMap, check: Check) -> Iterator[None]:
    """While `mode` is entered, `check` gets each tensor that is read, the name of what reads it,
    and the frame of its caller; it raises for one whose data the step must not know."""

    def asks(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def asking_read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            asked = _has_data(self) or (name in _REFUSED and isinstance(self, FakeTensor))
            recorded = asked and mode in _get_current_dispatch_mode_stack()
            if recorded and (name not in _OF_TORCH_TOO or _is_model(caller, sources)):
                check(self, name.strip("_"), caller)
            return read(self, *args, **kwargs)

        return asking_read

    def to_dlpack(read: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tensor: asks("to_dlpack", read)(tensor)

    with ExitStack() as stack:
        for owner in (Tensor, torch.nn.Parameter):
            for name in _READS if owner is Tensor else _READS & set(vars(owner)):
                stack.enter_context(patch.object(owner, name, asks(name, getattr(owner, name))))
        for module in (torch, torch.utils.dlpack, torch._C):
            for name in {"to_dlpack", "_to_dlpack"} & set(vars(module)):
                stack.enter_context(patch.object(module, name, to_dlpack(getattr(module, name))))
        yield


def _has_data(tensor: Tensor) -> bool:
    """Whether it is a plain tensor: one of a subclass with its own dispatch, such as a fake tensor,
    answers by itself."""
    return (
        type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not tensor.is_meta
        and tensor.numel() > 0
    )


def _is_model(frame: FrameType, sources: SourceMap) -> bool:
    while frame.f_code.co_filename.startswith("<") and frame.f_back is not None:
        frame = frame.f_back  # generated code, as the `__repr__` of a dataclass
    return sources.is_model(frame.f_code)
