"""The strides of what the device's kernels return.

Strides are in elements, those of `torch.Tensor.stride()`. Where fake kernels give different strides
than the CPU's kernels, `of_kernels` substitutes those of the CPU's; test/python/test_strides.py
compares both. Of a GPU's kernels, strides are known only for those that leave them to
TensorIterator, as the CPU's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from fsdp_mlir.support.layouts import Strides, is_dense, view_strides

aten = torch.ops.aten


def elementwise(shape: Sequence[int], operands: Sequence[Tensor]) -> Strides:
    """The strides that TensorIterator gives an output: `reorder_dimensions` and
    `allocate_or_resize_outputs` of ATen/TensorIterator.cpp, with its shortcuts for operands of
    one dense layout. `operands` are the inputs in the order in which the kernel adds them."""
    same = all(tensor.shape == operands[0].shape for tensor in operands)
    if same and all(tensor.is_contiguous() for tensor in operands):
        return _packed(shape, range(len(shape)))
    first = operands[0].stride()
    if same and is_dense(operands[0].shape, first) and all(t.stride() == first for t in operands):
        return first
    strides = [_broadcast(shape, tensor) for tensor in operands]

    def compared(a: int, b: int) -> int:
        """1 where dimension a is outside of b, -1 where inside, 0 where nothing decides."""
        for operand in strides:
            if operand[a] == 0 or operand[b] == 0:
                continue
            if operand[a] != operand[b]:
                return 1 if operand[a] > operand[b] else -1
            if shape[a] > shape[b]:
                return 1
        return 0

    inner_first = list(reversed(range(len(shape))))
    for i in range(1, len(shape)):
        moving = i
        for j in reversed(range(i)):
            order = compared(inner_first[j], inner_first[moving])
            if order < 0:
                break
            if order > 0:
                inner_first[j], inner_first[moving] = inner_first[moving], inner_first[j]
                moving = j
    return _packed(shape, list(reversed(inner_first)))


def _broadcast(shape: Sequence[int], tensor: Tensor) -> Strides:
    added = len(shape) - tensor.dim()
    own = [
        0 if size == 1 and shape[added + d] != 1 else stride
        for d, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    ]
    return (*[0] * added, *own)


def _packed(shape: Sequence[int], outer_first: Sequence[int]) -> Strides:
    """Dense strides of dimensions in that order."""
    strides = [0] * len(shape)
    step = 1
    for d in reversed(outer_first):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


# From a result and the call's arguments by name to the result's strides.
_Rule = Callable[[Tensor, dict[str, Any]], Strides]


class _iterated:  # one of the rules below, on every device
    """A TensorIterator over these arguments."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, result: Tensor, arguments: dict[str, Any]) -> Strides:
        operands = [arguments[name] for name in self.names]
        return elementwise(result.shape, [t for t in operands if isinstance(t, Tensor)])


def _contiguous(result: Tensor, _arguments: dict[str, Any]) -> Strides:
    return _packed(result.shape, range(result.dim()))


def _like(name: str) -> _Rule:
    """empty_like of this argument."""

    def rule(result: Tensor, arguments: dict[str, Any]) -> Strides:
        if result.shape != arguments[name].shape:
            return result.stride()  # reduced
        return torch.empty_like(arguments[name]).stride()

    return rule


def _suggested(name: str) -> _Rule:
    """Dense in the memory format that ATen suggests for this argument."""

    def rule(result: Tensor, arguments: dict[str, Any]) -> Strides:
        memory_format = suggest_memory_format(arguments[name])
        return torch.empty_like(result, memory_format=memory_format).stride()

    return rule


def _ldexp(result: Tensor, arguments: dict[str, Any]) -> Strides:
    """self * pow(2.0, other), of which a real power is contiguous."""
    power = arguments["other"]
    if not power.is_complex():
        power = torch.empty_like(power, memory_format=torch.contiguous_format)
    return elementwise(result.shape, [arguments["self"], power])


def _angle(result: Tensor, arguments: dict[str, Any]) -> Strides:
    """For a complex tensor the real part of a complex result is copied to a new tensor."""
    if arguments["self"].is_complex():
        return _contiguous(result, arguments)
    return result.stride()


def _rrelu_backward(result: Tensor, arguments: dict[str, Any]) -> Strides:
    """noise * grad_output in training, leaky_relu_backward otherwise."""
    drawn = arguments["training"] and arguments["upper"] - arguments["lower"] > 1e-6
    first = arguments["noise" if drawn else "self"]
    return elementwise(result.shape, [first, arguments["grad_output"]])


