"""What ATen computes otherwise for plain tensors than for those that a dispatch mode sees.

Composite operators and derivatives of ATen ask `isTensorSubclassLike`, which is true of all tensors
under a dispatch mode, and then keep clear of sizes and branches that data decide. The sums of both
ways differ in their order, or in more. The step is what plain tensors compute, so such an operator
is recorded as they run it, or refused. Checks of data that ATen leaves out under a mode are calls
of the step. test_plain.py compares both ways on all operators for which PyTorch has samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fsdp_mlir.support.errors import located, model_frame

aten = torch.ops.aten

_MEAN = 1  # of ATen's Reduction
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

#: Derivatives that eager PyTorch computes in one of several ways, by the data: autograd's node, and
#: a call that it makes under a mode.
_BY_DATA = {
    ("ProdBackward0", aten.cumprod.default): "the derivative of 'aten.prod'",
    ("ProdBackward1", aten.cumprod.default): "the derivative of 'aten.prod'",
    ("MaskedFillBackward1", aten.where.self): "the derivative of 'aten.masked_fill' by its value",
}


def decided_by_data(func: OpOverload) -> str | None:
    """The derivative that a call in backward belongs to, if eager PyTorch does not make the call
    with every data."""
    node = torch._C._current_autograd_node()
    return None if node is None else _BY_DATA.get((node.name(), func))


_QUANTILES = [
    *(aten.quantile.default, aten.quantile.scalar),
    *(aten.nanquantile.default, aten.nanquantile.scalar),
]


@contextmanager
def composites() -> Iterator[None]:
    """While it is entered, composite operators run as on plain tensors."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCPU", "AutogradCUDA"):  # before the composite kernel, unlike Autograd
        library.impl("cross_entropy_loss", _cross_entropy_loss, key)
        for overload in _QUANTILES:
            library.impl(overload.name().removeprefix("aten::"), _quantile(overload), key)
        library.impl("one_hot", _one_hot, key)
        library.impl("_linalg_check_errors", _linalg_check_errors, key)
    try:
        yield
    finally:
        library._destroy()


def _quantile(overload: OpOverload) -> Callable[..., Tensor]:
    """ATen selects in plain tensors, and sorts others: among equal elements, such as the zeros of a
    ReLU, the gradient goes to another one."""

    def quantile(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_grad_enabled() and self.requires_grad:
            frame = model_frame()
            raise located(
                (frame.f_code.co_filename, frame.f_lineno),
                f"the derivative of '{overload.name().replace('::', '.')}' goes to another one of "
                "equal elements under a dispatch mode than in eager PyTorch; use torch.sort",
            )
        made: Tensor = overload._op_dk(_COMPOSITE, self, *args, **kwargs)
        return made

    return quantile


def _one_hot(self: Tensor, num_classes: int = -1) -> Tensor:
    """ATen looks at the least and the greatest class, and does not under a mode."""
    if num_classes > 0 and self.numel() > 0:
        torch._assert_async(
            ((self >= 0) & (self < num_classes)).all(),
            f"one_hot: expected classes from 0 to {num_classes - 1}",
        )
    return aten.one_hot.default._op_dk(_COMPOSITE, self, num_classes)


def _linalg_check_errors(infos: Tensor, api_name: str, *, is_matrix: bool) -> None:
    """ATen raises an error for what LAPACK reports, and not under a mode."""
    torch._assert_async((infos == 0).all(), f"{api_name}: singular, or not positive definite")


def _cross_entropy_loss(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """A mean that weights of classes divide adds up the weights of those targets that count: with
    a mode ATen adds zeros for the others (`cross_entropy_loss_label_smoothing`)."""
    indices = target.shape != self.shape
    if weight is None or not label_smoothing > 0 or reduction != _MEAN or not indices:
        arguments = (self, target, weight, reduction, ignore_index, label_smoothing)
        return aten.cross_entropy_loss.default._op_dk(_COMPOSITE, *arguments)
    classes = 0 if self.dim() == 1 else 1
    logarithms = torch.log_softmax(self, classes, self.dtype)
    loss = aten.nll_loss_nd(logarithms, target, weight, reduction, ignore_index)
    shape = [1] * self.dim()
    shape[classes] = weight.shape[0]
    smooth = -(logarithms * weight.view(shape)).sum(classes)
    ignored = target == ignore_index
    smooth.masked_fill_(ignored, 0.0)
    counted = weight.gather(0, target.masked_select(~ignored).flatten())
    mean = smooth.sum() / counted.sum() * (label_smoothing / self.shape[classes])
    return (1 - label_smoothing) * loss + mean
