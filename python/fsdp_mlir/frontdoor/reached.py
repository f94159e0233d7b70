"""What code outside of a model is and calls, compared with what it was when a step was compiled:
which objects its names hold, the modules that the model does not have, the code of functions."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from fsdp_mlir.modules import memos, outside
from fsdp_mlir.modules.containers import Ordered, has_same_objects, in_order
from fsdp_mlir.modules.hooks import STATE_DICT_HOOKS
from fsdp_mlir.modules.place import ABSENT, OF_MODULES, SCALARS, Place, built_in, slot_names

MEMBERS = ("_parameters", "_buffers", "_modules")
_BY_IDENTITY = (type(None), nn.Module, type, FunctionType)
_EXACT_WHEN_EMPTY = (dict, OrderedDict, list, set, deque)
_MOST_ITEMS = 1 << 16  # of a list or the like that is compared by its items


def shallow(value: Any) -> Any:
    """A copy of a list or the like, so that its items are compared: as they are stored, which a
    subclass may hide."""
    kind = built_in(type(value))
    if kind in (None, tuple, frozenset) or kind.__len__(value) > _MOST_ITEMS:
        return value
    if kind is deque:
        return deque(deque.__iter__(value), value.maxlen)
    if kind is set:
        return Ordered(set.__iter__(value))
    return dict(kind.items(value)) if issubclass(kind, dict) else kind(kind.__iter__(value))


def same(now: Any, before: Any) -> bool:
    """Whether a value is as `shallow` gave it. Tensors are compared by identity: equal ones may be
    written later."""
    if now is before or isinstance(now, Tensor) or isinstance(before, Tensor):
        return now is before
    if type(now) is float and now != now:
        return type(before) is float and before != before
    try:
        return {"": now} == {"": before} and _is_exact(now, before)
    except Exception:  # such as the truth value of a different tensor
        return False


def _is_exact(now: Any, before: Any) -> bool:
    """Whether values that are equal also have equal types, items in the same order, and zeros of
    the same sign."""
    kind = built_in(type(now))
    if kind is None:
        if isinstance(now, (float, complex)):
            return repr(now) == repr(before)
        return now is before or not isinstance(now, Tensor)
    of_before = built_in(type(before))
    if kind in (set, frozenset):
        one, other = in_order(now), in_order(before)
        return all(map(is_, one, other)) or list(map(_typed, one)) == list(map(_typed, other))
    items, items_before = kind.__iter__(now), of_before.__iter__(before)
    if not issubclass(kind, dict):
        return _are_exact(items, items_before)
    keys, keys_before = list(items), list(items_before)
    values, values_before = kind.values(now), of_before.values(before)
    return keys == keys_before and (
        _are_exact(keys, keys_before) and _are_exact(values, values_before)
    )


def _are_exact(now: Iterable[Any], before: Iterable[Any]) -> bool:
    return all(
        a is b or (type(a) is type(b) and _is_exact(a, b)) for a, b in zip(now, before, strict=True)
    )


def _typed(value: Any) -> tuple[Any, ...]:
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


class Snapshot:
    """The values of names, such as a module's attributes, as they were."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = dict(values)
        self.copies = {name: shallow(value) for name, value in values.items()}
        # A comparison of all names at once finds most changes; what may be equal and yet another
        # value is looked at after that. Most modules have containers for hooks, which are empty.
        self._orders: list[tuple[str, list[str]]] = []
        self._single: list[tuple[str, str, Tensor]] = []  # which compare without an error
        self._exact: list[tuple[str, Any, bool]] = []
        for name, value in values.items():
            if name in MEMBERS:
                self._orders += [(name, list(value))] if len(value) > 1 else []
                tensors = ((key, x) for key, x in value.items() if isinstance(x, Tensor))
                self._single += [(name, key, x) for key, x in tensors if x.numel() == 1]
            elif not isinstance(value, _BY_IDENTITY) and not (
                type(value) in _EXACT_WHEN_EMPTY and not value
            ):
                self._exact.append((name, value, value is not self.copies[name]))

    def holds(self, now: dict[str, Any]) -> bool:
        """Whether nothing has changed."""
        try:
            if now != self.copies:
                return False
        except Exception:  # as in `same`
            return False
        for name, order in self._orders:
            if list(now[name]) != order:
                return False
        for kind, name, tensor in self._single:
            if now[kind][name] is not tensor:
                return False
        for name, value, is_copied in self._exact:
            if (is_copied or now[name] is not value) and not self.has(name, now[name]):
                return False
        return True

    def has(self, name: str, now: Any) -> bool:
        """Whether that is the value of a name."""
        before = self.values.get(name, ABSENT)
        return now is before if before is ABSENT else _has(now, type(before), self.copies[name])


