"""What a step gets: the inputs of one rank, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_mlir.step.training_step import ComputeLoss, Loss, required_inputs, signature_of
from fsdp_mlir.support.layouts import Strides, laid_out

Batch = dict[str, Any]


class Inputs:
    """The inputs of a model and its loss function: positional ones first, as arg0, arg1, …"""

    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        self._functions = [loss] if isinstance(loss, ComputeLoss) else [model.forward, loss]
        self._loss = loss
        self._names: list[str] | None = None
        self.positional = 0

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        """A call's inputs, always in the same order. The first call determines which ones they are;
        later calls may leave out, or add, inputs that have a default. TypeError for others."""
        if len(args) == 1 and not kwargs and not isinstance(args[0], Tensor):
            args, kwargs = ((), args[0]) if isinstance(args[0], Mapping) else (tuple(args[0]), {})
        if self._names is None:
            behind = required_inputs(self._loss)
            if not kwargs and len(args) > len(behind):
                # The last ones are the loss function's.
                cut = len(args) - len(behind)
                args, kwargs = args[:cut], dict(zip(behind, args[cut:], strict=True))
            self.positional = len(args)
            self._names = [*(f"arg{i}" for i in range(len(args))), *kwargs]
        names = self._names
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        changed = set(given) ^ set(names)
        if len(args) + len(kwargs) != len(given) or not all(map(self._is_optional, changed)):
            expected = ", ".join(f"'{name}'" for name in names)
            got = ", ".join([f"'{key}'" for key in kwargs] + [f"{len(args)} by position"])
            raise TypeError(f"expected the inputs {expected}, got {got}")
        return {name: given[name] for name in [*names, *sorted(changed)] if name in given}

    def _is_optional(self, name: str) -> bool:
        if self._names is not None and name in self._names[: self.positional]:
            return False
        for function in self._functions:
            try:
                parameters = signature_of(function).parameters.values()
            except (TypeError, ValueError):  # no loss function, a builtin without a signature
                continue
            for parameter in parameters:
                if parameter.kind is parameter.VAR_KEYWORD:
                    return True
                if parameter.name == name and parameter.default is not parameter.empty:
                    return True
        return False


def split(batch: Batch, count: int) -> list[Batch]:
    """The batches of `count` microbatches. Inputs without samples go to each of them."""
    pieces: list[Batch] = [{} for _ in range(count)]
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            for piece in pieces:
                piece[name] = value
            continue
        if count > 1 and value.shape[0] % count:
            raise ValueError(
                f"input '{name}': expected a number of samples that {count} microbatches "
                f"share, got shape {list(value.shape)}"
            )
        parts = value.chunk(count) if count > 1 else (value,)
        for piece, part in zip(pieces, parts, strict=True):
            piece[name] = part
    return pieces


def tensors(batch: Batch) -> list[Tensor]:
    """As a plan takes them."""
    return [
        (value if value.dim() else value.reshape(1)).detach().cpu().resolve_conj().resolve_neg()
        for value in batch.values()
        if isinstance(value, Tensor)
    ]


def form(batch: Batch) -> tuple[Any, ...]:
    """The form by which plans are told apart. Equal on ranks that have batches of the same form."""
    return tuple(
        (name, str(value.dtype), tuple(value.shape), _strides(value))
        if isinstance(value, Tensor)
        else (name, repr(value))
        for name, value in batch.items()
    )


def _strides(value: Tensor) -> Strides | None:
    """In which a plan has the data; None where it is contiguous."""
    strides = None if value.is_contiguous() else laid_out(value, expanded=False)
    made = torch.empty_strided(value.shape, strides, device="meta") if strides else value
    return None if made.is_contiguous() else strides
