"""Writes a recorded step as TorchScript IR text, and as an archive that plain LibTorch runs.

Values: parameters %p0…, buffers %b0… (tensor constants last), inputs %i0…, results %v0…, constants
%c0…, lists %l0…. IR text has no NaN and no complex number: these are `aten::Float` of the string
"nan" and `aten::Complex` of two floats, before all calls.

The archive's extra files:

- graph.ir: the step. Its inputs are all parameters, buffers and inputs in this order; its result is
  the tuple of the loss and the gradients.
- init.ir, for a model captured with its initialisation: no inputs; its result is the tuple of the
  initial values that `init` in capture.json lists.
- capture.json: what IR text cannot hold. Its keys are

  - format (1), producer, model (the class), training;
  - weights: path relative to the archive and hash of the safetensors file, or null;
  - modules, files: tables that nodes index; classes: that of each module;
  - params: name, aliases, shape, dtype, requires_grad, in FSDP2's order; buffers: name, shape,
    dtype, persistent; inputs: name, shape, dtype, and for integers the range [low, high);
  - nodes: one for each call of graph.ir in order, with op, overload, module, file, line (-1:
    unknown) and outs (shape and dtype of each result, null where there is none);
  - next to the shape of a buffer, an input or a result: strides, in elements, if it is not
    contiguous; those of a buffer or an input are dense but for strides of 0, which inputs lack;
    backward_begin, the first node of the backward; grads, the parameter of each gradient;
  - operators: by name, of those in other namespaces than aten that any graph calls: schema, as
    PyTorch prints it, and random, whether it draws from the generator;
  - units: the modules of each unit that the step was captured with, but for the root; entries: the
    modules that need an entry function if they are a unit, each with an input (unit_entry.py);
  - init: null, or nodes (those of init.ir, in the same form) and params and buffers: whose values
    the elements of init.ir's result are, parameters first.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

from fsdp_mlir.record.graph import Node, Ref
from fsdp_mlir.record.scalars import kinds_of
from fsdp_mlir.support.errors import CaptureError, located
from fsdp_mlir.support.files import replacing

# Above this many calls `forward` is left out of the archive: the time to save it is superlinear.
MAX_FORWARD_NODES = 16384


def is_runnable(nodes: Sequence[Node]) -> bool:
    """Whether plain LibTorch is to run the archive's `forward`."""
    return len(nodes) <= MAX_FORWARD_NODES and all(node.func.namespace == "aten" for node in nodes)


# c10::ScalarType, Layout and MemoryFormat, as TorchScript's integers.
_DTYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex32: 8,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
    torch.uint16: 27,
    torch.uint32: 28,
    torch.uint64: 29,
}
_LAYOUTS = {torch.strided: 0}
_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
_ELEMENTS = {
    "TensorType": "Tensor",
    "IntType": "int",
    "FloatType": "float",
    "BoolType": "bool",
    "StringType": "str",
    "NumberType": "Scalar",
}


@cache
def _tells_overloads_apart(func: OpOverload, at: int) -> bool:
    """Whether an optional tensor is an optional number in another overload, so that None alone does
    not say which one is called."""
    if kinds_of(func._schema.arguments[at].type) != "OptionalType TensorType":
        return False
    packet = func._overloadpacket
    others = [getattr(packet, name)._schema.arguments for name in packet.overloads()]
    kinds = {kinds_of(formals[at].type) for formals in others if len(formals) > at}
    return any(kind.startswith("OptionalType") for kind in kinds - {"OptionalType TensorType"})


