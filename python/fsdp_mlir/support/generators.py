"""The random number generators of Python and NumPy that a process has."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np


class _Python:
    """Python's generator; its states compare."""

    name = "Python"

    @staticmethod
    def state() -> Any:
        return random.getstate()

    @staticmethod
    def set(state: Any) -> None:
        random.setstate(state)


class _Numpy:
    """numpy.random's."""

    name = "NumPy"

    @staticmethod
    def state() -> Any:
        state: Any = np.random.get_state()
        return (state[0], tuple(state[1].tolist()), *state[2:])

    @staticmethod
    def set(state: Any) -> None:
        np.random.set_state(state)


HOSTS = (_Python, _Numpy)


def states() -> list[Any]:
    """Those of both."""
    return [host.state() for host in HOSTS]


def set_states(states: Sequence[Any]) -> None:
    for host, state in zip(HOSTS, states, strict=True):
        host.set(state)


@contextmanager
def undone() -> Iterator[None]:
    """Puts them back after the body."""
    before = states()
    try:
        yield
    finally:
        set_states(before)
