"""Runs capture with different random numbers and as another rank, to see what depends on them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

_WORDS = 624  # of MT19937, the generator of Python's random and of numpy.random
_EXTREMES = 600
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


@contextmanager
def other_surroundings(*, of_rank: bool) -> Iterator[None]:
    """Other seeds, with the second of two numbers of a normal distribution yet to come, and with
    `of_rank` the next rank's number wherever a model may look for it."""
    random.seed(0x5EED)
    random.gauss()
    np.random.seed(0x5EED)
    np.random.standard_normal()
    torch.manual_seed(0x5EED)
    if not of_rank:
        yield
        return
    ranks = {name: str(int(os.environ.get(name) or 0) + 1) for name in _RANK_VARIABLES}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, ranks))
        if dist.is_available() and dist.is_initialized():
            actual = dist.get_rank

            def next_rank(group: Any = None) -> int:
                return actual(group) + 1

            for module in (dist, dist.distributed_c10d):
                stack.enter_context(mock.patch.object(module, "get_rank", next_rank))
        yield


@contextmanager
def extreme_draws(*, high: bool) -> Iterator[None]:
    """Makes Python's and NumPy's uniform numbers the smallest possible, or the largest.

    A branch that compares one of them with a probability then goes both ways. After the first 600
    words others follow: a loop may wait for another number.
    """
    words = [_untempered(0xFFFFFFFF) if high else 0] * _EXTREMES
    words += np.random.RandomState(0x5EED).randint(1 << 31, size=_WORDS - _EXTREMES).tolist()
    random.setstate((3, (*words, 0), None))
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), 0))
    yield


def _untempered(word: int) -> int:
    """The state word that MT19937 tempers to `word` (Matsumoto and Nishimura, 1998)."""
    word ^= word >> 18
    word ^= (word << 15) & 0xEFC60000
    low = word
    for _ in range(4):
        low = word ^ ((low << 7) & 0x9D2C5680)
    high = low
    for _ in range(2):
        high = low ^ (high >> 11)
    return high & 0xFFFFFFFF
