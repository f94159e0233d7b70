"""What truth value a Python frame demands of a tensor: an assertion that a plan can make.

`assert c`, `if c: raise …` and torch._check(c) read a tensor only to stop the step. Under capture
the tensor has no value yet; the step goes on as if the check held, and the check becomes a call.
"""

from __future__ import annotations

import ast
import dis
import linecache
from types import CodeType, FrameType

_PASSED_OVER = {"CACHE", "NOP", "TO_BOOL", "NOT_TAKEN"}


def demanded(frame: FrameType) -> bool | None:
    """The truth value that `frame` needs to go on, if it is reading one; None if it may go on with
    either."""
    code, at = frame.f_code, frame.f_lasti
    following = [i for i in dis.get_instructions(code) if i.offset >= at]
    wanted = True  # of the value on the stack, in terms of the tensor's
    if _jump(following[0]) is None:
        if following[0].opname == "UNARY_NOT":
            wanted = False
        following = following[1:]
    for instruction in following:
        jumps_if = _jump(instruction)
        if jumps_if is not None:
            stay = _raises(following, instruction.offset + 2)
            leave = _raises(following, instruction.argval)
            if stay == leave:
                return None
            return (jumps_if if stay else not jumps_if) == wanted
        if instruction.opname == "UNARY_NOT":
            wanted = not wanted
        elif instruction.opname not in _PASSED_OVER:
            break
    return _demanded_by_check(code, at)


def _jump(instruction: dis.Instruction) -> bool | None:
    """The truth value for which a conditional jump is taken."""
    for name, taken in (("_IF_TRUE", True), ("_IF_FALSE", False)):
        if instruction.opname.endswith(name) and "JUMP" in instruction.opname:
            return taken
    return None


def _raises(instructions: list[dis.Instruction], begin: int) -> bool:
    """Whether the code at that offset raises without a further decision."""
    for instruction in instructions:
        if instruction.offset < begin:
            continue
        if instruction.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in instruction.opname or instruction.opname.startswith(("RETURN", "FOR_ITER")):
            return False
    return False


# By file: the position of each condition in a call of torch._check…, and the value that it needs.
_Position = tuple[int | None, int | None, int | None, int | None]
_conditions: dict[str, dict[_Position, bool]] = {}


def _demanded_by_check(code: CodeType, at: int) -> bool | None:
    file = code.co_filename
    if file not in _conditions:
        try:
            tree = ast.parse("".join(linecache.getlines(file)))
        except SyntaxError:
            tree = ast.Module([], [])
        _conditions[file] = dict(
            _condition(argument)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and _name(node.func).startswith("_check")
            for argument in node.args
        )
    return _conditions[file].get(list(code.co_positions())[at // 2])


def _condition(expression: ast.expr) -> tuple[_Position, bool]:
    """Where the value that an argument is, or negates, is read, and what it must be."""
    wanted = True
    while isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not):
        if not isinstance(expression.operand, ast.Call):
            wanted = not wanted
            break  # `not` itself reads the value
        expression, wanted = expression.operand, not wanted
    own = expression.lineno, expression.end_lineno, expression.col_offset, expression.end_col_offset
    return own, wanted


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
