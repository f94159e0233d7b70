"""Checks before each step whether a model is still the one that the step was compiled from.

A step is compiled again if the model has different flags, attributes, hooks or modules, or its code
reads different data from outside. Values of parameters and buffers are not compared: a step trains
in their memory.
"""

from __future__ import annotations

import os
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_mlir.frontdoor.process_reads import EVERY
from fsdp_mlir.frontdoor.reached import MEMBERS, Calls, Read, Snapshot, same
from fsdp_mlir.modules import hooks
from fsdp_mlir.modules.growing import GROWING, is_alike
from fsdp_mlir.modules.hooks import GLOBAL_HOOKS, HOOKS, STATE_DICT_HOOKS
from fsdp_mlir.modules.outside import attributes_read, reached
from fsdp_mlir.modules.place import ABSENT, CONTAINERS, OF_MODULES, SCALARS, Place, built_in
from fsdp_mlir.modules.python_state import PythonState, shown
from fsdp_mlir.step.batches import is_number
from fsdp_mlir.support.errors import prefixed, source_of

_PLAIN = (bool, int, float, str, type(None), tuple, list, dict, set, torch.dtype, torch.device)
_DICTS = (dict, OrderedDict, defaultdict)
_MOST_ITEMS = 256  # of a dict with numbers that a loop may change
_MOST_LEAVES = 2000  # of a value that is compared by all that it holds
_ALL_LEAVES = 200_000  # of all such values, after which only small ones are compared
_FEW_LEAVES = 50


@dataclass(frozen=True)
class _Change:
    """What has changed: an attribute of a module (or of an object that a module holds)."""

    key: tuple[int, str]
    text: str
    location: tuple[str, int] | None = None
    hook: bool = False  # a new one
    mode: bool = False  # train or eval mode
    attribute: bool = False  # of an object that is still the same

    def is_unread(self, names: frozenset[str] | None) -> bool:
        """Whether it is an attribute that is not among those that code may read."""
        return self.attribute and names is not None and self.key[1] not in names


@dataclass(frozen=True)
class _Held:
    """An attribute, or a place outside of the model, whose value holds others."""

    owner: Mapping[str, Any] | Place
    key: str
    change: _Change  # its text is the path
    whole: bool = True  # also what is deep in it

    def inside(self, most: int = _MOST_LEAVES) -> PythonState | None:
        """All that it holds; None if that is too much to compare."""
        return PythonState.inside(self.change.text, self.value, most, whole=self.whole)

    @property
    def value(self) -> Any:
        owner = self.owner
        return owner.value() if isinstance(owner, Place) else owner.get(self.key, ABSENT)

    def changed(self, before: PythonState) -> str:
        """The first path that differs."""
        return next(map(shown, before.changes(self.inside() or PythonState())), "")


@dataclass(frozen=True)
class _Shared:
    """A buffer that is held in several places: a plan knows it by the name of one."""

    name: str
    tensor: Tensor
    places: Sequence[tuple[Mapping[str, Any], str]]
    elsewhere: bool  # also outside of buffers

    def holds(self) -> bool:
        """Whether its places still hold one tensor: this one, if something else holds it, too."""
        now = [owner.get(key) for owner, key in self.places]
        first = self.tensor if self.elsewhere else now[0]
        return all(each is first for each in now)


