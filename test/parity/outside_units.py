"""Programs of around_ranks.py: what code sees of parameters outside of the forward of their
unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fsdp_mlir
import torch
from around_loop import batch, part, trained
from other_models import MIXED, Deep
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def _losses(
    compiled: bool, compute_loss: Callable[..., Tensor], model: Any = None, **policy: Any
) -> list[Any]:
    if model is None:
        model = Deep()
    for block in model.blocks:
        fully_shard(block, mp_policy=MIXED, **policy)
    fully_shard(model, mp_policy=MIXED)
    return _trained(compiled, model, compute_loss)


def _trained(compiled: bool, model: Any, compute_loss: Callable[..., Tensor]) -> list[Any]:
    """The losses and the parameters of a sharded model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = None
    if compiled:
        step = fsdp_mlir.compile(model, optimizer=optimizer, compute_loss=compute_loss)
    found: list[Any] = trained(model, optimizer, step, compute_loss)
    return found + [part(param).tolist() for param in model.parameters()]


def _mean_square(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().square().mean()
    return loss


def dtypes(compiled: bool) -> list[Any]:
    """They are the parameters' own while these are sharded, and those of the policy else."""

    class Casting(Deep):
        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x).to(self.blocks[1].up.weight.dtype).exp() / 3
            for block in self.blocks:
                x = block(x)
            return self.head(torch.sigmoid(x.to(self.head.weight.dtype) * 1.3))

    def compute_loss(model: Any, x: Tensor) -> Tensor:
        x = (x * 1.7).to(next(model.parameters()).dtype).sin()
        return model(x).to(model.blocks[0].up.weight.dtype).square().mean()

    return _losses(compiled, compute_loss, Casting())


def classes_and_sizes(compiled: bool) -> list[Any]:
    """DTensors of this rank's rows."""

    def compute_loss(model: Any, x: Tensor) -> Tensor:
        before = sum(isinstance(param, DTensor) for param in model.parameters())
        loss = model(x).float().square().mean()
        params = list(model.parameters())
        local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in params)
        return loss * before + loss.sin() * local

    return _losses(compiled, compute_loss)


