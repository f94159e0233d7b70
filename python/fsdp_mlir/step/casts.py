"""Calls of `float` and `int`, as in `float(loss)`: Python gives their results as numbers, which a
step has none of while it is recorded. In the modules of the model's code other classes of these
names take their place, which make of a tensor, or of a number of each step, such a number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from torch import Tensor

from fsdp_mlir.support.formulas import combined, is_symbol


class _Cast(type):
    """Of what stands for a class of numbers, also where code asks for that."""

    kind: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            value = args[0].item() if isinstance(args[0], Tensor) else args[0]
            return combined(cls.kind.__name__, value) if is_symbol(value) else cls.kind(value)
        return cls.kind(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.kind)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.kind)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.kind, name)


class _Float(metaclass=_Cast):
    kind = float


class _Int(metaclass=_Cast):
    kind = int


@contextmanager
def casts_of_numbers(modules: Iterable[ModuleType]) -> Iterator[None]:
    """In the body, code of these modules has them."""
    with ExitStack() as stack:
        for module in modules:
            for name, cast in (("float", _Float), ("int", _Int)):
                if name not in vars(module):
                    stack.enter_context(mock.patch.object(module, name, cast, create=True))
        yield
