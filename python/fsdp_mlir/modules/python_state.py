"""What a model keeps in Python: the attributes of its modules besides parameters and buffers."""

from __future__ import annotations

import enum
import io
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinMethodType, MethodWrapperType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fsdp_mlir.modules import in_place, loggers, memos
from fsdp_mlir.modules.containers import (
    changed,
    copied,
    digest,
    digest_of,
    has_same_objects,
    is_other_order,
    is_plain,
    is_table,
    items,
    names_itself,
)
from fsdp_mlir.modules.left import (
    MAX_DEPTH,
    Calculated,
    Copies,
    Left,
    Placing,
    Slots,
    Spot,
    in_slots,
    index_spot,
    is_left,
    item_spot,
    refill,
    same_items,
    slot_spot,
)
from fsdp_mlir.modules.outside import Kept, kept
from fsdp_mlir.modules.place import (
    ABSENT,
    BUFFERS,
    GENERATORS,
    SCALARS,
    Place,
    built_in,
    bytes_of,
    has_own_attributes,
    is_costly,
    is_same,
    opened,
    slot_names,
)
from fsdp_mlir.modules.untaken import standing_in

_MAX_NESTED = 64  # of containers
_MAX_SHARED = 1000  # elements of a container that no module of the model holds
_MAX_COPIED = 1 << 17  # of such a one that is put back


OF_SET = "{}"  # the end of the paths of the orders of sets

# What an RNN keeps of its parameters, anew where FSDP2 puts others in their place.
_OF_RNNS = "_flat_weights", "_flat_weight_refs"


class _TooMuchError(Exception):
    pass


# How a leaf compares: by value, as a tensor by identity, as what stands for a number, as any other
# object by identity. Those of
# this process alone are "held", what is no data, and "items", the objects of a long container.
Leaf = tuple[str, Any]


