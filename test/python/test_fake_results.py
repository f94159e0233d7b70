"""What is taken from an earlier call on fake tensors is what the fake kernel would have given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fsdp_mlir.record.fake_results import FakeResults
from fsdp_mlir.record.forms import forms_of_results
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
    except (RuntimeError, ValueError, ArithmeticError, LookupError, AssertionError) as error:
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


# Of calls whose forms are calculated: the forms of their tensors, with the arguments in between.
N, C = torch.empty(2, 4, 3, 3), torch.empty(4)
IMAGES = [
    N,
    N.to(memory_format=torch.channels_last),
    torch.empty(2, 9, 3, 3)[:, 2:6],
    torch.empty(2, 4, 6, 3)[:, :, ::2],
    torch.empty(1, 4, 1, 3),
    torch.empty(1, 4, 3, 1).transpose(0, 3).contiguous().transpose(0, 3),
    torch.empty(2, 4, 3, 1).expand(2, 4, 3, 3),
    torch.empty(0, 4, 3, 3),
    torch.empty(2, 4, 3, 3, dtype=torch.bfloat16),
    torch.empty(2, 4, 3, 3, dtype=torch.int64),
    torch.empty(2, 4),
    torch.empty(()),
]
BEHIND: dict[OpOverload, list[list[Any]]] = {
    aten.add.Tensor: [[1], [2], [0.5]],
    aten.sub.Tensor: [[1], [2], [0.5]],
    aten.mul.Tensor: [[]],
    aten.threshold_backward.default: [[0]],
    aten.gelu_backward.default: [["none"], ["tanh"]],
    aten.silu_backward.default: [[]],
    aten.sigmoid_backward.default: [[]],
    aten.tanh_backward.default: [[]],
}


def assert_calculated(func: OpOverload, given: list[Any]) -> bool:
    """Returns whether there is a rule for the call."""
    mode = FakeTensorMode()
    with mode:
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in given]
        want = outcome(partial(asked, func, fakes))
        got = outcome(partial(FakeResults().of, mode, func, fakes))
        assert form(got) == form(want)
    return forms_of_results(func, fakes) is not None


@pytest.mark.parametrize("func", BEHIND, ids=str)
def test_forms_of_elements(func: OpOverload) -> None:
    pairs = [(x, x) for x in IMAGES] + [(x, IMAGES[0]) for x in IMAGES]
    found = [assert_calculated(func, [*pair, *rest]) for pair in pairs for rest in BEHIND[func]]
    assert found.count(True) >= 8


@pytest.mark.parametrize("training", [True, False])
def test_forms_of_batch_norms(training: bool) -> None:
    found = []
    for x in IMAGES:
        for own, run in ((C, C), (C.bfloat16(), C), (C.bfloat16(), C.bfloat16()), (None, C)):
            given = [own, own, run, run]
            found.append(
                assert_calculated(aten.native_batch_norm.default, [x, *given, training, 0.1, 1e-5])
            )
            for mask in ([True] * 3, [True, False, True]):
                rest = [own, run, run, run, run, training, 1e-5, mask]
                backward = aten.native_batch_norm_backward.default
                found += [assert_calculated(backward, [y, x, *rest]) for y in (N, x)]
    assert any(found) == training


def test_statistics_of_another_dtype() -> None:
    """On a GPU those of 16 bits are in float32."""
    mode = FakeTensorMode()
    half, own = (mode.from_tensor(x.bfloat16()) for x in (N, C))
    given = [half, own, own, own, own, True, 0.1, 1e-5]
    assert forms_of_results(aten.native_batch_norm.default, given) is None


def test_forms_of_slices() -> None:
    ends = (None, -9, -2, 1, 2**63 - 1)
    parts = [[start, end, step] for start in ends for end in ends for step in (1, 2)]
    for x in IMAGES:
        for dim in (0, 1, -1):
            for part in parts:
                assert_calculated(aten.slice.Tensor, [x, dim, *part])


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