class Unchanged:
    """A snapshot of `model`, of `loss` if it is a module, and of what their code reads from
    outside, as they were when it was made or last `renewed`. `kernels` is code of theirs, too: that
    of operators. `variables`: those of the environment that it reads (process_reads.Reads); code
    that names os.environ may read others elsewhere."""

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        kernels: Sequence[FunctionType] = (),
        variables: Collection[str] = (),
    ) -> None:
        self._model = model
        self._loss = loss
        self._kernels = kernels
        self._variables = frozenset(variables)
        self.renew()

    def renew(self) -> None:
        """Takes the snapshot again."""
        self._modules = []
        self._objects: dict[int, tuple[str, Any, Snapshot]] = {}
        classes = {}
        for name, module in self._named_modules().items():
            self._modules.append((name, module, type(module), Snapshot(vars(module))))
            classes[type(module)] = type(module).forward
            for key, value in vars(module).items():
                if _is_settings(value):
                    kept = (_dotted(name, key), value, Snapshot(vars(value)))
                    self._objects.setdefault(id(value), kept)
        self._forwards = list(classes.items())
        self._globals = _global_hooks()
        found = reached(self._model, self._loss, self._kernels)
        self._outside = [
            Read(place) for place in found.places if place.owner is not vars(os.environ)
        ]
        self._environment = self._environment_now()
        self._calls = Calls(found)
        self._deep = list(self._inside(found.read))
        self._shared = list(self._sharing())
        self._in_dicts = list(self._values_in_dicts())

    def _inside(self, read: frozenset[str] | None) -> Iterator[tuple[_Held, PythonState]]:
        """What the values hold. Modules may share one, such as their model's configuration, and one
        may be a part of another: it is compared once, under a name that is `read` if it has one,
        lest a change be taken for that of an attribute that no code reads."""
        parts = set[int]()
        leaves = 0
        for value, held in sorted(self._holding(), key=lambda pair: pair[1].change.is_unread(read)):
            if id(value) in parts:
                continue
            parts.add(id(value))
            most = _MOST_LEAVES if leaves < _ALL_LEAVES else _FEW_LEAVES
            for each in (held, replace(held, whole=False)):
                inside = each.inside(most)
                leaves += most if inside is None else len(inside.leaves)
                if inside is not None:
                    yield each, inside
                    if each.whole:
                        parts |= inside.looked_into()
                    break

    def _values_in_dicts(self) -> Iterator[tuple[Place, Any]]:
        """Numbers and lists of dicts that attributes hold, or places outside of the model."""
        for name, _, values in self._named():
            for key, value in values.values.items():
                if type(value) in _DICTS and key not in OF_MODULES and key not in MEMBERS:
                    yield from _values_in(_dotted(name, key), value)
        for each in self._outside:
            if not each.place.library:
                yield from _values_in(each.place.label, each.place.value())

    def _named(self) -> Iterator[tuple[str, dict[str, Any], Snapshot]]:
        """What has attributes, by what messages call it, with these as they are and were."""
        for name, module, _, before in self._modules:
            yield name, vars(module), before
        for name, value, before in self._objects.values():
            yield name, vars(value), before

    def _environment_now(self) -> dict[str, str | None]:
        if EVERY in self._variables:
            return dict(os.environ)
        return {name: os.environ.get(name) for name in sorted(self._variables)}

    def _sharing(self) -> Iterator[_Shared]:
        """The buffers that the model holds under several names, or something else holds, too."""
        read = [each.place.value() for each in self._outside]
        others = set(map(id, read))
        own = {module for _, module, _, _ in self._modules}
        for root in (*self._calls.modules, *(each for each in read if isinstance(each, nn.Module))):
            for module in root.modules():
                if module not in own:
                    others.update(map(id, module._buffers.values()))
        for _, _, _, attributes in self._modules:
            others.update(id(value) for value in attributes.values.values())
        for _, inside in self._deep:
            others.update(map(id, inside.tensors().values()))
        places: dict[int, list[tuple[Mapping[str, Any], str]]] = {}
        names = {}
        for name, module, _, _ in self._modules:
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    places.setdefault(id(buffer), []).append((module._buffers, key))
                    names.setdefault(id(buffer), (_dotted(name, key), buffer))
        for number, held in places.items():
            if len(held) > 1 or number in others:
                yield _Shared(*names[number], held, number in others)

    def _holding(self) -> Iterator[tuple[Any, _Held]]:
        """The values that hold more than plain values and tensors, and where they are."""
        for name, module, _, attributes in self._modules:
            for key, value in attributes.values.items():
                if key not in MEMBERS and key not in OF_MODULES and _is_deep(value):
                    change = _Change((id(module), key), _dotted(name, key), attribute=True)
                    yield value, _Held(vars(module), key, change)
        for place in (each.place for each in self._outside):
            if _is_deep(value := place.value()):
                change = _Change(place.key, place.label, attribute=place.attribute)
                yield value, _Held(place, "", change)

    def _named_modules(self) -> dict[str, nn.Module]:
        named = dict(self._model.named_modules())
        if isinstance(self._loss, nn.Module):
            named |= dict(self._loss.named_modules(prefix="(loss)"))
        return named

    def holds(self) -> bool:
        """Whether nothing has changed."""
        for _, module, kind, attributes in self._modules:
            if type(module) is not kind or not attributes.holds(module.__dict__):
                return False
        for _, value, attributes in self._objects.values():
            if not attributes.holds(value.__dict__):
                return False
        if any(kind.forward is not forward for kind, forward in self._forwards):
            return False
        if not all(each.holds() for each in (*self._outside, *self._shared)):
            return False
        if not self._calls.holds() or self._environment_now() != self._environment:
            return False
        for held, before in self._deep:
            if before.surely_is_of(held.value):
                continue
            now = held.inside()
            if now is None or not now.is_as(before):
                return False
        return same(_global_hooks(), self._globals)

    def holds_what_matters(self, *, training: bool) -> bool:
        """Whether nothing has changed except attributes that no code reads and, without `training`,
        train and eval modes."""
        read = attributes_read(self._model, self._loss, self._kernels)
        for change in self._changes():
            if not change.is_unread(read) and (training or not change.mode):
                return False
        return True

    def numbers(self) -> dict[str, tuple[Place, int | float]]:
        """The numbers that it has compared, by what messages call them, and where they are."""
        return {name: each for name, each in self._values().items() if is_number(each[1])}

    def lists(self) -> dict[str, Place]:
        """The places of lists that a step may append to, in the same way."""
        found = {name: place for name, (place, _) in self._values().items()}
        return {name: place for name, place in found.items() if type(place.value()) in GROWING}

    def _values(self) -> dict[str, tuple[Place, Any]]:
        places = [
            (Place(owner, key, _dotted(name, key)), value)
            for name, owner, values in self._named()
            for key, value in values.values.items()
            if key not in OF_MODULES
        ]
        places += [*self._in_dicts, *self._calls.numbers()]
        for each in self._outside:
            if (place := _writable(each.place)) is not None:
                places.append((place, each.copy))
        # One dict may be held in several places.
        once = {place.key: (place, value) for place, value in reversed(places)}
        return {place.label: (place, value) for place, value in reversed(once.values())}

    def moved(self) -> list[str]:
        """The names of the numbers that are others now, if nothing else has changed."""
        found = {
            name: (place, value)
            for name, (place, value) in self.numbers().items()
            if is_number(place.value()) and not place.holds(value)
        }
        with as_before(found):
            return list(found) if found and self.holds_what_matters(training=True) else []

    def hook(self) -> str:
        """The first new hook, with its line; empty without any."""
        for change in self._changes():
            if change.hook:
                return prefixed(change.location, change.text)
        return ""

    def changed(self) -> str:
        """What has changed first; empty if nothing has."""
        return next((change.text for change in self._changes()), "")

    def attribute(self) -> str:
        """The first attribute, or the like, that has changed; empty without any."""
        return next((change.text for change in self._changes() if change.attribute), "")

    # --- what changed

    def _changes(self) -> Iterator[_Change]:
        modules = self._named_modules()
        own = set(self._model.modules())
        for name, module, kind, before in self._modules:
            now = modules.get(name)
            if now is not module or type(now) is not kind:
                yield _Change((id(module), ""), f"{_module(name)} is another one")
                continue
            for key in sorted({*vars(module), *before.values}):
                if key in MEMBERS:
                    held = vars(module)[key], before.copies[key]
                    yield from _member(id(module), name, key, *held, follows=module in own)
                elif key not in STATE_DICT_HOOKS:
                    yield from _attribute(id(module), name, key, vars(module), before)
        known = {name for name, _, _, _ in self._modules}
        for name, module in modules.items():
            if name not in known:
                yield _Change((id(module), ""), f"{_module(name)} is new")
        for place, value, before in self._objects.values():
            for key in sorted({*vars(value), *before.values}):
                yield from _attribute(id(value), place, key, vars(value), before)
        for kind, forward in self._forwards:
            if kind.forward is not forward:
                where = source_of(kind.forward)
                yield _Change((id(kind), ""), f"forward of '{kind.__name__}' is another one", where)
        for key, text in self._calls.changes():
            yield _Change(key, text)
        for key, text, attribute in self._calls.named():
            yield _Change(key, text, attribute=attribute)
        for each in self._outside:
            if not each.holds():
                place = each.place
                text = f"'{place.label}' is {_shown(place.value())}, the step was compiled with"
                text = f"{text} {_shown(each.copy)}"
                yield _Change(place.key, text, attribute=place.attribute)
        now = self._environment_now()
        for name in sorted(now.keys() | self._environment.keys()):
            if now.get(name) != self._environment.get(name):
                text = f"the variable {name} of the environment is not what it was"
                yield _Change((id(os.environ), name), text)
        for each in self._shared:
            if not each.holds():
                text = f"buffer '{each.name}' is not shared as when the step was compiled"
                yield _Change((id(each), ""), text)
        for held, inside in self._deep:
            if path := held.changed(inside):
                text = f"'{path}' is not what the step was compiled with"
                yield replace(held.change, text=text)
        for name, before in self._globals.items():
            method = f"register_module{name.removeprefix('_global').removesuffix('s')}"
            yield from _changed_hooks(method, "every module", 0, _global_hooks()[name], before)


