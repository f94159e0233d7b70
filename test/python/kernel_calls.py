"""Calls of the CPU's kernels on tensors of many layouts, compared with those of fake tensors.

The calls are those of PyTorch's own operator samples (OpInfo), forward and backward, below
autograd. As a script it compares many more layouts than the test does, and prints what differs:

    python test/python/kernel_calls.py [operator…]
"""

from __future__ import annotations

import sys
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from fsdp_mlir.record.known import flat_tensors
from fsdp_mlir.record.strides import corrected, of_kernels
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

# OpInfo's module takes a base class of its test cases from a package that nothing here needs.
_expecttest = ModuleType("expecttest")
_expecttest.TestCase = unittest.TestCase  # type: ignore[attr-defined]
sys.modules.setdefault("expecttest", _expecttest)

from torch.testing._internal import common_utils  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.opinfo import core  # noqa: E402

# Of samples that are not for this dtype, or of kernels that refuse a layout.
_UNUSABLE = (RuntimeError, LookupError, ValueError, TypeError, AssertionError)

# What the importer knows as views (isUnannotatedView in GraphReader.cpp).
UNSEEN_VIEWS = {"aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes"}

_WITHOUT_FAKES = (DataDependentOutputException, DynamicOutputShapeException)


def _permuted(order: Callable[[int], Sequence[int]]) -> Callable[[Tensor], Tensor]:
    def relayout(tensor: Tensor) -> Tensor:
        axes = order(tensor.dim())
        inverse = [axes.index(d) for d in range(len(axes))]
        return tensor.permute(*axes).contiguous().permute(*inverse)

    return relayout


# Of tensors with at least two dimensions; their values may change.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "transposed": _permuted(lambda n: [*reversed(range(n))]),
    "channels_last": _permuted(lambda n: [0, *range(2, n), 1]),
    "expanded": lambda tensor: tensor[:1].expand(tensor.shape),
    "sliced": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "swapped": _permuted(lambda n: [1, 0, *range(2, n)]),
    "columns": _permuted(lambda n: [*range(n - 2), n - 1, n - 2]),
    "batch_last": _permuted(lambda n: [*range(1, n), 0]),
    "expanded_columns": lambda tensor: tensor[..., :1].expand(tensor.shape),
}
FEW = ("contiguous", "transposed", "channels_last")

# Beside OpInfo's samples: what few of them would miss. By name, a function and a shape.
MORE: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "binary_cross_entropy": (
        lambda x: F.binary_cross_entropy(x.sigmoid(), torch.full((4, 6), 0.5), reduction="none"),
        (4, 6),
    ),
    "nll_loss2d": (
        lambda x: F.nll_loss(x, torch.ones(6, 4, 2).long().permute(2, 1, 0), reduction="none"),
        (2, 3, 4, 6),
    ),
    **{
        f"{mode}_pad{n}d": (
            lambda x, mode=mode: F.pad(x, (1,) * (2 * x.dim() - 4), mode),
            (2, 3, 4, 5, 6)[: n + 2],
        )
        for mode in ("reflect", "replicate", "circular")
        for n in (1, 2, 3)
    },
}

# Compositions of other operators that take long.
SLOW = ("linalg.", "masked.", "pca_", "svd_", "nn.functional.ctc_loss", "nn.functional.cosine_emb")


