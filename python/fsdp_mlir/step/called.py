"""What is called with the inputs of a step: the model and its loss, by their signatures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from inspect import Parameter, Signature, signature
from typing import Any

from torch import nn

from fsdp_mlir.modules.compute_loss import ComputeLoss
from fsdp_mlir.step.training_step import (
    Loss,
    loss_inputs,
    required_inputs,
    signature_of,
)

# Inputs by position and by name.
Call = tuple[tuple[Any, ...], Mapping[str, Any]]

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class Called:
    """A loss function that calls the model itself; otherwise the model, then the loss function."""

    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        self._model = model
        self._loss = loss

    @cached_property
    def takes_one(self) -> bool:
        """Whether it is a function of the model and one input, beside such with defaults: of what
        the loop has as a batch."""
        return isinstance(self._loss, ComputeLoss) and bool(self.one)

    def takes_as_one(self, held: Any) -> bool:
        """Whether it is such a function, and `held` is that input, not a mapping that names it."""
        return self.takes_one and not (isinstance(held, Mapping) and self.one in held)

    @property
    def one(self) -> str:
        """The name of the only input that the model needs, or a function that calls it; empty if
        there is no such."""
        needed = [each.name for each in self._positional if each.default is each.empty]
        return needed[0] if len(needed) == 1 else ""

    def names(self, keys: Iterable[Any]) -> bool:
        """Whether it gives one of its parameters such a name."""
        keys = list(keys)
        signature = self._signature
        own = list(signature.parameters)[len(self._first) :] if signature else []
        return bool({*own, *loss_inputs(self._loss, keys)} & set(keys))

    def with_names(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Inputs of which the last ones are the loss function's, if they come by position only."""
        behind = required_inputs(self._loss)
        if kwargs or len(args) <= len(behind):
            return tuple(args), kwargs
        cut = len(args) - len(behind)
        return tuple(args[:cut]), dict(zip(behind, args[cut:], strict=True))

    def by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The inputs by name, if it is a function that calls the model and takes them so: calls
        that mean the same are the same."""
        names = self._names[: len(args)]
        if len(names) < len(args) or kwargs.keys() & set(names):
            return tuple(args), kwargs
        return (), dict(zip(names, args, strict=True)) | dict(kwargs)

    @cached_property
    def _names(self) -> list[str]:
        """Of the inputs that may come by position or by name; none for a module, whose hooks see
        how they came, and for a function that may hand them on by position."""
        loss = self._loss
        if not isinstance(loss, ComputeLoss) or isinstance(loss.func, nn.Module):
            return []
        try:
            every = list(signature(loss.func, follow_wrapped=False).parameters.values())
        except (TypeError, ValueError):  # a builtin has none
            return []
        if any(each.kind in (each.VAR_POSITIONAL, each.POSITIONAL_ONLY) for each in every):
            return []
        return [each.name for each in every[1:] if each.kind is each.POSITIONAL_OR_KEYWORD]

    def takes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether these can be the inputs, as far as the signatures tell."""
        args, kwargs = self.with_names(args, kwargs)
        if any(not isinstance(name, str) for name in kwargs):
            return False
        if not isinstance(self._loss, ComputeLoss):
            if not kwargs.keys() >= set(required_inputs(self._loss)):
                return False
            beside = loss_inputs(self._loss, list(kwargs))
            kwargs = {name: value for name, value in kwargs.items() if name not in beside}
            if self.has_hooks:
                return True
        signature = self._signature
        try:
            if signature is not None:
                signature.bind(*self._first, *args, **kwargs)
        except TypeError:
            return False
        return True

    @property
    def has_hooks(self) -> bool:
        """Whether hooks of the model get the inputs first, and may change them."""
        if isinstance(self._loss, ComputeLoss):
            return False
        return any(map(_may_change_inputs, self._model._forward_pre_hooks.values()))

    @property
    def _signature(self) -> Signature | None:
        try:
            return signature_of(self._loss if isinstance(self._loss, ComputeLoss) else self._model)
        except (TypeError, ValueError):  # a builtin has none
            return None

    @property
    def _first(self) -> tuple[Any, ...]:
        """What is not of the batch."""
        return (self._model,) if isinstance(self._loss, ComputeLoss) else ()

    @property
    def _positional(self) -> list[Parameter]:
        """The parameters for inputs by position; none if there may be any number."""
        every = list(self._signature.parameters.values()) if self._signature else []
        if any(each.kind is each.VAR_POSITIONAL for each in every):
            return []
        return [each for each in every if each.kind in _POSITIONAL][len(self._first) :]


def _may_change_inputs(hook: Any) -> bool:
    """FSDP2's own, and other hooks of PyTorch, leave them as they are."""
    return not str(getattr(hook, "__module__", "")).startswith("torch.")
