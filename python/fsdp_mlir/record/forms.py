"""Forms of results that follow from those of the arguments at once.

FakeTensorMode computes them by the decomposition of the operator in Python, which takes tens of
milliseconds for each form: convolutional models have many. Only the usual calls are here, on
tensors of one floating-point dtype in row-major order; of others None is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensor

# Shape, strides, dtype, device, offset.
Form = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, int]

_Rule = Callable[[Sequence[Any]], list[Form] | None]

aten = torch.ops.aten


def form_of(tensor: FakeTensor) -> Form:
    place = tensor.dtype, tensor.fake_device, tensor.storage_offset()
    return tensor.shape, tensor.stride(), *place


def forms_of_results(
    func: OpOverload, fakes: Sequence[Any]
) -> tuple[type | None, list[Form | None]] | None:
    """The class of a call's container of results, or None, and the form of each result."""
    rule = _RULES.get(func)
    found = rule(fakes) if rule else None
    several = len(func._schema.returns) > 1
    return found and (tuple if several else None, [*found])


def _are_usual(tensors: Sequence[Any], is_laid_out: Callable[[Any], bool]) -> bool:
    return (
        all(isinstance(each, Tensor) and each.numel() > 0 for each in tensors)
        and all(map(is_laid_out, tensors))
        and len({(each.dtype, each.fake_device) for each in tensors}) == 1
        and tensors[0].is_floating_point()
    )


def _is_contiguous(tensor: FakeTensor) -> bool:
    return tensor.stride() == make_contiguous_strides_for(tensor.shape)


def _is_row_major(tensor: FakeTensor) -> bool:
    """Or a part of such a tensor."""
    strides = tensor.stride()
    falls = all(a > b for a, b in pairwise((*strides, 0)))
    return falls and (1 not in tensor.shape or _is_contiguous(tensor))


def _new(like: FakeTensor, shape: Sequence[int]) -> Form:
    strides = make_contiguous_strides_for(shape)
    return torch.Size(shape), strides, like.dtype, like.fake_device, 0


def _of_each_element(fakes: Sequence[Any]) -> list[Form] | None:
    tensors = [each for each in fakes if isinstance(each, Tensor)]
    others = [each for each in fakes if not isinstance(each, Tensor)]
    is_usual = _are_usual(tensors, _is_row_major) or _are_usual(tensors, _is_contiguous)
    is_usual = is_usual and len({each.shape for each in tensors}) == 1
    if not is_usual or not all(type(each) in (int, float, str) for each in others):
        return None
    return [_new(tensors[0], tensors[0].shape)]


def _is_norm(tensors: Sequence[Any]) -> bool:
    """In a dtype that the statistics have on each device."""
    return _are_usual(tensors, _is_contiguous) and tensors[0].dtype in (torch.float, torch.double)


def _batch_norm(fakes: Sequence[Any]) -> list[Form] | None:
    """Of input, weight, bias, running_mean, running_var, training, momentum, eps."""
    x, training = fakes[0], fakes[5]
    if training is not True or not _is_norm(fakes[:5]):
        return None
    return _of_channels(x, fakes[1:5])


def _of_channels(x: FakeTensor, others: Sequence[FakeTensor]) -> list[Form] | None:
    if x.dim() < 2 or any(each.shape != x.shape[1:2] for each in others):
        return None
    return [_new(x, x.shape), *[_new(x, x.shape[1:2])] * 2]


def _batch_norm_backward(fakes: Sequence[Any]) -> list[Form] | None:
    """Of grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps,
    output_mask."""
    x, training, mask = fakes[1], fakes[7], fakes[9]
    if training is not True or list(mask) != [True] * 3:
        return None
    if not _is_norm(fakes[:7]) or fakes[0].shape != x.shape:
        return None
    return _of_channels(x, fakes[2:7])


def _slice(fakes: Sequence[Any]) -> list[Form] | None:
    x, dim, start, end, step = fakes
    if x.dim() == 0 or not -x.dim() <= dim < x.dim() or step < 1:
        return None
    shape, strides = list(x.shape), list(x.stride())
    part = range(shape[dim])[start:end:step]
    offset = x.storage_offset() + part.start * strides[dim]
    shape[dim], strides[dim] = len(part), strides[dim] * step
    return [(torch.Size(shape), tuple(strides), x.dtype, x.fake_device, offset)]


_RULES: dict[OpOverload, _Rule] = {
    aten.slice.Tensor: _slice,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    **dict.fromkeys(
        (
            *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.threshold_backward.default),
            *(aten.silu_backward.default, aten.sigmoid_backward.default),
            *(aten.gelu_backward.default, aten.tanh_backward.default),
        ),
        _of_each_element,
    ),
}
