"""Results of calls on fake tensors, of which most are as those of an earlier call.

The layers of a model make the same calls on tensors of the same forms, and a step is recorded at
least twice. FakeTensorMode has a cache of its own, which takes several times as long to ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fsdp_mlir.record.forms import Form, form_of, forms_of_results
from fsdp_mlir.record.graph import split_arguments
from fsdp_mlir.record.known import flat_tensors
from fsdp_mlir.record.strides import of_kernels
from fsdp_mlir.support.fakes import fake_tensor

_DECIDED_BY_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# The layout of their results depends on whether MKL-DNN or cuDNN may be used.
_DECIDED_BY_SETTINGS = {
    torch.ops.aten.convolution.default,
    torch.ops.aten.convolution_backward.default,
}


class _OtherError(Exception):
    """An argument whose form says too little."""


class FakeResults:
    """Of the recordings of one step."""

    def __init__(self) -> None:
        # The class of a container of results, or None, and their forms. None where a result shares
        # memory in another way than a view does.
        self._known: dict[Any, tuple[type | None, list[Form | None]] | None] = {}

    def of(self, mode: FakeTensorMode, func: OpOverload, fakes: Sequence[Any]) -> Any:
        """What the call gives, with the strides of the device's kernels."""
        key = _key(func, fakes)
        known = self._known.get(key) if key is not None else None
        if known is None and key is not None and (found := forms_of_results(func, fakes)):
            known = self._known[key] = found
        if known is not None:
            kind, forms = known
            base = fakes[0] if func.is_view else None
            results = [form and fake_tensor(mode, *form, base) for form in forms]
            return results[0] if kind is None else kind(results)
        args, kwargs = split_arguments(func, fakes)
        result = of_kernels(func, list(fakes), func(*args, **kwargs))
        if key is not None:
            self._known[key] = _described(func, fakes, result)
        return result


@lru_cache(maxsize=4096)
def _is_decided_by_forms(func: OpOverload) -> bool:
    schema = func._schema
    writes = schema.is_mutable or torch.Tag.inplace_view in func.tags
    others = [each for each in schema.arguments[1:] if each.alias_info is not None]
    return (
        func.namespace == "aten"
        and func not in _DECIDED_BY_SETTINGS
        and not writes
        and not others
        and not _DECIDED_BY_DATA.intersection(func.tags)
        and all("Tensor" in str(each.type) for each in schema.returns)
    )


def _key(func: OpOverload, fakes: Sequence[Any]) -> Any:
    """None for a call whose result has to be asked for."""
    if not fakes or not _is_decided_by_forms(func):
        return None
    try:
        key = (func, torch.get_default_dtype(), *map(_part, fakes))
        hash(key)
    except (_OtherError, TypeError):
        return None
    return key


def _part(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _form(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_part, value))
    return type(value), value


def _form(tensor: Tensor) -> Form:
    if (
        type(tensor) is not FakeTensor
        or tensor.constant is not None
        or tensor.layout != torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.is_quantized
    ):
        raise _OtherError
    return form_of(tensor)


def _described(
    func: OpOverload, fakes: Sequence[Any], result: Any
) -> tuple[type | None, list[Form | None]] | None:
    kind = None if isinstance(result, Tensor) else type(result)
    if kind not in (None, list, tuple):
        return None
    results = [result] if kind is None else list(result)
    tensors = [each for each in results if each is not None]
    try:
        forms = [None if each is None else _form(each) for each in results]
    except _OtherError:
        return None
    memory = [each.untyped_storage()._cdata for each in tensors]
    if func.is_view:
        first = fakes[0].untyped_storage()._cdata
        is_usual = all(own == first for own in memory) and all(x is not fakes[0] for x in tensors)
    else:
        given = {each.untyped_storage()._cdata for each in flat_tensors(list(fakes))}
        is_usual = len({*memory}) == len(memory) and given.isdisjoint(memory)
    if not is_usual or any(each.requires_grad for each in tensors):
        return None
    return kind, forms
