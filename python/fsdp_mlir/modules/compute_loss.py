"""Loss functions: those that call the model themselves, and how the others are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Signature, signature
from typing import Any


@dataclass(frozen=True, eq=False)
class ComputeLoss:
    """From the model and all inputs to the loss. No functools.partial: one of another copies its
    keywords, and would not see them change."""

    func: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*args, **kwargs)

    @property
    def __signature__(self) -> Signature:
        return signature(self.func)


def call_loss(loss: Callable[..., Any], output: Any, **beside: Any) -> Any:
    """A function of the model's output. A recording puts something else in the place of this."""
    return loss(output, **beside)
