"""Which numbers are inputs of plans, as the ranks agree."""

from __future__ import annotations

import json
from dataclasses import replace

from fsdp_mlir.frontdoor.plan import Compiled
from fsdp_mlir.frontdoor.plans import Plans
from fsdp_mlir.frontdoor.requests import Request
from fsdp_mlir.frontdoor.together import has_no_plan
from fsdp_mlir.step.batches import Inputs
from fsdp_mlir.step.numbers import Refused
from fsdp_mlir.support.errors import CaptureError, CountedError


class Varying:
    """Those of a step's `inputs`, and those that its code reads; every method is a collective."""

    def __init__(self, inputs: Inputs, plans: Plans) -> None:
        self._inputs = inputs
        self._plans = plans

    def hold(self, before: Compiled) -> bool:
        """Takes numbers that code reads, if these alone have changed on some rank since a plan was
        captured, for numbers of each call, and those whose owners have been replaced no longer.
        Returns whether there are any on all ranks, or of the latter on one."""
        released = self._inputs.release(self._plans.places)
        _, told = self._plans.together(before.moved, lambda moved: json.dumps([released, *moved]))
        answers = [json.loads(text) for text in told]
        if any(released for released, *_ in answers):
            return True
        names = sorted({name for _, *moved in answers for name in moved})
        if not names:
            return False
        known = before.unchanged.numbers()
        places = {name: known[name][0] for name in names if name in known}
        _, told = self._plans.together(lambda: sorted(places), json.dumps)
        found = set.intersection(*map(set, map(json.loads, told)))
        return self._inputs.hold({name: places[name] for name in names if name in found})

    def count(self, error: Exception) -> bool:
        """Takes numbers that each step changes, because of which a capture has failed on any rank,
        for numbers of each call, which the step sets, and lists for those that it appends to.
        Returns whether there are any on all ranks that had not been taken so."""
        keys = error.keys if isinstance(error, CountedError) else ()
        now = self._plans.places() if keys else {}
        places = {place.key: (name, place) for name, place in now.items()}
        found = dict(places[key] for key in keys if key in places)
        _, told = self._plans.together(lambda: sorted(found), json.dumps)
        names = set.intersection(*map(set, map(json.loads, told)))
        return self._inputs.hold({name: found[name] for name in sorted(names)})

    def fix(self, request: Request, library: str, error: Exception) -> None:
        """Raises Refused for numbers because of which a capture has failed on any rank: those that
        it has refused, or all if there is a plan without them."""
        own = error.names if isinstance(error, Refused) else ()
        fails = isinstance(error, CaptureError)
        _, told = self._plans.together(lambda: None, lambda _: json.dumps([fails, *own]))
        answers = [json.loads(text) for text in told]
        names = sorted({name for _, *refused in answers for name in refused})
        if not any(failed for failed, *_ in answers):
            return
        if not names:
            try:
                self._plans.compile(replace(request, numbers=(), held={}, unread=()), library)
            except Exception as other:
                if has_no_plan(other):
                    return
                raise
            names = [*request.numbers, *request.held, *request.unread]
        if {*names}.isdisjoint([*request.numbers, *request.held, *request.unread]):
            return
        self._inputs.fix(names, str(error))
        raise Refused(str(error), names) from error
