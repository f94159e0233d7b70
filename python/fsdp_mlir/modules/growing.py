"""Lists that a step appends to, such as the losses of an epoch, which a loop reads and clears.

While a step is recorded, something else stands in the place of each. Forward may append to it, read
the last items that it has appended itself, and do nothing else with it. Eager replays have the list
itself, which grows: whoever reads it otherwise, such as by its class or where an operator takes it,
computes something else than was recorded. After each step the same is appended to the list that is
there.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.utils._pytree import tree_leaves, tree_map

from fsdp_mlir.modules.containers import has_same_objects, items_of
from fsdp_mlir.modules.left import Calculated
from fsdp_mlir.modules.place import Lent, Place, built_in
from fsdp_mlir.modules.python_state import PythonState
from fsdp_mlir.support.errors import CaptureError, SourceMap, is_ours, located, model_frame

# Classes of such lists.
GROWING = (list, deque)

_MAY = {"append", "extend", "__iadd__"}
_OF_ITSELF = {"__new__", "__init__", "__getattribute__", "__class_getitem__", "__hash__"}


class _Item:
    """The one item of a stand-in, for code that looks at items without asking the class."""

    def __init__(self, of: _StandIn) -> None:
        self.of = of

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, (cls, _StandIn)):
                raise (each.of if isinstance(each, cls) else each).refuse("an operator takes it")
        raise CaptureError("an operator takes a list to which forward appends")


class _StandIn:
    """That of a list which messages call `label`, until it is `closed`. `error`: the first one."""

    def __init__(self, label: str, most: int | None) -> None:
        super().__init__(*([_Item(self)], most)[: 1 if most is None else 2])
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


def _most(value: Any) -> int | None:
    """How many items a list may have."""
    return getattr(value, "maxlen", None)


def emptied(value: Any) -> Any:
    """A list like this one, without items."""
    made = value.copy()
    made.clear()
    return made


def is_alike(value: Any, other: Any) -> bool:
    """Whether both are such lists, of which only the items may differ."""
    return type(value) in GROWING and type(value) is type(other) and _most(value) == _most(other)


_STAND_INS = {kind: _stand_in(kind) for kind in GROWING}


class Growing(Lent):
    """Those in its places."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        super().__init__(places)
        self._contents: dict[str, list[Any]] = {}  # of the lists themselves
        self._known: Collection[int] = ()

    def check(self, state: PythonState) -> None:
        """CaptureError for one that is held elsewhere, too. What is in `state` is appended to
        none."""
        self._known = state.known()
        for name, place in self._places.items():
            if state.is_shared(place.value()):
                raise CaptureError(f"'{name}', to which forward appends, has another name, too")

    def knows(self, value: Any) -> bool:
        """Whether it is a container or an object that was there before the step, or has one."""
        kind = built_in(type(value))
        if id(value) in self._known and (kind is not None or hasattr(value, "__dict__")):
            return True
        return kind is not None and any(map(self.knows, items_of(value)))

    def put(self, *, recording: bool) -> None:
        """Before forward: puts stand-ins in their places for a recording, until `restore`."""
        if not recording:
            self._contents = {name: [*place.value()] for name, place in self._places.items()}
            return
        for name, place in self._places.items():
            own = self._before.get(name, place.value())
            self.lend(name, _STAND_INS[type(own)](name, _most(own)))

    def appended(self) -> dict[str, list[Any]]:
        """At the end of forward: what it has appended to them; it may not do so later. CaptureError
        if it did something else with them."""
        if not self._lent:
            return {name: self._replayed(name) for name in self._places}
        found = {}
        for name, stand_in in self._lent.items():
            kind = built_in(type(stand_in))
            if kind.__len__(stand_in) != 1:
                stand_in.refuse("writes it by other means")
            if self._places[name].value() is not stand_in:
                stand_in.refuse("puts something else there")
            if stand_in.error is not None:
                raise stand_in.error
            found[name], stand_in.appended = stand_in.appended, []
            stand_in.closed = True
        return found

    def _replayed(self, name: str) -> list[Any]:
        """The same of the list itself, in which it leaves no stand-ins for numbers."""
        value, was = self._places[name].value(), self._contents[name]
        count = _appended(was, [*value], value)
        items = [value.pop() for _ in range(count)][::-1]
        value.extend(tree_map(lambda x: 0.0 if isinstance(x, Calculated) else x, items))
        return items


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
    return {key: x for key, x in found.items() if not first.is_shared(x)}


def _appended(was: Sequence[Any], now: Sequence[Any], value: Any) -> int:
    """How many items; 0 if something else has been done with the list, or all it had is gone."""
    was, now, most = [*was], [*now], _most(value)
    if has_same_objects(was, now):
        return 0
    least = max(1, len(now) - len(was))
    for count in range(least, min(len(now), least if most is None else most - 1) + 1):
        both = [*was, *now[-count:]]
        kept = both if most is None else both[-most:]
        if len(kept) == len(now) and all(a is b for a, b in zip(kept, now, strict=True)):
            return count
    return 0
