"""A model's parameters and buffers: FSDP2's order, ties, and checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.nn.parameter import UninitializedTensorMixin

from fsdp_mlir.modules import hooks
from fsdp_mlir.support.errors import located, prefixed, source_of, warn


@dataclass(frozen=True)
class State:
    """A parameter or buffer under its first name; `aliases` are its other qualified names."""

    name: str
    tensor: Tensor
    aliases: tuple[str, ...]
    persistent: bool = True
    spec: DTensorSpec | None = None  # of the DTensor whose local part `tensor` is


def modules_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """Every path to every module. Unlike get_submodule, this finds one whose name is that of an
    attribute of the class."""
    return dict(model.named_modules(remove_duplicate=False))


def slots(model: nn.Module, states: Iterable[State]) -> dict[str, str]:
    """A name for each attribute of a module that holds one of `states`, and the state's first name.
    The attributes of a module that is in the model under several paths are given once."""
    found: dict[tuple[int, str], tuple[str, str]] = {}
    modules = modules_by_path(model)
    for state in states:
        for name in (state.name, *state.aliases):
            path, _, attribute = name.rpartition(".")
            found.setdefault((id(modules[path]), attribute), (name, state.name))
    return dict(found.values())


def of_model(model: nn.Module) -> list[nn.Parameter]:
    """What model.parameters() gives, unless its class has a method of this name that gives some of
    them."""
    return [param for _, param in nn.Module.named_parameters(model)]


def positions(model: nn.Module) -> dict[str, int]:
    """By a parameter's first name, its index in `of_model`."""
    index = {id(param): index for index, param in enumerate(of_model(model))}
    return {state.name: index[id(state.tensor)] for state in parameters(model)}


Members = Callable[[nn.Module], Iterable[tuple[str, Tensor | None]]]


def _modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every path to every module, children before their parent: FSDP2's post-order."""
    for name, child in module._modules.items():
        if child is not None:
            yield from _modules(child, f"{prefix}{name}.")
    yield prefix, module


def _collect(model: nn.Module, members: Members) -> list[tuple[str, nn.Module, str, Tensor]]:
    return [
        (f"{prefix}{name}", module, name, tensor)
        for prefix, module in _modules(model)
        for name, tensor in members(module)
        if tensor is not None
    ]


def _states(model: nn.Module, members: Members) -> list[State]:
    found: dict[int, list[tuple[str, nn.Module, str, Tensor]]] = {}
    for entry in _collect(model, members):
        found.setdefault(id(entry[3]), []).append(entry)
    return [
        State(
            entries[0][0],
            entries[0][3],
            tuple(entry[0] for entry in entries[1:]),
            any(name not in module._non_persistent_buffers_set for _, module, name, _ in entries),
        )
        for entries in found.values()
    ]


def parameters(model: nn.Module) -> list[State]:
    """The parameters in FSDP2's order; CaptureError for one that FSDP2 cannot shard."""
    states = _states(model, lambda module: module._parameters.items())
    for state in states:
        tensor = state.tensor
        fault = None
        if isinstance(tensor, UninitializedTensorMixin):
            fault = "is not initialised; run the model once before capture"
        elif tensor.layout != torch.strided:
            fault = f"has layout '{tensor.layout}', expected 'torch.strided'"
        elif not tensor.is_contiguous():
            fault = "is not contiguous; make it so with .contiguous()"
        if fault:
            raise located(source_of(model), f"parameter '{state.name}' {fault}")
    return states


def saved_name(name: str) -> str:
    """As state_dict() names it: without the prefix of checkpoint_wrapper."""
    return name.replace(_CHECKPOINT_PREFIX, "")


def buffers(model: nn.Module) -> list[State]:
    """The buffers, in the same order of modules; a tensor with several names is given once."""
    return _states(model, lambda module: module._buffers.items())


def warn_of_other_names(model: nn.Module) -> None:
    """A warning if the model saves itself under names other than its parameters' and buffers', with
    the innermost module that does so: what runs without Python cannot follow that."""
    for prefix, module in _modules(model):
        makers = [*module._state_dict_pre_hooks.values(), *module._state_dict_hooks.values()]
        for method in ("state_dict", "_save_to_state_dict", "get_extra_state"):
            overridden = getattr(type(module), method)
            if overridden is not getattr(nn.Module, method):
                makers.append(overridden)
        if makers and _saves_otherwise(module):
            name = f"module '{prefix[:-1]}'" if prefix else "the model"
            message = (
                f"{name} saves itself under other names or values, by {hooks.named(makers[0])}: "
                "fsdp-run --save-weights writes parameters and buffers by their own names"
            )
            warn(prefixed(source_of(makers[0]), message))
            return


def _saves_otherwise(module: nn.Module) -> bool:
    own = {
        f"{prefix}{name}": tensor
        for prefix, each in _modules(module)
        for name, tensor in (*each._parameters.items(), *each._buffers.items())
        if tensor is not None and name not in each._non_persistent_buffers_set
    }
    saved = module.state_dict(keep_vars=True)
    return set(saved) != set(own) or any(saved[name] is not own[name] for name in own)
