"""What a step gets: the inputs of one rank, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from inspect import Parameter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_mlir.modules.compute_loss import ComputeLoss
from fsdp_mlir.modules.growing import GROWING
from fsdp_mlir.modules.place import Place
from fsdp_mlir.step.called import Call, Called
from fsdp_mlir.step.nested import (
    form,
    is_plain,
    named_leaves,
    pattern,
    rebuilt,
    repetitions,
    sharing,
)
from fsdp_mlir.step.training_step import Loss, by_position, signature_of
from fsdp_mlir.support.layouts import Strides, is_dense, is_itself, laid_out

Batch = dict[str, Any]

# Why a batch has no plan.
OTHER_VALUES = (
    "values that decide a shape or a branch, as those of a mask, are not those of the batch that "
    "it was compiled for, or FSDP2 holds another model as it was before a change, here or on "
    "another rank"
)
MORE_VALUES = (
    "values that decide a shape or a branch, as those of a mask, are not those of any batch that a "
    "plan for this form was compiled for, and there are no more such plans"
)
OTHER_CALL = (
    "the call is not that of the other ranks, whose inputs, modes or settings have another form"
)

OTHER_NUMBERS = (
    "the numbers among the inputs, or those that the code changes from step to step, have had too "
    "many outcomes of comparisons, or values, each of which is another step, or arithmetic with "
    "them is an error; give what varies as a tensor"
)

# Those that have a name for the caller.
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)

# As a model has plans.
_MOST_FORMS = 8


class Inputs:
    """The inputs of a model and its loss function: positional ones first, as arg0, arg1, …"""

    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        self._functions = [loss] if isinstance(loss, ComputeLoss) else [model.forward, loss]
        self._called = Called(model, loss)
        self._names: list[str] | None = None
        self._is_one: bool | None = None  # whether a container is an input, and not all of them
        self.positional = 0
        self._forms: dict[Any, set[Any]] = {}
        self._last: Batch = {}  # numbers, by their names
        self._moving: set[str] = set()
        self._texts: dict[str, Any] = {}  # strings, and numbers in containers, by their names
        self._unread: set[str] = set()
        self._held: dict[str, Place] = {}
        self._fixed: dict[str, str] = {}  # with the reason

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        """A call's inputs, always in the same order, but for those whose order code may see, as by
        `**inputs`. The first call determines which ones they are; later calls may
        leave out, or add, inputs that have a default. TypeError for others."""
        held = args[0] if len(args) == 1 and not kwargs and _is_container(args[0]) else None
        if held is not None:
            args, kwargs = self._given_as(held)
        args, kwargs = self._called.by_name(args, kwargs)
        if self._names is None:
            args, kwargs = self._called.with_names(args, kwargs)
            self.positional = len(args)
            self._names = [*by_position(len(args)), *kwargs]
        names = self._names
        if not self._has(args, kwargs):
            expected = ", ".join(f"'{name}'" for name in names)
            got = ", ".join([f"'{key}'" for key in kwargs] + [f"{len(args)} by position"])
            raise TypeError(f"expected the inputs {expected}, got {got}{self._advice(held)}")
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        more = sorted(set(given) - set(names))
        own = {*names[: self.positional], *self._in_any_order}
        inputs = [name for name in [*names, *more] if name in given and name in own]
        others = [name for name in given if name not in own]
        return {name: given[name] for name in [*inputs, *others]}

    @property
    def _in_any_order(self) -> set[str]:
        """The names of inputs whose order nothing can see: parameters of the functions, but for
        what a hook or a wrapper gets before them."""
        return set() if self._called.has_hooks else self._parameters

    @cached_property
    def _parameters(self) -> set[str]:
        found = self._signatures(follow_wrapped=False)
        return {each.name for parameters in found for each in parameters if each.kind in _NAMED}

    def _signatures(self, *, follow_wrapped: bool = True) -> Iterator[Iterable[Parameter]]:
        for function in self._functions:
            # There may be no loss function; a builtin may have no signature.
            with suppress(TypeError, ValueError):
                yield signature_of(function, follow_wrapped=follow_wrapped).parameters.values()

    def _given_as(self, held: Any) -> Call:
        """A container alone: as all inputs, if these can be what it holds, otherwise as one. What
        the first is, the later ones are too. A function of the model and one input gets it as the
        loop has it, except a mapping by the name of that input."""
        if self._called.takes_as_one(held):
            return (held,), {}
        apart: Call = ((), held) if isinstance(held, Mapping) else (tuple(held), {})
        if self._is_one is None:
            fits = self._called.takes(*apart) or (self._names is not None and self._has(*apart))
            one = not fits and not self._called.names(apart[1])
            if one and not self._called.takes((held,), {}) and self._names is None:
                got = ", ".join(f"'{key}'" for key in apart[1]) or f"{len(apart[0])} by position"
                raise TypeError(f"expected the inputs of forward, got {got}{self._advice(held)}")
            self._is_one = one and self._called.takes((held,), {})
        return ((held,), {}) if self._is_one else apart

    def _has(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether these are the inputs that the first call had, but for optional ones."""
        assert self._names is not None
        given = {*self._names[: len(args)], *kwargs}
        changed = given ^ set(self._names)
        return len(args) + len(kwargs) == len(given) and all(map(self._is_optional, changed))

    def _advice(self, held: Any) -> str:
        if held is None or not (name := self._called.one):
            return ""
        return f"; a batch that is one input goes by its name, as {name}=batch"

    def note(self, batches: Iterable[Batch]) -> None:
        """Takes a number that is another one than in the call before for one that may be another in
        each call, unless it is fixed."""
        for batch in batches:
            found = {name: value for name, value in batch.items() if is_number(value)}
            for name in (found.keys() & self._last) - self._fixed.keys():
                if found[name] != self._last[name]:
                    self._moving.add(name)
            self._last |= found
            self._note_texts(batch)

    def _note_texts(self, batch: Batch) -> None:
        """Takes such a value that is another one than in the call before for one that the step does
        not read, such as the name of a sample, unless it is fixed."""
        found = {
            path: leaf
            for name, value in batch.items()
            for path, leaf in named_leaves(name, value)
            if type(leaf) in (str, bytes) or (path != name and is_number(leaf))
        }
        changed = {path for path, leaf in found.items() if self._texts.get(path, leaf) != leaf}
        self._unread |= set(map(pattern, changed)) - self._fixed.keys()
        self._texts |= found

    @property
    def unread(self) -> tuple[str, ...]:
        """The names of strings and numbers that the step may not read."""
        return tuple(sorted(self._unread))

    def numbers(self, batch: Batch) -> tuple[str, ...]:
        """The names of those that may be others in each call, which have one plan."""
        return tuple(
            name for name, value in batch.items() if name in self._moving and is_number(value)
        )

    def fix(self, names: Iterable[str], why: str) -> None:
        """Each value of these numbers is another step."""
        self._fixed |= dict.fromkeys(names, why)
        self._moving -= self._fixed.keys()
        self._unread -= self._fixed.keys()
        self._held = {name: place for name, place in self._held.items() if name not in self._fixed}

    def hold(self, places: Mapping[str, Place]) -> bool:
        """Takes the numbers in these places for numbers that may be others in each call, and lists
        for lists that each call appends to, unless they are fixed. Returns whether any of them is
        newly."""
        # An input may have the name of an attribute of the model.
        named = {
            f"attribute {name}" if name.isidentifier() else name: place
            for name, place in places.items()
        }
        taken = {*self._fixed, *self._held}
        found = {name: place for name, place in named.items() if name not in taken}
        self._held |= found
        return bool(found)

    def release(self, places: Callable[[], Mapping[str, Place]]) -> bool:
        """Numbers that are held and are in none of these places are held no longer. Returns whether
        there are any."""
        keys = {place.key for place in places().values()} if self._held else set()
        gone = [name for name, place in self._held.items() if place.key not in keys]
        for name in gone:
            del self._held[name]
        return bool(gone)

    @property
    def held(self) -> dict[str, Place]:
        """Those that have a number now."""
        return {name: each for name, each in self._held.items() if is_number(each.value())}

    @property
    def growing(self) -> dict[str, Place]:
        """Those that have a list now."""
        return {name: each for name, each in self._held.items() if type(each.value()) in GROWING}

    def given(self, batch: Batch) -> Batch:
        """With the numbers that are held."""
        return batch | {name: place.value() for name, place in self.held.items()}

    def form(self, batch: Batch) -> tuple[Any, ...]:
        """The form by which plans are told apart. Equal on ranks that have batches of the same
        form."""
        numbers = {*self.numbers(batch), *self.held}
        values = tuple(
            (name, type(value).__name__ if name in numbers else self._form(name, value))
            for name, value in self.given(batch).items()
        )
        return (*values, *repetitions(batch).items(), *sharing(batch).items())

    def _form(self, name: str, value: Any) -> Any:
        return form(value, _form_of_tensor, name, self._unread)

    def unlike(self, microbatches: Sequence[Batch]) -> str:
        """Why they have no plan together: it runs one graph for each. Empty if they are alike."""
        if len({self.form(batch) for batch in microbatches}) == 1:
            return ""
        return (
            "microbatches that are reduced together differ in their form, and a plan is for one "
            "form"
        )

    def vary(self, batch: Batch) -> str:
        """Why a batch of a form that is new is none for another plan: each value of its numbers and
        strings would need its own. Empty while there have been few for the same tensors."""
        tensors = tuple(
            (path, _form_of_tensor(value))
            for name, given in batch.items()
            for path, value in named_leaves(name, given)
            if isinstance(value, Tensor)
        )
        forms = self._forms.setdefault(tensors, set())
        if len(forms) < _MOST_FORMS:
            forms.add(self.form(batch))
        if self.form(batch) in forms:
            return ""
        why = next((why for name, why in self._fixed.items() if name in batch), "")
        return (
            f"the numbers and strings among the inputs have had more than {_MOST_FORMS} values "
            "for tensors of one form, and each value is another step; give what varies as a tensor"
            f"{why and f' ({why})'}"
        )

    def unfit(self, batch: Batch) -> str:
        """Why a batch has no plan: a plan takes dense tensors, on which sums have other bits than
        on a view with gaps or repeated elements. Empty if there is no such input."""
        leaves = (leaf for name, given in batch.items() for leaf in named_leaves(name, given))
        return next(filter(None, (_unfit(*leaf) for leaf in leaves if _is_tensor(*leaf))), "")

    def _is_optional(self, name: str) -> bool:
        if self._names is not None and name in self._names[: self.positional]:
            return False
        for parameters in self._signatures():
            for parameter in parameters:
                if parameter.kind is parameter.VAR_KEYWORD:
                    return True
                if parameter.name == name and parameter.default is not parameter.empty:
                    return True
        return False


