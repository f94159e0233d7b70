"""One run of a module that is called in the middle of a plan: its forward, and its backward.

It runs on a thread of its own, where neither inference mode nor the plan's allocator reaches: what
autograd keeps between forward and backward has memory of its own. Of operands, whose memory the
plan frees in between, it keeps only which part was kept; backward is given the operands again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fsdp_mlir.record.seen_call import Form, uses_of
from fsdp_mlir.support.errors import calls_the_model

calls_the_model(__file__)


@dataclass(frozen=True)
class _Part:
    """A tensor in the memory of an operand, whose elements `begin` that many bytes behind it."""

    operand: int
    begin: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, operands: Sequence[Tensor]) -> Tensor:
        operand = operands[self.operand].detach()
        storage = operand.untyped_storage()
        begin = operand.storage_offset() * operand.element_size() + self.begin
        made = torch.empty(0, dtype=self.dtype)
        return made.set_(storage, begin // made.element_size(), self.shape, self.stride)


@dataclass(eq=False)
class Run:
    """`failed`: why its results, or the gradients, mean nothing."""

    module: nn.Module
    leaves: Sequence[Any]
    spec: TreeSpec
    params: Sequence[str]
    form: Form
    training: Sequence[bool]
    autocast: tuple[bool, torch.dtype]
    filler: Sequence[Tensor] = ()  # results of an earlier run, for one that fails
    failed: str = ""
    learned: bool = False  # by the form, for another recording
    _strides: dict[int, tuple[int, ...]] = field(init=False)  # of gradients, as recorded
    _inputs: list[Tensor] = field(default_factory=list)
    _results: list[Tensor] = field(default_factory=list)
    _now: Sequence[Tensor] = ()  # the operands in backward

    def __post_init__(self) -> None:
        self._strides = dict(self.form.gradient_strides)

    def forward(
        self,
        operands: Sequence[Tensor],
        needs: Sequence[bool],
        elsewhere: set[int],
        *,
        grads: bool,
    ) -> list[Tensor]:
        """New tensors of the form of the results. `needs`, `elsewhere`: as graph_breaks.Break has
        them."""

        def run() -> list[Tensor]:
            leaves = [_leaf(x, need) for x, need in zip(operands, needs, strict=True)]
            count = len(leaves) - len(self.params)
            params = [nn.Parameter(x, x.requires_grad) for x in leaves[count:]]
            self._inputs = leaves[:count] + params
            versions = [each._version for each in self._inputs]
            with torch.set_grad_enabled(grads), self._saving(), self._as_recorded():
                result = self._called(self._inputs)
            if versions != [each._version for each in self._inputs]:
                raise _OtherwiseError("it writes its inputs")
            self._check(result, elsewhere)
            leaves = tree_flatten(result)[0]
            return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        found, error = _worker().call(run)
        results = self._results = found or []
        if error is not None:  # which FSDP2's step raises, if it is the model's
            self.failed = f"{type(error).__name__}: {error}"
            results = self.filler or [torch.zeros_like(x.empty()) for x in self.form.results]
        made = [_own(x.empty(), y) for x, y in zip(self.form.results, results, strict=True)]
        if not any(result.grad for result in self.form.results):
            self._inputs, self._results = [], []
        return made

    def backward(
        self,
        operands: Sequence[Tensor],
        gradients: Sequence[Tensor],
        given: Sequence[bool],
        wanted: Sequence[int],
    ) -> list[Tensor]:
        """The gradients of the operands that are `wanted`. `given`: which of the results that
        require grad have `gradients`."""

        def run() -> list[Tensor]:
            self._now = [_leaf(each, False) for each in operands]
            results = [x for x in self._results if x.requires_grad]
            roots = [x for x, is_given in zip(results, given, strict=True) if is_given]
            found = torch.autograd.grad(
                roots,
                [self._inputs[index] for index in wanted],
                [_leaf(each, False) for each in gradients],
                allow_unused=True,
            )
            return [self._gradient(index, x) for index, x in zip(wanted, found, strict=True)]

        found: list[Tensor] = []
        if not self.failed:
            found, error = _worker().call(run)
            if error is not None:
                self.failed = f"{type(error).__name__}: {error}"
        self._inputs, self._results, self._now = [], [], ()
        if self.failed:
            return [self._empty(index, operands[index]).zero_() for index in wanted]
        return [
            _own(self._empty(index, operands[index]), x)
            for index, x in zip(wanted, found, strict=True)
        ]

    def _empty(self, index: int, operand: Tensor) -> Tensor:
        stride = self._strides.get(index)
        if stride is None:
            return torch.empty(operand.shape, dtype=operand.dtype)
        return torch.empty_strided(operand.shape, stride, dtype=operand.dtype)

    def _gradient(self, index: int, found: Tensor | None) -> Tensor:
        if found is None:
            raise _OtherwiseError("a tensor has no gradient that had one")
        is_param = index >= len(self._inputs) - len(self.params)
        expected = self._empty(index, self._inputs[index]).stride()
        if not is_param and found.stride() != expected and found.numel():
            self.form.gradient_strides[index] = found.stride()
            self.learned = True
            raise _OtherwiseError("a gradient has other strides")
        return found

    def _called(self, inputs: Sequence[Tensor]) -> Any:
        each = iter(inputs)
        given = [next(each) if leaf is Tensor else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(given, self.spec)
        params = dict(zip(self.params, each, strict=True))
        return functional_call(self.module, params, args, kwargs)

    def _check(self, result: Any, elsewhere: set[int]) -> None:
        """_OtherwiseError for what is not as it was seen, or where gradients would be added in
        another order than eagerly."""
        if not self.form.fits(result):
            raise _OtherwiseError("its results have another form")
        results = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
        with_grad = [x for x in results if x.requires_grad]
        if not with_grad:
            return
        uses = uses_of(self._inputs, results)
        if uses is None or [bool(count) for count in uses] != self.form.reached:
            raise _OtherwiseError("it uses other tensors")
        most = 2 if len(with_grad) > 1 else max(uses)
        for index, count in enumerate(uses):
            if count > (1 if index in elsewhere else most):
                raise _OtherwiseError("the gradients of a tensor that it uses several times")

    @contextmanager
    def _as_recorded(self) -> Iterator[None]:
        modules = list(self.module.modules())
        before = [each.training for each in modules]
        enabled, dtype = self.autocast
        try:
            for each, training in zip(modules, self.training, strict=True):
                each.training = training
            with torch.autocast("cpu", dtype, enabled=enabled):
                yield
        finally:
            for each, training in zip(modules, before, strict=True):
                each.training = training

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """In the body, autograd keeps no memory of operands."""
        places = [(x.data_ptr(), x.data_ptr() + _bytes(x)) for x in self._inputs]

        def pack(tensor: Tensor) -> Any:
            begin = tensor.data_ptr()
            for index, (first, end) in enumerate(places):
                if first <= begin < end:
                    shape = tuple(tensor.shape)
                    return _Part(index, begin - first, shape, tensor.stride(), tensor.dtype)
            return tensor

        def unpack(packed: Any) -> Tensor:
            return packed.of(self._now) if isinstance(packed, _Part) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


class _OtherwiseError(Exception):
    """The module does something else than it was seen to do."""


def _leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    """A leaf in the same memory, which is no inference tensor."""
    made = torch.empty(0, dtype=tensor.dtype)
    made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return made.requires_grad_(requires_grad)


def _own(empty: Tensor, tensor: Tensor) -> Tensor:
    """The tensor in memory that the plan's allocator gives."""
    return empty.copy_(tensor.detach())


def _bytes(tensor: Tensor) -> int:
    """From its first element to its last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


class _Worker:
    """A thread of this process. One caller at a time."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        Thread(target=self._serve, name="fsdp-mlir-graph-breaks", daemon=True).start()

    def call(self, function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """What a function gives there, or None and its error."""
        context, answers = copy_context(), SimpleQueue[tuple[Any, BaseException | None]]()

        def run() -> None:
            try:
                answers.put((context.run(function), None))
            except BaseException as error:
                answers.put((None, error.with_traceback(None)))

        self._calls.put(run)
        return answers.get()

    def _serve(self) -> None:
        torch.get_num_threads()  # takes over the number of the process
        while True:
            self._calls.get()()


_workers: dict[int, _Worker] = {}


def _worker() -> _Worker:
    """That of this process, which may be forked."""
    pid = os.getpid()
    if pid not in _workers:
        _workers.clear()
        _workers[pid] = _Worker()
    return _workers[pid]
