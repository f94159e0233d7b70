"""Steps whose plans assume what decides a branch (step/assumed.py).

Where it is otherwise, all is put back, and FSDP2 makes the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fsdp_mlir.frontdoor.plan import BROKEN, Compiled
from fsdp_mlir.frontdoor.plans import Plans
from fsdp_mlir.frontdoor.together import EAGER, READY, Calls
from fsdp_mlir.step.assumed import Outcomes
from fsdp_mlir.support.errors import AssumesError

# Times in a row that a plan has run in vain.
_MOST_IN_VAIN = 8
_MOST_GUESSES = 4

# What a rank says of a run, besides READY and what Compiled.broken says.
_BRANCHES = EAGER

# Why there is no plan any more.
_WHY = (
    "what the step computes decides a branch, and hardly ever as it did",
    "a module that runs in Python hardly ever does what it was seen to do",
)


class Assuming:
    """Those of one step, whose methods are collectives. `can`: whether FSDP2 can make them."""

    def __init__(self, calls: Calls, plans: Plans, *, can: bool) -> None:
        self._calls = calls
        self._plans = plans
        self._can = can
        self._known: dict[Any, Sequence[bool]] = {}  # by the keys of plans
        self._guesses: dict[Any, int] = {}
        self._in_vain: dict[Any, int] = {}  # those that have run for none yet: not there
        self._why: dict[Any, str] = {}
        self.updates = True  # plans may make the optimizer's step

    def asked(self, key: Any) -> Outcomes | None:
        """What a capture may assume."""
        return (self._known.get(key, ()), ()) if self._can else None

    def count(self, error: Exception) -> bool:
        """Whether a capture has failed on any rank because what a plan with the optimizer's step
        does cannot be put back: then no further plan has that."""
        _, told = self._plans.together(lambda: isinstance(error, AssumesError), str)
        if "True" not in told:
            return False
        self.updates = False
        return True

    def ran(
        self, key: Any, compiled: Compiled, call: Callable[[], Any], inputs: Sequence[Tensor]
    ) -> Any:
        """What `call` gives, which runs the plan on `inputs`; None if what it assumes was otherwise
        on a rank. Then all is as before the call."""
        evaluation = key[0] == "evaluate"
        if not compiled.assumes(evaluation=evaluation):
            return call()
        undo = compiled.undoing(inputs, evaluation=evaluation)
        result = call()
        now = compiled.decided(evaluation=evaluation)
        own = _BRANCHES if now else READY if evaluation else compiled.broken()
        said = self._calls.agreed(("assumed",), own).said
        if said == READY:
            self._in_vain[key] = 0
            return result
        undo()
        is_guess = key not in self._in_vain and self._guesses.get(key, 0) < _MOST_GUESSES
        if is_guess and not evaluation and said != BROKEN:
            self._guesses[key] = self._guesses.get(key, 0) + 1
            self._known[key] = now or self._known.get(key, ())
        else:
            self._in_vain[key] = self._in_vain.get(key, 0) + (2 if said == BROKEN else 1)
        self._why[key] = _WHY[said == BROKEN]
        return None

    def guesses_again(self, key: Any) -> bool:
        """After a step that was in vain: whether the plan is to be captured anew."""
        return key not in self._in_vain

    def gives_up(self, key: Any) -> str:
        """Why there is no plan any more, as it has run in vain too often; empty if it has not."""
        return self._why[key] if self._in_vain.get(key, 0) >= _MOST_IN_VAIN else ""
