"""transformers' Trainer with compiled steps: docs/adapters.md#transformers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import transformers
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import fsdp_mlir
from fsdp_mlir.integrations.accelerate import fsdp2_on_cpu

# Inputs of the step that no model has.
_ITEMS, _COUNT = "(num_items_in_batch)", "(microbatches)"


class FSDP2OnCPU:
    """Comes before transformers.Trainer in the bases: makes `fsdp` of TrainingArguments work on the
    CPU, too."""

    def create_accelerator_and_postprocess(self: Any) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        arguments = self.args.fsdp_plugin_args
        if arguments is not None and not self.is_fsdp_enabled:
            fsdp2_on_cpu(self.accelerator, FullyShardedDataParallelPlugin(**arguments))
            self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None


class CompiledTraining(FSDP2OnCPU):
    """Comes before transformers.Trainer, or a subclass of it, in the bases. If FSDP2 shards the
    model, what training_step does is compiled, with the Trainer's compute_loss; everything else is
    the Trainer's.

    Microbatches of an update whose gradients are reduced together all run at the first of them,
    unless a subclass has its own training_step. `compile_options` are further options of
    fsdp_mlir.compile.
    """

    compile_options: Mapping[str, Any] = MappingProxyType({})
    _step: fsdp_mlir.Step | None = None
    _step_of: tuple[Any, ...] = ()
    _window: tuple[list[Any], list[Tensor]] = ([], [])  # one update's microbatches and losses

    def get_batch_samples(self: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """As the Trainer's."""
        batches, items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._window = batches, []
        return batches, items

    def training_step(
        self: Any, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """As the Trainer's."""
        if not self._has_step(model, inputs):
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        step = self._step_for(model)
        batches, losses = self._window
        position = next((i for i, batch in enumerate(batches) if batch is inputs), None)
        if position is None or not self._reduces_together(len(batches)):
            return step.backward(self._batch(inputs, num_items_in_batch))
        if position == 0:
            model.set_requires_gradient_sync(True)  # the Trainer's no_sync is on
            losses[:] = step.accumulate([self._batch(x, num_items_in_batch) for x in batches])
        return losses[position]

    def _has_step(self: Any, model: nn.Module, inputs: Any) -> bool:
        accelerator = self.accelerator
        return (
            isinstance(model, FSDPModule)
            and isinstance(inputs, Mapping)
            and accelerator.scaler is None
            and getattr(accelerator, "parallelism_config", None) is None
        )

    def _reduces_together(self: Any, microbatches: int) -> bool:
        options = self.accelerator.gradient_state.plugin_kwargs
        is_own = type(self).training_step is CompiledTraining.training_step
        return (
            microbatches > 1
            and is_own
            and not options.get("sync_each_batch", False)
            # With replicas such a model only defers the all-reduce over them.
            and not getattr(self, "is_distributed_loading_by_transformers", False)
        )

    def _step_for(self: Any, model: nn.Module) -> fsdp_mlir.Step:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if self._step is None or self._step_of != (model, optimizer):
            self._step, self._step_of = None, (model, optimizer)
            self._step = fsdp_mlir.compile(
                model, compute_loss=self._loss_of, optimizer=optimizer, **self.compile_options
            )
        return self._step

    def _batch(self: Any, inputs: Any, num_items_in_batch: Any) -> dict[str, Any]:
        inputs = self._prepare_inputs(inputs)
        self._kind_of_batch = type(inputs)
        count = self.current_gradient_accumulation_steps
        return {**inputs, _ITEMS: num_items_in_batch, _COUNT: count}

    def _loss_of(self: Any, model: nn.Module, **inputs: Any) -> Tensor:
        """The value with which Trainer.training_step begins backward."""
        items, count = inputs.pop(_ITEMS), inputs.pop(_COUNT)
        kind = self._kind_of_batch
        with self.compute_loss_context_manager():
            loss = self.compute_loss(
                model, inputs if kind is dict else kind(inputs), num_items_in_batch=items
            )
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            by_items = self.model_accepts_loss_kwargs and items is not None
            is_scaled = by_items or self.compute_loss_func is not None
        return loss if is_scaled else loss / count


class Trainer(CompiledTraining, transformers.Trainer):
    """transformers.Trainer, with compiled steps if FSDP2 shards the model."""
