"""Compiled steps in loops of Lightning: docs/adapters.md#lightning.

Nothing is imported from Lightning: `lightning` and `pytorch_lightning` have the same classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import fsdp_mlir
from fsdp_mlir.integrations.scaled import backward_over
from fsdp_mlir.modules import sharding
from fsdp_mlir.step.outputs import scalar_of

ComputeLoss = Callable[..., Tensor]


def compile(
    fabric: Any,
    model: nn.Module,
    optimizer: Any,
    compute_loss: ComputeLoss | None = None,
    **options: Any,
) -> fsdp_mlir.Step:
    """A step for the model and the optimizer that Fabric's `setup` returned under a
    ModelParallelStrategy. Its `backward(batch)` replaces the loss and `fabric.backward(loss)`.

    `compute_loss(model, ...)` gets the model, in Fabric's precision, and the batch; without it the
    model gets the batch, and returns the loss. `options` are further options of fsdp_mlir.compile.
    Raises ValueError if there is a gradient scaler.
    """
    precision = fabric.strategy.precision
    _check_no_scaler(precision)

    def loss_of(inner: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        forward = _Forward(inner, precision)
        if compute_loss is None:
            return scalar_of(forward(*args, **kwargs))
        return compute_loss(forward, *args, **kwargs)

    if compute_loss is not None:
        loss_of.__signature__ = inspect.signature(compute_loss)  # type: ignore[attr-defined]
    given = getattr(optimizer, "optimizer", optimizer)
    return fsdp_mlir.compile(model.module, compute_loss=loss_of, optimizer=given, **options)


def _check_no_scaler(precision: Any) -> None:
    if getattr(precision, "scaler", None) is not None:
        raise ValueError("expected precision without a gradient scaler, got '16-mixed'")


class _Forward:
    """A module in Fabric's precision, without the check in Fabric's wrapper that Fabric itself runs
    the backward."""

    def __init__(self, module: nn.Module, precision: Any) -> None:
        self._module = module
        self._precision = precision

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._precision.convert_input((args, kwargs))
        with self._precision.forward_context():
            output = self._module(*args, **kwargs)
        return self._precision.convert_output(output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class CompiledTraining:
    """Comes before LightningModule in the bases. In training_step, `self.compiled(self.model,
    compute_loss, *batch)` replaces the loss. Its arguments are the module that fully_shard has
    sharded, a function from that module and the batch to the loss, and the batch.

    Lightning's backward then only stores the gradients (of the loss divided by
    accumulate_grad_batches) where it would have computed them. `compile_options` are further
    options of fsdp_mlir.compile.
    """

    compile_options: dict[str, Any] | None = None
    _step: fsdp_mlir.Step | None = None
    _gradients: list[tuple[nn.Parameter, Tensor]] | None = None

    def compiled(
        self: Any, model: nn.Module, compute_loss: ComputeLoss, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The loss, after its backward."""
        if self._step is None:
            _check_no_scaler(self.trainer.precision_plugin)
            count = self.trainer.accumulate_grad_batches if self.automatic_optimization else 1

            def loss_of(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
                return backward_over(compute_loss(model, *args, **kwargs), count)

            loss_of.__signature__ = inspect.signature(compute_loss)  # type: ignore[attr-defined]
            optimizer = self.trainer.optimizers[0]
            options = self.compile_options or {}
            self._step = fsdp_mlir.compile(
                model, compute_loss=loss_of, optimizer=optimizer, **options
            )
        sharding.reshard(
            sharding.groups(model)
        )  # a validation leaves the root's parameters unsharded
        before = [(param, param.grad) for param in model.parameters()]
        if self.automatic_optimization:  # which clears gradients before backward
            for param, _ in before:
                param.grad = None
        loss = self._step.backward(*args, **kwargs)
        if self.automatic_optimization:
            made = [(param, param.grad) for param, _ in before]
            self._gradients = [(param, grad) for param, grad in made if grad is not None]
            for param, grad in before:
                param.grad = grad
        return loss

    def backward(self: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """As LightningModule's, unless `compiled` made the loss."""
        if self._gradients is None:
            super().backward(loss, *args, **kwargs)  # type: ignore[misc]
            return
        for param, grad in self._gradients:
            if param.grad is None:
                param.grad = grad
            else:
                param.grad += grad
        self._gradients = None
