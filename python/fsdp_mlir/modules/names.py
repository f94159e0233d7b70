"""The names that code uses, of globals and of attributes."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from itertools import pairwise
from operator import attrgetter, methodcaller
from types import CodeType, FunctionType
from typing import Any, NamedTuple

# What reads attributes by names that are not in the code, and what reads all of an object.
DYNAMIC = {"__dict__", "vars", "__getattribute__", "attrgetter"}
WHOLE = {"asdict", "astuple", "deepcopy", "dumps", "getmembers"}
# Methods that code does not call to read of an object: of making it, and of telling it from others.
NO_READING = {
    *("__init__", "__new__", "__init_subclass__", "__del__", "__setstate__", "__getstate__"),
    *("__repr__", "__str__", "__eq__", "__ne__", "__hash__", "__reduce__", "__reduce_ex__"),
}


def names_held(value: attrgetter | methodcaller) -> set[str]:
    """The names of attributes that such an object reads."""
    kind, arguments = value.__reduce__()
    if isinstance(kind, partial):  # a methodcaller with keywords
        arguments = kind.args
    names = arguments if isinstance(value, attrgetter) else arguments[:1]
    return {part for name in names for part in name.split(".")}


def read_by(code: CodeType) -> frozenset[str]:
    """All names that a function's code loads."""
    names = {name for op, name in _named_operations(code) if op.startswith("LOAD_")}
    return frozenset(names - READERS)


def used(code: CodeType, operations: frozenset[str] | set[str]) -> frozenset[str]:
    """The names that these operations use in a function's code, and in code inside it. An attribute
    may have the same name as a global that the code does not read."""
    return frozenset(name for operation, name in _named_operations(code) if operation in operations)


def names_in(code: CodeType) -> frozenset[str]:
    """The names in a function's code, and in that of functions inside it. Names of attributes that
    it gives as constants to getattr or hasattr are among them, "__getattribute__" stands for those
    that it computes, and for those of patterns."""
    operations = _named_operations(code)
    names = {name for op, name in operations if op == "LOAD_ATTR"}
    return frozenset(names.union(own_names(code)) - READERS)


def imported_by(function: FunctionType) -> Iterator[str]:
    """The modules that it imports when it runs, of those that are there."""
    packages = (function.__globals__.get("__package__") or "").split(".")
    above = [".".join(packages[:count]) for count in range(len(packages) + 1)]
    for imported in sorted(used(function.__code__, {"IMPORT_NAME"})):
        names = (f"{package}.{imported}".strip(".") for package in above)  # of relative imports
        yield from (name for name in names if name in sys.modules)


