"""Where modules have their hooks; and hooks of parameters and optimizers, which no plan calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fsdp_mlir.support.errors import CaptureError, in_torch, prefixed, source_of

# Of modules, by what registers them; of all modules.
HOOKS = {
    "_forward_pre_hooks": "register_forward_pre_hook",
    "_forward_hooks": "register_forward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
    "_backward_hooks": "register_full_backward_hook",
}
GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
# Attributes of nn.Module that do not affect a step.
STATE_DICT_HOOKS = {
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
}


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
        # A node shows its hooks to an additional hook.
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


class AfterStep:
    """Calls a method after a step that is expected of the optimizer itself, while the method's
    object is there. A plan that updates in the optimizer's place need not."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, method: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._method = weakref.WeakMethod(method)
        self._is_expected = False

    def expect(self) -> None:
        self._is_expected = True
        if self._optimizer is not None:
            self._optimizer.register_step_post_hook(self)
            self._optimizer = None  # which has this now

    def forget(self) -> None:
        self._is_expected = False

    def __call__(self, *_: Any) -> None:
        method = self._method()
        if method is not None and self._is_expected:
            self._is_expected = False
            method()


def of_step(optimizer: torch.optim.Optimizer) -> str:
    """Describes what runs around or in place of the step of the optimizer's class; empty if nothing
    does."""
    for method, hooks in (
        ("Optimizer.register_step_pre_hook", optimizer._optimizer_step_pre_hooks),
        ("Optimizer.register_step_post_hook", optimizer._optimizer_step_post_hooks),
        ("register_optimizer_step_pre_hook", _global_optimizer_pre_hooks),
        ("register_optimizer_step_post_hook", _global_optimizer_post_hooks),
    ):
        for hook in hooks.values():
            if not isinstance(hook, AfterStep):
                return f"the hook {named(hook)} of {method}"
    other = _other_step(optimizer)
    return "" if other is None else f"{named(other)} as optimizer.step"


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
