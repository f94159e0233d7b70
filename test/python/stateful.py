"""Functions beside a model that keep state, where a model's own code does not name it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

CALLS = 0
MASKS: dict[int, Tensor] = {}


def scaled(x: Tensor, calls: int) -> Tensor:
    return x if calls < 100 else x * 2


def counted(x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return scaled(x, CALLS)


def nested() -> Callable[[Tensor], Tensor]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    def counted_in_a_closure(x: Tensor) -> Tensor:
        return scaled(x, count())

    return counted_in_a_closure


NESTED = nested()


def tallied(x: Tensor) -> Tensor:
    tallied.calls += 1  # type: ignore[attr-defined]
    return scaled(x, tallied.calls)  # type: ignore[attr-defined]


tallied.calls = 0  # type: ignore[attr-defined]


def listed(calls: list[int], x: Tensor) -> Tensor:
    calls[0] += 1
    return scaled(x, calls[0])


LISTED = partial(listed, [0])


class Tally:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return scaled(x, self.calls)


TALLY = Tally()


def masked(x: Tensor) -> Tensor:
    """Adds a mask that is made once for each length."""
    if len(x) not in MASKS:
        MASKS[len(x)] = torch.arange(len(x) * 4).view(-1, 4) % 3 / 4
    return x + MASKS[len(x)]


def counts() -> list[int]:
    cell = NESTED.__closure__[0].cell_contents.__closure__[0]  # type: ignore[index]
    return [CALLS, cell.cell_contents, tallied.calls, LISTED.args[0][0], TALLY.calls]  # type: ignore[attr-defined]
