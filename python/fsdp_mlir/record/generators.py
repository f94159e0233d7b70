"""The random number generators of Python, NumPy and torch, for the duration of a recording."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch

from fsdp_mlir.modules.left import EachForward
from fsdp_mlir.support.errors import SourceMap, located
from fsdp_mlir.support.generators import HOSTS, set_states, states


@dataclass
class Drawn:
    """The states of Python's and NumPy's generators before a recording, and after it."""

    before: list[Any]
    after: list[Any] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.after != self.before

    def left(self) -> list[EachForward]:
        """What brings the generators from any state to that after a step that seeds them."""
        return [
            EachForward(partial(host.set, after))
            for host, before, after in zip(HOSTS, self.before, self.after, strict=True)
            if before != after
        ]

    def varies(self, other: Drawn) -> str:
        """The generator that a step draws from as it finds it, which this recording and another
        show; empty if it draws from none, or seeds first."""
        for index, host in enumerate(HOSTS):
            changed = any(each.before[index] != each.after[index] for each in (self, other))
            if changed and other.after[index] != self.after[index]:
                return host.name
        return ""


@contextmanager
def untouched_generators() -> Iterator[Drawn]:
    """Restores the generators of Python, NumPy and torch at the end. Yields what the body does to
    Python's and NumPy's."""
    torch_state = torch.random.default_generator.get_state()
    drawn = Drawn(states())
    try:
        yield drawn
    finally:
        drawn.after = states()
        set_states(drawn.before)
        torch.random.default_generator.set_state(torch_state)


@contextmanager
def noted_draws() -> Iterator[Drawn]:
    """Yields what the body does to Python's and NumPy's generators."""
    drawn = Drawn(states())
    try:
        yield drawn
    finally:
        drawn.after = states()


@contextmanager
def refused_seeding() -> Iterator[None]:
    """CaptureError, with the model's line, if torch's generator is set inside the step, or its seed
    is asked for, which is another one while the step is recorded.

    PyTorch's own code may set it: torch.utils.checkpoint draws again what it drew in forward.
    """
    sources = SourceMap()
    with ExitStack() as stack:
        for module, name in (
            (torch, "manual_seed"),
            (torch.random, "manual_seed"),
            (torch, "initial_seed"),
            (torch.random, "initial_seed"),
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
            f"'torch.{function.__name__}' in the step sets the generator of random numbers, or "
            "asks it for its seed, which cannot be captured; draw before the step and pass the "
            "numbers as an input",
        )

    return refuse
