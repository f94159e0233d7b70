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


def names_in(code: CodeType) -> Iterator[str]:
    """The names in a function's code, and in that of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def chains(code: CodeType) -> frozenset[tuple[str, ...]]:
    """Globals with the attributes that are read of them at once, such as ("torch", "nn",
    "functional", "gelu"), in a function's code and in code inside it."""
    return _scanned(code)[1]


# What gives names at run time: as globals, and as attributes of anything.
_NAMESPACES = {"globals", "eval", "exec", "__import__", "import_module"}
_OF_NAMESPACES = {"import_module", "__globals__", "f_globals"}


def namespace_in(code: CodeType) -> str | None:
    """What a function uses to read names that its code does not have, such as eval."""
    operations, found = _scanned(code)
    for operation, name in sorted(operations):
        is_global = operation in ("LOAD_GLOBAL", "LOAD_NAME")
        if name in (_NAMESPACES if is_global else _OF_NAMESPACES):
            return name
    given = (("sys", "modules"), *(("builtins", name) for name in sorted(_NAMESPACES)))
    return next((".".join(chain) for chain in given if chain in found), None)


def texts_in(code: CodeType) -> set[str]:
    """The texts in a function's code, which may be names."""
    inner = (texts_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return {each for each in code.co_consts if isinstance(each, str)}.union(*inner)


def _named_operations(code: CodeType) -> frozenset[tuple[str, str]]:
    return _scanned(code)[0]


@lru_cache(maxsize=4096)
def _scanned(code: CodeType) -> tuple[frozenset[tuple[str, str]], frozenset[tuple[str, ...]]]:
    """The operations with their names, and the chains."""
    operations: set[tuple[str, str]] = set()
    found: set[tuple[str, ...]] = set()
    chain: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        name, named = instruction.opname, instruction.argval
        if isinstance(named, str):
            operations.add((name, named))
        elif name == "MATCH_CLASS":  # reads attributes by constants
            operations.add(("LOAD_ATTR", "__getattribute__"))
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = (named,)
        elif chain and name in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = (*chain, named)
        elif name not in ("EXTENDED_ARG", "CACHE", "PUSH_NULL"):
            chain = ()
        if chain:
            found.add(chain)
    inner = [_scanned(each) for each in code.co_consts if isinstance(each, CodeType)]
    return (
        frozenset(operations).union(*(each[0] for each in inner)),
        frozenset(found).union(*(each[1] for each in inner)),
    )
