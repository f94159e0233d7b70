"""Calls of `float` and `int`, as in `float(loss)`: Python gives their results as numbers, which a
step has none of while it is recorded. In the modules of the model's code other classes of these
names take their place, which make of a tensor, or of a number of each step, such a number."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
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
    dtype = np.dtype(float)  # as which NumPy takes it


class _Int(metaclass=_Cast):
    kind = int
    dtype = np.dtype(int)


_CASTS = {"float": _Float, "int": _Int}


@cache
def _compares(module: ModuleType) -> bool:
    """Whether code of a module may tell one of these classes from another, as by `is`."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return True
    compared = (
        [node.left, *node.comparators] if isinstance(node, ast.Compare) else node.keys
        for node in ast.walk(tree)
        if isinstance(node, (ast.Compare, ast.Dict))
    )
    operands = (each for nodes in compared for each in nodes if each is not None)
    return any(
        isinstance(part, ast.Name) and part.id in _CASTS
        for each in operands
        for part in [each, *(each.elts if isinstance(each, (ast.Tuple, ast.List, ast.Set)) else [])]
    )


@contextmanager
def casts_of_numbers(modules: Iterable[ModuleType]) -> Iterator[None]:
    """In the body, code of these modules has them, but of those that compare such classes."""
    with ExitStack() as stack:
        for module in modules:
            for name, cast in _CASTS.items():
                if name not in vars(module) and not _compares(module):
                    stack.enter_context(mock.patch.object(module, name, cast, create=True))
        yield
