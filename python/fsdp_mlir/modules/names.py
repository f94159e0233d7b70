"""The names that code uses, of globals and of attributes."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import lru_cache, partial
from operator import attrgetter, methodcaller
from types import CodeType


def names_held(value: attrgetter | methodcaller) -> set[str]:
    """The names of attributes that such an object reads."""
    kind, arguments = value.__reduce__()
    if isinstance(kind, partial):  # a methodcaller with keywords
        arguments = kind.args
    names = arguments if isinstance(value, attrgetter) else arguments[:1]
    return {part for name in names for part in name.split(".")}


def read_by(code: CodeType) -> frozenset[str]:
    """All names that a function's code loads."""
    return frozenset(name for op, name in _named_operations(code) if op.startswith("LOAD_"))


def used(code: CodeType, operations: frozenset[str] | set[str]) -> frozenset[str]:
    """The names that these operations use in a function's code, and in code inside it. An attribute
    may have the same name as a global that the code does not read."""
    return frozenset(name for operation, name in _named_operations(code) if operation in operations)


@lru_cache(maxsize=4096)
def _named_operations(code: CodeType) -> frozenset[tuple[str, str]]:
    own = set()
    for instruction in dis.get_instructions(code):
        if isinstance(instruction.argval, str):
            own.add((instruction.opname, instruction.argval))
        elif instruction.opname == "MATCH_CLASS":  # reads attributes by constants
            own.add(("LOAD_ATTR", "__getattribute__"))
    inner = (_named_operations(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(own).union(*inner)


def names_in(code: CodeType) -> Iterator[str]:
    """The names in a function's code, and in that of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


@lru_cache(maxsize=4096)
def chains(code: CodeType) -> frozenset[tuple[str, ...]]:
    """Globals with the attributes that are read of them at once, such as ("torch", "nn",
    "functional", "gelu"), in a function's code and in code inside it."""
    found = set()
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = [instruction.argval]
        elif chain and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(instruction.argval)
        elif instruction.opname not in ("EXTENDED_ARG", "CACHE", "PUSH_NULL"):
            chain = []
        if chain:
            found.add(tuple(chain))
    inner = (chains(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(found).union(*inner)
