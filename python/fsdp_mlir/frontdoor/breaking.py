"""Steps in which a module has no plan: it may run in Python, in the middle of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fsdp_mlir.frontdoor.plans import Plans
from fsdp_mlir.record.graph_breaks import GraphBreaks
from fsdp_mlir.support.errors import BreakError, CaptureError, OtherwiseError, warn

# Others have a remedy, such as a plan for each value.
_KINDS = (CaptureError, OtherwiseError, BreakError)

# Captures that fail in a module that is then observed.
_MOST = 16


class Breaking:
    """The graph breaks of one step."""

    def __init__(
        self, model: nn.Module, loss: Callable[..., Any] | None, plans: Plans, rank: int
    ) -> None:
        self._plans = plans
        self._rank = rank
        self._name = type(model).__name__
        self._observes = False
        self._count = 0
        self._told: set[str] = set()
        self.breaks = GraphBreaks(model, loss)

    def begins(self, error: Exception) -> bool:
        """After a capture that has failed: whether it has on any rank because of a module that may
        run in Python. FSDP2 makes this step then, in which the module is observed, and the next
        call is captured. A collective."""
        own = type(error) in _KINDS and self._count < _MOST and self.breaks.want(error)
        self._observes |= own
        _, told = self._plans.together(lambda: own, str)
        self._count += 1
        return "True" in told

    def relies(self) -> bool:
        """Where there are no more plans for other values on which a step relies: whether on any
        rank modules may run in Python that do. FSDP2 makes this step then, as in `begins`. A
        collective."""
        own = self.breaks.want_relying()
        self._observes |= own
        return "True" in self._plans.together(lambda: own, str)[1]

    @contextmanager
    def observed(self) -> Iterator[None]:
        """In the body FSDP2 makes a step."""
        if not self._observes:
            yield
            return
        self._observes = False
        with self.breaks.observed():
            yield

    def tell(self) -> None:
        """After a capture that has become a plan: says once of each module that runs in Python."""
        self.breaks.taken()
        for key, why in self.breaks.broken().items():
            if key not in self._told and self._rank == 0:
                self._told.add(key)
                warn(f"'{key}' of {self._name} runs in Python, in the middle of the plan: {why}")
