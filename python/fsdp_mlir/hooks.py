"""Hooks of parameters and optimizers, which no compiled step calls: each is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fsdp_mlir.errors import CaptureError, CompileError, in_torch, prefixed, source_of


def check_parameter(name: str, param: Tensor) -> None:
    """CaptureError for a hook on the gradient of `param`."""
    if not param.requires_grad:
        return  # its gradient is never computed
    _refuse_gradient_hook(name, "register_hook", param._backward_hooks)
    _refuse_gradient_hook(
        name, "register_post_accumulate_grad_hook", param._post_accumulate_grad_hooks
    )
    node = torch.autograd.graph.get_gradient_edge(param).node
    for method in ("register_hook", "register_prehook"):
        # A node shows the hooks that it has to one more of them.
        handle = getattr(node, method)(_nothing)
        others = handle.hooks_dict_ref()
        handle.remove()
        _refuse_gradient_hook(name, f"AccumulateGrad.{method}", others)


def _refuse_gradient_hook(name: str, method: str, hooks: Mapping[int, Any] | None) -> None:
    for hook in (hooks or {}).values():
        instead = "FSDP2 never calls it, for it trains shards of its own; change the gradient"
        if method == "register_post_accumulate_grad_hook":
            instead = "a compiled step calls no Python when a gradient is reduced; do it"
        raise CaptureError(
            prefixed(
                source_of(hook),
                f"parameter '{name}' has the hook {named(hook)} of {method}, which would be lost: "
                f"{instead} in the model, or remove the hook",
            )
        )


def _nothing(*_: Any) -> None:
    pass


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """CompileError for a hook of its step, and for a step that is not torch.optim's own."""
    for method, hooks in (
        ("Optimizer.register_step_pre_hook", optimizer._optimizer_step_pre_hooks),
        ("Optimizer.register_step_post_hook", optimizer._optimizer_step_post_hooks),
        ("register_optimizer_step_pre_hook", _global_optimizer_pre_hooks),
        ("register_optimizer_step_post_hook", _global_optimizer_post_hooks),
    ):
        for hook in hooks.values():
            raise CompileError(
                prefixed(
                    source_of(hook),
                    f"the hook {named(hook)} of {method} would be lost: a compiled step never "
                    "calls optimizer.step(); do what it does after the step, or remove it",
                )
            )
    other = _other_step(optimizer)
    if other is not None:
        raise CompileError(
            prefixed(
                source_of(other),
                f"optimizer.step is {named(other)}, which would be lost: a compiled step never "
                f"calls it; expected the step of torch.optim.{type(optimizer).__name__}",
            )
        )


def check_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """CompileError for a hook of its state dict."""
    for method in (
        "register_state_dict_pre_hook",
        "register_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_load_state_dict_post_hook",
    ):
        attribute = "_optimizer_" + method.removeprefix("register_").removesuffix("_hook")
        for hook in getattr(optimizer, f"{attribute}_hooks").values():
            raise CompileError(
                prefixed(
                    source_of(hook),
                    f"the hook {named(hook)} of Optimizer.{method} would be lost: the state of a "
                    "compiled step is its own; change the state dict outside",
                )
            )


def _other_step(optimizer: torch.optim.Optimizer) -> Any:
    """What is around or in place of the class's own step; None where nothing is.

    PyTorch's wrappers, as those of its schedulers, are looked through.
    """
    layer: Any = optimizer.step
    while True:
        layer = getattr(layer, "__func__", layer)
        code = getattr(layer, "__code__", None)
        if code is None or not in_torch(code.co_filename):
            return layer
        if not hasattr(layer, "__wrapped__"):
            return None
        layer = layer.__wrapped__


def named(function: Any) -> str:
    """The quoted name of a function, or that of a callable object's class."""
    return f"'{getattr(function, '__name__', type(function).__name__)}'"
