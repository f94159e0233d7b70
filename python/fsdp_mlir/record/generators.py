"""The random number generators of Python, NumPy and torch, for the duration of a recording."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from fsdp_mlir.support.errors import SourceMap, located


@contextmanager
def untouched_generators() -> Iterator[Callable[[], bool]]:
    """Restores the generators of Python, NumPy and torch at the end. Yields a function that says
    whether Python's or NumPy's has been drawn from since."""
    python, numpy = random.getstate(), np.random.get_state()
    torch_state = torch.random.default_generator.get_state()

    def drawn() -> bool:
        now: Any = np.random.get_state()
        return random.getstate() != python or _key(now) != _key(numpy)

    try:
        yield drawn
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.random.default_generator.set_state(torch_state)


def _key(state: Any) -> tuple[bytes, int, int]:
    return state[1].tobytes(), state[2], state[3]


@contextmanager
def refused_seeding() -> Iterator[None]:
    """CaptureError, with the model's line, if torch's generator is set inside the step.

    PyTorch's own code may set it: torch.utils.checkpoint draws again what it drew in forward.
    """
    sources = SourceMap()
    with ExitStack() as stack:
        for module, name in (
            (torch, "manual_seed"),
            (torch.random, "manual_seed"),
            (torch, "seed"),
            (torch.random, "seed"),
            (torch, "set_rng_state"),
            (torch.random, "set_rng_state"),
            (torch.random, "fork_rng"),
        ):
            refused = _refused(getattr(module, name), sources)
            stack.enter_context(mock.patch.object(module, name, refused))
        yield


def _refused(function: Callable[..., Any], sources: SourceMap) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__", "").partition(".")[0] == "torch":
            return function(*args, **kwargs)
        raise located(
            sources.frame(caller),
            f"'torch.{function.__name__}' in the step sets the generator of random numbers, which "
            "cannot be captured; draw before the step and pass the numbers as an input",
        )

    return refuse
