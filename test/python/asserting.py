"""Functions that check tensors, for models. Beside the tests, whose assertions pytest rewrites."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def asserts(_: nn.Module, y: Tensor) -> Tensor:
    assert (y < 100).all() and not (y > 100).any(), "large"
    return y


def raises(_: nn.Module, y: Tensor) -> Tensor:
    if not torch.isfinite(y).all():
        raise ValueError(f"expected finite values, got {y}")
    return y


def checks(_: nn.Module, y: Tensor) -> Tensor:
    torch._check((y < 100).all().item(), lambda: "large")
    torch._check(not bool((y > 100).any()))
    return y


def check_tensor(_: nn.Module, y: Tensor) -> Tensor:
    torch._check_tensor_all(y < 100)
    return y


def assert_async(_: nn.Module, y: Tensor) -> Tensor:
    torch._assert_async((y < 100).all())
    return y


def _small(y: Tensor) -> bool:
    return bool((y < 100).all())


class _Checks:
    @staticmethod
    def large(y: Tensor) -> bool:
        return not _small(y)


def helpers(_: nn.Module, y: Tensor) -> Tensor:
    assert _small(y)
    if _Checks.large(y):
        raise ValueError("large")
    return y


def distribution(_: nn.Module, y: Tensor) -> Tensor:
    return y + torch.distributions.Normal(y, y.square().exp()).log_prob(y.detach())


def any_of_helpers(_: nn.Module, y: Tensor) -> Tensor:
    assert any(map(_small, [y * 1000, y]))
    return y


def kept(_: nn.Module, y: Tensor) -> Tensor:
    small = _small(y)
    return y if small else y * 2


def either(_: nn.Module, y: Tensor) -> Tensor:
    assert (y > 0).all() or (y < 1).all()
    return y


def raises_in_one_case(model: nn.Module, y: Tensor) -> Tensor:
    if (y > 0).all():
        if model.training:
            raise ValueError
        return y * 2
    return y
