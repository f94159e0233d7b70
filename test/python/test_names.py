"""The instructions of code, decoded as Python's own dis decodes them."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import dis
import inspect
import typing
from collections.abc import Iterator
from types import CodeType, ModuleType

import torch
from fsdp_mlir.modules.names import decoded


def code_of(module: ModuleType) -> Iterator[CodeType]:
    pending = [compile(inspect.getsource(module), module.__name__, "exec")]
    while pending:
        code = pending.pop()
        yield code
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]


MODULES = [argparse, ast, dataclasses, inspect, typing, torch.nn.functional, torch.nn.modules.rnn]


def test_decodes_as_dis_does() -> None:
    """Names, constants and arguments; long ones too, of which there are some in so much code."""
    extended = 0
    with_names = {*dis.hasname, *dis.hasconst, *dis.haslocal, *dis.hasfree}
    for code in (code for module in MODULES for code in code_of(module)):
        instructions = list(dis.get_instructions(code))
        extended += sum(each.opname == "EXTENDED_ARG" for each in instructions)
        ours = decoded(code)
        theirs = [e for e in instructions if e.opname not in ("EXTENDED_ARG", "CACHE", "NOP")]
        assert [each[:3] for each in ours] == [(e.opcode, e.opname, e.arg) for e in theirs]
        for our, their in zip(ours, theirs, strict=True):
            if their.opname == "KW_NAMES":  # dis does not know its constants
                assert isinstance(our.argval, tuple)
            elif their.opcode in with_names:
                assert our.argval == their.argval or our.argval is their.argval
            else:
                assert our.argval == (their.arg or 0)
    assert extended > 0