def split(batch: Batch, count: int) -> list[Batch]:
    """The batches of `count` microbatches. Inputs without samples go to each of them."""
    if count == 1:
        return [dict(batch)]
    pieces: list[Batch] = [{} for _ in range(count)]
    samples: int | None = None
    chunks_of: dict[int, tuple[Tensor, ...]] = {}  # the same ones of a tensor that comes twice
    for name, value in batch.items():
        leaves = [leaf for leaf in named_leaves(name, value) if _is_tensor(*leaf)]
        for path, leaf in leaves:
            if leaf.dim() == 0:
                continue
            samples = leaf.shape[0] if samples is None else samples
            if path != name and leaf.shape[0] != samples:  # such as a list of a sample each
                raise ValueError(
                    f"input '{path}': expected {samples} samples, as the inputs before it have, "
                    f"for {count} microbatches to share, got shape {list(leaf.shape)}; give the "
                    "microbatches one by one, to step.accumulate or step.backward"
                )
        for path, leaf in leaves:
            if id(leaf) not in chunks_of:
                chunks_of[id(leaf)] = _chunks(path, leaf, count)
        chunks = [chunks_of[id(leaf)] for _, leaf in leaves]
        for index, piece in enumerate(pieces):
            piece[name] = rebuilt(value, iter([parts[index] for parts in chunks]))
    return pieces


