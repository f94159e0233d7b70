"""Tensors that a step reads in places of their own, and that code replaces there: the mean that a
criterion keeps in an attribute, the state of an RNN from one batch to the next, weights of classes
that a loop sets.

What a step assigns there is written in place into the tensor that it has read, as with a buffer. So
that the compiled step does what code would have done, it reads what is in the place before each
call, and gives the place a new tensor if it writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdp_mlir.modules.containers import items_of
from fsdp_mlir.modules.left import Spot
from fsdp_mlir.modules.python_state import PythonState
from fsdp_mlir.step.nested import form, named_leaves, rebuilt
from fsdp_mlir.support.layouts import is_dense, storage_of

_MOST = 256  # tensors in a place


@dataclass(eq=False)
class _Place:
    """`value`: what was there when the step was captured, a tensor, or a tuple, a list or a dict of
    them; `begin`: when the present recording began. `is_alone`: no other place has these tensors.
    `is_assigned` by the step."""

    spot: Spot
    value: Any
    begin: Any
    is_alone: bool = True
    is_assigned: bool = False


class Candidates:
    """The places of one step that may be followed, over its recordings: of plain tensors outside of
    the model's parameters and buffers, whose storages are `own`. `begins`: places that it assigns
    have one tensor in the beginning."""

    def __init__(self, state: PythonState | None = None, own: Set[int] = frozenset()) -> None:
        self.begins = False
        places: dict[Any, _Place] = {}
        seen = Counter[int]()
        state = state or PythonState()
        for spot, value in state.spots(Tensor, tuple, list, dict):
            if _is_followable(value) and own.isdisjoint(map(storage_of, _tensors(value))):
                places.setdefault((id(spot.owner), spot.name), _Place(spot, value, value))
                seen.update(map(storage_of, _tensors(value)))
        self._places = list(places.values())
        # One object may have been come by twice, or hold what is no place, such as a set's item.
        paths = Counter(map(storage_of, state.tensors().values()))
        held = Counter(storage_of(x) for each in self._places for x in _tensors(each.value))
        for each in self._places:
            keys = list(map(storage_of, _tensors(each.value)))
            each.is_alone = all(held[key] == 1 and seen[key] == paths[key] for key in keys)

    def settle(
        self, own: Set[int], read: Callable[[], tuple[Mapping[int, bool], Set[int]]]
    ) -> None:
        """At the end of a step: writes what was assigned in place, into the tensors that were there
        when it began, and puts these back. In the first recording, only if they are among those
        that it has `read`, which says by their ids which it has written by itself, and what the
        storages of these and of inputs are: a part of them is no tensor of the place's own. All
        others stay what they are. `own`: the storages of the model's state."""
        moved = [each for each in self._places if each.spot.get() is not each.begin]
        if not moved:
            return
        known, taken = read()
        moved = [each for each in moved if each.is_assigned or _is_read(each, known)]
        values = [(each, each.spot.get()) for each in moved]
        values = [(each, value) for each, value in values if _is_alike(value, each.begin, True)]
        new = Counter(storage_of(x) for _, value in values for x in _tensors(value, True))
        old = Counter(storage_of(x) for each, _ in values for x in _tensors(each.begin))
        self.begins |= any(count > 1 for count in old.values())
        # Places may exchange their tensors.
        begun = {storage_of(x) for each, _ in values for x in _tensors(each.begin)}
        stay = {storage_of(x) for each in self._places for x in _tensors(each.begin)} - begun
        refused = own | (taken - begun) | stay
        copied = []
        with torch.no_grad():
            for each, value in values:
                tensors = [(x, storage_of(x)) for x in _tensors(value, True)]
                shared = any(old[storage_of(x)] > 1 for x in _tensors(each.begin))
                if not shared and not any(new[key] > 1 or key in refused for _, key in tensors):
                    fresh = [x.clone() if key in begun else x for x, key in tensors]
                    copied.append((each, fresh))
            for each, fresh in copied:
                for target, tensor in zip(_tensors(each.begin), fresh, strict=True):
                    target.copy_(tensor)
                each.spot.put(each.begin)
                each.is_assigned = True

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """In the body, other tensors with the same memory are in places that are alone with theirs,
        and in those that the step assigns."""
        self._places = [each for each in self._places if each.is_alone or each.is_assigned]
        for each in self._places:
            each.begin = rebuilt(each.value, iter([x.detach() for x in _tensors(each.value)]))
            each.spot.put(each.begin)
        try:
            yield
        finally:
            for each in self._places:
                if each.spot.get() is each.begin:
                    each.spot.put(each.value)

    def __bool__(self) -> bool:
        return bool(self._places)

    def forget(self) -> None:
        """None is followed."""
        self._places.clear()

    def assigned(self) -> str:
        """The name of a place that the step assigns; empty if there is none."""
        return next((str(each.spot.name) for each in self._places if each.is_assigned), "")

    def keep(self, constants: Sequence[Tensor]) -> bool:
        """After a recording in the body of `elsewhere`, which has taken these: forgets the places
        whose tensors the step does not take from there alone. Returns whether it assigns none of
        those."""
        taken = set(map(id, constants))
        kept = []
        for each in self._places:
            old, new = map(_tensors, (each.value, each.begin))
            each.begin = each.value
            if taken.isdisjoint(map(id, old)) and not taken.isdisjoint(map(id, new)):
                kept.append(each)
            elif each.is_assigned:
                return False
        self._places = kept
        return True

    def found(
        self, constants: Mapping[str, Tensor], written: Set[str], *, overwrites: bool
    ) -> Followed:
        """Those of the step's constants, by the names that the plan has for them. One that the step
        has `written` by itself is no such place: it is written where it is. `overwrites`: whether
        the step writes an input."""
        by_tensor = {id(tensor): name for name, tensor in constants.items()}
        places = []
        for each in self._places:
            found = {
                index: by_tensor[id(tensor)]
                for index, tensor in enumerate(_tensors(each.value))
                if id(tensor) in by_tensor
            }
            if found and (each.is_assigned or written.isdisjoint(found.values())):
                places.append(_Follow(each.spot, each.value, found, each.is_assigned))
        return Followed(tuple(places), overwrites)