def _relaid(values: Any, layout: str) -> Any:
    def relaid(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            return tensor
        if tensor.dim() < 2 or tensor.numel() == 0:
            return tensor
        return LAYOUTS[layout](tensor.detach()).requires_grad_(tensor.requires_grad)

    return tree_map(relaid, values)


@dataclass
class Compared(TorchDispatchMode):
    """Runs each new call on fake tensors as well.

    `wrong` has what differs after corrections, by operator, a message for each; `corrected` the
    operators whose fake kernel alone is wrong; `unseen_views` those whose results share storage
    with an argument although their schema does not say so.
    """

    fake_mode: FakeTensorMode
    case: str = ""
    calls: int = 0
    wrong: dict[OpOverload, list[str]] = field(default_factory=dict)
    corrected: set[OpOverload] = field(default_factory=set)
    unseen_views: set[str] = field(default_factory=set)
    _seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        formals = func._schema.arguments
        given = dict(zip((formal.name for formal in formals), args, strict=False))
        given |= kwargs or {}
        values = [given.get(formal.name, formal.default_value) for formal in formals]
        key = hash((func, repr(tree_map(_described, values))))
        comparable = func.namespace == "aten" and all(map(_plain, tree_leaves(values)))
        fakes = None
        if comparable and key not in self._seen:
            self._seen.add(key)
            fakes = self._faked(values)
        result = func(*args, **(kwargs or {}))
        if fakes is not None:
            self._find_views(func, values, result)
            with _disable_current_modes(), self.fake_mode:
                self._compare(func, fakes, result)
        return result

    def _find_views(self, func: OpOverload, values: list[Any], result: Any) -> None:
        """Fills `unseen_views`."""
        given = {_storage(tensor) for tensor in flat_tensors(values) if tensor.numel()}
        annotated = any(formal.alias_info is not None for formal in func._schema.returns)
        made = [tensor for tensor in flat_tensors(result) if tensor.layout == torch.strided]
        if not annotated and any(_storage(tensor) in given for tensor in made):
            self.unseen_views.add(func._schema.name)

    def _faked(self, values: list[Any]) -> list[Any]:
        made: dict[int, Tensor] = {}

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in made:
                empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
                empty = empty.conj() if value.is_conj() else empty
                made[id(value)] = torch._neg_view(empty) if value.is_neg() else empty
            return made[id(value)]

        with _disable_current_modes(), self.fake_mode:
            return tree_map(fake, values)

    def _compare(self, func: OpOverload, fakes: list[Any], result: Any) -> None:
        pairs = list(zip(func._schema.arguments, fakes, strict=True))
        try:
            fake = func(
                *(value for formal, value in pairs if not formal.kwarg_only),
                **{formal.name: value for formal, value in pairs if formal.kwarg_only},
            )
        except _WITHOUT_FAKES:
            return
        self.calls += 1
        expected = [_result(tensor) for tensor in flat_tensors(result)]
        if [_result(tensor) for tensor in flat_tensors(fake)] != expected:
            self.corrected.add(func)
        got = [_result(tensor) for tensor in flat_tensors(of_kernels(func, fakes, fake))]
        if got != expected:
            arguments = tree_map(_described, fakes)
            message = f"{self.case}: {func}{arguments}: expected {expected}, got {got}"
            self.wrong.setdefault(func, []).append(message)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _plain(value: Any) -> bool:
    return not isinstance(value, Tensor) or (
        value.layout == torch.strided and not value.is_quantized and not value.is_nested
    )


def _described(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    bits = (value.is_conj(), value.is_neg())
    return str(value.dtype), tuple(value.shape), value.stride(), *(bits if any(bits) else ())


def _result(tensor: Tensor) -> Any:
    """What a run checks: strides of dimensions with one element, or of no element, say nothing."""
    if tensor.layout != torch.strided:
        return tensor.layout
    strides = [
        stride if size > 1 else None
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return tensor.dtype, tuple(tensor.shape), strides if tensor.numel() else None


def _samples(op: Any, dtype: torch.dtype, most: int) -> Iterator[Any]:
    """Some of an operator's samples, from all over them."""
    grad = op.supports_autograd and dtype.is_floating_point
    with ExitStack() as stack:
        for module in (common_utils, core):  # which would search the whole stack for each sample
            stack.enter_context(mock.patch.object(module, "extract_test_fn", lambda: None))
        samples = list(islice(op.sample_inputs("cpu", dtype, requires_grad=grad), 40))
    most = 1 if dtype.is_complex else most
    return islice(iter(samples[:: max(1, len(samples) // most)]), most)


def _raised(values: Any) -> Any:
    """Vectors as tensors of three dimensions: what is elementwise takes them as well."""

    def raised(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or tensor.dim() != 1:
            return tensor
        copies = tensor.detach().expand(2, 3, *tensor.shape).contiguous()
        return copies.requires_grad_(tensor.requires_grad)

    return tree_map(raised, values)


def _variants(sample: Any, layouts: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The sample's tensors in each layout: all, the first alone, those behind it alone."""
    first, rest = sample.input, (sample.args, sample.kwargs)
    tensors = [t for t in tree_leaves((first, rest)) if isinstance(t, Tensor)]
    if any(tensor.dim() == 1 for tensor in tensors) and all(t.dim() < 2 for t in tensors):
        first, rest = _raised((first, rest))
    yield "contiguous", (sample.input, (sample.args, sample.kwargs))
    for layout in layouts:
        relaid = _relaid(first, layout), _relaid(rest, layout)
        yield f"{layout}, {layout}", relaid
        if layout != "contiguous" and tree_leaves(rest):
            yield f"{layout}, contiguous", (relaid[0], rest)
            if len(layouts) > len(FEW):
                yield f"contiguous, {layout}", (first, relaid[1])


def compare(layouts: Sequence[str], samples: int, operators: Sequence[str]) -> Compared:
    """Compares the calls of up to `samples` samples of each of OpInfo's operators, and of MORE."""
    compared = Compared(FakeTensorMode(allow_non_fake_inputs=True))
    for op in op_db:
        if op.name not in operators:
            continue
        for dtype in (torch.float32, torch.int64, torch.complex64):
            if dtype not in op.dtypes or (dtype == torch.int64 and torch.float32 in op.dtypes):
                continue
            try:
                for index, sample in enumerate(_samples(op, dtype, samples)):
                    for layout, (first, rest) in _variants(sample, layouts):
                        compared.case = f"{op.name}, {dtype}, sample {index}, {layout}"
                        _run(compared, op, first, rest, layouts)
            except _UNUSABLE:
                continue
    for name, (function, shape) in MORE.items():
        for layout in layouts:
            compared.case = f"{name}, {layout}"
            tensor = _relaid(torch.ones(shape, requires_grad=True), layout)
            _run(compared, function, tensor, ((), {}), layouts)
    return compared


def _run(compared: Compared, op: Any, first: Any, rest: Any, layouts: Sequence[str]) -> None:
    """Forward, then backward for gradients of each layout."""
    args, kwargs = rest
    try:
        with compared:
            output = op(first, *args, **kwargs)
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        leaves = [
            t for t in tree_leaves((first, rest)) if isinstance(t, Tensor) and t.requires_grad
        ]
        if not outputs or not leaves:
            return
        for layout in layouts if len(layouts) > len(FEW) else FEW[:2]:
            grads = [_relaid(torch.ones(t.shape, dtype=t.dtype), layout) for t in outputs]
            with compared:
                torch.autograd.grad(outputs, leaves, grads, retain_graph=True, allow_unused=True)
    except _UNUSABLE:
        return


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    compared = compare(tuple(LAYOUTS), 8, sys.argv[1:] or [op.name for op in op_db])
    for func, messages in compared.wrong.items():
        print(f"{func}: {len(messages)} calls differ")
        for message in messages[:3]:
            print(f"  {message}")
    if len(sys.argv) == 1:
        for func in corrected() - compared.corrected:
            print(f"{func}: corrected without need")
    unseen = compared.unseen_views - UNSEEN_VIEWS
    for name in unseen:
        print(f"{name}: its results are views, which its schema does not say")
    print(f"{compared.calls} calls compared, {len(compared.wrong)} operators differ")
    return 1 if compared.wrong or unseen else 0


if __name__ == "__main__":
    sys.exit(main())
