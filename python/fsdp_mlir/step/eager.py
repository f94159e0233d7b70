"""A training step as FSDP2 makes it: forward, backward, clipping and update, each in Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_mlir.step.outputs import scalar_of
from fsdp_mlir.step.training_step import TrainingStep, eval_mode
from fsdp_mlir.support.autocast import without_autocast


@dataclass(frozen=True)
class Clipping:
    """torch.nn.utils.clip_grad_norm_'s arguments."""

    max_norm: float
    norm_type: float

    @property
    def has_plan(self) -> bool:
        """Whether a plan may clip so."""
        return 0 < self.max_norm < math.inf and self.norm_type in (1, 2, math.inf)

    def apply(self, model: nn.Module) -> float:
        """The total norm before."""
        norm = nn.utils.clip_grad_norm_(model.parameters(), self.max_norm, self.norm_type)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def detached(value: Any) -> Any:
    """The same without autograd's graph. A DTensor that is a scalar and the same on all ranks, as a
    loss over parallel logits is, becomes a plain tensor, as a plan returns it."""

    def apart(tensor: Tensor) -> Tensor:
        alike = isinstance(tensor, DTensor) and all(p.is_replicate() for p in tensor.placements)
        return (tensor.to_local() if alike and tensor.dim() == 0 else tensor).detach()

    return torch.utils._pytree.tree_map_only(Tensor, apart, value)


def backward(
    step: TrainingStep,
    microbatches: Sequence[Sequence[Any]],
    *,
    reduce_each: bool = True,
    all_reduce_each: bool = True,
    mean: bool = True,
) -> list[Any]:
    """Leaves gradients of the mean loss of all microbatches, or of the sum, in the parameters;
    returns what `step` returned for each. Gradients are reduced, and all-reduced, for each
    microbatch or with the last."""
    count = len(microbatches)
    sharded = [module for module in step.model.modules() if isinstance(module, FSDPModule)]
    values = []
    for number, batch in enumerate(microbatches):
        last = number == count - 1
        for module in sharded:
            if not reduce_each:
                module.set_requires_gradient_sync(last, recurse=False)
            elif not all_reduce_each:
                module.set_requires_all_reduce(last, recurse=False)
        torch.clear_autocast_cache()  # a plan casts the weights for each microbatch
        value = step.value(batch)
        loss = scalar_of(value)
        if isinstance(loss, FakeTensor):
            raise RuntimeError(
                "the model keeps a tensor without data, from when its step was captured, where it "
                "was not found; call the model once before compile"
            )
        with without_autocast():
            (loss / count if mean and count > 1 else loss).backward()
        values.append(detached(value))
    return values


def mean_loss(values: Sequence[Any]) -> Tensor:
    """Of what `step` returned for each microbatch, as a plan computes it."""
    losses = [scalar_of(value) for value in values]
    return torch.tensor(sum(x.item() for x in losses) / len(losses), dtype=losses[0].dtype)


def evaluate(step: TrainingStep, batch: Sequence[Any]) -> Any:
    """What `step` returns in eval mode, without gradients."""
    torch.clear_autocast_cache()
    with torch.no_grad(), eval_mode(step.model):
        return detached(step.value(batch))
