"""What code may not ask of the tensors that stand for others while a step is recorded.

They are other objects than the parameters that FSDP2 shows, and than inputs and buffers, without
the gradients of these, the attributes that code has set on them, and their places in sets and
dicts. What such a question gave would be part of the plan, whatever the answer is in a later step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import local
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fsdp_mlir.support.errors import SourceMap, located

_PACKAGE = str(Path(__file__).parents[1])
_FAKES = str(Path(torch.__file__).parent / "_subclasses")  # which describes tensors to itself

_GRAD: Any = torch._C.TensorBase.grad  # type: ignore[attr-defined]


@contextmanager
def guarded(
    sharded: Mapping[int, str],
    wholes: Mapping[int, str],
    others: Mapping[int, tuple[str, Tensor]],
) -> Iterator[None]:
    """In the body, CaptureError for code that reads the gradient of a stand-in, and for one of a
    sharded parameter, an attribute that tensors do not have, its hash, or that sets an attribute.
    So it is for one of the `others` that reads an attribute that the tensor has, or sets one.

    These have the names of parameters and others, by the ids of what stands for them."""
    sources = SourceMap()
    being_read = local()  # by this thread: a mode for torch functions reads once more

    def refuse(name: str, what: str, frame: FrameType) -> None:
        raise located(
            sources.frame(frame),
            f"the step {what} {name}, which a plan does not see; do so before or after the step",
        )

    def grad(tensor: Tensor) -> Any:
        name = sharded.get(id(tensor)) or wholes.get(id(tensor))
        if name is None or getattr(being_read, "tensor", None) is tensor:
            return _GRAD.__get__(tensor)
        frame = sys._getframe(1)
        if not frame.f_code.co_filename.startswith((_PACKAGE, _FAKES)):
            refuse(f"parameter '{name}'", "reads the gradient of", frame)
        being_read.tensor = tensor
        try:
            return _GRAD.__get__(tensor)
        finally:
            being_read.tensor = None

    def missing(tensor: Tensor, attribute: str) -> Any:
        name, frame = sharded.get(id(tensor)), sys._getframe(1)
        told, source = others.get(id(tensor), (f"parameter '{name}'", None))
        has = name is not None or (source is not None and hasattr(source, attribute))
        if has and sources.is_model(frame.f_code):
            refuse(told, f"reads the attribute '{attribute}' of", frame)
        # As without this function. The name of the class is the tensor's own.
        raise AttributeError(
            f"'{type(tensor).__name__}' object has no attribute '{attribute}'",
            name=attribute,
            obj=tensor,
        )

    def set_attribute(tensor: Tensor, attribute: str, value: Any) -> None:
        # First: fake tensors set many attributes of themselves.
        key = id(tensor)
        is_other = key in others and not hasattr(Tensor, attribute)
        if (key in sharded or is_other) and sources.is_model((frame := sys._getframe(1)).f_code):
            name = others[key][0] if is_other else f"parameter '{sharded[key]}'"
            refuse(name, f"sets the attribute '{attribute}' of", frame)
        object.__setattr__(tensor, attribute, value)

    def hashed(tensor: Tensor) -> int:
        name = sharded.get(id(tensor))
        if name is not None and sources.is_model((frame := sys._getframe(1)).f_code):
            refuse(f"parameter '{name}'", "looks in a set or a dict for", frame)
        return id(tensor)

    with ExitStack() as stack:
        for attribute, method in (
            ("grad", property(grad, _GRAD.__set__, _GRAD.__delete__)),
            ("__getattr__", missing),
            ("__setattr__", set_attribute),
            ("__hash__", hashed),
        ):
            stack.enter_context(
                patch.object(Tensor, attribute, method, create=not hasattr(Tensor, attribute))
            )
        yield
