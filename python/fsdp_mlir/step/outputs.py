"""What a training step returns besides its loss: logits, further losses, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from fsdp_mlir.step.items import is_item
from fsdp_mlir.step.numbers import Number
from fsdp_mlir.support.formulas import Formula, is_symbol, moved, settled, value_of

_LOSS = object()
_PLAIN = (bool, int, float, str, NoneType)


def scalar_of(value: Any) -> Any:
    """The loss in what a loss function, or a model without one, returns: the value itself, its
    `.loss` or entry 'loss', or the first element of a sequence."""
    if isinstance(value, Tensor):
        return value
    if getattr(value, "loss", None) is not None:
        return scalar_of(value.loss)
    if isinstance(value, Mapping) and "loss" in value:
        return scalar_of(value["loss"])
    if isinstance(value, (tuple, list)) and value:
        return scalar_of(value[0])
    raise TypeError(
        "expected the loss: a scalar, a mapping with 'loss', or a sequence that begins with it; "
        f"got '{type(value).__name__}'"
    )


class Outputs:
    """The form of a value that holds the loss, and for each other tensor in it a `slot`: a tensor
    from outside the step, into which the step copies it. A recording has these copies like any
    write to a tensor that the model keeps. Without `keeps` only the loss is wanted."""

    def __init__(self, *, keeps: bool) -> None:
        self.slots: list[Tensor] = []
        self._keeps = keeps
        self._form: TreeSpec | None = None
        self._plain: list[Any] = []  # a number, string or None; the loss; or a slot's index

    def take(
        self,
        value: Any,
        loss: Tensor | None,
        error: Callable[[str], Exception],
        given: Mapping[str, Any],
    ) -> None:
        """Copies the tensors of `value` to their slots. The first call creates these; later calls
        raise `error` if the value has a different form. `given`: the numbers that the step has."""
        if not self._keeps:
            return
        leaves, form = tree_flatten(value)
        plain: list[Any] = []
        tensors: list[Tensor] = []
        for leaf in leaves:
            if loss is not None and leaf is loss:
                plain.append(_LOSS)
            elif is_item(leaf):
                plain.append(_Calculated(moved(leaf.formula, len(tensors))))
                tensors += leaf.tensors
            elif type(leaf) is Number:
                leaf.check()
                plain.append(_Calculated(leaf.formula))
            elif is_symbol(leaf):
                raise leaf.refused()
            elif isinstance(leaf, DTensor):
                raise error(
                    "an output is a DTensor, expected a tensor, as .to_local() or .full_tensor() "
                    "gives"
                )
            elif isinstance(leaf, Tensor):
                plain.append(_Slot(len(tensors)))
                tensors.append(leaf.detach())
            elif isinstance(leaf, _PLAIN):
                plain.append(leaf)
            else:
                raise error(
                    f"an output is of type '{type(leaf).__name__}': expected tensors, numbers, "
                    "strings and None in tuples, lists and mappings"
                )
        if self._form is None:
            self._form, self._plain = form, plain
            with _disable_current_modes():
                self.slots = [torch.zeros(t.shape, dtype=t.dtype) for t in tensors]
        alike = [[_settled(leaf, given) for leaf in each] for each in (plain, self._plain)]
        if form != self._form or alike[0] != alike[1]:
            raise error("the outputs have another form each time")
        for slot, tensor in zip(self.slots, tensors, strict=True):
            if slot.shape != tensor.shape or slot.dtype != tensor.dtype:
                raise error("an output has another shape or dtype each time")
            slot.copy_(tensor)

    def value(self, loss: Tensor | None, given: Mapping[str, Any]) -> Any:
        """What the last step returned, in separate tensors, with `loss` as its loss; just `loss` if
        that is all. `given`: the numbers that it had."""
        if self._form is None:
            return loss
        return tree_unflatten(self.leaves(loss, given), self._form)

    def leaves(self, loss: Tensor | None, given: Mapping[str, Any]) -> Iterator[Any]:
        """Those of `value`, each calculated when it is taken."""

        def made(leaf: Any) -> Any:
            if leaf is _LOSS:
                return loss
            if isinstance(leaf, _Slot):
                return self.slots[leaf.index].clone()
            if isinstance(leaf, _Calculated):
                return value_of(leaf.formula, numbers)
            return leaf

        calculates = any(isinstance(leaf, _Calculated) for leaf in self._plain)
        slots = enumerate(self.slots) if calculates else ()
        numbers = {**given, **{index: s.item() for index, s in slots if s.numel() == 1}}
        return map(made, self._plain)

    def record(self) -> dict[str, Any]:
        """The same without data, as JSON; NotImplementedError for a class that has no JSON form."""
        return {
            "keeps": self._keeps,
            "form": None if self._form is None else treespec_dumps(self._form),
            "leaves": [
                {"loss": True}
                if leaf is _LOSS
                else {"slot": leaf.index}
                if isinstance(leaf, _Slot)
                else {"formula": leaf.formula}
                if isinstance(leaf, _Calculated)
                else {"value": leaf}
                for leaf in self._plain
            ],
            "slots": [[str(s.dtype).removeprefix("torch."), list(s.shape)] for s in self.slots],
        }

    @staticmethod
    def of(record: Mapping[str, Any]) -> Outputs:
        """What `record` gave."""
        made = Outputs(keeps=record["keeps"])
        if record["form"] is not None:
            made._form = treespec_loads(record["form"])
        made._plain = [
            _LOSS
            if "loss" in leaf
            else _Slot(leaf["slot"])
            if "slot" in leaf
            else _Calculated(leaf["formula"])
            if "formula" in leaf
            else leaf["value"]
            for leaf in record["leaves"]
        ]
        made.slots = [
            torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in record["slots"]
        ]
        return made


def no_counts() -> tuple[Outputs, Outputs]:
    """Of training and of evaluation, before they take any."""
    return Outputs(keeps=True), Outputs(keeps=True)


@dataclass
class _Slot:
    """A leaf that lies in a slot."""

    index: int


@dataclass
class _Calculated:
    """A leaf that is calculated from slots of one element, and numbers that are given."""

    formula: Formula


def _settled(leaf: Any, given: Mapping[str, Any]) -> Any:
    if not isinstance(leaf, _Calculated):
        return leaf
    formula = settled(leaf.formula, given)
    return formula[1] if formula[0] == "number" else _Calculated(formula)
