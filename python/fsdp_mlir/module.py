"""`FSDPModule`: the methods that FSDP2's fully_shard gives a module, as policy for `compile`.

Arguments, defaults and errors are those of torch.distributed.fsdp.FSDPModule. What is policy is
recorded. What only concerns the schedule on a GPU has no effect, and says so. What a training loop
calls between forward and backward is a NotImplementedError that names the option of `compile`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import nn
from torch.distributed._composable_state import _get_module_state, _insert_module_state, _State
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

_classes: dict[type, type] = {}


class ShardPolicy(_State):
    """What one call of fully_shard says, shared by the modules that it was called on."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: tuple[nn.Module, ...] = ()
        self.params: list[nn.Parameter] = []  # those it manages: no inner call's, none ignored
        self.mesh: DeviceMesh | None = None  # None: all ranks
        # An integer is a number of ranks other than 1 and all.
        self.reshard_after_forward: bool | int | None = None
        self.reshard_after_backward = True
        self.precision = MixedPrecisionPolicy()
        self.offload = False
        self.placements: dict[nn.Parameter, int] = {}  # sharded dimensions other than 0
        self.divide_factor: float | None = None
        self.force_sum = False
        self.compiled = False  # a step was made of it


def policy_of(module: nn.Module) -> ShardPolicy | None:
    """What fully_shard recorded on a module."""
    state = _get_module_state(module)
    return state if isinstance(state, ShardPolicy) else None


class FSDPModule:
    """What fully_shard makes a module an instance of; the module's own class is a base as well."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object of the module's own class, as when a container makes one like itself."""
        own = original_class(cls)
        made = own.__new__(own, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    # --- policy

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Gradients of this module's unit are divided by `factor`, not the number of ranks."""
        self._recorded("set_gradient_divide_factor").divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated: set_gradient_divide_factor."""
        warnings.warn("Use `set_gradient_divide_factor` instead", FutureWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Gradients of this module's unit are summed, and divided after."""
        self._recorded("set_force_sum_reduction_for_comms").force_sum = enable

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """In place of fully_shard's argument; that of the root too."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        for module in self._fsdp_modules(recurse):
            policy = module._recorded("set_reshard_after_forward")
            policy.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether microbatches but the last reshard after backward."""
        for module in self._fsdp_modules(recurse):
            policy = module._recorded("set_reshard_after_backward")
            policy.reshard_after_backward = reshard_after_backward

    # --- what a loop does, and a compiled step does itself

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        if not requires_gradient_sync:
            _refuse("set_requires_gradient_sync", "reduce_each_microbatch=False of compile")

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        if not requires_all_reduce:
            _refuse("set_requires_all_reduce", "all_reduce_each_microbatch=False of compile")

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        if not is_last_backward:
            _refuse("set_is_last_backward", "gradient_accumulation_steps of compile")

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        if enabled:
            _refuse("set_manual_backward_finalization")

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        if reduce_scatter_unused_params:
            _refuse("set_reduce_scatter_unused_params")

    def finalize_backward(self, *, async_op: bool = False) -> None:
        _refuse("finalize_backward")

    def reset_iter_state(self) -> None:
        _refuse("reset_iter_state")

    def unshard(self, async_op: bool = False) -> None:
        _refuse("unshard")

    def reshard(self) -> None:
        _refuse("reshard")

    def set_custom_all_gather(self, comm: Any) -> None:
        _refuse("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        _refuse("set_custom_reduce_scatter")

    def set_all_reduce_hook(self, hook: Callable[..., None], *, stream: Any = None) -> None:
        _refuse("set_all_reduce_hook")

    # --- how a GPU overlaps, without a say in the numbers

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        _check_all_fsdp_modules(modules)
        _pass_over("set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        _check_all_fsdp_modules(modules)
        _pass_over("set_modules_to_backward_prefetch")

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        _pass_over("set_unshard_in_backward")

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        _pass_over("set_keep_unsharded_storage")

    def set_post_optim_event(self, event: Any) -> None:
        _pass_over("set_post_optim_event")

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        _pass_over("set_reduce_scatter_max_input_buffers")

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        _pass_over("set_separate_reduce_scatter_group")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        _pass_over("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        _pass_over("set_symm_mem_for_comm")

    # ---

    def _fsdp_modules(self, recurse: bool) -> Iterator[FSDPModule]:
        assert isinstance(self, nn.Module)
        modules = self.modules() if recurse else [self]
        return (module for module in modules if isinstance(module, FSDPModule))

    def _recorded(self, method: str) -> ShardPolicy:
        """The policy that `method` changes."""
        assert isinstance(self, nn.Module)
        policy = policy_of(self)
        assert policy is not None
        if policy.compiled:
            warnings.warn(
                f"{method}: steps that are compiled already do not follow it; compile again",
                stacklevel=3,
            )
        return policy


def make_fsdp_module(module: nn.Module, policy: ShardPolicy) -> None:
    """Puts FSDPModule before the module's own class. The caller keeps the policy alive."""
    _insert_module_state(module, policy)
    own = type(module)
    if own not in _classes:
        members = {"__deepcopy__": _no_deepcopy, "__module__": own.__module__}
        _classes[own] = type(f"FSDP{own.__name__}", (FSDPModule, own), members)
    module.__class__ = _classes[own]


def original_class(cls: type) -> type:
    """The class that a module has without fully_shard."""
    return cls.__mro__[2] if cls.__mro__[1] is FSDPModule else cls


def class_name(module: nn.Module) -> str:
    return original_class(type(module)).__name__


def _no_deepcopy(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


def _check_all_fsdp_modules(modules: Any) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")


def _refuse(method: str, option: str = "") -> NoReturn:
    instead = f", use {option}" if option else ""
    raise NotImplementedError(f"{method}: a compiled step does not follow it{instead}")


def _pass_over(method: str) -> None:
    warnings.warn(f"{method} has no effect: a plan's order is fixed", stacklevel=3)
