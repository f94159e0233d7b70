"""The model that a step is recorded from: stand-ins without data."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_mlir.view.layouts import placeholder
from fsdp_mlir.view.model_view import ModelView


class FakeModel:
    """Stand-ins of a view's state and inputs: CPU tensors without data, whatever the device. Each
    recording has its own.

    On meta, attention would take another path than on CPU tensors.
    """

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode:
            self.params = [
                view.parameter(
                    param,
                    torch.empty(param.tensor.shape, dtype=view.computed(param), device="cpu"),
                )
                for param in view.params
            ]
            self.buffers = [placeholder(buffer.tensor) for buffer in view.buffers]
            self.inputs = [placeholder(example, expanded=False) for example in view.inputs.values()]
        names = [state.name for state in view.states]
        self.slots = view.slots(dict(zip(names, (*self.params, *self.buffers), strict=True)))
