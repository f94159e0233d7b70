"""What a step reports besides its loss."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """That of the last step."""

    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False


class Reported:
    """A part of `Step`."""

    _result = Result()

    @property
    def grad_norm(self) -> float | None:
        """Total norm of the last step's gradients before clipping; None without clipping."""
        return self._result.grad_norm

    @property
    def loss_scale(self) -> float | None:
        """What the last step's loss was multiplied by; None without a gradient scaler."""
        return self._result.loss_scale

    @property
    def skipped(self) -> bool:
        """Whether the last step changed nothing, because a gradient was not finite."""
        return self._result.skipped