@dataclass
class PythonState:
    """The leaves of a model's attributes by path ("layers.0.calls", "cache['k'][1]"), and what it
    takes to restore the containers. Objects that are compared by identity are kept alive."""

    leaves: dict[str, Leaf] = field(default_factory=dict)
    orders: dict[str, list[str]] = field(default_factory=dict)  # of the items of dicts and sets
    _contents: list[tuple[Any, Any]] = field(default_factory=list)  # container, shallow copy
    _seen: dict[int, Any] = field(default_factory=dict)
    _outside: list[tuple[Place, Any]] = field(default_factory=list)  # with its value
    _held: list[tuple[Place, Any]] = field(default_factory=list)  # the same of no data
    _slots: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)  # object, attributes
    _generators: list[tuple[Any, Any]] = field(default_factory=list)  # with its state
    _written: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # of in_place, with copies
    _named: list[tuple[dict[str, Any], frozenset[str]]] = field(default_factory=list)
    _memos: list[tuple[Any, Any]] = field(default_factory=list)  # of functools, with its results
    _closed: list[tuple[Any, Any]] = field(default_factory=list)  # which have results of their own
    _data: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # tensors, their memory
    _autograd: list[tuple[Tensor, bool, Any]] = field(default_factory=list)  # leaf, its gradient
    _most: int | None = None  # leaves
    _deepest: int = MAX_DEPTH
    _whole: bool = False  # it is an error if something is too deep
    # What it looked into, with its class and its attributes, which may be replaced.
    _kinds: list[tuple[Any, type, Any]] = field(default_factory=list)
    _root: Any = None  # that of `inside`
    _by_value: bool = False  # something other than a container was compared by what it holds
    _from_end: bool = False
    _counts: dict[str, int] = field(default_factory=dict)  # of paths that come again

    @staticmethod
    def of(
        model: nn.Module,
        loss: Callable[..., Any] | None = None,
        *,
        from_end: bool = False,
        outside: Kept | None = None,
    ) -> PythonState:
        """The current state, with that of a loss function and of what their code reads from outside
        (outside.py), such as globals. For parameters, buffers and submodules only their names
        count. Items of lists have their indices in their paths; if asked, those `from_end`.
        `outside`: what `kept` gives now, if that is known."""
        state = PythonState(_from_end=from_end)
        for path, module in model.named_modules():
            state._add_module(f"{path}." if path else "", module)
        if isinstance(loss, nn.Module):
            own = set(model.modules())
            for path, module in loss.named_modules():
                if module not in own:
                    label = f"loss.{path}." if path else "loss."
                    state._add_module(label, module, is_own=False)
        outside = outside or kept(model, loss)
        for place in outside.places:
            state._add_place(place)
        for place in outside.held:
            state._held.append((place, value := place.value()))
            state._identify(state._unused(place.label), "held", value)
        placed = {(id(place.owner), place.name) for place in outside.places}
        for label, module in outside.modules:
            state._add_module(f"{label}.", module, is_own=False, placed=placed)
        state._named = [(held, frozenset(held)) for held in outside.objects]
        for memo in outside.memos:
            state._add_memo(memo)
        return state

    @staticmethod
    def inside(path: str, value: Any, most: int, *, whole: bool) -> PythonState | None:
        """What a value at `path` holds; None if that is more than `most` leaves, or deeper than can
        be followed. Unless `whole`, what is deep is compared by identity. So are generators, and
        arrays and buffers of more than a megabyte."""
        deepest = _MAX_NESTED if whole else MAX_DEPTH
        state = PythonState(_most=most, _deepest=deepest, _whole=whole, _root=value)
        try:
            state._add(path, value, 0)
        except _TooMuchError:
            return None
        return state

    def restore(self) -> None:
        """Puts every attribute, container and generator back as it was, with the data of arrays and
        the like (in_place.py) and the results of functools.lru_cache; tensors keep their data."""
        for container, content in self._contents:
            refill(container, content)
        for owner, attributes in self._slots:
            for name in in_slots(owner):
                if name not in attributes:
                    delattr(owner, name)
            for name, value in attributes.items():
                if not is_same(getattr(owner, name, ABSENT), value):
                    object.__setattr__(owner, name, value)
        for place, value in (*self._outside, *self._held):
            if not place.holds(value):
                place.put(value)
        for attributes, names in self._named:
            for name in attributes.keys() - names:
                del attributes[name]
        for tensor, data in self._data.values():
            if not _has_memory_of(tensor, data):
                tensor.data = data
        for tensor, requires, grad in self._autograd:
            if tensor.is_leaf and tensor.requires_grad is not requires:
                tensor.requires_grad_(requires)
            if tensor.is_leaf and tensor.grad is not grad:
                tensor.grad = grad
        for generator, before in self._generators:
            in_place.set_state(generator, before)
        for owner, copy in self._written.values():
            in_place.put(owner, copy)
        for memo, results in self._memos:
            memos.hold(memo, results)
        for memo, info in self._closed:
            if memo.cache_info().misses != info.misses:
                memo.cache_clear()

    def watched(self) -> list[Tensor]:
        """The tensors besides parameters and buffers of the model that have data of their own."""
        return list({id(tensor): tensor for tensor, _ in self._data.values()}.values())

    def given_data(self) -> str:
        """The path of a tensor that now has other memory, as by `x.data = y`; empty if there is
        none."""
        pairs = self._data.items()
        return next((path for path, pair in pairs if not _has_memory_of(*pair)), "")

    @contextmanager
    def untaken(self) -> Iterator[None]:
        """In the body, a forward that takes an item from an iterator among the attributes, or
        outside of the model, fails with a CaptureError."""
        for memo, info in self._closed:
            if info.currsize:
                raise memos.refused(memo)
        with standing_in(self._contents, self._slots, self._outside):
            yield

    def changes(self, after: PythonState) -> list[str]:
        """The paths that differ, in order."""
        paths = dict.fromkeys([*self.leaves, *after.leaves])
        return [
            path
            for path in paths
            if self.leaves.get(path) != after.leaves.get(path)
            or any(
                is_other_order(self.orders.get(each, []), after.orders.get(each, []))
                for each in (path, f"{path}{OF_SET}")
            )
        ]

    def is_as(self, other: PythonState) -> bool:
        """Whether nothing differs."""
        return self.leaves == other.leaves and self.orders == other.orders

    def looked_into(self) -> set[int]:
        """The ids of the containers and objects of which it has all that they hold."""
        return {id(each) for each, _, _ in self._kinds}

    def surely_is_of(self, value: Any) -> bool:
        """Whether `value` holds the same objects in the same containers as when `inside` was given
        it. So it is of most values, and to find it out takes a tenth of the time that `inside`
        takes. What is false may be equal all the same."""
        if value is not self._root or self._by_value:
            return False
        slots = ((in_slots(owner), attributes) for owner, attributes in self._slots)
        return (
            all(
                type(each) is kind and getattr(each, "__dict__", None) is attributes
                for each, kind, attributes in self._kinds
            )
            and all(has_same_objects(*each) for each in self._contents)
            and all(has_same_objects(*each) for each in slots)
        )

    def left(self, after: PythonState, slots: Slots | None = None) -> list[Left]:
        """How to put in place what a step has changed, if `after` is the state after it: plain
        values, tensors and objects that were there before, and tensors that have `slots`."""
        copies = Copies(slots) if slots and slots.paths else None
        before = self.contents()
        place = Placing(self.known(), copies)
        found: list[Left] = [] if copies is None else [copies]
        for container, content in after._contents:
            old = before.get(id(container))
            if old is None:  # which one of the others may hold
                if copies is None or not copies.holds(content):
                    found.append(partial(refill, container, content))
            elif isinstance(container, dict):
                for key, new in changed(old, content):
                    found += place.put(item_spot(container, key), new)
                if is_other_order([*old], [*content]):
                    found += place.refill(container, content)
            elif not same_items(old, content):
                found += place.refill(container, content)
        slotted = {id(owner): attributes for owner, attributes in self._slots}
        for owner, attributes in after._slots:
            for name, new in changed(slotted.get(id(owner), attributes), attributes):
                found += place.put(slot_spot(owner, name), new)
        for key, (owner, copy) in after._written.items():
            written = self._written.get(key, (owner, copy))[1]
            is_plain = not isinstance(owner, ContextVar) or is_left(copy, place.known)
            if is_plain and not in_place.is_same(written, copy):
                found.append(partial(in_place.put, owner, copy))
        for memo, info in after._closed:
            if self._closed.count((memo, info)) == 0:
                raise memos.refused(memo)
        results = dict(self._memos)
        for memo, now in after._memos:
            for key, new in changed(results.get(memo, now), now):
                put = partial(memos.put, memo, key)
                found += place.put(Spot(memo, key, partial(memos.get, memo, key), put), new)
        places = {each.key: value for each, value in self._outside}
        # An object that the step has made is put in place with what it holds.
        owners = {id(each.owner) for each, _ in self._outside} | {id(x) for x, _ in self._named}
        for each, value in after._outside:
            old = places.get(each.key, ABSENT)
            if id(each.owner) in owners and not is_same(value, old):
                found += place.put(Spot(each, "", each.value, each.put), value)
        return found

    def contents(self) -> dict[int, Any]:
        """Those of containers, by their ids."""
        return {id(container): content for container, content in self._contents}

    def known(self) -> set[int]:
        """The ids of what was there."""
        return {*self._seen, *self.contents()}

    def is_shared(self, container: Any) -> bool:
        """Whether it is held in several places, or by one of its methods."""
        kinds = BuiltinMethodType, MethodWrapperType
        methods = (x for x in self._seen.values() if type(x) in kinds)
        # The first place of a container is not compared by identity, unless that is a long one.
        places = [*self.leaves.values()].count(("object", id(container)))
        is_long = id(container) not in self.looked_into()
        return places > is_long or any(x.__self__ is container for x in methods)

    def spots(self, *kinds: type) -> Iterator[tuple[Spot, Any]]:
        """Attributes, and items of dicts and lists, that held a value of one of these kinds, with
        that. One may come twice."""
        for container, content in self._contents:
            if isinstance(container, (dict, list)):
                spot = item_spot if isinstance(container, dict) else index_spot
                found = ((k, value) for k, value in items(content) if isinstance(value, kinds))
                yield from ((spot(container, key), value) for key, value in found)
        for owner, attributes in self._slots:
            for name, value in attributes.items():
                if isinstance(value, kinds):
                    yield slot_spot(owner, name), value
        for place, value in self._outside:
            if isinstance(value, kinds) and not place.is_referent:
                attributes = getattr(place.owner, "__dict__", None)
                owner = place.owner if isinstance(place.owner, dict) else attributes
                if isinstance(owner, dict) and place.name in owner:
                    yield item_spot(owner, place.name), value
                else:
                    yield Spot(place.owner, place.name, place.value, place.put), value

    def holds_computed(self, path: str) -> bool:
        """Whether a tensor that is not a parameter lies there, as in RNNs' list of their
        weights."""
        kind, value = self.leaves.get(path, ("none", None))
        return kind == "tensor" and not isinstance(self._seen[value], nn.Parameter)

    def made_since(self, before: PythonState) -> list[str]:
        """The paths of tensors that a step after `before` has made, and left there."""
        return [path for path in before.changes(self) if self.holds_computed(path)]

    def held(self, identity: int) -> Any:
        """The tensor or object of a leaf that is compared by identity."""
        return self._seen[identity]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by their paths."""
        return {
            path: self._seen[value]
            for path, (kind, value) in self.leaves.items()
            if kind == "tensor"
        }

    def numbers(self) -> dict[str, Calculated]:
        """What stands for numbers, by its paths."""
        return {
            path: self._seen[value]
            for path, (kind, value) in self.leaves.items()
            if kind == "number"
        }

    def _add_place(self, place: Place) -> None:
        value = place.value()
        if place.owner is vars(os.environ) and isinstance(value, dict):
            value = dict(value)  # which is put back by os.environ: the process has a copy
            self._keep(os.environ)
        else:
            self._outside.append((place, value))
        path = self._unused(place.label)  # a variable of another closure of one function
        kind = built_in(type(value))
        is_long = kind is not None and kind.__len__(value) > _MAX_SHARED
        if is_long and not is_table(value, kind):
            self._identify(path, "object", value)
            if kind not in (tuple, frozenset) and kind.__len__(value) <= _MAX_COPIED:
                content = copied(value, kind)
                self._contents.append((value, content))
                self.leaves[f"{path}[:]"] = ("items", f"{len(content)} {digest_of(content)}")
        elif value is not ABSENT:
            self._add(path, value, 0)

    def _add_memo(self, memo: Any) -> None:
        path, results = f"{memos.named(memo)}()", memos.held(memo)
        if results is None:
            self._closed.append((memo, memo.cache_info()))
            self.leaves[path] = ("value", f"{memo.cache_info().misses} calls")
            return
        self._memos.append((memo, results))
        for key, result in results.items():
            self._add(self._unused(f"{path}[{memos.shown(key)!r}]"), result, 1)

    def _add_module(
        self,
        prefix: str,
        module: nn.Module,
        *,
        is_own: bool = True,
        placed: Set[tuple[int, Any]] = frozenset(),
    ) -> None:
        """One of the model, of the loss, or another, whose buffers are not the step's. `placed`:
        the attributes that have been added."""
        attributes = vars(module)
        self._contents.append((attributes, dict(attributes)))
        for name, value in list(attributes.items()):
            if name in ("_parameters", "_buffers", "_modules"):
                self._contents.append((value, dict(value)))
                for member in value:
                    if name == "_buffers" and not is_own:
                        self._add(f"{prefix}{member}", value[member], 1)
                        continue
                    self.leaves[f"{prefix}{member}"] = ("member", value[member] is None)
                    if name == "_buffers" and _has_attributes(value[member]):
                        self._add_attributes(f"{prefix}{member}", value[member], 1)
                    if name == "_parameters" and not is_own:
                        self._keep_data(f"{prefix}{member}", value[member])
            elif (id(attributes), name) not in placed and (
                is_own or name not in _OF_RNNS or not isinstance(module, nn.RNNBase)
            ):
                self._add(f"{prefix}{name}", value, 0)

    def _add(self, path: str, value: Any, depth: int) -> None:
        if self._most is not None and len(self.leaves) >= self._most:
            raise _TooMuchError
        if isinstance(value, Calculated):
            self._identify(path, "number", value)
            return
        value = opened(value)
        kind = built_in(type(value))
        if self._most is not None and is_costly(value):
            self._identify(path, "object", value)
        elif isinstance(value, SCALARS):
            self._add_scalar(path, value, depth)
        elif isinstance(value, Tensor):
            self._add_tensor(path, value, depth)
        elif isinstance(value, logging.Logger):
            self._identify(path, "object", value)
            self._by_value = True
            self.leaves[f"{path}.level"] = ("value", loggers.shown(value))
        elif isinstance(value, np.ndarray):
            self._by_value = True
            self._keep(value)
            text = f"{value.dtype}{list(value.shape)} {digest(value.tobytes())}"
            self.leaves[path] = ("value", text)
            if value.dtype == object and id(value) not in self._seen:
                self._seen[id(value)] = value
                for index, member in enumerate(value.flat):
                    self._add(f"{path}.flat[{index}]", member, depth + 1)
        elif isinstance(value, BUFFERS):
            self._by_value = True
            self._keep(value)
            data = bytes_of(value)
            text = f"{type(value).__name__} of {len(data)} bytes {digest(data)}"
            self.leaves[path] = ("value", text)
        elif isinstance(value, GENERATORS):
            self._by_value = True
            before = in_place.state_of(value)
            self.leaves[path] = ("value", f"state {digest(in_place.bytes_of_state(before))}")
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._generators.append((value, before))
        elif isinstance(value, ContextVar):
            self._by_value = True
            self._keep(value)
            self.leaves[path] = ("type", type(value))
            self._add(f"{path}.get()", value.get(ABSENT), depth)
        elif isinstance(value, io.IOBase) and self._most is None and _is_read(value):
            self._keep(value)
            where, data = in_place.position(value)
            self.leaves[path] = ("value", f"at {where} {digest(repr(data).encode())}")
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._add_attributes(path, value, depth)
        elif isinstance(value, weakref.ref) and self._most is None:
            self.leaves[path] = ("type", type(value))  # an RNN makes those of its weights anew
        elif id(value) in self._seen or (kind is None and not has_own_attributes(value)):
            self._identify(path, "object", value)
        elif depth >= self._most_depth(kind):
            if self._whole:
                raise _TooMuchError
            self._identify(path, "object", value)
        else:
            self._seen[id(value)] = value
            self._kinds.append((value, type(value), getattr(value, "__dict__", None)))
            self.leaves[path] = ("type", type(value))
            if kind is not None:
                self._add_items(path, value, kind, depth)
            if kind is None or not is_plain(value):
                self._add_attributes(path, value, depth)

    def _keep(self, owner: Any) -> None:
        """A copy for `restore`, which no comparison before a step needs."""
        if self._most is None and id(owner) not in self._written:
            self._written[id(owner)] = (owner, in_place.copied(owner))

    def _most_depth(self, kind: Any) -> int:
        """Containers are data; objects may lead anywhere, which a capture does not follow."""
        return _MAX_NESTED if kind is not None and self._most is None else self._deepest

    def _add_scalar(self, path: str, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in SCALARS:
            self.leaves[path] = ("value", repr(value))
            return
        base = next(each for each in kind.__mro__ if each in SCALARS)
        self.leaves[path] = ("value", f"{kind.__qualname__} {base.__repr__(value)}")
        if id(value) not in self._seen:  # members of an enumeration may hold each other
            self._seen[id(value)] = value
            self._add_attributes(path, value, depth)

    def _add_items(self, path: str, value: Any, kind: Any, depth: int) -> None:
        if self._most is None and is_table(value, kind):
            text = f"{kind.__name__} of {len(value)} {digest(repr(value).encode())}"
            self.leaves[path] = ("value", text)
        elif issubclass(kind, dict):
            names = self.orders[path] = []
            for index, (key, member) in enumerate(kind.items(value)):
                name = f"[{key!r}]" if names_itself(key) else f"[#{index}]"
                names.append(name)
                if type(key) not in SCALARS:
                    self._add(f"{path}.keys()[{index}]", key, depth + 1)
                self._add(self._unused(path + name), member, depth + 1)
        elif kind in (set, frozenset):
            members = self.orders[f"{path}{OF_SET}"] = []
            for member in kind.__iter__(value):
                members.append(repr(member))
                self._add(self._unused(f"{path}{{{member!r}}}"), member, depth + 1)
        else:
            first = -kind.__len__(value) if self._from_end else 0
            for index, member in enumerate(kind.__iter__(value), first):
                self._add(f"{path}[{index}]", member, depth + 1)
        if kind not in (tuple, frozenset):
            self._contents.append((value, copied(value, kind)))

    def _add_attributes(self, path: str, value: Any, depth: int) -> None:
        attributes = dict(getattr(value, "__dict__", {}))
        if attributes or (self._most is not None and hasattr(value, "__dict__")):
            self._contents.append((vars(value), dict(attributes)))
        slots = in_slots(value)
        if slot_names(type(value)):
            self._slots.append((value, slots))
        for name, member in (attributes | slots).items():
            # Of a member of an enumeration, what Python itself keeps there does not count.
            if not isinstance(value, enum.Enum) or name == "_value_" or name[:1] != "_":
                self._add(f"{path}.{name}", member, depth + 1)

    def _add_tensor(self, path: str, value: Tensor, depth: int) -> None:
        """With the attributes that code has set on it."""
        is_known = id(value) in self._seen
        self._identify(path, "tensor", value)
        if value.is_leaf and value.grad is not None:
            self._identify(f"{path}.grad", "object", value.grad)
        if type(value) is Tensor and not is_known:
            self._add_attributes(path, value, depth)

    def _unused(self, path: str) -> str:
        """Objects may have the same text: later ones get a number."""
        if path not in self.leaves:
            return path
        count = self._counts[path] = self._counts.get(path, 1) + 1
        return self._unused(f"{path}'{count}")

    def _keep_data(self, path: str, value: Any) -> None:
        is_plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
        if is_plain and self._most is None:
            self._data[path] = value, value.detach()
            if value.is_leaf:
                self._autograd.append((value, value.requires_grad, value.grad))

    def _identify(self, path: str, kind: str, value: Any) -> None:
        self._keep_data(path, value)
        self._seen[id(value)] = value
        self.leaves[path] = (kind, id(value))


def shown(path: str) -> str:
    """As a message has it: keys may be long."""
    return path if len(path) <= 120 else f"{path[:70]}…{path[-49:]}"


def _has_attributes(value: Any) -> bool:
    """Whether it is a tensor with attributes that code has set."""
    return type(value) is Tensor and bool(vars(value))


def _is_read(file: io.IOBase) -> bool:
    return in_place.position(file) is not ABSENT


def _has_memory_of(tensor: Tensor, data: Tensor) -> bool:
    return tensor.untyped_storage()._cdata == data.untyped_storage()._cdata
