"""The model that a step is recorded from: stand-ins without data."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_mlir.support.fakes import fake_tensor
from fsdp_mlir.support.layouts import placeholder
from fsdp_mlir.view.model_view import ModelView


class _FakeMode(FakeTensorMode):
    @property
    def avoid_device_init(self) -> bool:
        """No device must be queried, even if torch.cuda says that there is one."""
        return True


class FakeModel:
    """Stand-ins for a view's state and inputs: tensors without data on the requested device,
    wherever the model's own are. Each recording has its own stand-ins.

    On meta, attention would take a different path than on that device.
    """

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.mode = _FakeMode(allow_non_fake_inputs=True)
        device = view.asked.device.type
        place = torch.device(device)
        with self.mode:
            self.params = [
                view.parameter(
                    param,
                    fake_tensor(self.mode, param.tensor.shape, None, view.computed(param), place),
                )
                for param in view.params
            ]
            self.buffers = [placeholder(each.tensor, device=device) for each in view.buffers]
            self.inputs = [
                placeholder(example, expanded=False, device=device)
                for example in view.inputs.values()
            ]
        examples = zip(self.inputs, view.inputs.items(), strict=True)
        # Stand-ins of inputs and buffers, by their ids, with what they stand for.
        self.others = {id(x): (f"input '{name}'", example) for x, (name, example) in examples} | {
            id(x): (f"buffer '{state.name}'", state.tensor)
            for x, state in zip(self.buffers, view.buffers, strict=True)
        }
        names = [state.name for state in view.states]
        self.slots = view.slots(dict(zip(names, (*self.params, *self.buffers), strict=True)))