# By operator, a rule for each result on which its fake kernel and the CPU's differ.
_RULES: dict[OpOverload, dict[int, _Rule]] = {
    aten._batch_norm_with_update.default: {0: _suggested("input")},
    aten._log_softmax_backward_data.default: {0: _contiguous},
    aten._native_batch_norm_legit.default: {0: _suggested("input")},
    aten._prelu_kernel_backward.default: {
        0: _iterated("self", "weight", "grad_output"),
        1: _iterated("self", "weight", "grad_output"),
    },
    aten.angle.default: {0: _angle},
    aten.batch_norm_backward.default: {0: _suggested("input")},
    aten.binary_cross_entropy.default: {0: _like("self")},
    aten.binary_cross_entropy_backward.default: {0: _like("self")},
    aten.channel_shuffle.default: {0: _suggested("self")},
    aten.copysign.Tensor: {0: _iterated("self", "other")},
    aten.div.Tensor_mode: {0: _iterated("self", "other")},
    aten.elu_backward.default: {0: _iterated("grad_output", "self_or_result")},
    aten.floor_divide.default: {0: _iterated("self", "other")},
    aten.glu_backward.default: {0: _contiguous},
    aten.hardsigmoid_backward.default: {0: _iterated("grad_output", "self")},
    aten.hardswish_backward.default: {0: _iterated("grad_output", "self")},
    aten.hardtanh_backward.default: {0: _iterated("grad_output", "self")},
    aten.heaviside.default: {0: _iterated("self", "values")},
    aten.huber_loss_backward.default: {0: _contiguous},
    aten.isin.Tensor_Tensor: {0: _contiguous},
    aten.ldexp.Tensor: {0: _ldexp},
    aten.leaky_relu_backward.default: {0: _iterated("self", "grad_output")},
    aten.log_sigmoid_backward.default: {0: _like("grad_output")},
    aten.log_sigmoid_forward.default: {0: _contiguous, 1: _contiguous},
    aten.logaddexp.default: {0: _iterated("self", "other")},
    aten.logical_and.default: {0: _iterated("self", "other")},
    aten.logical_or.default: {0: _iterated("self", "other")},
    aten.logical_xor.default: {0: _iterated("self", "other")},
    aten.logit_backward.default: {0: _iterated("grad_output", "self")},
    aten.mse_loss_backward.default: {0: _contiguous},
    aten.native_batch_norm.default: {0: _suggested("input")},
    aten.native_batch_norm_backward.default: {0: _suggested("input")},
    aten.native_dropout_backward.default: {0: _iterated("grad_output", "mask")},
    aten.native_layer_norm_backward.default: {0: _contiguous, 1: _contiguous, 2: _contiguous},
    aten.nll_loss2d_forward.default: {0: _contiguous},
    aten.normal.Tensor_Tensor: {0: _contiguous},
    aten.pow.Scalar: {0: _contiguous},
    aten.reflection_pad2d_backward.default: {0: _suggested("self")},
    aten.reflection_pad3d.default: {0: _suggested("self")},
    aten.reflection_pad3d_backward.default: {0: _suggested("self")},
    aten.replication_pad2d_backward.default: {0: _suggested("self")},
    aten.replication_pad3d.default: {0: _suggested("self")},
    aten.replication_pad3d_backward.default: {0: _suggested("self")},
    aten.rrelu_with_noise.default: {0: _contiguous},
    aten.rrelu_with_noise_backward.default: {0: _rrelu_backward},
    aten.smooth_l1_loss_backward.default: {0: _contiguous},
    aten.soft_margin_loss_backward.default: {0: _iterated("target", "self")},
    aten.softplus_backward.default: {0: _iterated("grad_output", "self")},
    aten.special_xlog1py.default: {0: _iterated("self", "other")},
    aten.threshold_backward.default: {0: _iterated("self", "grad_output")},
    aten.xlogy.Tensor: {0: _iterated("self", "other")},
}


# Fake kernels leave a tensor as it is if it has the shape already, and else may give other strides
# along dimensions of one element.
_VIEWS = {aten.view.default, aten._unsafe_view.default}


def of_kernels(func: OpOverload, values: list[Any], result: Any) -> Any:
    """`result` of the fake kernel of `func` with the strides and memory of the CPU's; inside the
    fake mode.

    `values` has every schema argument.
    """
    if isinstance(result, tuple):
        result = _apart(result)
    if func in _VIEWS and 1 in result.shape:
        strides = view_strides(values[0], result.shape)
        return result.as_strided(result.shape, strides, result.storage_offset())
    rules = _RULES.get(func)
    if rules is None:
        return result
    names = [formal.name for formal in func._schema.arguments]
    arguments = dict(zip(names, values, strict=True))
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    for index, rule in rules.items():
        fake = results[index]
        if fake is not None and (fake.device.type == "cpu" or isinstance(rule, _iterated)):
            strides = rule(fake, arguments)
            results[index] = torch.empty_strided(
                fake.shape, strides, dtype=fake.dtype, device=fake.device
            )
    return tuple(results) if isinstance(result, (tuple, list)) else results[0]


def _apart(results: tuple[Any, ...]) -> tuple[Any, ...]:
    """A fake kernel may give one tensor as two results; they are two for the CPU's kernels."""
    seen: set[int] = set()
    apart = list(results)
    for index, result in enumerate(results):
        if isinstance(result, Tensor) and id(result) in seen:
            apart[index] = torch.empty_like(result)
        seen.add(id(result))
    return tuple(apart)


def corrected() -> set[OpOverload]:
    """The operators whose fake kernels give other strides."""
    return set(_RULES)
