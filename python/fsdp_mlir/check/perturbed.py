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