class _Writer:
    """Collects the lines of one graph."""

    def __init__(self) -> None:
        self.constants: list[str] = []
        self.lines: list[str] = []
        self._names: dict[tuple[str, str], str] = {}
        self._lists = 0

    def constant(self, kind: str, literal: str) -> str:
        """The value of a constant, made once; kind is its TorchScript type."""
        name = self._names.get((kind, literal))
        if name is None:
            name = f"%c{len(self._names)}"
            self._names[kind, literal] = name
            attribute = f"[value={literal}]" if literal else ""
            self.constants.append(f"{name} : {kind} = prim::Constant{attribute}()")
        return name

    def undefined(self) -> str:
        """The absence of a tensor where the schema has a tensor that is not optional."""
        name = self._names.get(("Tensor", ""))
        if name is None:
            name = f"%c{len(self._names)}"
            self._names["Tensor", ""] = name
            self.constants.append(f"{name} : Tensor = prim::AutogradZero()")
        return name

    def number(self, value: float) -> str:
        if value != 0 and abs(value) < sys.float_info.min:
            raise CaptureError(f"{value!r} is subnormal, which TorchScript cannot read; use 0.0")
        if not math.isnan(value):
            return self.constant("float", repr(value))
        name = self._names.get(("float", "nan"))
        if name is None:
            text = self.constant("str", '"nan"')
            name = f"%c{len(self._names)}"
            self._names["float", "nan"] = name
            self.constants.append(f"{name} : float = aten::Float({text})")
        return name

    def complex_number(self, value: complex) -> str:
        parts = ", ".join(self.number(part) for part in (value.real, value.imag))
        name = self._names.get(("complex", parts))
        if name is None:
            name = f"%c{len(self._names)}"
            self._names["complex", parts] = name
            self.constants.append(f"{name} : complex = aten::Complex({parts})")
        return name

    def value(self, value: Any, kinds: str, length: int | None) -> str:
        """The graph value of one call argument; kinds are those of its schema type."""
        first, _, element = kinds.partition(" ")
        if value is None and first == "TensorType":
            return self.undefined()
        if value is None:
            return self.constant("NoneType", "")
        if first == "OptionalType":
            return self.value(value, element, length)
        if first == "ListType":
            items = value if isinstance(value, (list, tuple)) else [value] * (length or 1)
            optional, _, inner = element.partition(" ")
            kind = f"{_ELEMENTS[inner]}?" if optional == "OptionalType" else _ELEMENTS[element]
            names = ", ".join(self.value(item, element, None) for item in items)
            name = f"%l{self._lists}"
            self._lists += 1
            self.lines.append(f"{name} : {kind}[] = prim::ListConstruct({names})")
            return name
        if isinstance(value, Ref):
            return f"%{value.name}"
        if isinstance(value, str):
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            return self.constant("str", f'"{escaped}"')
        if isinstance(value, torch.device):
            if value.type not in ("cpu", "cuda"):
                raise CaptureError(f"expected device 'cpu' or 'cuda', got '{value}'")
            return self.constant("Device", '"cpu"')  # the run's own device, whichever it is
        for table in (_DTYPES, _LAYOUTS, _MEMORY_FORMATS):
            if isinstance(value, type(next(iter(table)))):
                if value not in table:
                    raise CaptureError(f"'{value}' is not supported")
                return self.constant("int", str(table[value]))
        if first == "BoolType" or (first == "NumberType" and isinstance(value, bool)):
            return self.constant("bool", str(int(value)))
        if first == "FloatType" or isinstance(value, float):
            return self.number(float(value))
        if isinstance(value, int):
            if abs(value) >= 1 << 63:
                raise CaptureError(f"expected a number of 64 bits, got {value}")
            return self.constant("int", str(int(value)))
        if isinstance(value, complex):
            return self.complex_number(value)
        raise CaptureError(
            f"expected a tensor, number, string or dtype, got '{type(value).__name__}'"
        )

    def call(self, node: Node) -> None:
        """One line for the call, and one to unpack each list of tensors that it returns."""
        schema = node.func._schema
        for type_ in node.types:
            if type_ is not None and type_.dtype not in _DTYPES:
                message = f"'{node.func}' returns '{type_.dtype}', which is not supported"
                raise located(node.origin.location, message)
        args = []
        for at, (value, formal) in enumerate(zip(node.args, schema.arguments, strict=True)):
            try:
                if value is None and _tells_overloads_apart(node.func, at):
                    args.append(self.constant("Tensor?", ""))
                else:
                    args.append(self.value(value, kinds_of(formal.type), formal.N))
            except CaptureError as error:
                message = f"argument '{formal.name}' of '{node.func}': {error}"
                raise located(node.origin.location, message) from error
        results: list[str] = []
        unpacks: list[str] = []
        for out, formal in zip(node.outs, schema.returns, strict=True):
            if isinstance(out, str):
                kind = kinds_of(formal.type)
                results.append(f"%{out} : {'int' if kind == 'IntType' else 'Tensor'}")
            else:
                name = f"%l{self._lists}"
                self._lists += 1
                results.append(f"{name} : Tensor[]")
                items = ", ".join(f"%{item} : Tensor" for item in out)
                if items:
                    unpacks.append(f"{items} = prim::ListUnpack({name})")
        prefix = f"{', '.join(results)} = " if results else ""
        self.lines.append(f"{prefix}{schema.name}({', '.join(args)})")
        self.lines += unpacks


def graph_text(inputs: Sequence[str], nodes: Sequence[Node], results: Sequence[str]) -> str:
    """The IR text of a graph of `nodes` that returns the tuple `results`; names without '%'."""
    writer = _Writer()
    for node in nodes:
        writer.call(node)
    kinds = ", ".join("Tensor" for _ in results)
    values = ", ".join(f"%{name}" for name in results)
    lines = [
        "graph(" + ",\n      ".join(f"%{name} : Tensor" for name in inputs) + "):",
        *(f"  {line}" for line in writer.constants),
        *(f"  {line}" for line in writer.lines),
        f"  %result : ({kinds}) = prim::TupleConstruct({values})",
        "  return (%result)",
    ]
    return "\n".join(lines) + "\n"


def parsed(text: str, nodes: Sequence[Node]) -> torch._C.Graph:
    """Parses IR text and checks that every call resolves to the overload that was recorded."""
    graph = torch._C.parse_ir(text)
    numbers = ("aten::Float", "aten::Complex")
    calls = [
        n for n in graph.nodes() if not n.kind().startswith("prim::") and n.kind() not in numbers
    ]
    if len(calls) != len(nodes):
        raise CaptureError(f"expected {len(nodes)} calls in the graph, got {len(calls)}")
    for call, node in zip(calls, nodes, strict=True):
        if node.func.namespace != "aten":
            continue  # its overload stands in capture.json
        schema = node.func._schema
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        got = call.schema().split("(", 1)[0]
        if got != name:
            raise located(node.origin.location, f"expected overload '{name}', got '{got}'")
    return graph


def save_archive(
    path: Path,
    graph: torch._C.Graph | None,
    irs: dict[str, str],
    record: dict[str, Any],
) -> None:
    """Writes the archive to `path` atomically: a reader sees the old file or the whole new one.

    `graph`, if any, becomes `forward`; `irs` are IR texts by their file names.
    """
    if graph is None:
        graph = torch._C.parse_ir("graph():\n  %n : NoneType = prim::Constant()\n  return (%n)\n")
    function = torch._C._create_function_from_graph("forward", graph)
    files = {"capture.json": json.dumps(record, separators=(",", ":")), **irs}
    with replacing(path) as temporary:
        # Through a buffer: a file's own name would become the name of the archive's root folder.
        temporary.write_bytes(function.save_to_buffer(_extra_files=files))
