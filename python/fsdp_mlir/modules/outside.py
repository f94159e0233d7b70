"""Data that a model's code reads but that is not the model's: attributes of classes, globals, what
functions close over and their attributes, a loss function's own attributes, and the data of objects
found this way.

Names are found in the code of the classes of the model's modules, except PyTorch's own, and of the
functions and classes that this code names, except those of the standard library and of installed
packages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_mlir.modules.hooks import GLOBAL_HOOKS, HOOKS
from fsdp_mlir.modules.memos import Memo
from fsdp_mlir.modules.names import DYNAMIC, WHOLE, read_by, used
from fsdp_mlir.modules.place import Place, is_library, is_no_models, is_users
from fsdp_mlir.modules.search import OF_CALLS, Search


@dataclass(frozen=True)
class Kept:
    """Where a step may keep something in Python beside the modules of model and loss: `places` of
    data, and those `held` of anything else, in which it may put another object; `objects` are
    attributes, to which it may add."""

    places: list[Place]
    held: list[Place]
    memos: list[Memo[Any]]
    objects: list[dict[str, Any]]
    modules: list[tuple[str, nn.Module]]


@dataclass(frozen=True)
class Reached:
    """What the code of a model and of a loss reads and calls, beside the modules of both."""

    places: list[Place]  # of data
    held: list[Place]  # of anything else: which object it is may change
    modules: list[tuple[str, nn.Module]]  # with what is to be called them in messages
    functions: list[FunctionType]
    names: frozenset[str] | None  # of attributes that this code may read; None if of any name
    read: frozenset[str] | None  # what attributes_read gives
    named: list[tuple[str, Any, Mapping[str, Any]]]  # whose attributes may be set later
    memos: list[Memo[Any]]
    kept: Kept


def reached(model: nn.Module, loss: Any, kernels: Sequence[FunctionType] = ()) -> Reached:
    """All that, with other modules that the code calls, such as a teacher in a closure."""
    found = _places(model, loss, kernels, reaches=True)
    return Reached(
        found.all(),
        found.held(),
        found.modules(),
        [each for each in found.seen() if isinstance(each, FunctionType)],
        found.names(),
        _attributes_read(found, model, loss),
        found.named(),
        _memos(found),
        _kept(found),
    )


def places(model: nn.Module, loss: Any, kernels: Sequence[FunctionType] = ()) -> list[Place]:
    """The places that the modules of `model`, a loss function and kernels of operators read, always
    in the same order."""
    return _places(model, loss, kernels).all()


def kept(model: nn.Module, loss: Any) -> Kept:
    return _kept(_places(model, loss, reaches=True))


def _kept(found: Search) -> Kept:
    named = found.named()
    objects = [held for _, owner, held in named if not isinstance(owner, (type, ModuleType))]
    places = [each for each in found.all() if not each.is_referent]
    # What is computed at each look is no place.
    owners = (dict, type, CellType)
    held = [each for each in found.held() if isinstance(each.owner, owners) and not each.library]
    return Kept(places, held, _memos(found), cast(list[dict[str, Any]], objects), found.modules())


def _memos(found: Search) -> list[Memo[Any]]:
    return [each for each in found.seen() if isinstance(each, Memo)]


def _places(
    model: nn.Module, loss: Any, kernels: Sequence[FunctionType] = (), *, reaches: bool = False
) -> Search:
    modules = list(model.modules())
    if isinstance(loss, nn.Module):
        modules += loss.modules()
    found = Search(modules, reaches=reaches)
    for kernel in kernels:
        found.add_object(kernel.__qualname__, kernel)
    if loss is not None and not isinstance(loss, nn.Module):
        found.add_object("(loss)", loss)
    for module in modules:
        found.add_class(type(module), is_no_models)
        for name, held in vars(module).items():
            label = f"{type(module).__qualname__}.{name}"
            if callable(held) and not isinstance(held, (type, nn.Module, Tensor)):
                found.add_object(label, held)
            elif is_users(name):
                found.find_modules(held)
                found.look_inside(label, held)
    for hooks in [*map(vars, modules), vars(nn.modules.module)]:
        for name in sorted({*HOOKS, *GLOBAL_HOOKS} & hooks.keys()):
            for hook in hooks[name].values():
                found.add_object(f"a hook of {name}", hook)
    return found


def in_order(functions: Iterable[FunctionType]) -> list[FunctionType]:
    """By their names: the order in which they are found differs from process to process."""
    return sorted(functions, key=lambda each: (each.__module__ or "", each.__qualname__))


def asks_for_numbers(model: nn.Module, loss: Any) -> FunctionType | None:
    """The first of these functions that may ask whether the class of a value is one of numbers, as
    in `type(x) is float`, which nothing that stands for a number can answer as that does. Functions
    of installed packages are not asked, as many do so for other reasons, nor are those that have
    made the modules."""
    functions = [each for each in _places(model, loss).seen() if isinstance(each, FunctionType)]
    bases = {base for module in model.modules() for base in type(module).__mro__}
    made = {vars(base).get("__init__") for base in bases if issubclass(base, nn.Module)}
    for each in in_order(each for each in functions if each not in made):
        found = used(each.__code__, {"LOAD_GLOBAL"})
        if "type" in found and found & {"int", "float", "bool"} and not is_library(each):
            return each
    return None


def attributes_read(
    model: nn.Module, loss: Any, kernels: Sequence[FunctionType] = ()
) -> frozenset[str] | None:
    """The names of attributes that the code of the modules, PyTorch's layers included, and of what
    it calls may read; None if it reads some by names that are not in the code."""
    return _attributes_read(_places(model, loss, kernels, reaches=True), model, loss)


def functions_of(model: nn.Module, loss: Any) -> list[FunctionType]:
    """Those of the classes of the modules, and those that their code names."""
    return _functions(_places(model, loss, reaches=True), model, loss)


def _functions(found: Search, model: nn.Module, loss: Any) -> list[FunctionType]:
    classes = {type(module) for module in model.modules()}
    if isinstance(loss, nn.Module):
        classes |= {type(module) for module in loss.modules()}
    functions = [value for value in found.seen() if isinstance(value, FunctionType)]
    for base in {base for owner in classes for base in owner.__mro__} - {nn.Module, object}:
        for value in vars(base).values():
            value = value.fget if isinstance(value, property) else value
            value = getattr(value, "__func__", value)
            if isinstance(value, FunctionType) and base.__module__ != FSDPModule.__module__:
                functions.append(value)
    return functions


def _attributes_read(found: Search, model: nn.Module, loss: Any) -> frozenset[str] | None:
    functions = _functions(found, model, loss)
    names = OF_CALLS.union(found.got(), *(read_by(function.__code__) for function in functions))
    return None if names & (DYNAMIC | WHOLE) else names