@contextmanager
def as_before(values: Mapping[str, tuple[Place, Any]]) -> Iterator[None]:
    """In the body, places that have numbers, or lists that grow, have these."""
    now = [(place, place.value(), value) for place, value in values.values()]
    now = [each for each in now if is_number(each[1]) or is_alike(*each[1:])]
    try:
        for place, _, value in now:
            place.put(value)
        yield
    finally:
        for place, value, _ in now:
            place.put(value)


def _values_in(label: str, value: Any, depth: int = 3) -> Iterator[tuple[Place, Any]]:
    """The numbers and lists of a dict, and of dicts in it, by their keys."""
    if type(value) not in _DICTS or len(value) > _MOST_ITEMS:
        return
    for key, item in list(value.items()):
        if not isinstance(key, str):
            continue
        if is_number(item) or type(item) in GROWING:
            yield Place(value, key, f"{label}[{key!r}]"), item
        elif depth > 1:
            yield from _values_in(f"{label}[{key!r}]", item, depth - 1)


def _writable(place: Place) -> Place | None:
    """The same place, to be written without what an object does then; None for an attribute that is
    calculated, and for a library's variable."""
    if place.library:
        return None
    if isinstance(place.owner, (dict, CellType)):
        return place
    if place.name not in getattr(place.owner, "__dict__", ()):
        return None
    return place if isinstance(place.owner, type) else replace(place, owner=vars(place.owner))