@dataclass(frozen=True)
class _Follow:
    """A place, what was there when the step was captured, and what the plan calls the tensors in
    that, by their numbers."""

    spot: Spot
    value: Any
    names: Mapping[int, str]
    is_assigned: bool


@dataclass(frozen=True)
class Followed:
    """The places whose tensors a plan reads, and those among them that it writes."""

    places: tuple[_Follow, ...] = ()
    overwrites: bool = False  # an input
    # What was put, or found, last: its id, and the storages; by the number of the place.
    _last: dict[int, tuple[int, list[int]]] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Of the constants."""
        return {name for each in self.places for name in each.names.values()}

    @property
    def keys(self) -> set[Any]:
        """Of the places."""
        return {(id(each.spot.owner), each.spot.name) for each in self.places}

    def would_miss(self, inputs: Iterable[Tensor]) -> bool:
        """Whether a place has the memory of these, which the step writes: it reads a copy."""
        if not (self.overwrites and self.places):
            return False
        held = {storage_of(x) for each in self.places for x in _tensors(each.spot.get())}
        return not held.isdisjoint(map(storage_of, inputs))

    @property
    def writes(self) -> bool:
        return any(each.is_assigned for each in self.places)

    @contextmanager
    def as_captured(self, own: Callable[[bool], Set[int]]) -> Iterator[None]:
        """In the body, places have what they had when the step was captured, unless something of
        another form is there now, or something that shares memory with what the plan may write:
        `own` gives the storages of that; if asked, those of buffers alone."""
        put = []
        for number, each in enumerate(self.places):
            now = each.spot.get()
            if now is each.value or not self._takes(number, now, own):
                continue
            put.append((each.spot, now))
            each.spot.put(each.value)
        try:
            yield
        finally:
            for spot, now in put:
                spot.put(now)

    def _takes(self, number: int, now: Any, own: Callable[[bool], Set[int]]) -> bool:
        if not _is_alike(now, self.places[number].value):
            return False
        storages = list(map(storage_of, _tensors(now)))
        # Buffers may be replaced; parameters stay where they are.
        known = self._last.get(number) == (id(now), storages)
        if not own(known).isdisjoint(storages):
            return False
        self._last[number] = id(now), storages
        return True

    def tensors(self) -> dict[str, Tensor | None]:
        """Before a call: what the plan reads, by the names of its constants; None where that is of
        another form. A place that the step writes has that anew: who holds the tensor from before
        keeps its values."""
        found: dict[str, Tensor | None] = {}
        for number, each in enumerate(self.places):
            now = each.spot.get()
            if now is each.value and not each.is_assigned and _is_alike(now, now):
                continue
            if not _is_alike(now, each.value):
                found |= dict.fromkeys(each.names.values())
                continue
            anew = rebuilt(now, iter(map(_copied, _tensors(each.value), _tensors(now))))
            tensors = _tensors(anew)
            if each.is_assigned:
                each.spot.put(anew)
                self._last[number] = id(anew), list(map(storage_of, tensors))
            found |= {name: tensors[index] for index, name in each.names.items()}
        return found


def _is_followable(value: Any) -> bool:
    tensors = _tensors(value)
    return bool(tensors) and not any(
        tensor.layout is not torch.strided
        or tensor.requires_grad
        or tensor.is_meta
        or vars(tensor)
        or not is_dense(tensor.shape, tensor.stride())
        for tensor in tensors
    )


def _tensors(value: Any, made: bool = False) -> list[Tensor]:
    """Those of a tensor, or of nested tuples, lists and dicts of nothing else; none of anything
    else. They are of no subclass, but for stand-ins that a recording has `made`."""
    nested = isinstance(value, tuple) or type(value) in (list, dict)
    if nested and len(items_of(value)) > _MOST:
        return []
    leaves = [x for _, x in named_leaves("", value)] if nested else [value]
    are = (type(x) is Tensor or (made and isinstance(x, Tensor)) for x in leaves)
    return leaves if all(are) else []


def _copied(like: Tensor, tensor: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(tensor)


def _is_alike(now: Any, value: Any, made: bool = False) -> bool:
    """Whether it is a value of the same form that autograd does not reach."""
    tensors = _tensors(now, made)
    return (
        bool(tensors)
        and (made or _is_followable(now))
        and not any(
            tensor.requires_grad or tensor.layout is not torch.strided for tensor in tensors
        )
        and form(now, _form) == form(value, _form)
    )


def _form(tensor: Tensor) -> tuple[Any, ...]:
    strides = [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return tensor.shape, tensor.dtype, tensor.device, *strides


def _is_read(place: _Place, read: Mapping[int, bool]) -> bool:
    """And not written."""
    found = [read.get(id(tensor)) for tensor in _tensors(place.begin)]
    return False in found and True not in found
