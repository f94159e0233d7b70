"""torchtitan's Trainer with compiled steps: docs/adapters.md#torchtitan.

Nothing is imported from torchtitan, since importing it takes the machine's accelerator.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import fsdp_mlir


class CompiledTraining:
    """Comes before torchtitan.train.Trainer in the bases: forward, loss and backward of a
    microbatch are compiled if the model is in one part and neither is split by tokens; everything
    else is the Trainer's.

    `compile_options` are further options of fsdp_mlir.compile.
    """

    compile_options: Mapping[str, Any] = MappingProxyType({})
    _compiled: fsdp_mlir.Step | None = None

    def forward_backward_step(
        self: Any, *, input_dict: dict[str, Tensor], labels: Tensor, global_valid_tokens: Any
    ) -> Tensor:
        """As the Trainer's."""
        if self.parallel_dims.pp_enabled or self.parallel_dims.cp_enabled:
            return super().forward_backward_step(  # type: ignore[misc]
                input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
            )
        inputs, labels, extra_inputs, extra = self.post_dataloading_process(input_dict, labels)
        if self._compiled is None:
            self._compiled = fsdp_mlir.compile(
                self.model_parts[0],
                compute_loss=self._loss_of,
                optimizer=self.optimizers.optimizers[0],
                **self.compile_options,
            )
        # An input, so that one plan serves any number of tokens.
        tokens = torch.as_tensor(global_valid_tokens, dtype=torch.float32)
        with self.train_context():
            loss: Tensor = self._compiled.backward(
                _inputs=inputs, _labels=labels, _tokens=tokens, **extra_inputs, **extra
            )
        return loss

    def _loss_of(
        self: Any, model: nn.Module, _inputs: Tensor, _labels: Tensor, _tokens: Tensor, **more: Any
    ) -> Tensor:
        with self.maybe_enable_amp:
            loss: Tensor = self.loss_fn(model(_inputs, **more), _labels) / _tokens
        return loss
