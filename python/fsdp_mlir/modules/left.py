"""What a step leaves in Python, put there again after each compiled step.

A value that forward has computed in Python is the same each time, and so is the call that puts it
there. The tensors that it has made are not: the compiled step copies them to slots, and what is put
in place has copies of these.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_mlir.modules.containers import has_same_objects, in_order
from fsdp_mlir.modules.place import ABSENT, SCALARS, built_in, has_own_attributes, slot_names
from fsdp_mlir.support.errors import CaptureError
from fsdp_mlir.support.layouts import placeholder

# What a step leaves in Python, as a call that puts it there.
Left = Callable[[], None]

MAX_DEPTH = 6  # of objects in objects

# Containers that were made, with what they held.
Parts = list[tuple[Any, Any]]

# The value that was put last, with the containers that were made for it.
_Last = tuple[Any, Parts]

# By place, for all plans of a model.
Lasts = dict[tuple[int, Any], _Last]


class Calculated:
    """What stands for a number that each step calculates from the elements of `tensors`."""

    tensors: list[Tensor]

    @property
    def form(self) -> str:
        """How; empty if from something else, too."""
        raise NotImplementedError

    def calculated(self, elements: Sequence[Any]) -> Any:
        """The number."""
        raise NotImplementedError


class _Number:
    """In the place of a number while what steps leave is compared."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "a number of the step"


# A tensor that a step makes, or what stands for a number.
Made = Tensor | Calculated


class Slots:
    """For each tensor that a step makes and leaves in Python, and for those of each number, a
    tensor from outside the step, into which the step copies it. `recorded` are those of the first
    recording, and `paths` where they are (PythonState, with items of lists from the end, since
    forward may append them)."""

    def __init__(self) -> None:
        self.paths: list[str] | None = None
        self.recorded: list[Made] = []
        self.of_each: list[list[Tensor]] = []
        self.taken: list[Made] = []  # by the last call

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensors in self.of_each for tensor in tensors]

    def take(self, state: Callable[[], Mapping[str, Made]], own: Collection[int]) -> None:
        """Copies the tensors that are there now, by their paths. The first call is that of the
        first recording; CaptureError if later ones find other forms. Memory of the model's `own`
        parameters and buffers is not copied: it is shared."""
        self.taken = []
        if self.paths == []:
            return
        now = state()
        if self.paths is None:
            made = {id(each): path for path, each in now.items() if is_made(each, own)}
            self.paths = list(made.values())
            self.recorded = [now[path] for path in self.paths]
            with _disable_current_modes():
                self.of_each = [[placeholder(x).fill_(1) for x in _of(m)] for m in self.recorded]
        for path, recorded, slots in zip(self.paths, self.recorded, self.of_each, strict=True):
            made_now = now.get(path)
            if made_now is None or not _is_alike(made_now, recorded):
                raise CaptureError(f"what forward leaves at '{path}' varies")
            self.taken.append(made_now)
            for slot, tensor in zip(slots, _of(made_now), strict=True):
                slot.copy_(tensor.detach())


def _of(made: Made) -> list[Tensor]:
    return made.tensors if isinstance(made, Calculated) else [made]


def _is_alike(made: Made, recorded: Made) -> bool:
    """Whether they have one form."""
    form, other = ([(x.shape, x.dtype) for x in _of(each)] for each in (made, recorded))
    if isinstance(made, Calculated) and isinstance(recorded, Calculated):
        return form == other and made.form == recorded.form
    return form == other and not isinstance(made, Calculated)


def is_made(tensor: Made, own: Collection[int]) -> bool:
    """Whether it is a recorded one that may be copied to a slot: of no subclass, such as DTensor,
    and no parameter, as in the list of an RNN's weights."""
    if isinstance(tensor, Calculated):
        return bool(tensor.form)
    is_plain = type(tensor) is FakeTensor and not isinstance(tensor, nn.Parameter)
    if not is_plain or tensor.layout != torch.strided:
        return False
    return tensor.untyped_storage()._cdata not in own


