"""Which parameters code sees whole while a step is recorded: those of units that are gathered.

Before a unit's forward, and after it if the unit is resharded, its modules hold the sharded
parameters, in their own dtype. Code may look at these (`next(model.parameters()).dtype`), but a
plan has no calls on them: a parameter is gathered where its unit runs, and its gradient reduced.
In backward all are whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_mlir.modules.placed import local, placed
from fsdp_mlir.modules.weights import State, modules_by_path
from fsdp_mlir.policy.unit_entry import Entries
from fsdp_mlir.view.model_view import ModelView


class Gathered:
    """`wholes` are leaves of the parameters of `view`. To be made where tensors of the recording
    are made."""

    def __init__(self, view: ModelView, wholes: Sequence[Tensor], entries: Entries) -> None:
        self._entries = entries
        self.names: dict[int, str] = {}  # by the ids of tensors that no call of a step may take
        self._slots: dict[str, list[tuple[dict[str, Any], str, Tensor, Tensor]]] = {}
        modules = modules_by_path(view.model)
        for param, whole in zip(view.params, wholes, strict=True):
            unit = entries.unit_of(param)
            if unit is None:
                continue
            sharded = _sharded(view, param)
            self.names |= {id(sharded): param.name, id(local(sharded)): param.name}
            held = set()
            for name in (param.name, *param.aliases):
                path, _, attribute = name.rpartition(".")
                slots = modules[path]._parameters
                if (id(slots), attribute) not in held:
                    held.add((id(slots), attribute))
                    self._slots.setdefault(unit, []).append((slots, attribute, whole, sharded))

    def gather(self, unit: str) -> None:
        for slots, attribute, whole, _ in self._slots.get(unit, ()):
            slots[attribute] = whole

    def free(self, unit: str) -> None:
        for slots, attribute, _, sharded in self._slots.get(unit, ()):
            slots[attribute] = sharded

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """In the body, which runs forward, units are gathered and freed. Before and after it all
        parameters are whole."""
        for unit in self._slots:
            self.free(unit)
        self._entries.gathered = self
        try:
            yield
        finally:
            self._entries.gathered = None
            for unit in self._slots:
                self.gather(unit)


def _sharded(view: ModelView, param: State) -> nn.Parameter:
    """A stand-in of what FSDP2 shows of a parameter that is not gathered."""
    shown = view.asked.shown
    own = shown.params.get(param.name) if shown else None
    device, trained = view.asked.device.type, param.tensor.requires_grad
    shape = param.tensor.shape if own is None else own._local_tensor.shape
    data = torch.empty(shape, dtype=param.tensor.dtype, device=device)
    return nn.Parameter(data if own is None else placed(data, own._spec), requires_grad=trained)
