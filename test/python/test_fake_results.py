"""What is taken from an earlier call on fake tensors is what the fake kernel would have given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fsdp_mlir.record.fake_results import FakeResults
from fsdp_mlir.record.graph import split_arguments
from fsdp_mlir.record.strides import of_kernels
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten

Call = tuple[OpOverload, list[Any]]


def tensors() -> list[Tensor]:
    return [
        torch.empty(4, 6),
        torch.empty(6, 4).t(),
        torch.empty(2, 4, 6)[1],
        torch.empty(4, 6, dtype=torch.bfloat16),
        torch.empty(4, 6, dtype=torch.int64),
        torch.empty(1, 6).expand(4, 6),
        torch.empty(0, 6),
        torch.empty(4, 1),
    ]


# With arguments behind the first one.
CALLS: list[tuple[OpOverload, list[Any]]] = [
    (aten.gelu.default, ["none"]),
    (aten.add.Tensor, [2, 1]),
    (aten.add.Tensor, [2.0, 1]),
    (aten.add.Tensor, [True, 1]),
    (aten.div.Tensor, [2]),
    (aten.view.default, [[-1]]),
    (aten.t.default, []),
    (aten.slice.Tensor, [0, 1, 3, 1]),
    (aten.split.Tensor, [2, 1]),
    (aten.unbind.int, [0]),
    (aten.sum.dim_IntList, [[0], False, None]),
    (aten.sum.dim_IntList, [[0], True, torch.float64]),
    (aten.native_layer_norm.default, [[6], None, None, 1e-5]),
    (aten.cumsum.default, [0, None]),
    (aten.sort.default, [0, False]),
    (aten.clone.default, [None]),
    (aten.clone.default, [torch.channels_last]),
    (aten._to_copy.default, [torch.float64, None, None, None, False, None]),
    (aten.empty_like.default, [None, None, None, None, None]),
]


def form(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value), [form(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    place = value.storage_offset(), value.dtype, value.device, value.requires_grad
    return value.shape, value.stride(), *place


def flat(value: Any) -> list[Tensor]:
    return (
        [x for each in value for x in flat(each)] if isinstance(value, (list, tuple)) else [value]
    )


def outcome(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (RuntimeError, ValueError, NotImplementedError, IndexError) as error:
        return str(error).splitlines()[0]


def asked(func: OpOverload, values: list[Any]) -> Any:
    args, kwargs = split_arguments(func, values)
    return of_kernels(func, values, func(*args, **kwargs))


@pytest.mark.parametrize("call", range(len(CALLS)))
def test_equals_the_fake_kernel(call: int) -> None:
    func, rest = CALLS[call]
    mode, results = FakeTensorMode(), FakeResults()
    for tensor in tensors():
        with mode:
            first = mode.from_tensor(tensor)
            want = outcome(partial(asked, func, [first, *rest]))
            for _ in range(3):
                given = mode.from_tensor(tensor)
                got = outcome(partial(results.of, mode, func, [given, *rest]))
                assert form(got) == form(want)
                if isinstance(got, str):
                    continue
                memory = given.untyped_storage()._cdata
                for own, other in zip(flat(got), flat(want), strict=True):
                    shares = other.untyped_storage()._cdata == first.untyped_storage()._cdata
                    assert (own.untyped_storage()._cdata == memory) == shares
                    assert own is not given


def test_the_default_dtype_counts() -> None:
    mode, results = FakeTensorMode(), FakeResults()
    with mode:
        whole = torch.empty(3, dtype=torch.int64)
        assert results.of(mode, aten.div.Tensor, [whole, 2]).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert results.of(mode, aten.div.Tensor, [whole, 2]).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_what_data_decides_is_asked_for() -> None:
    """And what writes, which returns its argument."""
    mode, results = FakeTensorMode(), FakeResults()
    with mode:
        x = torch.empty(3)
        for _ in range(2):
            assert results.of(mode, aten.add_.Tensor, [x, 1.0, 1]) is x
            with pytest.raises(torch._subclasses.fake_tensor.DynamicOutputShapeException):
                results.of(mode, aten.nonzero.default, [x])
