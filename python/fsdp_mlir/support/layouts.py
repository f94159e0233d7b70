"""The strides of what the captured step takes from outside.

Strides are in elements, those of `torch.Tensor.stride()`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Strides = tuple[int, ...]


def laid_out(tensor: Tensor, expanded: bool = True) -> Strides:
    """The strides in which a run lays out the data of `tensor`: a dense permutation.

    A dense tensor keeps its own. One with gaps or overlaps is made dense in the order of its
    strides; dimensions of stride 0 stay so, unless not `expanded`.
    """
    given = tensor.stride()
    if is_dense(tensor.shape, given):
        return given
    kept = [d for d, stride in enumerate(given) if stride != 0 or not expanded]
    part = torch.empty_strided(
        [tensor.shape[d] for d in kept], [given[d] for d in kept], device="meta"
    )
    result = [0] * tensor.dim()
    for d, stride in zip(kept, torch.empty_like(part).stride(), strict=True):
        result[d] = stride
    return tuple(result)


def placeholder(tensor: Tensor, expanded: bool = True, device: str = "cpu") -> Tensor:
    """A tensor of the same type, laid out as in a run, without its data."""
    strides = laid_out(tensor, expanded)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device)


def laid_out_copy(tensor: Tensor, expanded: bool = True) -> Tensor:
    """A copy of the data of `tensor`, laid out as in a run."""
    made = placeholder(tensor, expanded, device=str(tensor.device))
    once = [slice(0, 1) if stride == 0 else slice(None) for stride in made.stride()]
    made[tuple(once)].copy_(tensor[tuple(once)])
    return made


def is_itself(tensor: Tensor) -> bool:
    """Whether a plan of this process takes the memory of an input, and not a copy."""
    bits = tensor.is_conj() or tensor.is_neg() or not tensor.is_cpu
    return not bits and is_dense(tensor.shape, tensor.stride())


def is_dense(shape: torch.Size, strides: Strides) -> bool:
    """Whether every element of a storage, from its beginning on, belongs to the tensor exactly
    once."""
    step = 1
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda pair: pair[1]):
        if size == 0:
            return True
        if size > 1:
            if stride != step:
                return False
            step *= size
    return True


def view_strides(tensor: Tensor, shape: Sequence[int]) -> Strides:
    """Those of `tensor.view(shape)`."""
    with _disable_current_modes():
        made = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
        strides: Strides = made.view(shape).stride()
        return strides


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements as bytes, in their order, which may share memory with the tensor."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 1:  # of any stride
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def storage_of(tensor: Tensor) -> int:
    """Identifies its storage, as long as that exists; 0 for a sparse tensor."""
    if tensor.layout is not torch.strided:
        return 0
    key: int = tensor.untyped_storage()._cdata
    return key