def _member(
    owner: int,
    place: str,
    kind: str,
    now: Mapping[str, Any],
    before: Mapping[str, Any],
    *,
    follows: bool,
) -> Iterator[_Change]:
    """Different parameters, and buffers and modules that are new or gone. A plan `follows` a
    replaced buffer of the model, not one of the loss; a replaced module is reported by itself."""
    whole = {"_parameters"} if follows else {"_parameters", "_buffers"}
    for key in sorted({*now, *before}):
        one, other = (members.get(key) for members in (now, before))
        if (one is None) != (other is None) or (kind in whole and one is not other):
            text = f"'{_dotted(place, key)}' is another one, new or gone"
            yield _Change((owner, key), text)
    if [key for key in now if key in before] != [key for key in before if key in now]:
        text = f"{_module(place)} has its {kind[1:]} in another order"
        yield _Change((owner, kind), text)


def _attribute(
    owner: int, place: str, key: str, now: dict[str, Any], snapshot: Snapshot
) -> Iterator[_Change]:
    before = snapshot.copies
    if snapshot.has(key, now.get(key, ABSENT)):
        return
    if key == "training":
        mode = "train" if now[key] else "eval"
        was = "train" if before[key] else "eval"
        text = f"{_module(place)} is in {mode} mode, the step was compiled with it in {was} mode"
        yield _Change((owner, key), text, mode=True)
    elif key in HOOKS:
        yield from _changed_hooks(HOOKS[key], _module(place), owner, now[key], before[key])
    else:
        got, was = (_shown(values.get(key, ABSENT)) for values in (now, before))
        name = _dotted(place, key)
        text = f"attribute '{name}' is {got}, the step was compiled with {was}"
        yield _Change((owner, key), text, attribute=True)