def kept_after_forward(compiled: bool) -> list[Any]:
    """A penalty on the parameters of units that are not resharded, and of the root."""

    def compute_loss(model: Any, x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        return loss + sum((param.float().square().sum() for param in model.parameters()), 0.0)

    return _losses(compiled, compute_loss, reshard_after_forward=False)


def penalties_of_shards(compiled: bool) -> list[Any]:
    def compute_loss(model: Any, x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        penalty = model.blocks[0].up.weight.square().sum()
        return loss + 0.1 * (penalty.full_tensor() if isinstance(penalty, DTensor) else penalty)

    return _losses(compiled, compute_loss)


def norms_in_hooks(compiled: bool) -> list[Any]:
    """A hook that was registered before fully_shard runs before the unit is freed."""
    found: list[Any] = []
    for later in (False, True):
        model, seen = Deep(), []

        def note(module: nn.Module, _args: Any, output: Tensor, seen: list[Any] = seen) -> Tensor:
            dtype = module.up.weight.dtype
            seen[:] = [str(dtype)]
            return output + (output * 3).to(dtype).sin().to(output.dtype)

        def register(model: Deep = model, note: Any = note) -> None:
            for block in model.blocks:
                block.register_forward_hook(note)

        if not later:
            register()
        for block in model.blocks:
            fully_shard(block, mp_policy=MIXED)
        fully_shard(model, mp_policy=MIXED)
        if later:
            register()
        found += [*_trained(compiled, model, _mean_square), *seen]
    return found


def hooks_outside_of_fsdp2s(compiled: bool) -> list[Any]:
    """Before inputs are cast and after outputs are."""
    model = Deep()
    for block in model.blocks:
        fully_shard(block, mp_policy=MIXED)
    fully_shard(model, mp_policy=replace(MIXED, output_dtype=torch.float32))
    for module in (model, *model.blocks):
        module.register_forward_pre_hook(
            lambda module, args: (args[0] * 1.1 + args[0].sin(),), prepend=True
        )
        module.register_forward_hook(lambda module, args, output: output * 1.1 + output.sin())
    return _trained(compiled, model, _mean_square)


def gradients_in_the_loss(compiled: bool) -> list[Any]:
    """Of an earlier backward, in a later one."""
    model = Deep()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    def compute_loss(model: Any, x: Tensor) -> Tensor:
        there = model.blocks[0].up.weight.grad is not None
        return _mean_square(model, x) * (2.0 if there else 1.0)

    if compiled:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = fsdp_mlir.compile(model, optimizer=optimizer, compute_loss=compute_loss)
    found: list[Any] = []
    for number in range(2):
        if compiled:
            found.append(step.backward(batch(number)).item())
        else:
            loss = compute_loss(model, batch(number))
            loss.backward()
            found.append(loss.item())
    return found + [part(param.grad).tolist() for param in model.parameters()]


def attributes_in_the_loss(compiled: bool) -> list[Any]:
    """Which code has set on the parameters."""

    def compute_loss(model: Any, x: Tensor) -> Tensor:
        counted = sum(getattr(param, "decays", False) for param in model.parameters())
        return _mean_square(model, x) * (1 + counted)

    model = Deep()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for param in model.parameters():
        param.decays = param.dim() > 1
    return _trained(compiled, model, compute_loss)


def marked_in_the_loss(compiled: bool) -> list[Any]:
    def compute_loss(model: Any, x: Tensor) -> Tensor:
        model.blocks[0].up.weight.seen = True
        return _mean_square(model, x)

    model = Deep()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return [*_trained(compiled, model, compute_loss), hasattr(model.blocks[0].up.weight, "seen")]


def members_in_the_loss(compiled: bool) -> list[Any]:
    """Of a set of parameters."""
    model = Deep()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    some = set(model.blocks.parameters())

    def compute_loss(model: Any, x: Tensor) -> Tensor:
        return _mean_square(model, x) * sum(param in some for param in model.parameters())

    return _trained(compiled, model, compute_loss)


def classes_in_backward(compiled: bool) -> list[Any]:
    """In hooks of backward: of units before and after theirs, and of the root."""
    return _looking_back(compiled, False) + _looking_back(compiled, True)


def classes_in_a_backward_that_keeps(compiled: bool) -> list[Any]:
    """In which no unit is resharded."""

    def keep(model: Any) -> None:
        model.set_reshard_after_backward(False)

    return _looking_back(compiled, False, keep)


def _looking_back(
    compiled: bool, kept: bool, set_policy: Callable[[Any], None] = lambda model: None
) -> list[Any]:
    """A run whose hooks of backward scale by which parameters are whole; `kept` after forward."""
    model = Deep()
    looks = [model.blocks[0].up, model.blocks[1].up, model.head]

    def scale(module: nn.Module, given: Any, _: Any) -> tuple[Tensor, ...]:
        whole = [not isinstance(look.weight, DTensor) for look in looks]
        factor = 1.0 + sum(each << at for at, each in enumerate(whole)) / 8
        return (given[0] * factor,)

    for module in (*model.blocks, model.head, *(block.down for block in model.blocks)):
        module.register_full_backward_hook(scale)
    for block in model.blocks:
        fully_shard(block, mp_policy=MIXED, reshard_after_forward=not kept)
    fully_shard(model, mp_policy=MIXED)
    set_policy(model)
    return _trained(compiled, model, _mean_square)


def unsharded_in_the_loss(compiled: bool) -> list[Any]:
    """By FSDP2's own method, and read there."""

    def compute_loss(model: Any, x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        block = model.blocks[0]
        with torch.no_grad():
            block.unshard()
            scale = block.up.weight.norm()
            block.reshard()
        return loss * scale

    return _losses(compiled, compute_loss)


def set_in_the_loss(compiled: bool) -> list[Any]:
    def compute_loss(model: Any, x: Tensor) -> Tensor:
        model.blocks[0].set_reshard_after_forward(x.shape[0] > 4)
        return _mean_square(model, x)

    return _losses(compiled, compute_loss)


def resharded_in_the_loss(compiled: bool) -> list[Any]:
    """Another model, which the step sees change."""
    teacher = Deep(1).requires_grad_(False)
    fully_shard(teacher)
    parts = [part(param) for param in teacher.parameters()]

    def compute_loss(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        teacher.reshard()
        return (model(x) - wanted).square().mean()

    model = fully_shard(Deep())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = None
    if compiled:
        step = fsdp_mlir.compile(model, optimizer=optimizer, compute_loss=compute_loss)
    losses: list[Any] = []
    for _ in range(2):
        losses += trained(model, optimizer, step, compute_loss)
        for each in parts:
            each.data.mul_(0.5)
    return losses


def kept_by_pairs(compiled: bool) -> list[Any]:
    """After forward the parameters are those that two of four ranks keep, as they were gathered."""

    def compute_loss(model: Any, x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        weight = model.blocks[0].up.weight
        local = weight.to_local().numel() if isinstance(weight, DTensor) else 0
        return (loss * 1.7).to(weight.dtype).float() * local

    return _losses(compiled, compute_loss, reshard_after_forward=2)


# As those of around_models.py.
PROGRAMS: dict[Callable[[bool], list[Any]], str] = {
    dtypes: "",
    classes_and_sizes: "",
    kept_after_forward: "",
    penalties_of_shards: "parameter 'blocks.0.up.weight' is used outside of the forward of its",
    norms_in_hooks: "",
    hooks_outside_of_fsdp2s: "",
    gradients_in_the_loss: "the step reads the gradient of parameter 'blocks.0.up.weight'",
    attributes_in_the_loss: "the step reads the attribute 'decays' of parameter 'enter.weight'",
    marked_in_the_loss: "the step sets the attribute 'seen' of parameter 'blocks.0.up.weight'",
    members_in_the_loss: "the step looks in a set or a dict for parameter 'blocks.0.norm.weight'",
    classes_in_backward: "",
    classes_in_a_backward_that_keeps: "",
    unsharded_in_the_loss: "the step calls FSDP2's 'unshard()' of 'Block', which a plan does not",
    set_in_the_loss: "the step calls FSDP2's 'set_reshard_after_forward()' of 'Block', which a",
    resharded_in_the_loss: "the step calls FSDP2's 'reshard()' of 'Deep', which a plan does not",
}
OF_FOUR: dict[Callable[[bool], list[Any]], str] = {kept_by_pairs: ""}
