"""Truth values of what a step computes, as in `if x.isnan().any():`, which its capture assumes.

A plan has the calls of one way. Where the step runs in the process that has captured it, it returns
what decides the way: a caller finds out whether the step was as assumed, and else puts back what it
has written. Elsewhere a step that would go another way stops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_mlir.step.items import Item
from fsdp_mlir.step.outputs import Outputs
from fsdp_mlir.support.errors import STOPS, CaptureError, OtherwiseError

aten = torch.ops.aten

# Those of training and of evaluation that are known, in the order of the code.
Outcomes = tuple[Sequence[bool], Sequence[bool]]

_MOST = 64


class Assumed:
    """Those of one step in one mode, of which the first are `known`. With `returns`, the step
    returns what decides; else it stops."""

    def __init__(self, known: Sequence[bool], *, returns: bool, evaluating: bool) -> None:
        self._known = list(known)
        self._evaluating = evaluating
        self._returns = returns
        self._outputs = Outputs(keeps=True)
        self._items: list[Item] = []
        self.outcomes: list[bool] = []
        self.errors: list[CaptureError] = []
        self.inputs: set[str] = set()  # those that the step writes, as its calls name them
        self.may_fail = False  # a call may, on data from which a branch may keep it

    @property
    def slots(self) -> list[Tensor]:
        """Those of Outputs."""
        return self._outputs.slots

    def begin(self, *, records: bool) -> None:
        """Forward begins."""
        self._items = []
        if records:
            self.outcomes, self.errors = [], []

    def recorded(self, item: Item) -> bool:
        """The truth value of an Item, while the step is recorded."""
        if self._is_unused(item):
            return True
        index = len(self._items)
        if index == _MOST:
            raise item.error
        outcome = self._known[index] if index < len(self._known) else _likely(item)
        self.relied(item, outcome)
        self._items.append(item.combined("truth", [item]))
        self.outcomes.append(outcome)
        self.errors.append(item.error)
        return outcome

    def relied(self, item: Item, outcome: bool) -> None:
        """While the step is recorded, which goes the way of this truth value."""
        if not self._returns:
            _assert(item, outcome)

    def replayed(self, item: Item) -> bool:
        """The same while the step runs eagerly. OtherwiseError if it is another one."""
        if self._is_unused(item):
            return True
        index = len(self._items)
        if index == len(self.outcomes):
            raise CaptureError("the step reads more of what it computes than while it is recorded")
        outcome = self.outcomes[index]
        try:
            now = bool(item.now())
        except (ArithmeticError, ValueError):  # which code may expect
            now = not outcome
        if now != outcome:
            raise self._otherwise(index)
        self._items.append(item.combined("truth", [item]))
        return outcome

    def _is_unused(self, item: Item) -> bool:
        """Whether it says that a number can be calculated, of which nothing is made."""
        return item.formula[0] == "computes" and not self._returns

    def failed(self, *, of_capture: bool = False) -> None:
        """After an error of the model: the last guess may be why. So it may be if what records the
        step has failed, if that has been a guess."""
        if self.outcomes and (not of_capture or len(self.outcomes) > len(self._known)):
            raise self._otherwise(len(self.outcomes) - 1)

    def _otherwise(self, index: int) -> CaptureError:
        known = [*self.outcomes[:index], not self.outcomes[index]]
        return OtherwiseError(self.errors[index], known, evaluating=self._evaluating)

    def take(self, error: Callable[[str], Exception], given: Mapping[str, Any]) -> None:
        """At the end of forward, as Outputs.take."""
        items, self._items = self._items, []
        if items and self._returns:

            def varies(_: str) -> Exception:
                return error("what decides a branch is calculated in another way each time")

            self._outputs.take(items, torch.empty(0), varies, given)

    def now(self, given: Mapping[str, Any]) -> list[bool]:
        """What decided the last step, up to what was otherwise. `given`: the numbers that it
        had."""
        values = self._outputs.leaves(torch.empty(0), given)
        for index, outcome in enumerate(self.outcomes):  # what follows another one may be an error
            try:
                if bool(next(values)) == outcome:
                    continue
            except (ArithmeticError, ValueError):  # which code may expect
                pass
            return [*self.outcomes[:index], not outcome]
        return self.outcomes


def _likely(item: Item) -> bool:
    """A guess: that a tensor is false, such as what says that there are infinities or that a loop
    goes on, and that a number is 1."""
    if (expected := item.error.expected) is not None:
        return expected
    if item.formula[0] == "item":
        return False
    try:
        return bool(item.likely(for_bool=False))
    except (ArithmeticError, ValueError):
        return False


def _assert(item: Item, outcome: bool) -> None:
    """Records that the step stops if it is not so."""
    if (tensor := item.computed()) is None:
        raise item.refused()
    if tensor.dtype != torch.bool:
        tensor = tensor != 0
    where = str(item.error).partition(": ")[0]
    aten._assert_async.msg(tensor if outcome else tensor.logical_not(), f"{STOPS}{where}")


@dataclass(frozen=True)
class Assumption:
    """What a captured step assumes in training and in evaluation, the buffers and constants that it
    writes, but for slots, its graph breaks, whose modules may do something else, and whether the
    step of any rank assumes something."""

    modes: tuple[Assumed, ...] = ()
    written: frozenset[str] = frozenset()
    breaks: tuple[Any, ...] = ()
    anywhere: tuple[bool, bool] = (False, False)

    def of(self, *, evaluation: bool) -> Assumed | None:
        """What it assumes in one mode, if it does."""
        assumed = self.modes[evaluation] if self.modes else None
        return assumed if assumed is not None and assumed.outcomes else None

    def inputs(self, *, evaluation: bool) -> list[int]:
        """The places of the inputs that the step writes."""
        assumed = self.modes[evaluation] if self.modes else None
        return sorted(int(name[1:]) for name in assumed.inputs) if assumed else []

    @property
    def here(self) -> tuple[bool, bool]:
        """Whether it does in each mode."""
        training, evaluation = (self.of(evaluation=each) is not None for each in (False, True))
        return training or bool(self.breaks), evaluation