def _chunks(name: str, value: Tensor, count: int) -> tuple[Tensor, ...]:
    if value.dim() == 0:
        return (value,) * count
    if value.shape[0] % count:
        raise ValueError(
            f"input '{name}': expected a number of samples that {count} microbatches "
            f"share, got shape {list(value.shape)}"
        )
    return value.chunk(count)


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_tensor(_: str, value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_container(value: Any) -> bool:
    """Of inputs, which a dataclass is not unless it is a mapping."""
    if isinstance(value, Mapping):
        return True
    one = isinstance(value, (Tensor, np.ndarray)) or dataclasses.is_dataclass(value)
    return isinstance(value, Iterable) and not one and not is_plain(value)


def tensors(batch: Batch) -> list[Tensor]:
    """As a plan takes them."""
    return [
        (value if value.dim() else value.reshape(1)).detach().cpu().resolve_conj().resolve_neg()
        for name, given in batch.items()
        for _, value in named_leaves(name, given)
        if isinstance(value, Tensor)
    ]


def _unfit(path: str, value: Tensor) -> str:
    if value.is_nested or value.layout != torch.strided:
        return f"input '{path}' is a {'nested' if value.is_nested else 'sparse'} tensor"
    if type(value) not in (Tensor, nn.Parameter, DTensor):  # which code may ask for
        return (
            f"input '{path}' is of class {type(value).__name__}, expected a plain tensor, as its "
            ".as_subclass(torch.Tensor) is"
        )
    if is_dense(value.shape, value.stride()) or not (
        value.is_floating_point() or value.is_complex()
    ):
        return ""
    return (
        f"input '{path}' is a view with gaps, of shape {list(value.shape)} and strides "
        f"{list(value.stride())}, on which sums have other bits than on dense data; give its "
        ".contiguous()"
    )


def _form_of_tensor(value: Tensor) -> tuple[Any, ...]:
    if value.is_nested or value.layout != torch.strided:
        return str(value.dtype), "not dense"
    form = str(value.dtype), tuple(value.shape), _strides(value), value.requires_grad
    if not is_itself(value):
        form = *form, "copied"
    if isinstance(value, nn.Parameter):
        form = *form, "parameter"
    attributes = vars(value) if type(value) is Tensor else {}
    return (*form, *sorted(attributes))  # which code may ask for


def _strides(value: Tensor) -> Strides | None:
    """In which a plan has the data; None where it is contiguous."""
    strides = None if value.is_contiguous() else laid_out(value, expanded=False)
    made = torch.empty_strided(value.shape, strides, device="meta") if strides else value
    return None if made.is_contiguous() else strides
