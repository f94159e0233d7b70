"""Writes a recorded step: capture.json, the IR texts and the weights (the form: torchscript.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fsdp_mlir.archive import torchscript
from fsdp_mlir.check.proof import Checked
from fsdp_mlir.modules import weights
from fsdp_mlir.modules.sharding import class_name
from fsdp_mlir.record import collectives
from fsdp_mlir.record.graph import Node, TensorType
from fsdp_mlir.record.init import InitTrace, record_init
from fsdp_mlir.record.operators import qualified
from fsdp_mlir.record.recording import Recording
from fsdp_mlir.support.errors import Location, short_path
from fsdp_mlir.support.files import save_tensors
from fsdp_mlir.support.layouts import placeholder
from fsdp_mlir.support.numerics import numerics
from fsdp_mlir.support.version import __version__
from fsdp_mlir.view.model_view import constant_name

FORMAT = 2


@dataclass(frozen=True)
class Contents:
    """What an archive is written from: a checked step, and its model's initialisation, if that was
    asked for."""

    checked: Checked
    init: InitTrace | None

    @staticmethod
    def of(checked: Checked) -> Contents:
        """Records the initialisation; CaptureError as of record_init."""
        return Contents(checked, record_init(checked.recording))

    @property
    def recording(self) -> Recording:
        return self.checked.recording

    def foreign(self) -> Iterator[OpOverload]:
        """Operators that readers of the archive do not know: all that are not ATen's."""
        for graph in (self.recording.trace, self.recording.evaluation, self.init):
            for node in graph.nodes if graph else ():
                if node.func.namespace != "aten":
                    yield node.func


@dataclass(frozen=True)
class Written:
    """An archive of `size` bytes, and the file of tensors beside it, if there is one."""

    contents: Contents
    path: Path
    weights: Path | None
    size: int


def write(contents: Contents) -> Written:
    """Writes the archive, and the tensors beside it, to the path that was asked for.

    Without `save_weights` the tensors are only the graph's own constants, and if `outputs` were
    asked for, those of them that the step itself makes. Every graph is parsed and its calls are
    resolved first: if that fails, nothing is written.
    """
    recording, init = contents.recording, contents.init
    view, trace = recording.view, recording.trace
    path, save_weights = view.asked.path, view.asked.save_weights
    constants = trace.constants
    inputs = [f"p{i}" for i in range(len(view.params))]
    inputs += [f"b{i}" for i in range(len(view.buffers) + len(constants))]
    inputs += [f"i{i}" for i in range(len(view.inputs))]
    results = [recording.loss, *recording.gradients.values()]
    irs = {"graph.ir": torchscript.graph_text(inputs, trace.nodes, results)}
    graph = torchscript.parsed(irs["graph.ir"], trace.nodes)

    files: dict[str, int] = {}
    record = _record(recording, files)
    if init is not None:
        irs["init.ir"] = torchscript.graph_text([], init.nodes, init.results)
        torchscript.parsed(irs["init.ir"], init.nodes)
        record["init"] = {
            "nodes": _node_records(init.nodes, files),
            "params": list(range(len(view.params))),
            "buffers": list(range(len(record["buffers"]))),
        }
    if recording.evaluation is not None:
        nodes = recording.evaluation.nodes
        irs["eval.ir"] = torchscript.graph_text(inputs, nodes, [recording.evaluation_loss])
        torchscript.parsed(irs["eval.ir"], nodes)
        record["evaluation"] = {"nodes": _node_records(nodes, files)}
    record["files"] = [short_path(file) for file in files]
    record["operators"] = {
        qualified(func): {
            "schema": str(func._schema),
            "random": torch.Tag.nondeterministic_seeded in func.tags,
        }
        for func in contents.foreign()
    }

    # Who executes the step in this process has the others.
    own = trace.literals if view.asked.outputs is not None else range(len(constants))
    data = {constant_name(i): constants[i] for i in sorted(own)}
    if save_weights:
        data = {state.name: state.tensor for state in (*view.params, *view.buffers)} | data
    data_path = None
    if data and not any(tensor.is_meta for tensor in data.values()):
        data_path = path.with_suffix(".safetensors")
        file_hash = save_tensors(data_path, data)
        if save_weights:
            record["weights"] = {"path": data_path.name, "hash": file_hash}
    runnable = graph if torchscript.is_runnable(trace.nodes) else None
    torchscript.save_archive(path, runnable, irs, record)
    return Written(contents, path, data_path, path.stat().st_size)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _typed(type_: TensorType) -> dict[str, Any]:
    record: dict[str, Any] = {"shape": list(type_.shape), "dtype": _dtype(type_.dtype)}
    if type_.strides is not None:
        record["strides"] = list(type_.strides)
    return record