class Copies:
    """Values of a recorded step with tensors of later steps in place of those of the recording. A
    call begins the next step: it copies the slots."""

    def __init__(self, slots: Slots) -> None:
        self._recorded, self._slots = slots.recorded, slots.of_each
        self._stands = [
            _Number() if isinstance(each, Calculated) else tensors[0]
            for each, tensors in zip(self._recorded, self._slots, strict=True)
        ]
        self._made: dict[int, Any] = {}

    def __call__(self) -> None:
        self._begin(
            [
                each.calculated([slot.item() for slot in slots])
                if isinstance(each, Calculated)
                else slots[0].clone()
                for each, slots in zip(self._recorded, self._slots, strict=True)
            ]
        )

    def of_slots(self) -> None:
        """The same with the slots themselves, and what stands for numbers: they stay from step to
        step."""
        self._begin(self._stands)

    def _begin(self, made: Sequence[Any]) -> None:
        self._made = {id(a): b for a, b in zip(self._recorded, made, strict=True)}

    @property
    def known(self) -> set[int]:
        """The ids of what the recording has made."""
        return set(map(id, self._recorded))

    def can(self, value: Any) -> bool:
        """Whether `of` makes such a value, which has in it a tensor of the recording, by no code of
        its class."""
        if not self.holds(value):
            return True
        kind, own = built_in(type(value)), type(value)
        if isinstance(value, (Tensor, Calculated)):
            return True
        if kind in (set, frozenset) or (kind is tuple and not _is_plain_tuple(value)):
            return False
        if kind is not tuple and isinstance(getattr(own, "__copy__", None), FunctionType):
            return False
        keys = kind.__iter__(value) if isinstance(value, dict) else ()
        return not any(map(self.holds, keys)) and all(map(self.can, _members(value)))

    def holds(self, value: Any) -> bool:
        """Whether it is, or has in it, a tensor of the recording."""
        return any(True for _ in self.inside(value))

    def inside(self, value: Any, depth: int = 0) -> Iterator[int]:
        """The ids of such tensors."""
        if isinstance(value, (Tensor, Calculated)):
            yield from (id(each) for each in self._recorded if each is value)
        elif not isinstance(value, SCALARS) and depth < MAX_DEPTH:
            for item in _members(value):
                yield from self.inside(item, depth + 1)

    def of(self, value: Any, parts: Parts) -> Any:
        """The value anew; `parts` gets each container that was made, with what it holds."""
        if id(value) in self._made:
            return self._made[id(value)]
        if not self.holds(value):
            return value
        kind = built_in(type(value))
        if kind is tuple:
            items = [self.of(item, parts) for item in tuple.__iter__(value)]
            # Others are those of torch.return_types.
            made = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        else:
            made = copy.copy(value)
            if made is value:
                raise TypeError(f"a copy of a '{type(value).__name__}' is the same object")
            if kind is not None:
                content = self.items(value, parts)
                refill(made, content)
                parts.append((made, content))
            for name, item in in_slots(value).items():
                object.__setattr__(made, name, self.of(item, parts))
            if attributes := getattr(value, "__dict__", None):
                content = self.items(attributes, parts)
                refill(vars(made), content)
                parts.append((vars(made), content))
        self._made[id(value)] = made
        return made

    def items(self, container: Any, parts: Parts) -> Any:
        """Those of a container, in a dict or a list."""
        kind = built_in(type(container))
        if isinstance(container, dict):
            return {key: self.of(item, parts) for key, item in kind.items(container)}
        return [self.of(item, parts) for item in kind.__iter__(container)]


def _is_plain_tuple(value: Any) -> bool:
    kind = type(value)
    return kind is tuple or hasattr(kind, "_fields") or hasattr(kind, "n_sequence_fields")


@dataclass(frozen=True)
class Spot:
    """A place where a value may be, which `owner` holds under a name."""

    owner: Any
    name: Any
    get: Callable[[], Any]
    put: Callable[[Any], None]


def item_spot(container: Any, key: Any) -> Spot:
    """That of an item of a dict, as it is stored."""
    get = partial(built_in(type(container)).get, container, key, ABSENT)
    return Spot(container, key, get, partial(set_item, container, key))


def index_spot(container: Any, index: int) -> Spot:
    """That of an item of a list, as it is stored."""

    def get() -> Any:
        inside = -1 < index < list.__len__(container)
        return list.__getitem__(container, index) if inside else ABSENT

    return Spot(container, index, get, partial(list.__setitem__, container, index))


def slot_spot(owner: Any, name: str) -> Spot:
    """That of an attribute that lies in a slot of its class."""
    return Spot(owner, name, partial(getattr, owner, name, ABSENT), partial(set_slot, owner, name))


class MadePlace:
    """Where a step leaves a value with tensors that it has made, as the recorded one left `value`;
    a call puts one there with copies of the last step's."""

    def __init__(self, spot: Spot, value: Any, copies: Copies) -> None:
        self._spot = spot  # whose owner keeps its id
        self.key = id(spot.owner), spot.name
        self.get, self.put = spot.get, spot.put
        self.value = value
        self.copies = copies
        self.last: _Last = (ABSENT, [])

    def __call__(self) -> None:
        parts: Parts = []
        value = self._anew(parts)
        self.put(value)
        self.last = value, parts

    def _anew(self, parts: Parts) -> Any:
        return self.copies.of(self.value, parts)

    def now(self) -> Any:
        """What is there, as `put` takes it."""
        return self.get()

    def has(self, last: _Last) -> bool:
        """Whether it has what was put there last, unchanged."""
        return self.get() is last[0] and all(same_items(*part) for part in last[1])


