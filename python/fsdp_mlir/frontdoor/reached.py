"""What code outside of a model is and calls, compared with what it was when a step was compiled:
which objects its names hold, the modules that the model does not have, the code of functions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from fsdp_mlir.modules import outside
from fsdp_mlir.modules.outside import OF_MODULES, STATE_DICT_HOOKS
from fsdp_mlir.modules.place import ABSENT, SCALARS, Place

MEMBERS = ("_parameters", "_buffers", "_modules")
_MOST_ITEMS = 1 << 16  # of a list or the like that is compared by its items


def shallow(value: Any) -> Any:
    """A copy of a list or the like, so that its items are compared."""
    if isinstance(value, dict) and len(value) <= _MOST_ITEMS:
        return dict(dict.items(value))  # as stored: a subclass may compute what it returns
    if type(value) in (list, set, deque) and len(value) <= _MOST_ITEMS:
        return type(value)(value)
    return value


def same(now: Any, before: Any) -> bool:
    """Tensors are compared by identity: equal ones may be written later."""
    if now is before or isinstance(now, Tensor) or isinstance(before, Tensor):
        return now is before
    return equal({"": now}, {"": before})


def equal(now: dict[str, Any], before: dict[str, Any]) -> bool:
    try:
        return now == before
    except Exception:  # such as the truth value of a different tensor
        return False


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
        self._attributes = {
            name: dict(value) if name in MEMBERS else shallow(value)
            for name, value in vars(module).items()
        }
        self._tensors = [
            (members, name, tensor, _form(tensor))
            for members in (module._parameters, module._buffers)
            for name, tensor in members.items()
            if tensor is not None
        ]

    def change(self) -> str | None:
        """The first attribute that differs, of those that code may read; None without one."""
        if type(self.module) is not self._kind:
            return "__class__"
        for members, name, tensor, form in self._tensors:
            if members.get(name) is not tensor or _form(tensor) != form:
                return name
        now, before = vars(self.module), self._attributes
        if equal(now, before):
            return None
        for name in (now.keys() | before.keys()) - STATE_DICT_HOOKS:
            read = self._names is None or name in self._names or name in OF_MODULES
            if read and not same(now.get(name, ABSENT), before.get(name, ABSENT)):
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
        return keywords is None or equal(keywords, self._keywords)


class Calls:
    """A snapshot of that. What is compared by identity is kept alive, so that nothing else takes
    its id."""

    def __init__(self, found: outside.Reached) -> None:
        self._held = [(reader(place), shallow(place.value()), place) for place in found.held]
        self._modules = [_Module(label, module, found.names) for label, module in found.modules]
        self._functions = [_Function(function) for function in found.functions]

    def holds(self) -> bool:
        """Whether nothing has changed."""
        for read, before, _ in self._held:
            now = read()
            if now is not before and not _is_same_object(now, before):
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
        for module in self._modules:
            if name := module.change():
                yield (id(module.module), name), f"'{module.label}.{name}' is another one"


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
        return bool(now == before)
    if isinstance(now, partial):
        parts = [(each.func, each.args, each.keywords) for each in (now, before)]
        return all(_is_alike(*pair, depth - 1) for pair in zip(*parts, strict=True))
    if isinstance(now, (tuple, list)):
        pairs = zip(now, before, strict=False)
        return len(now) == len(before) and all(_is_alike(*pair, depth - 1) for pair in pairs)
    if isinstance(now, (type, nn.Module, FunctionType, Tensor)) or not hasattr(now, "__dict__"):
        return False
    if outside.slot_names(type(now)) or vars(now).keys() != vars(before).keys():
        return False
    return all(_is_alike(vars(now)[name], vars(before)[name], depth - 1) for name in vars(now))
