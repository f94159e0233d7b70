"""What truth value a Python frame demands of a tensor: an assertion that a plan can make.

`assert c`, `if c: raise …` and torch._check(c) read a tensor only to stop the step. Under capture
the tensor has no value yet; the step goes on as if the check held, and the check becomes a call. A
function that only returns what it reads demands what its caller does.
"""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
from dataclasses import dataclass, field
from types import FrameType, FunctionType, MethodType
from typing import Any

_PASSED_OVER = {"CACHE", "NOP", "TO_BOOL", "NOT_TAKEN"}
_CALLS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX"}
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def demanded(frame: FrameType, *, asserts: bool = False) -> bool | None:
    """The truth value that `frame` needs to go on, if it is reading one; None if it may go on with
    either. If it only `asserts`, errors but AssertionError are another way to go on."""
    following = _from_now(frame)
    wanted = True  # of the value on the stack, in terms of the tensor's
    if _jump(following[0]) is None:
        if following[0].opname == "UNARY_NOT":
            wanted = False
        following = following[1:]
    for instruction in following:
        jumps_if = _jump(instruction)
        if jumps_if is not None:
            stay = _raises(following, instruction.offset + 2, asserts)
            leave = _raises(following, instruction.argval, asserts)
            if stay == leave:
                return None
            return (jumps_if if stay else not jumps_if) == wanted
        if instruction.opname == "UNARY_NOT":
            wanted = not wanted
        elif instruction.opname == "RETURN_VALUE":
            if frame.f_back is None or not _calls(frame.f_back, frame):
                return None
            returned = demanded(frame.f_back, asserts=asserts)
            return None if returned is None else returned == wanted
        elif instruction.opname not in _PASSED_OVER:
            break
    return _source(frame.f_code.co_filename).conditions.get(_position(frame))


def _from_now(frame: FrameType) -> list[dis.Instruction]:
    """The instruction that `frame` runs, and those behind it. While a function in Python runs, a
    call is at the last of its caches; Python 3.11 makes some calls in PRECALL, once they are
    frequent."""
    instructions = [i for i in dis.get_instructions(frame.f_code) if i.opname != "PRECALL"]
    if frame.f_code.co_code[frame.f_lasti] == dis.opmap.get("PRECALL"):
        return [i for i in instructions if i.offset > frame.f_lasti]
    now = max(i.offset for i in instructions if i.offset <= frame.f_lasti)
    return [i for i in instructions if i.offset >= now]


def _jump(instruction: dis.Instruction) -> bool | None:
    """The truth value for which a conditional jump is taken."""
    for name, taken in (("_IF_TRUE", True), ("_IF_FALSE", False)):
        if instruction.opname.endswith(name) and "JUMP" in instruction.opname:
            return taken
    return None


def _raises(instructions: list[dis.Instruction], begin: int, asserts: bool) -> bool:
    """Whether the code at that offset raises without a further decision."""
    is_assertion = False
    for instruction in instructions:
        if instruction.offset < begin:
            continue
        is_assertion |= instruction.opname == "LOAD_ASSERTION_ERROR"
        if instruction.opname == "RAISE_VARARGS":
            return is_assertion or not asserts
        if "JUMP" in instruction.opname or instruction.opname.startswith(("RETURN", "FOR_ITER")):
            return False
    return False


_Position = tuple[int | None, int | None, int | None, int | None]


@dataclass(frozen=True)
class _Source:
    """Of a file, by position: the calls, and for each condition in a call of torch._check… the
    value that it needs."""

    calls: dict[_Position, ast.Call] = field(default_factory=dict)
    conditions: dict[_Position, bool] = field(default_factory=dict)


_sources: dict[str, _Source] = {}


def _source(file: str) -> _Source:
    if file not in _sources:
        try:
            tree = ast.parse("".join(linecache.getlines(file)))
        except SyntaxError:
            tree = ast.Module([], [])
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        _sources[file] = _Source(
            {_place(call): call for call in calls},
            dict(
                _condition(argument)
                for call in calls
                if _name(call.func).startswith("_check")
                for argument in call.args
            ),
        )
    return _sources[file]


def _position(frame: FrameType) -> _Position:
    """That of what the frame runs now."""
    return list(frame.f_code.co_positions())[frame.f_lasti // 2]


def _place(node: ast.expr) -> _Position:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _calls(caller: FrameType, frame: FrameType) -> bool:
    """Whether the expression that `caller` evaluates now is a call of the function that runs in
    `frame`, whose result it thus has: not so where a function in C, such as `any`, calls it."""
    if frame.f_code.co_flags & _SUSPENDED:
        return False
    if _from_now(caller)[0].opname not in _CALLS:
        return False
    call = _source(caller.f_code.co_filename).calls.get(_position(caller))
    called = None if call is None else _named(call.func, caller)
    if isinstance(called, (staticmethod, classmethod, MethodType)):
        called = called.__func__
    return isinstance(called, FunctionType) and called.__code__ is frame.f_code


def _named(expression: ast.expr, frame: FrameType) -> Any:
    """What a name, or an attribute of what has one, stands for in `frame`. Runs no code."""
    if isinstance(expression, ast.Attribute):
        owner = _named(expression.value, frame)
        return inspect.getattr_static(owner, expression.attr, None)
    if isinstance(expression, ast.Name):
        return frame.f_locals.get(expression.id, frame.f_globals.get(expression.id))
    return None


def _condition(expression: ast.expr) -> tuple[_Position, bool]:
    """Where the value that an argument is, or negates, is read, and what it must be."""
    wanted = True
    while isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not):
        if not isinstance(expression.operand, ast.Call):
            wanted = not wanted
            break  # `not` itself reads the value
        expression, wanted = expression.operand, not wanted
    return _place(expression), wanted


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
