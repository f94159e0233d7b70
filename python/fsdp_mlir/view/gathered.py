"""Which parameters code sees whole while a step is recorded: those of units that are gathered.

Before a unit's forward, and after it if the unit is resharded, its modules hold the sharded
parameters, in their own dtype; after it those that groups of ranks keep, in the dtype in which they
were gathered, if `reshard_after_forward` is a number of ranks. Code may look at these
(`next(model.parameters()).dtype`), but a plan has no calls on them: a parameter is gathered where
its unit runs, and its gradient reduced. In backward a unit is whole from where the gradient of its
output comes by until those of its inputs have been made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_mlir.modules.placed import local, placed
from fsdp_mlir.modules.weights import State, modules_by_path
from fsdp_mlir.policy.unit_entry import Entries
from fsdp_mlir.support.fakes import fake_tensor
from fsdp_mlir.view.model_view import ModelView
from fsdp_mlir.view.stand_ins import guarded

# What holds a parameter, under which name; the whole one, and stand-ins of it before its unit is
# gathered, and after it is freed.
_Slot = tuple[dict[str, Any], str, Tensor, Tensor, Tensor]


class Gathered:
    """`wholes` are leaves of the parameters of `view`. To be made where tensors of the recording
    are made."""

    def __init__(self, view: ModelView, wholes: Sequence[Tensor], entries: Entries) -> None:
        self._entries = entries
        self.names: dict[int, str] = {}  # by the ids of tensors that no call of a step may take
        pairs = zip(wholes, view.params, strict=True)
        self._wholes = {id(whole): param.name for whole, param in pairs}
        self._slots: dict[str, list[_Slot]] = {}
        self._after_forward: list[Tensor] = []  # what the slots hold
        modules = modules_by_path(view.model)
        for param, whole in zip(view.params, wholes, strict=True):
            unit = entries.unit_of(param)
            if unit is None:
                continue
            mode = getattr(local(whole), "fake_mode", None)
            stand_ins = sharded, left = _sharded(view, param, mode)
            self.names |= {id(x): param.name for each in stand_ins for x in (each, local(each))}
            held = set()
            for name in (param.name, *param.aliases):
                path, _, attribute = name.rpartition(".")
                slots = modules[path]._parameters
                if (id(slots), attribute) not in held:
                    held.add((id(slots), attribute))
                    self._slots.setdefault(unit, []).append(
                        (slots, attribute, whole, sharded, left)
                    )

    def gather(self, unit: str) -> None:
        for slots, attribute, whole, _, _ in self._slots.get(unit, ()):
            slots[attribute] = whole

    def free(self, unit: str) -> None:
        for slots, attribute, _, _, left in self._slots.get(unit, ()):
            slots[attribute] = left

    def reshard(self, unit: str) -> None:
        for slots, attribute, _, sharded, _ in self._slots.get(unit, ()):
            slots[attribute] = sharded

    def guarded(self, others: Mapping[int, tuple[str, Tensor]]) -> AbstractContextManager[None]:
        """In the body, which is recorded, code asks nothing of a parameter that these tensors do
        not know, nor of `others` (FakeModel.others)."""
        return guarded(self.names, self._wholes, others)

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """In the body, which runs forward, units are gathered and freed. Before and after it all
        parameters are whole."""
        for slots, attribute, _, sharded, _ in chain(*self._slots.values()):
            slots[attribute] = sharded
        self._entries.gathered = self
        try:
            yield
        finally:
            self._entries.gathered = None
            every = chain(*self._slots.values())
            self._after_forward = [slots[attribute] for slots, attribute, *_ in every]
            for unit in self._slots:
                self.gather(unit)

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """The same for the backward of what was run in `in_forward`."""
        every = chain(*self._slots.values())
        for (slots, attribute, *_), held in zip(every, self._after_forward, strict=True):
            slots[attribute] = held
        self._entries.gathered, self._entries.differentiates = self, True
        try:
            yield
        finally:
            self._entries.gathered, self._entries.differentiates = None, False
            for unit in self._slots:
                self.gather(unit)


def _sharded(
    view: ModelView, param: State, mode: FakeTensorMode | None
) -> tuple[nn.Parameter, nn.Parameter]:
    """Stand-ins of what FSDP2 shows of a parameter before its unit is gathered, and after it is
    freed; without data in a `mode`."""
    device, trained = torch.device(view.asked.device.type), param.tensor.requires_grad

    def stand_in(shape: Sequence[int], dtype: torch.dtype, place: Any) -> nn.Parameter:
        if mode is not None:
            data: Tensor = fake_tensor(mode, shape, None, dtype, device)
        else:
            data = torch.empty(shape, dtype=dtype, device=device)
        return nn.Parameter(place(data), requires_grad=trained)

    shown, dtype = view.asked.shown, param.tensor.dtype
    record = shown.records.get(param.name) if shown else None
    if record is None:
        alone = stand_in(param.tensor.shape, dtype, lambda data: data)
        return alone, alone
    own = record.sharded_param
    sharded = stand_in(own._local_tensor.shape, dtype, lambda data: placed(data, own._spec))
    if record.post_forward_mesh_info in (None, record.mesh_info):
        return sharded, sharded
    size, place = record.sharded_post_forward_size, record.to_sharded_post_forward_dtensor
    return sharded, stand_in(size, view.computed(param), place)
