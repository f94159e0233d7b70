"""A model as capture sees it: its state, its units, and one training step on example inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_mlir.modules import hooks, weights
from fsdp_mlir.modules.outside import asks_for_numbers
from fsdp_mlir.modules.placed import local, placed
from fsdp_mlir.modules.sharding import class_name
from fsdp_mlir.policy.policy import Units, read_policy
from fsdp_mlir.step import numbers
from fsdp_mlir.step.nested import repetitions
from fsdp_mlir.step.training_step import TrainingStep, by_position, example_inputs, split_constants
from fsdp_mlir.support.errors import located, source_of
from fsdp_mlir.view.asked import Asked


def constant_name(index: int) -> str:
    """The name of a tensor constant in capture.json and in the file of weights."""
    return f"(constant).{index}"


@dataclass(frozen=True)
class ModelView:
    """Parameters in FSDP2's order, buffers, and inputs by name; scalar inputs have a dim 0 of one
    element. None of it is modified."""

    asked: Asked
    step: TrainingStep
    units: Units
    params: list[weights.State]
    buffers: list[weights.State]
    inputs: dict[str, Tensor]

    @staticmethod
    def of(asked: Asked) -> ModelView:
        """CaptureError for a model that cannot be trained as a graph."""
        model = asked.model
        units = Units(read_policy(asked.config), model)
        given, constants = split_constants(asked.args, asked.kwargs)
        inputs = example_inputs(model, given)
        # The examples of a capture for other processes do not say what is the same there.
        repeated = repetitions(inputs) if asked.outputs is not None else {}
        scalars = {name for name, value in inputs.items() if value.dim() == 0}
        inputs |= {name: inputs[name].reshape(1) for name in scalars}
        stands_in = asked.numbers or asked.held or asked.unread or asked.drawn
        if stands_in and (function := asks_for_numbers(model, asked.loss)) is not None:
            name = function.__qualname__
            raise located(source_of(function), f"'{name}' asks for the class of a number")
        if asked.numbers or asked.held or asked.drawn:
            inputs[numbers.INPUT] = numbers.Taken().input({})
        step = TrainingStep(
            model,
            list(given),
            len(asked.args),
            asked.loss,
            constants,
            asked.outputs,
            scalars,
            {name: value for name, value in given.items() if not isinstance(value, Tensor)},
            asked.numbers,
            asked.held,
            asked.growing,
            repeated,
            frozenset(asked.unread),
            asked.assume,
            asked.relied,
            asked.draws,
            asked.drawn,
            asked.counting,
            asked.casts is not None,
            order=[*by_position(len(asked.args)), *asked.kwargs],
        )
        params = [_part(param) for param in weights.parameters(model)]
        if not any(param.tensor.requires_grad for param in params):
            raise located(
                source_of(model), "no parameter requires grad: expected at least one to train"
            )
        _check_modules(model)
        for buffer in weights.buffers(model):
            if isinstance(buffer.tensor, DTensor):
                raise located(source_of(model), f"buffer '{buffer.name}' is a DTensor")
            if buffer.tensor.requires_grad:
                text = f"buffer '{buffer.name}' requires grad but is no parameter"
                raise located(source_of(model), f"{text}; register it with register_parameter")
        for param in weights.parameters(model):
            hooks.check_parameter(param.name, param.tensor)
            if param.tensor.dim() == 0 and not units.ignores(param):
                raise located(
                    source_of(model),
                    f"parameter '{param.name}' is a scalar, expected at least one dimension; "
                    "reshape it to [1]",
                )
        view = ModelView(asked, step, units, params, weights.buffers(model), inputs)
        if asked.save_weights:
            weights.warn_of_other_names(model)
        return view

    @property
    def model(self) -> nn.Module:
        return self.step.model

    @property
    def states(self) -> Iterable[weights.State]:
        return (*self.params, *self.buffers)

    def is_data(self, name: str) -> bool:
        """Whether the input of this name is one of the batch, and not that of its numbers."""
        return name != numbers.INPUT

    def computed(self, param: weights.State) -> torch.dtype:
        """The dtype in which the step sees a parameter."""
        precision = self.units.precision_of(param)
        dtype = param.tensor.dtype
        return precision.computed(dtype) if precision else dtype

    def parameter(self, param: weights.State, data: Tensor) -> nn.Parameter:
        """A leaf that holds `data` as the step sees this parameter."""
        value = data if param.spec is None else placed(data, param.spec)
        leaf = nn.Parameter(value, requires_grad=param.tensor.requires_grad)
        precision = self.units.precision_of(param)
        if precision and param.tensor.requires_grad:
            leaf.grad_dtype = precision.grad_dtype(param.tensor.dtype, self.asked.device.version)
        return leaf

    def slots(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Converts tensors by the first name of a state to tensors by the attributes that hold
        it."""
        slots = weights.slots(self.model, self.states)
        return {slot: tensors[name] for slot, name in slots.items()}