def _laid_out(tensor: Tensor, expanded: bool = True) -> dict[str, Any]:
    """The entry of a tensor from outside the step."""
    return _typed(TensorType.of(placeholder(tensor, expanded, device="meta")))


def _input_record(name: str, tensor: Tensor) -> dict[str, Any]:
    record: dict[str, Any] = {"name": name, **_laid_out(tensor, expanded=False)}
    integer = not tensor.is_floating_point() and tensor.dtype != torch.bool
    if integer and not tensor.is_complex() and not tensor.is_meta and tensor.numel():
        record |= {"low": int(tensor.min()), "high": int(tensor.max()) + 1}
    return record


def _node_records(nodes: Sequence[Node], files: dict[str, int]) -> list[dict[str, Any]]:
    """The entries of `nodes`; adds source files to `files`, which numbers them."""

    def line(location: Location | None) -> dict[str, int]:
        if location is None:
            return {"file": -1, "line": -1}
        return {"file": files.setdefault(location[0], len(files)), "line": location[1]}

    return [
        {
            "op": node.func._schema.name,
            "overload": node.func._schema.overload_name,
            "module": node.origin.module,
            **line(node.origin.location),
            "outs": [type_ and _typed(type_) for type_ in node.types],
        }
        for node in nodes
    ]


def _record(recording: Recording, files: dict[str, int]) -> dict[str, Any]:
    """capture.json, except `files`, and without weights, init and evaluation."""
    view, trace = recording.view, recording.trace
    model, units = view.model, view.units
    positions = weights.positions(model)
    behind = recording.post_backwards
    return {
        "format": FORMAT,
        "producer": f"fsdp_mlir {__version__}, torch {torch.__version__.split('+')[0]}",
        "device": {
            "type": view.asked.device.type,
            "arch": view.asked.device.arch,
            "torch": view.asked.device.torch,
            "numerics": numerics(),
        },
        "model_parallel": collectives.model_parallel(recording.nodes(), view.asked.data_ranks),
        "model": class_name(model),
        "training": model.training,
        "weights": None,
        "init": None,
        "evaluation": None,
        "modules": recording.modules.paths,
        "classes": recording.modules.classes,
        "params": [
            {
                "name": param.name,
                "aliases": list(param.aliases),
                **_laid_out(param.tensor),
                "compute_dtype": _dtype(view.computed(param)),
                "requires_grad": param.tensor.requires_grad,
                "position": positions[param.name],
                **({"post_backward": calls} if (calls := behind.get(index)) else {}),
            }
            for index, param in enumerate(view.params)
        ],
        "mixed_precision": [
            {
                "module": name,
                "param_dtype": unit.param_dtype and _dtype(unit.param_dtype),
                "reduce_dtype": unit.reduce_dtype and _dtype(unit.reduce_dtype),
                "output_dtype": unit.output_dtype and _dtype(unit.output_dtype),
                "cast_forward_inputs": unit.cast_forward_inputs,
            }
            for name, unit in units.with_precision(view.params).items()
        ],
        "buffers": [
            {"name": buffer.name, **_laid_out(buffer.tensor), "persistent": buffer.persistent}
            for buffer in view.buffers
        ]
        + [
            {"name": constant_name(i), **_laid_out(tensor), "persistent": False}
            for i, tensor in enumerate(trace.constants)
        ],
        "inputs": [_input_record(name, tensor) for name, tensor in view.inputs.items()],
        "backward_begin": trace.backward_begin,
        "nodes": _node_records(trace.nodes, files),
        "grads": list(recording.gradients),
        "units": recording.units,
        "entries": recording.entries,
    }