class MadeItems(MadePlace):
    """The same for the items of a list or the like that was there before."""

    def __init__(self, container: Any, content: Any, copies: Copies) -> None:
        spot = Spot(container, "", lambda: container, partial(refill, container))
        super().__init__(spot, content, copies)

    def _anew(self, parts: Parts) -> Any:
        content = self.copies.items(self.value, parts)
        parts.append((self.get(), content))
        return content

    def now(self) -> Any:
        container = self.get()
        kind = built_in(type(container))
        if isinstance(container, dict):
            return dict(kind.items(container))
        return list(kind.__iter__(container))

    def has(self, last: _Last) -> bool:
        return all(same_items(*part) for part in last[1])


@dataclass(frozen=True)
class Placing:
    """What a step leaves, where `known` are the ids of what was there before."""

    known: Collection[int]
    copies: Copies | None

    def put(self, spot: Spot, value: Any) -> Iterator[Left]:
        """The call that puts `value` there, if it may be left."""
        if is_left(value, self.known):
            yield partial(spot.put, value)
        elif self._is_made(value):
            assert self.copies is not None
            yield MadePlace(spot, value, self.copies)

    def refill(self, container: Any, content: Any) -> Iterator[Left]:
        """The call that gives a container that content, if it may be left."""
        if is_left(content, self.known):
            yield partial(refill, container, content)
        elif self._is_made(content):
            assert self.copies is not None
            yield MadeItems(container, content, self.copies)

    def _is_made(self, value: Any) -> bool:
        if self.copies is None:
            return False
        if not is_left(value, {*self.known, *self.copies.known}) or not self.copies.can(value):
            return False
        self.copies.of_slots()
        try:
            self.copies.of(value, [])
        except Exception:  # its class makes no such object
            return False
        return True


def tensors_of(left: Sequence[Left]) -> set[int]:
    """The ids of the recorded tensors in whose place copies are put."""
    places = [each for each in left if isinstance(each, MadePlace)]
    return {found for each in places for found in each.copies.inside(each.value)}


@dataclass(frozen=True)
class EachForward:
    """What a step leaves: a call for each of its microbatches."""

    call: Left

    def __call__(self) -> None:
        self.call()


class Leaving:
    """Leaves in Python what the steps of one plan leave there, which was captured with what is in
    these places now. `lasts` are those of the model; `read` has the keys of places whose tensors
    the step reads."""

    def __init__(self, lasts: Lasts, left: Sequence[Left], read: Collection[Any]) -> None:
        self._lasts, self._left, self._read = lasts, left, read
        self._proven = frozenset(self._others(left))

    def after_step(self, microbatches: int) -> None:
        """Puts it in place."""
        for put in self._left:
            for _ in range(microbatches if isinstance(put, EachForward) else 1):
                put()
        self._lasts.update(
            {each.key: each.last for each in self._left if isinstance(each, MadePlace)}
        )

    @contextmanager
    def compared(self) -> Iterator[None]:
        """In the body, the slots are in place of the copies that a step has left, unless something
        else has been put there since: a comparison finds the same objects after each step. They are
        also in place of something else, such as what an evaluation has left there, if the step was
        captured with the like of that, of which it does not read the tensors."""
        put: list[tuple[MadePlace, _Last]] = []
        for each in self._left:
            last = self._lasts.get(each.key) if isinstance(each, MadePlace) else None
            if last is not None and each.has(last):  # type: ignore[attr-defined]
                put.append((each, last))  # type: ignore[arg-type]
        has_last = {id(each) for each, _ in put}
        others = self._others([each for each in self._left if id(each) not in has_last])
        if others.keys() == self._proven:
            put += [(each, (each.now(), [])) for each in others.values()]
        for copies in {id(each.copies): each.copies for each, _ in put}.values():
            copies.of_slots()
        try:
            for each, _ in put:
                each()
            yield
        finally:
            for each, last in put:
                each.put(last[0])

    def _others(self, left: Sequence[Left]) -> dict[Any, MadePlace]:
        """The places with something in them whose form is known, by place and form."""
        memory: dict[int, int] = {}
        places = [each for each in left if isinstance(each, MadePlace)]
        forms = [
            (each, _form_of_items(each.get(), memory))
            if isinstance(each, MadeItems)
            else (each, _form(each.get, memory, read=each.key in self._read))
            for each in places
        ]
        return {(each.key, form): each for each, form in forms if form is not None}