def _part(param: weights.State) -> weights.State:
    """With this rank's part in place of a DTensor."""
    if not isinstance(param.tensor, DTensor):
        return param
    part = nn.Parameter(local(param.tensor.detach()), requires_grad=param.tensor.requires_grad)
    return replace(param, tensor=part, spec=param.tensor._spec)


def _check_modules(model: nn.Module) -> None:
    """CaptureError for modules whose step involves communication between ranks, or whose parameters
    cannot be replaced."""
    for name, module in model.named_modules():
        for child, held in module.named_children():
            if getattr(module, child, None) is not held:
                raise located(
                    source_of(model),
                    f"module '{f'{name}.{child}' if name else child}' is hidden by an attribute "
                    f"'{child}' of the class '{class_name(module)}', so that code cannot call it; "
                    "rename one of them",
                )
        if isinstance(module, torch.jit.ScriptModule):
            raise located(
                source_of(model),
                f"module '{name}' is a ScriptModule, whose parameters cannot be replaced by what a "
                "unit gathers; use the module that was scripted",
            )
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            raise located(
                source_of(model),
                f"module '{name}' is a SyncBatchNorm in train mode, whose statistics are those of "
                "all ranks, which cannot be captured; use BatchNorm, whose statistics are each "
                "rank's",
            )


def shared_memory(view: ModelView, constants: list[Tensor]) -> dict[str, list[str]]:
    """By name: for each buffer or constant, the states and constants whose memory overlaps it."""
    named = [(state.name, state.tensor) for state in view.states]
    named += [(constant_name(i), tensor) for i, tensor in enumerate(constants)]
    by_storage: dict[int, list[tuple[str, tuple[int, int]]]] = {}
    for name, tensor in named:
        if not tensor.is_meta and tensor.numel():
            key = tensor.untyped_storage()._cdata
            by_storage.setdefault(key, []).append((name, _extent(tensor)))
    return {
        name: others
        for members in by_storage.values()
        for name, (begin, end) in members
        if (others := [n for n, (b, e) in members if n != name and b < end and begin < e])
    }


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte and the byte behind the last of a tensor in its storage; strides are >= 0."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    begin = tensor.storage_offset()
    size = tensor.element_size()
    return begin * size, (begin + last + 1) * size


def check_shared_memory(view: ModelView, constants: list[Tensor], written: set[str]) -> None:
    """CaptureError if two states share memory and one of them changes in the step.

    Each has memory of its own in the compiled step, so the other would not see the change.
    `written` are the states and constants that the step writes in place.
    """
    trained = {param.name for param in view.params if param.tensor.requires_grad}
    for name, others in shared_memory(view, constants).items():
        for other in others:
            if name in trained and other in trained:
                continue  # FSDP2 gives each its own shards
            if other in written or other in trained:
                what = "trains" if other in trained else "changes in place"
                raise located(
                    source_of(view.model),
                    f"'{name}' shares memory with '{other}', which the step {what}, and would not "
                    "follow it; compute it from the other in forward",
                )