class Read:
    """The value of a place, as it was."""

    def __init__(self, place: Place) -> None:
        value = place.value()
        self.place, self._read = place, reader(place)
        self.copy, self._kind = shallow(value), type(value)

    def holds(self) -> bool:
        now = self._read()
        return now is self.copy or _has(now, self._kind, self.copy)


def _has(now: Any, kind: type, before: Any) -> bool:
    """Whether a value is of a class, and as `shallow` gave it."""
    return type(now) is kind and (has_same_objects(now, before) or same(now, before))


def reader(place: Place) -> Callable[[], Any]:
    """A function that gives its value, fast for those of dicts and classes."""
    if isinstance(place.owner, (dict, type)):
        names = place.owner if isinstance(place.owner, dict) else vars(place.owner)
        return partial(names.get, place.name, ABSENT)
    if isinstance(place.owner, CellType):
        return place.value
    return partial(getattr, place.owner, place.name, ABSENT)


class _Module:
    """A module that code reaches, with its parameters and buffers: which tensors, and where."""

    def __init__(self, label: str, module: nn.Module, names: frozenset[str] | None) -> None:
        self.label, self.module, self._kind = label, module, type(module)
        if type(module).__module__.partition(".")[0] == "torch":
            names = None  # its code was not looked into
        self._names = names
        self._attributes = Snapshot(vars(module))
        self._tensors = [
            (members, name, tensor, _form(tensor))
            for members in (module._parameters, module._buffers)
            for name, tensor in members.items()
            if tensor is not None
        ]

    def numbers(self) -> Iterator[tuple[Place, int | float]]:
        """The attributes that are numbers, as they were."""
        owner = vars(self.module)
        for name, value in self._attributes.values.items():
            if type(value) in (int, float) and name not in OF_MODULES:
                yield Place(owner, name, f"{self.label}.{name}"), value

    def change(self) -> str | None:
        """The first attribute that differs, of those that code may read; None without one."""
        if type(self.module) is not self._kind:
            return "__class__"
        for members, name, tensor, form in self._tensors:
            if members.get(name) is not tensor or _form(tensor) != form:
                return name
        now, before = vars(self.module), self._attributes
        if before.holds(now):
            return None
        for name in (now.keys() | before.values.keys()) - STATE_DICT_HOOKS:
            read = self._names is None or name in self._names or name in OF_MODULES
            if read and not before.has(name, now.get(name, ABSENT)):
                return name
        return None


@dataclass
class _Function:
    """The parts of one that may be replaced in place."""

    function: FunctionType

    def __post_init__(self) -> None:
        self._parts = self._now()
        self._keywords = shallow(self.function.__kwdefaults__)

    def _now(self) -> tuple[Any, ...]:
        function = self.function
        return function.__code__, function.__defaults__, function.__kwdefaults__

    def holds(self) -> bool:
        parts = zip(self._now(), self._parts, strict=True)
        if not all(now is before for now, before in parts):
            return False
        keywords = self.function.__kwdefaults__
        return keywords is None or same(keywords, self._keywords)


class _Names:
    """The names of attributes of an object, a class or a Python module."""

    def __init__(self, label: str, owner: Any, attributes: Mapping[str, Any]) -> None:
        self._label, self._attributes = label, attributes
        self.owner = owner if isinstance(owner, type) else attributes  # as Place has it
        self._before = frozenset(attributes)

    def holds(self) -> bool:
        return self._attributes.keys() == self._before

    def changes(self) -> Iterator[tuple[tuple[int, str], str, bool]]:
        for name in sorted(self._attributes.keys() ^ self._before):
            text = f"'{self._label}.{name}' is new or gone"
            yield (id(self.owner), name), text, not self._is_special(name)

    def _is_special(self, name: str) -> bool:
        """Whether it is a method that no code names, such as that of an operator."""
        is_method = name in self._before or callable(self._attributes.get(name))
        return isinstance(self.owner, type) and name[:2] == "__" == name[-2:] and is_method


