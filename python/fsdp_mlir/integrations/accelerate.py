"""Compiled steps in a loop of accelerate: docs/adapters.md#accelerate."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn

import fsdp_mlir
from fsdp_mlir.integrations.scaled import backward_over
from fsdp_mlir.step.outputs import scalar_of


def fsdp2_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Makes `prepare` shard with FSDP2 on the CPU, where accelerate has no FSDP.

    Call this before `prepare`. Does nothing on other devices, in a job of one rank, and for FSDP1.
    """
    state = accelerator.state
    if plugin.fsdp_version == 2 and state.distributed_type == DistributedType.MULTI_CPU:
        if state.mixed_precision != "no":
            plugin.set_mixed_precision(state.mixed_precision)
        state.fsdp_plugin = plugin
        state.distributed_type = DistributedType.FSDP
        # Each AcceleratorState() takes it from there again.
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def compile(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    compute_loss: Callable[..., Tensor] | None = None,
    **options: Any,
) -> fsdp_mlir.Step:
    """A step for the model and the optimizer that `prepare` returned. Its `backward(batch)`
    replaces the loss and `accelerator.backward(loss)`: it returns the loss, and adds the gradients
    of the loss divided by `gradient_accumulation_steps`.

    `compute_loss(model, ...)` gets the model and the batch; without it the model gets the batch,
    and returns the loss. `options` are further options of fsdp_mlir.compile. Raises ValueError if
    there is a gradient scaler.
    """
    if accelerator.scaler is not None:
        raise ValueError("expected mixed precision without a gradient scaler, got 'fp16'")
    count = accelerator.gradient_accumulation_steps

    def divided(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        if compute_loss is None:
            loss = scalar_of(model(*args, **kwargs))
        else:
            loss = compute_loss(model, *args, **kwargs)
        return backward_over(loss, count)

    if compute_loss is not None:
        divided.__signature__ = inspect.signature(compute_loss)  # type: ignore[attr-defined]
    given = getattr(optimizer, "optimizer", optimizer)
    return fsdp_mlir.compile(model, compute_loss=divided, optimizer=given, **options)
