"""Lists that a step appends to, such as the losses of an epoch, which a loop reads and clears.

While a step is recorded or replayed, something else stands in the place of each. Forward may append
to it, read the last items that it has appended itself, and do nothing else with it. After each step
the same is appended to the list that is there.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fsdp_mlir.modules.containers import has_same_objects
from fsdp_mlir.modules.place import Place
from fsdp_mlir.modules.python_state import PythonState
from fsdp_mlir.support.errors import CaptureError, SourceMap, is_ours, located, model_frame

# Classes of such lists.
GROWING = (list, deque)

_MAY = {"append", "extend", "__iadd__"}
_OF_ITSELF = {"__new__", "__init__", "__getattribute__", "__class_getitem__", "__hash__"}


class _Item:
    """The one item of a stand-in, for code that looks at items without asking the class."""


class _StandIn:
    """That of a list which messages call `label`, until it is `closed`. `error`: the first one."""

    def __init__(self, label: str, most: int | None) -> None:
        super().__init__([_Item()])
        self.label, self.most = label, most
        self.appended: list[Any] = []
        self.closed = False
        self.error: CaptureError | None = None

    def keeps_all(self) -> bool:
        """Whether it has all that was appended."""
        return self.most is None or len(self.appended) <= self.most

    def refuse(self, does: str) -> CaptureError:
        text = f"forward appends to '{self.label}', and {does}, which a captured step does not do"
        self.error = self.error or located(SourceMap().frame(model_frame()), text)
        return self.error


def _stand_in(kind: type) -> type:
    """Its class for lists of that one."""

    def refused(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_ours(sys._getframe(1).f_code.co_filename):  # which looks for something else
                return getattr(kind, name)(self, *args, **kwargs)
            index = args[0] if name == "__getitem__" else 0
            if type(index) is int and -len(self.appended) <= index < 0 and self.keeps_all():
                return self.appended[index]
            raise self.refuse(f"reads or changes it by {name}")

        return method

    def appends(name: str) -> Any:
        def method(self: Any, item: Any) -> Any:
            if self.closed:
                raise self.refuse("so does backward")
            self.appended.extend([item] if name == "append" else item)
            return self if name == "__iadd__" else None

        return method

    own = {name for name, member in vars(kind).items() if callable(member)} - _OF_ITSELF
    methods = {name: appends(name) if name in _MAY else refused(name) for name in own}
    copies = {name: refused(name) for name in ("__copy__", "__deepcopy__", "__reduce_ex__")}
    return type(f"_Growing{kind.__name__}", (_StandIn, kind), methods | copies)


_STAND_INS = {kind: _stand_in(kind) for kind in GROWING}


class Growing:
    """Those in `places`, by their names."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = dict(places)
        self._before: dict[str, Any] = {}
        self._stand_ins: dict[str, Any] = {}

    def put(self) -> None:
        """Puts stand-ins in their places, until `restore`."""
        for name, place in self._places.items():
            self._before.setdefault(name, place.value())
            own = self._before[name]
            self._stand_ins[name] = _STAND_INS[type(own)](name, getattr(own, "maxlen", None))
            place.put(self._stand_ins[name])

    def appended(self) -> dict[str, list[Any]]:
        """At the end of forward: what it has appended to them; it may not do so later. CaptureError
        if it did something else with them."""
        found = {}
        for name, stand_in in self._stand_ins.items():
            if self._places[name].value() is not stand_in:
                stand_in.refuse("puts something else there")
            if stand_in.error is not None:
                raise stand_in.error
            found[name], stand_in.appended = stand_in.appended, []
            stand_in.closed = True
        return found

    def restore(self) -> None:
        for name, value in self._before.items():
            self._places[name].put(value)
        self._before.clear()
        self._stand_ins.clear()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Does so at the end of the body."""
        try:
            yield
        finally:
            self.restore()


def grown(
    before: PythonState, first: PythonState, second: PythonState
) -> dict[tuple[int, str], list[Any]]:
    """The lists to which each of two steps has appended something, by the keys of their places."""
    states = [state.contents() for state in (before, first, second)]

    def grows(value: Any) -> bool:
        was, now, then = (state.get(id(value)) for state in states)
        if was is None or now is None or then is None:
            return False
        count = _appended(was, now, value)
        return count > 0 and count == _appended(now, then, value)

    spots = {(id(spot.owner), spot.name): value for spot, value in first.spots(*GROWING)}
    found = {key: x for key, x in spots.items() if type(x) in GROWING and grows(x)}
    # Code may read one by another name.
    return {key: x for key, x in found.items() if sum(x is each for each in spots.values()) == 1}


def _appended(was: Sequence[Any], now: Sequence[Any], value: Any) -> int:
    """How many items; 0 if something else has been done with the list, or all it had is gone."""
    was, now, most = [*was], [*now], getattr(value, "maxlen", None)
    if has_same_objects(was, now):
        return 0
    least = max(1, len(now) - len(was))
    for count in range(least, min(len(now), least if most is None else most - 1) + 1):
        both = [*was, *now[-count:]]
        kept = both if most is None else both[-most:]
        if len(kept) == len(now) and all(a is b for a, b in zip(kept, now, strict=True)):
            return count
    return 0
