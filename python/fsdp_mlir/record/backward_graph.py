"""What decides the backward of a recorded loss: the graph that autograd has made of it.

If a second recording has the same calls in forward and the same graph, and no Python code runs in
its backward, autograd makes the same calls there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import Node

from fsdp_mlir.record import graph
from fsdp_mlir.support.autograd import nodes_from
from fsdp_mlir.support.errors import in_torch, is_ours
from fsdp_mlir.support.numerics import numerics

_GRAD_FN: Any = torch._C.TensorBase.grad_fn  # type: ignore[attr-defined]
_SAVED: Any = torch._C._autograd
_PUSH = "_push_saved_tensors_default_hooks"
_REGISTER = ("register_hook", "register_post_accumulate_grad_hook")


class Hooks:
    """Whether code other than this package's may have registered a hook that backward calls."""

    def __init__(self) -> None:
        self.any = _SAVED._top_saved_tensors_default_hooks(False) is not None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """In the body, which runs forward."""

        def noting(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self._note()
                return function(*args, **kwargs)

            return call

        def grad_fn(tensor: Tensor) -> Any:  # which has methods that register hooks
            self._note()
            return _GRAD_FN.__get__(tensor)

        with ExitStack() as stack:
            for name in _REGISTER:
                stack.enter_context(patch.object(Tensor, name, noting(getattr(Tensor, name))))
            stack.enter_context(patch.object(_SAVED, _PUSH, noting(getattr(_SAVED, _PUSH))))
            stack.enter_context(patch.object(Tensor, "grad_fn", property(grad_fn), create=True))
            yield

    def _note(self) -> None:
        """By the caller of the caller."""
        frame = sys._getframe(2)
        while frame.f_back is not None and in_torch(frame.f_code.co_filename):
            frame = frame.f_back
        self.any = self.any or not is_ours(frame.f_code.co_filename)


@dataclass(frozen=True)
class BackwardGraph:
    """The nodes in the order in which forward made them: each with its name, and its edges as
    (place of a node, number of its input). A leaf is its number among the leaves."""

    nodes: tuple[tuple[str | int, tuple[tuple[int, int], ...]], ...]
    settings: tuple[tuple[str, str], ...]

    @staticmethod
    def of(loss: Tensor, leaves: Sequence[Tensor]) -> BackwardGraph | None:
        """None if a function in Python is among the nodes, or a leaf that is none of `leaves`."""
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        named: list[tuple[int, str | int, Node]] = []
        for node in nodes_from(loss.grad_fn):
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, Tensor):
                if id(leaf) not in numbers:
                    return None
                # Leaves have no place in that order: the last one.
                named.append((sys.maxsize + numbers[id(leaf)], numbers[id(leaf)], node))
                continue
            if isinstance(node, torch._C._FunctionBase) and not _is_ours(node):
                return None
            named.append((node._sequence_nr(), node.name(), node))
        named.sort(key=lambda each: each[0])
        places = {id(node): place for place, (_, _, node) in enumerate(named)}
        nodes = tuple(
            (name, tuple((places.get(id(user), -1), at) for user, at in node.next_functions))
            for _, name, node in named
        )
        return BackwardGraph(nodes, tuple(numerics().items()))


@dataclass(frozen=True)
class Backward:
    """The calls of a backward that a graph decides, and how many values have names after it."""

    graph: BackwardGraph
    nodes: tuple[graph.Node, ...]
    count: int

    @staticmethod
    def of(decided_by: BackwardGraph, trace: graph.Trace) -> Backward:
        """The last calls of `trace`."""
        return Backward(decided_by, tuple(trace.nodes[trace.backward_begin :]), trace.count)

    def again(self, trace: graph.Trace) -> None:
        """Adds them to a trace of the same forward."""
        trace.nodes += self.nodes
        trace.count = self.count


def _is_ours(node: Any) -> bool:
    """Whether a function in Python is this package's."""
    module = sys.modules.get(node._forward_cls.__module__)
    return is_ours(getattr(module, "__file__", None) or "")
