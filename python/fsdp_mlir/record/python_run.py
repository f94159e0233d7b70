"""One run of a module that is called in the middle of a plan: its forward, and its backward.

It runs outside of the plan's inference mode and allocator: what autograd keeps between forward and
backward has memory of its own. Of operands, whose memory the plan frees in between, it keeps only
which part was kept; backward is given the operands again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fsdp_mlir.modules.outside import Kept
from fsdp_mlir.record.seen_call import Form, outside_of, state_of, uses_of
from fsdp_mlir.support import build
from fsdp_mlir.support.errors import calls_the_model
from fsdp_mlir.support.generators import set_states, states
from fsdp_mlir.support.layouts import is_dense

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


class _OtherwiseError(Exception):
    """The module does something else than it was seen to do."""


class _WrittenError(RuntimeError):
    """A parameter has been written in the memory that the ranks train."""


@dataclass(eq=False)
class Called:
    """A call of a module: `leaves` in the structure `spec`, with Tensor in place of each tensor,
    which are the first operands; the others are the parameters of the names `params`. `strides`: of
    gradients of operands that are not contiguous."""

    module: nn.Module
    leaves: Sequence[Any]
    spec: TreeSpec
    params: Sequence[str]
    form: Form
    training: Sequence[bool]
    grads: bool
    autocast: tuple[bool, torch.dtype]
    strides: Mapping[int, tuple[int, ...]]

    @cached_property
    def outside(self) -> Kept:
        """Where the module reads from outside, which does not change while it is as it was
        recorded."""
        return outside_of(self.module)

    def gradient(self, index: int, operand: Tensor) -> Tensor:
        """Memory for that of an operand."""
        stride, like = self.strides.get(index), {"dtype": operand.dtype, "device": operand.device}
        if stride is None:
            return torch.empty(operand.shape, **like)
        return torch.empty_strided(operand.shape, stride, **like)

    @contextmanager
    def set_up(self, params: Sequence[Tensor]) -> Iterator[None]:
        """In the body, the module has these parameters, and is in the modes of the recording.
        _WrittenError if the body writes one."""
        modules = list(self.module.modules())
        before = [each.training for each in modules]
        versions = [each._version for each in params]
        given = dict(zip(self.params, params, strict=True))
        try:
            for each, training in zip(modules, self.training, strict=True):
                each.training = training
            with stateless._reparametrize_module(self.module, given, tie_weights=True):
                yield
            if [each.training for each in modules] != list(self.training):
                raise _OtherwiseError("it sets a module's mode")
        finally:
            for each, training in zip(modules, before, strict=True):
                each.training = training
            for name, each, version in zip(self.params, params, versions, strict=True):
                if each._version != version:  # also where the module has failed since
                    raise _WrittenError(f"'{name}' is written by a module in the middle of a plan")


class Around:
    """What a module reads from Python, as it is before a run."""

    def __init__(self, module: nn.Module, outside: Kept) -> None:
        self._module, self._outside = module, outside
        self._before = state_of(module, outside)
        self._generators = states()
        found = {id(x): x for x in (*self._before.tensors().values(), *module.buffers())}
        self._tensors = [
            (x, x._version, x.detach().clone()) for x in found.values() if not x.is_inference()
        ]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor, _, _ in self._tensors]

    def check(self) -> None:
        """_OtherwiseError if the run has changed it: the rest of the step would not see that."""
        changed = self._before.changes(state_of(self._module, self._outside))
        if changed:
            raise _OtherwiseError(f"it changes '{changed[0]}'")
        if any(x._version != version for x, version, _ in self._tensors):
            raise _OtherwiseError("it writes a tensor that is no result")
        if self._generators != states():
            raise _OtherwiseError("it draws Python's or NumPy's random numbers")

    def restore(self) -> None:
        self._before.restore()
        set_states(self._generators)
        with torch.no_grad():
            for tensor, _, copy in self._tensors:
                if not torch.equal(tensor, copy):  # also what NumPy has written
                    tensor.copy_(copy)


@dataclass(eq=False)
class Run:
    """`failed`: why its results, or the gradients, mean nothing. `learned`: the form has what
    another recording needs."""

    called: Called
    failed: str = ""
    learned: bool = False
    interrupt: BaseException | None = None  # that nobody else raises
    around: Around | None = None
    _inputs: list[Tensor] = field(default_factory=list)
    _results: list[Tensor] = field(default_factory=list)
    _now: Sequence[Tensor] = ()  # the operands in backward

    def forward(
        self, operands: Sequence[Tensor], elsewhere: set[int] | None, filler: Sequence[Tensor]
    ) -> list[Tensor]:
        """New tensors of the form of the results; those of `filler`, or zeros, if the run has
        failed. `elsewhere`: as graph_breaks.Break has it; None if there is no backward."""
        called = self.called

        def run() -> list[Tensor]:
            self.around = Around(called.module, called.outside)
            count = len(operands) - len(called.params)
            pairs = list(zip(operands, called.form.needs, strict=True))
            # What it writes to its inputs is not to be seen; parameters are too large for copies.
            inputs = [_copy(x).requires_grad_(need) for x, need in pairs[:count]]
            params = [nn.Parameter(_alias(x), need) for x, need in pairs[count:]]
            self._inputs = inputs + params
            versions = [each._version for each in inputs]
            given = iter(inputs)
            filled = [next(given) if leaf is Tensor else leaf for leaf in called.leaves]
            args, kwargs = tree_unflatten(filled, called.spec)
            enabled, dtype = called.autocast
            with (
                torch.set_grad_enabled(called.grads),
                self._saving(),
                called.set_up(params),
                torch.autocast("cpu", dtype, enabled=enabled),
            ):
                result = called.module(*args, **kwargs)
            if versions != [each._version for each in inputs]:
                raise _OtherwiseError("it writes its inputs")
            if any(x._backward_hooks for x in self._inputs):
                raise _OtherwiseError("it registers hooks of its inputs or parameters")
            self._check(result, elsewhere)
            self.around.check()
            return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]

        self._results = self._ran(run)
        results = self._results if not self.failed else filler
        forms = called.form.results
        if not results:
            made = [x.empty().zero_() for x in forms]
        else:
            made = [_own(x.empty(), y) for x, y in zip(forms, results, strict=True)]
        if not any(form.grad for form in forms):
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
        called = self.called

        def run() -> list[Tensor]:
            self._now = [_alias(each) for each in operands]
            results = [x for x in self._results if x.requires_grad]
            roots = [x for x, is_given in zip(results, given, strict=True) if is_given]
            count = len(operands) - len(called.params)
            pairs = zip(self._now[count:], called.form.needs[count:], strict=True)
            with torch.enable_grad(), called.set_up([nn.Parameter(x, need) for x, need in pairs]):
                found = torch.autograd.grad(
                    roots,
                    [self._inputs[index] for index in wanted],
                    [_copy(each) for each in gradients],
                    allow_unused=True,
                )
            return [self._gradient(index, x) for index, x in zip(wanted, found, strict=True)]

        found = [] if self.failed else self._ran(run)
        self._inputs, self._results, self._now = [], [], ()
        made = [called.gradient(index, operands[index]) for index in wanted]
        if self.failed:
            return [each.zero_() for each in made]
        return [_own(each, x) for each, x in zip(made, found, strict=True)]

    def _ran(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        def normally() -> list[Tensor]:
            with torch.inference_mode(False):
                return run()

        try:
            found: list[Tensor] = build.runtime().on_heap(normally)
        except _WrittenError:
            raise
        except BaseException as error:  # which FSDP2's step raises, if it is the model's
            self.failed = f"{type(error).__name__}: {error}"
            if not isinstance(error, (Exception, SystemExit)):
                self.interrupt = error
            return []
        return found

    def _gradient(self, index: int, found: Tensor | None) -> Tensor:
        if found is None:
            raise _OtherwiseError("a tensor has no gradient that had one")
        is_param = index >= len(self._inputs) - len(self.called.params)
        expected = self.called.gradient(index, self._inputs[index]).stride()
        if not is_param and found.stride() != expected and found.numel():
            self.called.form.gradient_strides[index] = found.stride()
            self.learned = True
            raise _OtherwiseError("a gradient has other strides")
        return found

    def _check(self, result: Any, elsewhere: set[int] | None) -> None:
        """_OtherwiseError for what is not as it was seen, or where gradients would be added in
        another order than eagerly."""
        form = self.called.form
        if not form.fits(result):
            raise _OtherwiseError("its results have another form")
        results = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
        assert self.around is not None
        known = [_extent(x) for x in (*self._inputs, *self.around.tensors)]
        for extent in map(_extent, results):
            if any(_overlap(extent, other) for other in known):
                raise _OtherwiseError("its results share memory")
            known.append(extent)
        with_grad = [x for x in results if x.requires_grad]
        if not with_grad:
            return
        uses = uses_of(self._inputs, results)
        if uses is None or [bool(count) for count in uses] != form.reached:
            raise _OtherwiseError("it uses other tensors")
        most = 2 if len(with_grad) > 1 else max(uses)
        for index, count in enumerate(uses) if elsewhere is not None else ():
            if count > (1 if index in elsewhere else most):
                raise _OtherwiseError("the gradients of a tensor that it uses several times")

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """In the body, autograd keeps no memory of operands."""
        places = [_extent(x) for x in self._inputs]

        def pack(tensor: Tensor) -> Any:
            begin = tensor.data_ptr()
            for index, (first, end) in enumerate(places):
                if first <= begin < end:
                    shape = tuple(tensor.shape)
                    return _Part(index, begin - first, shape, tensor.stride(), tensor.dtype)
            return tensor, tensor._version

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, _Part):
                return packed.of(self._now)
            tensor, version = packed
            if tensor._version != version:  # the error of autograd, which does not look here
                raise RuntimeError("a tensor that backward needs has been written in place")
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


def _alias(tensor: Tensor) -> Tensor:
    """One in the same memory, which is no inference tensor."""
    made = torch.empty(0, dtype=tensor.dtype)
    made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return made


def _copy(tensor: Tensor) -> Tensor:
    """A copy of the same layout."""
    if is_dense(tensor.shape, tensor.stride()):
        return _alias(tensor).clone()
    size = (_extent(tensor)[1] - _extent(tensor)[0]) // tensor.element_size()
    whole = torch.as_strided(_alias(tensor), (size,), (1,)).clone()
    return torch.empty(0, dtype=tensor.dtype).set_(
        whole.untyped_storage(), 0, tensor.shape, tensor.stride()
    )


def _own(empty: Tensor, tensor: Tensor) -> Tensor:
    """The tensor in memory that the plan's allocator gives."""
    return empty.copy_(tensor.detach())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses from its first element to behind its last; nothing without elements."""
    if not tensor.numel():
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]
