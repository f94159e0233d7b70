"""Steps that FSDP2 makes because the model is not yet what it will be: the first one makes a table,
or a mean over steps begins with it; and because the inputs before had no plan in any form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_mlir.frontdoor.plan import Compiled
from fsdp_mlir.frontdoor.plans import Plans
from fsdp_mlir.frontdoor.together import COMPILE, EAGER, FOR_FSDP2, READY
from fsdp_mlir.support.errors import FirstStepError

# As often as a plan, or a capture, may be made in vain.
_MOST_UNSETTLED = 8
_MOST_BEGINNINGS = 2
_MOST_IN_A_ROW = 8
_MOST_IN_VAIN = 4
_OFTEN = 8

# Why a form is not captured.
IN_VAIN = (
    f"{_MOST_IN_VAIN} forms of the inputs in a row have had none; of further ones in a row, only "
    f"the 8th, the 16th and so on are captured, and those that come for the {_OFTEN}th time"
)


class Settling:
    """Those of one step, by the keys of its plans. `can`: whether FSDP2 can make them."""

    def __init__(self, plans: Plans, *, can: bool) -> None:
        self._plans = plans
        self._can = can
        self._counts: dict[Any, int] = {}
        self._beginnings: dict[Any, set[str]] = {}  # what had changed since the plan
        self._in_a_row: dict[Any, int] = {}  # calls for which the plan did not fit
        self._changes: dict[Any, str] = {}
        self._in_vain = 0  # new keys in a row without a plan
        self._passed: dict[Any, int] = {}  # how often keys came that were passed over

    def passes_over(self, key: Any, made: Mapping[Any, Compiled | None]) -> bool:
        """Whether a form is not captured, as those before it were in vain: where each batch has
        another one, as with boxes in images, captures would take longer than steps. Counts the
        calls that are passed over."""
        if key in made or self._in_vain < _MOST_IN_VAIN:
            return False
        times, count = self._passed.get(key, 0), self._in_vain + 1
        if times + 1 >= _OFTEN or (times == 0 and count & (count - 1) == 0):
            return False
        self._passed[key] = times + 1
        if times == 0:
            self._in_vain = count
        return True

    def tried(self, key: Any, compiled: Compiled | None, made: Mapping[Any, Any]) -> None:
        """What a form has after a capture, and before it is among those that are `made`."""
        if compiled is not None:
            self._in_vain = 0
        elif key not in made and key not in self._passed:
            self._in_vain += 1

    def is_unsettled(self, compiled: Compiled | None) -> bool:
        """Whether what forward leaves in Python, such as a table that it makes once, decides what
        the next step is, and FSDP2 can leave it there."""
        return compiled is not None and compiled.captured.unsettled and self._can

    def settle(self, key: Any) -> str:
        """FSDP2 makes one step, after which the model is captured as that step left it. Returns why
        not; empty if it may."""
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._counts[key] < _MOST_UNSETTLED:
            return ""
        return (
            f"forward has {_MOST_UNSETTLED} times left something else in the model, which decides "
            "what the next step is"
        )

    def begins(self, key: Any, error: Exception, made: Mapping[Any, Compiled | None]) -> bool:
        """Whether FSDP2 makes this step, after which a capture that has failed on any rank may do,
        or a plan that was `made` fits again. A collective."""
        before = made.get(key)
        changed = "" if before is None else before.changed()
        self._counts[key] = self._counts.get(key, 0) + 1
        own = isinstance(error, FirstStepError) and self._can
        few = len(self._beginnings.get(key, ())) < (_MOST_UNSETTLED if changed else 0)
        own = own and (few or self._counts[key] <= _MOST_BEGINNINGS)
        begins = "True" in self._plans.together(lambda: own, str)[1]
        if begins and changed:
            self._beginnings.setdefault(key, set()).add(changed)
        return begins

    def note(self, key: Any, said: int) -> None:
        """What all ranks do in a call for which there is a plan."""
        count = self._in_a_row.get(key, 0)
        if said == READY:
            self._in_a_row[key] = 0
        elif said == COMPILE or (said == FOR_FSDP2 and count >= _MOST_IN_A_ROW):
            self._in_a_row[key] = count + 1

    def again(self, key: Any, compiled: Compiled) -> tuple[int, str]:
        """What to do where a plan does not fit the model as it is now, and why."""
        if key in self._beginnings and compiled.changed() in self._beginnings[key]:
            return EAGER, ""  # a capture has failed so before
        why = self._always_changes(key, compiled)
        return (FOR_FSDP2 if why else COMPILE), why

    def _always_changes(self, key: Any, compiled: Compiled) -> str:
        """Why FSDP2 makes a step that would be captured anew, as the calls before it were; after
        twice as many calls each time it is captured all the same. Empty if it need not."""
        count = self._in_a_row.get(key, 0)
        if count < _MOST_IN_A_ROW or count & (count - 1) == 0:
            return ""
        return self._changes.setdefault(
            key,
            f"before each of {_MOST_IN_A_ROW} calls something that the step may read has changed: "
            f"{compiled.changed()}",
        )
