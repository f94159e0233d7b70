"""Several plans for calls of one form, whose values decide shapes or ways of the step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fsdp_mlir.frontdoor.plan import Compiled
from fsdp_mlir.step.batches import Batch

# For one form: there are LIMIT plans of a model in all.
_MOST = 5


class Several:
    """Those of one step among `made`, where None is for what has no plan. All ranks have the same
    keys there, and make each plan together."""

    def __init__(self, made: Mapping[Any, Compiled | None]) -> None:
        self._made = made

    def keys(self, key: Any) -> list[Any]:
        """The plans for one form: that of `key`, and what has been compiled beside it."""
        keys = [key]
        while len(keys) < _MOST and (another := self._key(key, len(keys))) in self._made:
            keys.append(another)
        return keys

    def another(self, key: Any) -> Any:
        """The key of a further plan beside that of `key`; None if there is to be none."""
        keys = self.keys(key)
        can = len(keys) < _MOST and all(self._made.get(each) is not None for each in keys)
        return self._key(key, len(keys)) if can else None

    def serving(
        self,
        keys: Sequence[Any],
        current: Collection[Any],
        microbatches: Sequence[Batch],
        *,
        evaluation: bool = False,
    ) -> int:
        """Of these plans, those that are `current` and serve the values of these microbatches, as
        the bits of a number."""
        return sum(
            1 << place
            for place, key in enumerate(keys)
            if key in current
            and (made := self._made[key])
            and made.serves(microbatches, evaluation=evaluation)
        )

    @staticmethod
    def _key(key: Any, place: int) -> Any:
        return (*key, "values", place) if place else key


def first(serving: int) -> int:
    """The place of the first of these plans; 0 if there is none."""
    return (serving & -serving).bit_length() - 1 if serving else 0