def own_names(code: CodeType) -> set[str]:
    """The same without those names of attributes that are constants or computed."""
    inner = (own_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def passes_on(code: CodeType) -> bool:
    """Whether a method does anything with its object but name its attributes, such as give it to
    a function."""
    if not code.co_argcount:
        return True
    return _passes(code, code.co_varnames[0])


def _passes(code: CodeType, name: str) -> bool:
    for each, following in pairwise(decoded(code)):
        is_named = each.argval == name or (isinstance(each.argval, tuple) and name in each.argval)
        is_loaded = each.opname.startswith("LOAD_") and each.opname not in _NO_VARIABLES
        if is_named and is_loaded and following.opname not in _OF_OBJECTS:
            return True
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return any(name in each.co_freevars and _passes(each, name) for each in inner)


def chains(code: CodeType) -> frozenset[tuple[str, ...]]:
    """Globals with the attributes that are read of them at once, such as ("torch", "nn",
    "functional", "gelu"), in a function's code and in code inside it."""
    return _scanned(code)[1]


# Functions that are given names of attributes.
READERS = frozenset({"getattr", "hasattr"})
_NOTHING = {"EXTENDED_ARG", "CACHE", "NOP"}
_FROM_NAMESPACES = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD"}
_NO_VARIABLES = {*_FROM_NAMESPACES, "LOAD_CONST", "LOAD_CLOSURE"}
_OF_OBJECTS = {"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR"}
_CALL = "PRECALL" if "PRECALL" in dis.opmap else "CALL"
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
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


def hashed_in(code: CodeType) -> str:
    """How a function may depend on the hashes of strings, which each process has for itself: by
    asking for them, or by the order of a set. Empty if it does not."""
    before = None
    for instruction in decoded(code):
        operation, named = instruction.opname, instruction.argval
        if operation in ("LOAD_GLOBAL", "LOAD_NAME") and named in ("hash", "set", "frozenset"):
            return f"calls {named}()"
        if operation in ("BUILD_SET", "SET_ADD"):
            return "makes a set"
        if operation == "GET_ITER" and isinstance(before, frozenset) and not _are_numbers(before):
            return "goes through a set"
        before = named
    return next(
        (how for each in code.co_consts if isinstance(each, CodeType) if (how := hashed_in(each))),
        "",
    )


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


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
    instructions = decoded(code)
    for index, instruction in enumerate(instructions):
        name, named = instruction.opname, instruction.argval
        if isinstance(named, str):
            operations.add((name, named))
            if named in READERS and name in _FROM_NAMESPACES:
                given = _constant_given(instructions[index + 1 :]) or "__getattribute__"
                operations.add(("LOAD_ATTR", given))
        elif name == "MATCH_CLASS":  # reads attributes by constants
            operations.add(("LOAD_ATTR", "__getattribute__"))
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = (named,)
        elif chain and name in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = (*chain, named)
        elif name != "PUSH_NULL":
            chain = ()
        if chain:
            found.add(chain)
    inner = [_scanned(each) for each in code.co_consts if isinstance(each, CodeType)]
    return (
        frozenset(operations).union(*(each[0] for each in inner)),
        frozenset(found).union(*(each[1] for each in inner)),
    )


class Instruction(NamedTuple):
    """As dis.Instruction, of which these are the fields that are asked for: argval is a name, a
    constant, a pair of names, or the argument."""

    opcode: int
    opname: str
    arg: int | None
    argval: Any


# Bits of an argument beside the index of its name (dis._get_instructions_bytes).
_FLAGS = {"LOAD_GLOBAL": 1}
if sys.version_info >= (3, 12):
    _FLAGS |= {"LOAD_ATTR": 1, "LOAD_SUPER_ATTR": 2}
_NAME, _CONSTANT, _VARIABLE, _PAIR, _NUMBER = range(5)


def _kind_of(opcode: int) -> int:
    """What the argument of an instruction stands for."""
    if opcode in dis.hasname:
        return _NAME
    if opcode in dis.hasconst:
        return _CONSTANT
    if opcode in dis.haslocal or opcode in dis.hasfree:
        return _PAIR if dis.opname[opcode].count("_FAST") == 2 else _VARIABLE
    return _NUMBER


_KINDS = [_kind_of(opcode) for opcode in range(256)]


def decoded(code: CodeType) -> list[Instruction]:
    """A function's instructions, except those that do nothing, in a fifth of the time that
    dis.get_instructions takes."""
    found, extended = [], 0
    raw = code.co_code
    for opcode, byte in zip(raw[::2], raw[1::2], strict=True):
        name = dis.opname[opcode]
        if name in _NOTHING:
            extended = (extended | byte) << 8 if name == "EXTENDED_ARG" else extended
            continue
        arg, extended = extended | byte, 0
        kind, value = _KINDS[opcode], arg
        if kind == _NAME:
            value = code.co_names[arg >> _FLAGS.get(name, 0)]
        elif kind == _CONSTANT:
            value = code.co_consts[arg]
        elif kind == _VARIABLE:
            value = code._varname_from_oparg(arg)  # type: ignore[attr-defined]
        elif kind == _PAIR:
            pair = arg >> 4, arg & 15
            value = tuple(map(code._varname_from_oparg, pair))  # type: ignore[attr-defined]
        has_argument = opcode >= dis.HAVE_ARGUMENT
        found.append(Instruction(opcode, name, arg if has_argument else None, value))
    return found


def _constant_given(instructions: list[Instruction]) -> str | None:
    """The text that a function is given as its second argument, if these instructions, which come
    after it was loaded, call it with a constant there."""
    depth, given = 0, None
    for each in instructions:
        if each.opname == _CALL and each.arg == depth:
            return given
        if each.opcode in _JUMPS or each.opname.startswith("RETURN"):
            return None
        before = depth
        depth += dis.stack_effect(each.opcode, each.arg, jump=False)
        if depth < 0:
            return None
        if before == 1 and depth == 2 and isinstance(each.argval, str):
            given = each.argval if each.opname == "LOAD_CONST" else None
        elif depth <= 2:
            given = None
    return None
