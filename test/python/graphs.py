"""Reads and runs what capture wrote, and runs the same step eagerly."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Captured:
    """capture.json, the IR texts and the weights of an archive."""

    record: dict[str, Any]
    text: str
    weights: dict[str, Tensor]
    init: str | None = None
    evaluation: str | None = None

    @staticmethod
    def load(path: Path) -> Captured:
        files = {"capture.json": "", "graph.ir": "", "init.ir": "", "eval.ir": ""}
        torch.jit.load(str(path), _extra_files=files)
        record = json.loads(files["capture.json"])
        entry = record["weights"]
        weights = load_file(path.parent / entry["path"]) if entry else {}
        init, evaluation = (
            files[name].decode() if files[name] else None for name in ("init.ir", "eval.ir")
        )
        return Captured(record, files["graph.ir"].decode(), weights, init, evaluation)

    def arguments(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        """The graph's arguments: weights under their first names, then the inputs by name."""
        return [
            _laid_out(values[entry["name"]], entry.get("strides"))
            for key, values in (
                ("params", self.weights),
                ("buffers", self.weights),
                ("inputs", inputs),
            )
            for entry in self.record[key]
        ]

    def run(self, inputs: dict[str, Tensor], seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradients by parameter name. Buffers in `weights` change as the step says."""
        graph = torch._C.parse_ir(self.text)
        function = torch._C._create_function_from_graph("forward", graph)
        torch.manual_seed(seed)
        with torch.no_grad():
            loss, *gradients = function(*self.arguments(inputs))
        names = [self.record["params"][index]["name"] for index in self.record["grads"]]
        return loss, dict(zip(names, gradients, strict=True))

    def run_evaluation(self, inputs: dict[str, Tensor]) -> Tensor:
        """The loss in eval mode."""
        assert self.evaluation
        graph = torch._C.parse_ir(self.evaluation)
        function = torch._C._create_function_from_graph("forward", graph)
        with torch.no_grad():
            (loss,) = function(*self.arguments(inputs))
        return loss

    def run_calls(self, inputs: dict[str, Tensor]) -> list[Any]:
        """The results of `run`, call by call: TorchScript's executor drops assertions."""
        return _interpreted(self.text, self.record["nodes"], self.arguments(inputs))

    def run_init(self, seed: int) -> dict[str, Tensor]:
        """The initial parameters and buffers by name.

        Call by call: TorchScript's executor would drop draws whose result is not used.
        """
        assert self.init is not None
        init = self.record["init"]
        torch.manual_seed(seed)
        results = _interpreted(self.init, init["nodes"], [])
        names = [
            self.record[key][index]["name"] for key in ("params", "buffers") for index in init[key]
        ]
        return dict(zip(names, results, strict=True))

    def ops(self) -> list[str]:
        return [node["op"] for node in self.record["nodes"]]


def _interpreted(text: str, nodes: list[dict[str, Any]], arguments: list[Tensor]) -> list[Any]:
    """The results of a graph whose calls `nodes` describes."""
    graph = torch._C.parse_ir(text)
    values: dict[str, Any] = dict(
        zip((value.debugName() for value in graph.inputs()), arguments, strict=True)
    )
    overloads = iter(node["overload"] or "default" for node in nodes)
    with torch.no_grad():
        for node in graph.nodes():
            inputs = [values[value.debugName()] for value in node.inputs()]
            kind = node.kind()
            if kind == "prim::TupleConstruct":
                return inputs
            if kind == "prim::Constant":
                value = node.output().toIValue()
            elif kind == "prim::ListConstruct":
                value = inputs
            elif kind == "prim::ListUnpack":
                value = inputs[0]
            elif kind == "aten::Float":
                value = float(inputs[0])
            elif kind == "aten::Complex":
                value = complex(*inputs)
            else:
                packet = getattr(torch.ops.aten, kind.removeprefix("aten::"))
                value = _called(getattr(packet, next(overloads)), inputs)
            outputs = list(node.outputs())
            made = [value] if len(outputs) == 1 else value or ()
            for output, item in zip(outputs, made, strict=True):
                values[output.debugName()] = item
    raise AssertionError("the graph has no result")


def _laid_out(tensor: Tensor, strides: list[int] | None) -> Tensor:
    """`tensor` with its recorded strides; itself where it is contiguous, so that a buffer stays."""
    if strides is None:
        return tensor.contiguous()
    result = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
    kept = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    result[kept].copy_(tensor[kept])
    return result


def _called(op: OpOverload, values: list[Any]) -> Any:
    """Calls `op` on the values of all its arguments in schema order."""
    pairs = list(zip(op._schema.arguments, values, strict=True))
    return op(
        *(value for formal, value in pairs if not formal.kwarg_only),
        **{formal.name: value for formal, value in pairs if formal.kwarg_only},
    )


Loss = Callable[[Any], Tensor]


def scalar(output: Any, loss: Loss | None) -> Tensor:
    if loss is not None:
        return loss(output)
    return output if isinstance(output, Tensor) else output.loss


def eager(
    model: nn.Module, inputs: dict[str, Tensor], loss: Loss | None = None, seed: int = 0
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and buffers after one eager step of a copy of `model`, by first name."""
    model = deepcopy(model)
    torch.manual_seed(seed)
    value = scalar(model(**inputs), loss)
    value.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return value.detach(), gradients, dict(model.named_buffers())


# What only autograd sees, and what reads a value that capture knows.
_NOT_CAPTURED = ("aten::detach", "aten::lift_fresh", "aten::_local_scalar_dense")


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.name not in _NOT_CAPTURED:
            self.ops.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def eager_ops(model: nn.Module, inputs: dict[str, Tensor], loss: Loss | None = None) -> list[str]:
    """The ATen ops below autograd of one eager step on real tensors, in order."""
    model = deepcopy(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    with _Log() as log:
        torch.autograd.grad(scalar(model(**inputs), loss), trainable, allow_unused=True)
    return log.ops


def assert_same_step(
    model: nn.Module,
    captured: Captured,
    inputs: dict[str, Tensor],
    loss: Loss | None = None,
    seed: int = 0,
) -> None:
    """The captured graph gives eager's loss, gradients and buffers, bit for bit."""
    want_loss, want, buffers = eager(model, inputs, loss, seed)
    got_loss, got = captured.run(inputs, seed)
    assert torch.equal(got_loss, want_loss), f"loss: expected {want_loss!r}, got {got_loss!r}"
    first = {
        alias: p["name"] for p in captured.record["params"] for alias in [p["name"], *p["aliases"]]
    }
    want = {first[name]: gradient for name, gradient in want.items()}
    assert got.keys() == want.keys()
    different = [name for name in want if not torch.equal(got[name], want[name])]
    assert not different, f"gradients differ: {different}"
    for name, buffer in buffers.items():
        assert torch.equal(captured.weights[name], buffer), f"buffer {name} differs"