class _Memo:
    """Results that functools.lru_cache keeps: those that were there."""

    def __init__(self, memo: memos.Memo[Any]) -> None:
        self.memo, self._before = memo, memos.held(memo) or {}

    def holds(self) -> bool:
        if not self._before:
            return True
        now = memos.held(self.memo) or {}
        return all(now.get(key, ABSENT) is value for key, value in self._before.items())


class Calls:
    """A snapshot of that. What is compared by identity is kept alive, so that nothing else takes
    its id."""

    def __init__(self, found: outside.Reached) -> None:
        self._held = [(reader(place), shallow(place.value()), place) for place in found.held]
        self._modules = [_Module(label, module, found.names) for label, module in found.modules]
        self._functions = [_Function(function) for function in found.functions]
        self._memos = [_Memo(memo) for memo in found.memos]
        self._named = [_Names(*each) for each in found.named]

    @property
    def modules(self) -> list[nn.Module]:
        """Those that the code calls, outside of the model."""
        return [each.module for each in self._modules]

    def numbers(self) -> Iterator[tuple[Place, int | float]]:
        """The attributes of these that are numbers, as they were."""
        for module in self._modules:
            yield from module.numbers()

    def holds(self) -> bool:
        """Whether nothing has changed."""
        for read, before, _ in self._held:
            now = read()
            if now is not before and not _is_same_object(now, before):
                return False
        if not all(each.holds() for each in (*self._named, *self._memos)):
            return False
        return all(each.holds() for each in self._functions) and not any(
            each.change() for each in self._modules
        )

    def changes(self) -> Iterator[tuple[tuple[int, str], str]]:
        """Places, with messages, that do not hold what does the same as before."""
        for read, before, place in self._held:
            if not _is_alike(read(), before):
                yield place.key, f"'{place.label}' is another one"
        for function in self._functions:
            if not function.holds():
                name = function.function.__qualname__
                yield (id(function.function), "__code__"), f"the code of '{name}' is another"
        for each in self._memos:
            if not each.holds():
                name = memos.named(each.memo)
                yield (id(each.memo), ""), f"'{name}' has other results of functools.lru_cache"
        for module in self._modules:
            if name := module.change():
                yield (id(module.module), name), f"'{module.label}.{name}' is another one"

    def named(self) -> Iterator[tuple[tuple[int, str], str, bool]]:
        """Attributes that are new or gone, and whether that matters only if code reads them."""
        for each in self._named:
            yield from each.changes()


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """What a plan relies on beside the values; `.data` may be assigned."""
    if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
        return (tensor.requires_grad,)
    return (
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.requires_grad,
    )


def _is_same_object(now: Any, before: Any) -> bool:
    """Methods are new objects at each access; a dict is compared with a copy of it."""
    if type(now) is not type(before):
        return False
    return isinstance(now, (MethodType, dict)) and same(now, before)


def _is_alike(now: Any, before: Any, depth: int = 3) -> bool:
    """Whether an object has the same parts, as one that a loop makes anew for each step."""
    if now is before or _is_same_object(now, before):
        return True
    if type(now) is not type(before) or depth == 0:
        return False
    if isinstance(now, SCALARS):
        return same(now, before)
    if isinstance(now, partial):
        parts = [(each.func, each.args, each.keywords) for each in (now, before)]
        return all(_is_alike(*pair, depth - 1) for pair in zip(*parts, strict=True))
    if isinstance(now, (tuple, list)):
        pairs = zip(now, before, strict=False)
        return len(now) == len(before) and all(_is_alike(*pair, depth - 1) for pair in pairs)
    if isinstance(now, (type, nn.Module, FunctionType, Tensor)) or not hasattr(now, "__dict__"):
        return False
    if slot_names(type(now)) or vars(now).keys() != vars(before).keys():
        return False
    return all(_is_alike(vars(now)[name], vars(before)[name], depth - 1) for name in vars(now))
