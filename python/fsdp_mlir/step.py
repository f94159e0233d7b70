"""Captures one training step of a model: forward, loss and backward, as a graph of ATen calls."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_mlir import torchscript, weights
from fsdp_mlir.errors import CaptureError, Location, SourceMap, located, short_path, source_of
from fsdp_mlir.files import save_tensors
from fsdp_mlir.init import Factory, capture_init
from fsdp_mlir.module import class_name
from fsdp_mlir.policy import Units, read_policy
from fsdp_mlir.strides import placeholder
from fsdp_mlir.trace import ModuleStack, Node, Recorder, TensorType, Trace, evaluated, traced
from fsdp_mlir.version import __version__

FORMAT = 1

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class CaptureSummary:
    """What was written. Sizes are in elements and bytes, time in seconds."""

    path: Path
    weights: Path | None
    params: int
    elements: int
    buffers: int
    nodes: int
    backward_begin: int
    grads: int
    seconds: float
    bytes: int

    def __str__(self) -> str:
        forward, backward = self.backward_begin, self.nodes - self.backward_begin
        data = f"weights in {self.weights}" if self.weights else "no weights"
        return (
            f"{self.path}: {self.params} params ({self.elements} elements), "
            f"{self.buffers} buffers, {self.nodes} ops ({forward} forward, {backward} backward), "
            f"{self.grads} gradients, {self.seconds:.2f} s, {self.bytes} bytes, {data}"
        )


def capture(
    model: nn.Module,
    args: Sequence[Tensor] = (),
    kwargs: dict[str, Tensor] | None = None,
    *,
    loss: Loss | None = None,
    init: Factory | None = None,
    evaluation: bool = False,
    config: str | Path | None = None,
    path: str | Path = "model.pt",
    save_weights: bool = True,
) -> CaptureSummary:
    """Captures the training step `model(*args, **kwargs)` → loss → gradients, and writes `path`.

    The tensors in `args` and `kwargs` are examples: their shapes and dtypes are captured, and their
    dim 0 is the batch of one rank. Those of `kwargs` name the graph's inputs, those of `args` are
    arg0, arg1, …. `loss` maps the model's output to a scalar; inputs that are named like further
    parameters of it go to it and not to the model. Without it the output itself, or its `.loss`,
    is the scalar. Train or eval mode is captured as it is. Nothing is computed, so a model on
    `meta` works at any size. The graph is that of CPU tensors.

    Weights go beside `path` with suffix .safetensors, unless a parameter is on `meta`. For such a
    model, `init()` builds the same model as one would on one device: what it does to initialise
    itself is captured too, on fake tensors, and fsdp-run does it at its own seed. A seed that
    `init` sets is not part of that. Without `save_weights` the file has only the tensors that are
    the graph's own, if there are any.

    `evaluation` captures the loss in eval mode too, on the same inputs and without gradients, for
    evaluations between steps; the model's own mode stays as it is.

    `config` is a policy file of fsdp-opt, read for the units and their mixed precision: parameters
    then have the dtype in which they are gathered, and the graph has the casts at unit boundaries.
    Raises CaptureError, and then writes nothing.
    """
    start = time.perf_counter()
    path = Path(path)
    units = Units(read_policy(Path(config) if config is not None else None), model)
    params = weights.parameters(model)
    buffers = weights.buffers(model)
    if not any(param.tensor.requires_grad for param in params):
        raise located(
            source_of(model), "no parameter requires grad: expected at least one to train"
        )
    inputs = _inputs(model, args, kwargs or {})
    names, examples = list(inputs), list(inputs.values())
    of_loss = _loss_inputs(loss, kwargs or {})

    # One fake mode, always on CPU: on meta, attention would take another path than on CPU tensors.
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_mode:
        fake_params = [_fake_param(units, param) for param in params]
        fake_buffers = [placeholder(buffer.tensor) for buffer in buffers]
        fake_inputs = [placeholder(example, expanded=False) for example in examples]
    sources = SourceMap()
    with ModuleStack(model) as modules, units.hooked():
        recorder = Recorder(fake_mode, modules, sources, len(buffers))

        def bind_inputs(to: Recorder) -> None:
            for index, tensor in enumerate(fake_params):
                to.bind(tensor, f"p{index}")
            for index, (tensor, state) in enumerate(zip(fake_buffers, buffers, strict=True)):
                to.bind(tensor, f"b{index}", state.tensor)
            for index, (tensor, example) in enumerate(zip(fake_inputs, examples, strict=True)):
                to.bind(tensor, f"i{index}", example)

        bind_inputs(recorder)
        fakes = dict(zip((param.name for param in params), fake_params, strict=True))
        fakes |= dict(zip((buffer.name for buffer in buffers), fake_buffers, strict=True))
        slots = weights.slots(model, (*params, *buffers))
        before = {slot: fakes[name] for slot, name in slots.items()}
        state = dict(before)
        trainable = [index for index, param in enumerate(fake_params) if param.requires_grad]

        def forward() -> Tensor:
            keywords = dict(zip(names[len(args) :], fake_inputs[len(args) :], strict=True))
            beside = {name: keywords.pop(name) for name in of_loss}
            output = torch.func.functional_call(
                model, state, tuple(fake_inputs[: len(args)]), keywords, tie_weights=False
            )
            for name, tensor in before.items():
                if state[name] is not tensor:
                    raise located(
                        source_of(model),
                        f"'{slots[name]}' was assigned in forward, and the new value would be "
                        "lost; change it in place, as with .copy_()",
                    )
            return _scalar_loss(model, output, loss, beside)

        def differentiate(value: Tensor) -> Sequence[Tensor | None]:
            return torch.autograd.grad(
                value, [fake_params[index] for index in trainable], allow_unused=True
            )

        with fake_mode:
            value, gradients = traced(forward, differentiate, recorder)
        trace = recorder.trace

        eval_trace = None
        if evaluation:
            evaluator = Recorder(fake_mode, modules, sources, len(buffers))
            bind_inputs(evaluator)
            evaluator.share_constants(recorder)
            with fake_mode, _eval_mode(model):
                eval_loss = evaluator.name_of(evaluated(forward, evaluator))
            if eval_loss is None:
                raise located(source_of(model), "the loss was not made by the captured evaluation")
            eval_trace = evaluator.trace

    used = [(i, g) for i, g in zip(trainable, gradients, strict=True) if g is not None]
    results = [recorder.name_of(tensor) for tensor in (value, *(g for _, g in used))]
    if None in results:
        raise located(source_of(model), "the loss or a gradient was not made by the captured step")
    graph_inputs = [f"p{i}" for i in range(len(params))]
    graph_inputs += [f"b{i}" for i in range(len(buffers) + len(trace.constants))]
    graph_inputs += [f"i{i}" for i in range(len(examples))]
    text = torchscript.graph_text(graph_inputs, trace.nodes, [r for r in results if r])
    graph = torchscript.parsed(text, trace.nodes)

    irs = {"graph.ir": text}
    files: dict[str, int] = {}
    record = _record(model, units, params, buffers, inputs, trace, modules, files)
    record["grads"] = [index for index, _ in used]
    if init is not None:
        made = capture_init(init, model, params, buffers, trace.constants)
        irs["init.ir"] = torchscript.graph_text([], made.nodes, made.results)
        torchscript.parsed(irs["init.ir"], made.nodes)
        record["init"] = {
            "nodes": _node_records(made.nodes, files),
            "params": list(range(len(params))),
            "buffers": list(range(len(record["buffers"]))),
        }
    if eval_trace is not None:
        irs["eval.ir"] = torchscript.graph_text(graph_inputs, eval_trace.nodes, [eval_loss])
        torchscript.parsed(irs["eval.ir"], eval_trace.nodes)
        record["evaluation"] = {"nodes": _node_records(eval_trace.nodes, files)}
    record["files"] = [short_path(file) for file in files]

    data = {f"(constant).{i}": tensor for i, tensor in enumerate(trace.constants)}
    if save_weights:
        data = {state.name: state.tensor for state in (*params, *buffers)} | data
    weights_path = None
    if data and not any(tensor.is_meta for tensor in data.values()):
        weights_path = path.with_suffix(".safetensors")
        file_hash = save_tensors(weights_path, data)
        if save_weights:
            record["weights"] = {"path": weights_path.name, "hash": file_hash}
    torchscript.save_archive(path, graph, len(trace.nodes), irs, record)
    return CaptureSummary(
        path=path,
        weights=weights_path,
        params=len(params),
        elements=sum(param.tensor.numel() for param in params),
        buffers=len(buffers) + len(trace.constants),
        nodes=len(trace.nodes),
        backward_begin=trace.backward_begin,
        grads=len(used),
        seconds=time.perf_counter() - start,
        bytes=path.stat().st_size,
    )


def _inputs(
    model: nn.Module, args: Sequence[Tensor], kwargs: dict[str, Tensor]
) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {f"arg{i}": value for i, value in enumerate(args)}
    for name, value in kwargs.items():
        if name in inputs:
            raise CaptureError(f"the keyword '{name}' is taken by a positional input")
        inputs[name] = value
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            raise located(
                source_of(model),
                f"input '{name}': expected a tensor, got '{type(value).__name__}'; set it in the "
                "model or wrap the model in one that takes tensors only",
            )
        if value.layout != torch.strided or value.dim() == 0:
            raise located(
                source_of(model), f"input '{name}': expected a dense tensor with samples in dim 0"
            )
        if value.requires_grad:
            raise located(source_of(model), f"input '{name}' requires grad: expected data")
    return inputs


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode for the body; then every module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _computed(units: Units, param: weights.State) -> torch.dtype:
    """The dtype in which the step sees a parameter."""
    precision = units.precision_of(param)
    return precision.computed(param.tensor.dtype) if precision else param.tensor.dtype


def _fake_param(units: Units, param: weights.State) -> nn.Parameter:
    """A parameter as the step sees it; call inside the fake mode."""
    fake = nn.Parameter(
        torch.empty(param.tensor.shape, dtype=_computed(units, param), device="cpu"),
        requires_grad=param.tensor.requires_grad,
    )
    precision = units.precision_of(param)
    if precision and param.tensor.requires_grad:
        fake.grad_dtype = precision.grad_dtype(param.tensor.dtype)
    return fake


def _loss_inputs(loss: Loss | None, kwargs: dict[str, Tensor]) -> list[str]:
    """The inputs that `loss` names beside the output."""
    if loss is None:
        return []
    try:
        named = list(inspect.signature(loss).parameters)[1:]
    except ValueError:  # a builtin without a signature
        return []
    return [name for name in named if name in kwargs]


def _scalar_loss(
    model: nn.Module, output: Any, loss: Loss | None, beside: dict[str, Tensor]
) -> Tensor:
    where = source_of(model if loss is None else loss)
    if loss is not None:
        value = loss(output, **beside)
        what = "the loss function's result"
    else:
        value = output
        what = "the model's output"
        if not isinstance(output, Tensor) and getattr(output, "loss", None) is not None:
            value = output.loss
            what = "the model's .loss"
    fix = "" if loss else "; pass loss=, a function from the output to a scalar"
    if not isinstance(value, Tensor):
        raise located(
            where, f"{what} is no tensor: expected a scalar, got '{type(value).__name__}'{fix}"
        )
    if value.dim() != 0 or not value.is_floating_point():
        got = f"{_dtype(value.dtype)}{list(value.shape)}"
        raise located(where, f"{what} is no loss: expected a floating scalar, got {got}{fix}")
    if torch.is_grad_enabled() and not value.requires_grad:
        raise located(where, f"{what} depends on no parameter that requires grad")
    return value


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


def _record(
    model: nn.Module,
    units: Units,
    params: list[weights.State],
    buffers: list[weights.State],
    inputs: dict[str, Tensor],
    trace: Trace,
    modules: ModuleStack,
    files: dict[str, int],
) -> dict[str, Any]:
    """capture.json, but for `files` and `grads`, and without weights, init and evaluation."""
    return {
        "format": FORMAT,
        "producer": f"fsdp_mlir {__version__}, torch {torch.__version__.split('+')[0]}",
        "model": class_name(model),
        "training": model.training,
        "weights": None,
        "init": None,
        "evaluation": None,
        "modules": modules.paths,
        "classes": modules.classes,
        "params": [
            {
                "name": param.name,
                "aliases": list(param.aliases),
                **_laid_out(param.tensor),
                "compute_dtype": _dtype(_computed(units, param)),
                "requires_grad": param.tensor.requires_grad,
            }
            for param in params
        ],
        "mixed_precision": [
            {
                "module": name,
                "param_dtype": unit.param_dtype and _dtype(unit.param_dtype),
                "reduce_dtype": unit.reduce_dtype and _dtype(unit.reduce_dtype),
                "output_dtype": unit.output_dtype and _dtype(unit.output_dtype),
                "cast_forward_inputs": unit.cast_forward_inputs,
            }
            for name, unit in units.with_precision(params).items()
        ],
        "buffers": [
            {"name": buffer.name, **_laid_out(buffer.tensor), "persistent": buffer.persistent}
            for buffer in buffers
        ]
        + [
            {"name": f"(constant).{i}", **_laid_out(tensor), "persistent": False}
            for i, tensor in enumerate(trace.constants)
        ],
        "inputs": [_input_record(name, tensor) for name, tensor in inputs.items()],
        "backward_begin": trace.backward_begin,
        "nodes": _node_records(trace.nodes, files),
    }
