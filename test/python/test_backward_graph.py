"""A second recording does without backward where the graph of autograd decides it, and only
there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import fsdp_mlir
import pytest
import torch
from fsdp_mlir import CaptureError
from fsdp_mlir.record.backward_graph import BackwardGraph
from test_proof import Net
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def moment() -> float:
    """Another number at each call."""
    return float(time.perf_counter_ns() % 1_000_003)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * moment()


class InFunction(Net):
    def step(self, x: Tensor) -> Tensor:
        scaled: Tensor = Scaled.apply(x)
        return scaled


class InHook(Net):
    def step(self, x: Tensor) -> Tensor:
        x.register_hook(lambda grad: grad * moment())
        return x


class InHookOfSeveral(Net):
    def step(self, x: Tensor) -> Tensor:
        y = x.sin()
        scale: Any = lambda grads: tuple(grad * moment() for grad in grads)  # noqa: E731
        torch.autograd.graph.get_gradient_edge(y).node.register_prehook(scale)
        return y


class InHookOfNode(Net):
    def step(self, x: Tensor) -> Tensor:
        assert x.grad_fn is not None
        x.grad_fn.register_prehook(lambda grads: (grads[0] * moment(),))
        return x


class InHookOfModule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_full_backward_pre_hook(lambda _, grads: (grads[0] * moment(),))


class InSaved(Net):
    def step(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * moment()):
            return x.sin()


class InCheckpoint(Net):
    reentrant = False

    def step(self, x: Tensor) -> Tensor:
        def part(x: Tensor) -> Tensor:
            again = torch._C._current_autograd_node() is not None
            return (x * moment() if again else x).sin()

        return checkpoint(part, x, use_reentrant=self.reentrant)


class InReentrantCheckpoint(InCheckpoint):
    reentrant = True


IN_PYTHON = [
    *(InFunction, InHook, InHookOfSeveral, InHookOfNode, InHookOfModule, InSaved, InCheckpoint),
    InReentrantCheckpoint,
]


@pytest.mark.parametrize("model", IN_PYTHON)
def test_code_in_backward_runs_again(model: type[nn.Module], tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"the step is not the same each time: .*mul"):
        fsdp_mlir.capture(model(), [torch.randn(3, 4)], path=tmp_path / "model.pt", check=False)


@pytest.mark.parametrize("model", [Net, nn.Sequential])
def test_backward_runs_once(
    model: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = (
        model()
        if model is Net
        else nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 1))
    )
    calls = []
    grad = torch.autograd.grad

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    fsdp_mlir.capture(
        made,
        [torch.randn(3, 4)],
        loss=torch.sum,
        evaluation=True,
        path=tmp_path / "model.pt",
        check=False,
    )
    assert len(calls) == 1


def graph(loss: Tensor, *leaves: Tensor) -> BackwardGraph | None:
    return BackwardGraph.of(loss, leaves)


def test_graphs_differ_where_calls_do_not() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    first = graph((x.sin() * y).sum(), x, y)
    assert first is not None and first == graph((x.sin() * y).sum(), x, y)
    others = [
        (x.sin() * y.detach()).sum(),
        (x.sin().detach() * y).sum(),
        (y.sin() * x).sum(),
        (x.sin() * x).sum(),
        (x.cos() * y).sum(),
    ]
    assert all(first != graph(loss, x, y) for loss in others)
    a, b = x.sin(), y.cos()
    c, d = y.cos(), x.sin()
    assert graph((a * b).sum(), x, y) != graph((d * c).sum(), x, y)  # in another order


def test_graph_depends_on_settings() -> None:
    x = torch.ones(2, requires_grad=True)
    first = graph(x.sum(), x)
    torch.use_deterministic_algorithms(True)
    try:
        assert first != graph(x.sum(), x)
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    assert graph(Scaled.apply(x).sum(), x) is None
    assert graph(x.sum()) is None  # another leaf
