"""Programs of around_ranks.py: steps that call further models that fully_shard was called on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsdp_mlir
import torch
from around_loop import batch, part, whole
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """Its parameters are no multiple of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 7), nn.Linear(7, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(seed: int, **policy: Any) -> Any:
    model = Deep(seed)
    for block in model.blocks:
        fully_shard(block, **policy)
    return fully_shard(model, **policy)


def _loop(compiled: bool, model: Any, compute_loss: Callable[..., Tensor], **more: Any) -> Any:
    """An optimizer and, if compiled, the step; else a function that does the same."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if compiled:
        step = fsdp_mlir.compile(model, optimizer=optimizer, compute_loss=compute_loss, **more)
        return lambda *inputs: float(step(*inputs))

    def step_of_fsdp2(*inputs: Tensor) -> float:
        loss = compute_loss(model, *inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step_of_fsdp2


def _weights(model: nn.Module) -> list[Any]:
    return [part(param).detach().clone().tolist() for param in model.parameters()]


def a_reference_of_units(compiled: bool) -> list[Any]:
    """In preference learning it is called twice; and its parameters may change between steps, of
    which FSDP2 sees those of units only."""
    found: list[Any] = []
    for policy in ({}, {"mp_policy": MIXED}):
        model, reference = sharded(0, **policy), sharded(1, **policy).requires_grad_(False)
        pairs = list(zip(reference.parameters(), model.parameters(), strict=True))

        def compute_loss(model: nn.Module, x: Tensor, reference: Any = reference) -> Tensor:
            with torch.no_grad():
                chosen, rejected = reference(x), reference(-x)
            margin = (model(x) - chosen) - (model(-x) - rejected)
            return -nn.functional.logsigmoid(margin.mean())

        step = _loop(compiled, model, compute_loss)
        for number in range(4):
            found.append(step(batch(number)))
            if number == 1:
                for theirs, ours in pairs:
                    part(theirs).data.lerp_(part(ours).data, 0.5)
            if number == 2:
                reference.reshard()
        found += _weights(model)
    return found


def a_frozen_critic(compiled: bool) -> list[Any]:
    """Through which gradients flow, and which also sees data."""
    model = sharded(0)
    critic = Deep(1).requires_grad_(False)
    for block in critic.blocks:
        fully_shard(block)
    fully_shard(critic, shard_placement_fn=lambda p: Shard(1) if p.shape == (8, 8) else None)

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        return (critic(model(x)) - critic(x)).square().mean()

    step = _loop(compiled, model, compute_loss)
    found = [step(batch(0)), step(batch(1))]
    with torch.no_grad():
        for param in critic.parameters():
            part(param).mul_(0.5)
        found.append(critic(batch(2)).sum().item())
    return [*found, step(batch(3)), step(batch(4)), *_weights(model)]


def a_critic_from_before(compiled: bool) -> list[Any]:
    """FSDP2 keeps the root's parameters that a forward without backward has gathered, and computes
    with them after a change, until the next backward."""
    model, critic = sharded(0), sharded(1).requires_grad_(False)
    params = list(critic.parameters())

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        return critic(model(x)).square().mean()

    step = _loop(compiled, model, compute_loss)
    found = [step(batch(0))]
    for number in range(1, 3):
        with torch.no_grad():
            found.append(critic(batch(number)).sum().item())
        found.append(step(batch(number + 10)))  # no change yet
    with torch.no_grad():
        found.append(critic(batch(3)).sum().item())
    for param in params:
        part(param).data.mul_(0.5)
    return [*found, step(batch(4)), step(batch(5)), *_weights(model)]


def a_unit_from_before(compiled: bool) -> list[Any]:
    """That is unsharded as its parameters change: FSDP2 computes with its copy once."""
    found: list[Any] = []
    for kept in (False, True):
        model, teacher = sharded(0), sharded(1).requires_grad_(False)
        block, parts = teacher.blocks[0], [part(param) for param in teacher.parameters()]

        def compute_loss(model: nn.Module, x: Tensor, teacher: Any = teacher) -> Tensor:
            with torch.no_grad():
                wanted = teacher(x)
            return (model(x) - wanted).square().mean()

        step = _loop(compiled, model, compute_loss)
        for number in range(6):
            if kept and number in (1, 3):
                block.set_reshard_after_forward(number == 3)
            if not kept and number in (1, 3):
                block.unshard()
            if number != 1:
                for each in parts:
                    each.data.mul_(0.8)
            found.append(step(batch(number)))
    return found


def adversaries(compiled: bool) -> list[Any]:
    """Two models, of which each step trains one and calls the other."""
    found: list[Any] = []
    for detached in (False, True):
        generator, critic = sharded(0), sharded(1)

        def for_critic(
            critic: nn.Module,
            x: Tensor,
            z: Tensor,
            generator: Any = generator,
            detached: bool = detached,
        ) -> Tensor:
            if detached:
                fake = generator(z).detach()
            else:
                with torch.no_grad():
                    fake = generator(z)
            return critic(fake).square().mean() - torch.sigmoid(critic(x)).mean()

        def for_generator(generator: nn.Module, z: Tensor, critic: Any = critic) -> Tensor:
            return -critic(generator(z)).mean()

        first = _loop(compiled, critic, for_critic)
        second = _loop(compiled, generator, for_generator)
        for number in range(4):
            if number > 0 or detached:  # the other begins
                found.append(first(batch(number), batch(number + 20)))
            critic.requires_grad_(False)
            found.append(second(batch(number + 40)))
            critic.requires_grad_(True)
        found += [_weights(generator), _weights(critic)]
    return found


def a_critic_that_trains(compiled: bool) -> list[Any]:
    """Its gradients, which the loop drops, are reduced by FSDP2 alone."""
    model, critic = sharded(0), sharded(1)

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        return critic(model(x)).square().mean()

    step = _loop(compiled, model, compute_loss)
    return (
        [step(batch(number)) for number in range(3)]
        + _weights(model)
        + [whole(param.grad).tolist() for param in critic.parameters()]
    )


def a_teacher_in_evaluation(compiled: bool) -> list[Any]:
    """Its forward draws, and the loss is also evaluated."""
    model, teacher = sharded(0), sharded(1).requires_grad_(False)

    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = model

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = teacher(nn.functional.dropout(x, 0.5, self.training))
            return (self.student(x) - wanted).square().mean()

    distilled = Distilled()
    fully_shard(distilled)
    optimizer = torch.optim.SGD(distilled.parameters(), lr=0.1)
    step = None
    if compiled:
        step = fsdp_mlir.compile(distilled, optimizer=optimizer, evaluation=True)
    found: list[Any] = []
    for number in range(3):
        if step is not None:
            found += [step(batch(number)).item(), step.evaluate(batch(9)).item()]
        else:
            loss = distilled(batch(number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            distilled.eval()
            with torch.no_grad():
                found.append(distilled(batch(9)).item())
            distilled.train()
    return found + _weights(distilled)


def a_critic_in_evaluation(compiled: bool) -> list[Any]:
    """Whose root stays gathered until backward, of the step alone."""
    model, critic = sharded(0), sharded(1).requires_grad_(False)

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        return critic(model(x)).square().mean()

    step = _loop(compiled, model, compute_loss, evaluation=True)
    return [step(batch(0)), step(batch(1)), *_weights(model)]


def _states(model: nn.Module) -> list[Any]:
    """The form and data of a state dict, sharded unless its hooks are gone."""
    state = model.state_dict()
    return [(key, type(x).__name__, part(x).tolist()) for key, x in state.items()]


def a_target_network(compiled: bool) -> list[Any]:
    """That of Q-learning, whose first forward is that of the step, and which is then loaded from
    the model."""
    model, target = sharded(0), sharded(1).requires_grad_(False)

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = target(-x).amax(1, keepdim=True)
        return (model(x) - wanted).square().mean()

    step = _loop(compiled, model, compute_loss)
    found: list[Any] = []
    for number in range(4):
        found += [step(batch(number)), _states(target)]
        if number == 1:
            target.load_state_dict(model.state_dict())
    return found + _weights(model)


def a_target_without_a_plan(compiled: bool) -> list[Any]:
    """The same where the capture that has met it fails."""
    model, target = sharded(0), sharded(1).requires_grad_(False)

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = target(x)
        return (model(x) - wanted).square().mean() * (1 if wanted.sum().item() > 0 else 2)

    step = _loop(compiled, model, compute_loss)
    found = [step(batch(0)), _states(target)]
    target.load_state_dict(model.state_dict())
    return [*found, step(batch(1)), _states(target), *_weights(model)]


def a_teacher_in_inference_mode(compiled: bool) -> list[Any]:
    """Whose memory FSDP2 makes in that mode, at its first forward or in an evaluation before."""
    found: list[Any] = []
    for before in (True, False):
        model, teacher = sharded(0), sharded(1).requires_grad_(False)

        def compute_loss(model: nn.Module, x: Tensor, teacher: Any = teacher) -> Tensor:
            with torch.inference_mode():
                wanted = teacher(x)
            return (model(x) - wanted.clone()).square().mean()

        if before:
            with torch.inference_mode():
                found.append(teacher(batch(9)).tolist())
        step = _loop(compiled, model, compute_loss)
        for number in range(3):
            teacher.reshard()
            found.append(step(batch(number)))
        found += _weights(model)
    return found


# As those of around_models.py.
PROGRAMS: dict[Callable[[bool], list[Any]], str] = {
    a_reference_of_units: "",
    a_frozen_critic: "",
    a_critic_from_before: "or FSDP2 holds another model as it was before a change",
    a_unit_from_before: "or FSDP2 holds another model as it was before a change",
    adversaries: "",
    a_critic_that_trains: "the loss has a gradient for parameters of 'Deep'",
    a_teacher_in_evaluation: "",
    a_critic_in_evaluation: "",
    a_target_network: "",
    a_target_without_a_plan: "depends on the data of a tensor",
    a_teacher_in_inference_mode: "Cannot set version_counter for inference tensor",
}