def _changed_hooks(
    method: str, of: str, owner: int, now: Mapping[int, Any], before: Mapping[int, Any]
) -> Iterator[_Change]:
    for key, hook in now.items():
        if before.get(key) is not hook:
            name = hooks.named(hook)
            text = f"the hook {name} of {method} of {of} was registered after the step was compiled"
            yield _Change((owner, method), text, source_of(hook), hook=True)
    if before.keys() - now.keys():
        yield _Change((owner, method), f"a hook of {method} of {of} was removed")
    if [key for key in now if key in before] != [key for key in before if key in now]:
        yield _Change((owner, method), f"hooks of {method} of {of} are in another order")


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        text = f"a tensor of shape {list(value.shape)}"
    elif built_in(type(value)) is not None and _has_tensors(value):
        text = f"a '{type(value).__name__}' of {len(value)} with tensors"
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:60] + "…"


def _has_tensors(value: Any) -> bool:
    """Whether a container may hold tensors: parameters without memory have no text."""
    inside = PythonState.inside("", value, _MOST_LEAVES, whole=False)
    return inside is None or bool(inside.tensors())


def _module(name: str) -> str:
    return f"module '{name}'" if name else "the model"


def _dotted(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _is_deep(value: Any) -> bool:
    """Whether a change inside a value may leave the value itself equal."""
    kind = built_in(type(value))
    if kind is not None:
        if type(value) not in CONTAINERS:  # a subclass, which may have attributes
            return True
        items = [*kind.__iter__(value), *(kind.values(value) if issubclass(kind, dict) else ())]
        return any(
            type(item) not in SCALARS and (type(item) is Tensor or not isinstance(item, Tensor))
            for item in items
        )
    if isinstance(value, SCALARS):  # such as the member of an enumeration
        return type(value) not in SCALARS
    if isinstance(value, Tensor):  # with the attributes that code has set on it
        return type(value) is Tensor
    return not isinstance(value, (type, nn.Module)) and not callable(value)


def _is_settings(value: Any, depth: int = 2) -> bool:
    """Whether an attribute holds an object of plain values, such as a configuration."""
    if isinstance(value, (type, Tensor, nn.Module, Mapping)) or callable(value):
        return False
    attributes = getattr(value, "__dict__", None)
    return isinstance(attributes, dict) and all(
        isinstance(item, _PLAIN) or (depth > 1 and _is_settings(item, depth - 1))
        for item in attributes.values()
    )


def _global_hooks() -> dict[str, dict[int, Any]]:
    return {name: dict(getattr(nn.modules.module, name)) for name in GLOBAL_HOOKS}