def _form(
    get: Callable[[], Any], memory: dict[int, int], depth: int = 0, read: bool = False
) -> Any:
    """What code may see of a value before it reads tensors; None if not all of that is known, such
    as whether it is another one that something else holds. `memory`: that of tensors, numbered."""
    value = get()
    if value is ABSENT or type(value) in SCALARS:
        return type(value), repr(value)
    if read or sys.getrefcount(value) > _HELD_ONCE:
        return None
    if type(value) is Tensor:
        if value.layout != torch.strided or value.is_quantized or vars(value):
            return None
        place = memory.setdefault(value.untyped_storage()._cdata, len(memory))
        form = place, value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
        asks = value.requires_grad, value.is_leaf, value._is_view(), value._version
        return Tensor, *form, *asks, value.is_inference(), value.is_neg(), value.is_conj()
    items = None if depth == MAX_DEPTH else _form_of_items(value, memory, depth + 1)
    return None if items is None else (type(value), items)


def _form_of_items(value: Any, memory: dict[int, int], depth: int = 0) -> Any:
    """That of the items of a list, a tuple or a dict."""
    if type(value) not in (list, tuple, dict):
        return None
    keys = list(value) if isinstance(value, dict) else range(len(value))
    if any(type(key) not in SCALARS for key in keys):
        return None
    forms = [_form(partial(value.__getitem__, key), memory, depth) for key in keys]
    return None if None in forms else tuple(zip(map(repr, keys), forms, strict=True))


def _references(get: Callable[[], Any]) -> int:
    value = get()
    return sys.getrefcount(value)


# To a value in one container alone, as `_form` counts.
_HELD_ONCE = _references(partial([[]].__getitem__, 0))


def is_left(value: Any, known: Collection[int], depth: int = 0) -> bool:
    """Whether a step that computes nothing in Python leaves the same: a plain value, or what was
    there before, whose ids are `known`. A tensor that the step has made is not."""
    if isinstance(value, Calculated):
        return id(value) in known
    if value is ABSENT or isinstance(value, (*SCALARS, np.ndarray)) or id(value) in known:
        return True
    if depth == MAX_DEPTH:
        return False
    if built_in(type(value)) is None and (
        isinstance(value, Tensor) or not has_own_attributes(value)
    ):
        return False
    return all(is_left(item, known, depth + 1) for item in _members(value))


def _members(value: Any) -> list[Any]:
    """What a value holds: items, keys and attributes."""
    kind = built_in(type(value))
    items = [] if kind is None else list(kind.__iter__(value))
    if isinstance(value, dict):
        items += kind.values(value)
    return [*items, *getattr(value, "__dict__", {}).values(), *in_slots(value).values()]


def in_slots(value: Any) -> dict[str, Any]:
    """The attributes of an object that lie in slots of its class."""
    names = slot_names(type(value))
    found = {name: getattr(value, name, ABSENT) for name in names}
    return {name: member for name, member in found.items() if member is not ABSENT}


def set_item(container: dict[Any, Any], key: Any, value: Any) -> None:
    """Puts an item as it is stored; ABSENT removes it."""
    kind = built_in(type(container))
    if value is ABSENT:
        kind.pop(container, key, None)
    else:
        kind.__setitem__(container, key, value)


def set_slot(owner: Any, name: str, value: Any) -> None:
    """Puts an attribute that lies in a slot; ABSENT removes it."""
    if value is not ABSENT:
        object.__setattr__(owner, name, value)
    elif hasattr(owner, name):
        delattr(owner, name)


def refill(container: Any, content: Any) -> None:
    """Gives a container that content, as it is stored."""
    kind = built_in(type(container))
    if isinstance(container, dict):
        # Not Counter's update, which adds.
        if not same_items(container, content):
            kind.clear(container)
            for key, value in content.items():
                kind.__setitem__(container, key, value)
    elif isinstance(container, set):
        if set(set.__iter__(container)) != content:
            set.clear(container)
            set.update(container, in_order(content))
    elif not same_items(container, content):
        kind.clear(container)
        kind.extend(container, content)


def same_items(container: Any, content: Any) -> bool:
    """Whether these are the same keys, and the same objects, in the same order."""
    if has_same_objects(container, content):
        return True  # as most have
    pairs = itertools.zip_longest(*map(_pairs, (container, content)), fillvalue=(None, None))
    return all(_same_key(a[0], b[0]) and a[1] is b[1] for a, b in pairs)


def _pairs(container: Any) -> Iterable[tuple[Any, Any]]:
    kind = built_in(type(container))
    if isinstance(container, dict):
        items: Iterable[tuple[Any, Any]] = kind.items(container)
        return items
    return enumerate(kind.__iter__(container))


def _same_key(left: Any, right: Any) -> bool:
    # Tensors are equal element by element; an optimizer's state has them as keys.
    return left is right or (not isinstance(left, Tensor) and bool(left == right))
