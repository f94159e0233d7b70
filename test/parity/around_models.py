"""Programs of around_ranks.py: what models keep, draw and share, and what loops compile."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import fsdp_mlir
import numpy as np
import torch
import torch.distributed as dist
from around_loop import Loop, Net, batch, part, trained, whole
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Averaging(nn.Module):
    """Its forward assigns a buffer, and leaves a tensor for the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.linear(x))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0).to(self.mean.dtype)
        self.spread = (x - self.mean).square().mean()
        return x * self.spread


class Leaving(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = Averaging()

    def scaled(self, x: Tensor) -> Tensor:
        averaged: Tensor = self.c(x)
        return averaged


def what_forward_leaves(compiled: bool) -> list[Any]:
    found: list[Any] = []
    bfloat16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    recomputed = {"match": "c"}
    for count, policy in ((1, {}), (2, {}), (2, {"mp_policy": bfloat16})):
        for options in ({}, {"activation_checkpoint": recomputed}) if count == 2 else ({},):
            model = Leaving()
            loop = Loop(
                model, compiled, count=count, policy=policy, **(options if compiled else {})
            )
            kept = []
            for number in range(3):
                before = model.c.mean
                found.append(loop.step(batch(number)))
                kept += [before, model.c.mean, model.c.spread]
            found += [each.double().sum().item() for each in kept] + loop.weights()
    return found


class TwoUses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).float().square().mean()


def a_tied_weight_in_bfloat16(compiled: bool) -> list[Any]:
    """FSDP2 adds the gradients of its uses in float32, but only in the first microbatch."""
    model: Any = fully_shard(
        TwoUses(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fsdp_mlir.compile(model, optimizer=optimizer) if compiled else None
    found: list[Any] = []
    for number in range(3):
        pair = batch(2 * number), batch(2 * number + 1)
        if step is not None:
            losses = step.accumulate(pair)
        else:
            losses = []
            for at, x in enumerate(pair):
                model.set_requires_gradient_sync(at == 1)
                losses.append(model(x))
                losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item() for loss in losses]
    return [*found, part(model.a.weight).tolist()]


class Drawing(Net):
    """It draws from the generators of the process what its step does not depend on."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.draw = draw

    def scaled(self, x: Tensor) -> Tensor:
        self.draw()
        return x


def seeded() -> None:
    random.seed(3)
    np.random.seed(3)
    np.random.permutation(4)


def drawn() -> None:
    random.random()
    random.uniform(0, 1)
    np.random.rand(), np.random.standard_normal()


def at_random() -> None:
    while random.sample([0, 1], 1)[0]:
        pass


def _drawing(compiled: bool, *draws: Callable[[], Any]) -> list[Any]:
    found: list[Any] = []
    for draw in draws:
        for count in (1, 2):
            random.seed(dist.get_rank())
            np.random.seed(dist.get_rank())
            loop = Loop(Drawing(draw), compiled, count=count)
            for number in range(3):
                factor = random.random() + np.random.rand()
                found += [factor, loop.step(batch(number) * factor)]
    return found


def draws_of_the_process(compiled: bool) -> list[Any]:
    return _drawing(compiled, seeded, drawn)


def draws_that_decide_how_many(compiled: bool) -> list[Any]:
    return _drawing(compiled, at_random)


class Tied(Net):
    """A parameter of a module and of its child, as BERT's `cls.predictions.bias`."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, size), nn.Linear(size, size))
        self.b = nn.Sequential(nn.Linear(size, size), nn.Linear(size, 8))
        self.b.bias = self.b[0].bias


def norms_of_a_tied_parameter(compiled: bool) -> list[Any]:
    options = {"max_norm": 1.0} if compiled else {}
    loop, found = Loop(Tied(), compiled, (torch.optim.SGD, {"lr": 0.0}), **options), []
    for number in range(60):
        x = batch(number, 8)
        if loop.compiled is not None:
            loop.step(x)
            found.append(loop.compiled.grad_norm)
        else:
            loop.backward(x)
            norm = torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
            loop.optimizer.zero_grad()
            found.append(whole(norm).item())
    return found


def tied_after_fully_shard(compiled: bool) -> list[Any]:
    found: list[Any] = []
    for rows in (8, 11):  # which the ranks share evenly, or not
        model = Net()
        model.a, model.b = nn.Linear(8, rows), nn.Linear(rows, 8)
        model.c = nn.Linear(8, rows)
        fully_shard(model)
        model.c.weight = model.a.weight
        model.forward = lambda x, m=model: m.c(m.b(m.a(x).tanh())).square().mean()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = fsdp_mlir.compile(model, optimizer=optimizer) if compiled else None
        found += trained(model, optimizer, step, lambda model, x: model(x))
        found += [part(param).double().sum().item() for param in model.parameters()]
    return found


def inputs_with_gaps(compiled: bool) -> list[Any]:
    loop, wide, found = Loop(Net(), compiled), batch(0, 64).reshape(16, 32), []
    views = (wide[::2, :8], wide[:, 5:13], wide[:, :1].expand(16, 8), wide[:, :8].contiguous())
    for view in views:
        found += [loop.step(view), loop.evaluate(view)]
    return found + loop.weights()


def an_optimizer_of_more(compiled: bool) -> list[Any]:
    model, scale = fully_shard(nn.Linear(8, 8)), nn.Parameter(torch.ones(()))
    torch.nn.init.constant_(model.weight, 0.1)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1, foreach=False)

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * scale).square().mean()

    step = None
    if compiled:
        step = fsdp_mlir.compile(model, optimizer=optimizer, compute_loss=compute_loss)
    return [*trained(model, optimizer, step, compute_loss), scale.item()]


def a_reference_model(compiled: bool) -> list[Any]:
    """As in preference learning; it has not run before."""
    reference = fully_shard(Net().requires_grad_(False))

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = reference(x)
        return (model(x) - wanted + 1).square()

    model = fully_shard(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = None
    if compiled:
        step = fsdp_mlir.compile(model, optimizer=optimizer, compute_loss=compute_loss)
    return trained(model, optimizer, step, compute_loss)


def optimizers_of_the_loop(compiled: bool) -> list[Any]:
    """Two over the parts of a model, and then one in hooks of backward."""
    found: list[Any] = []
    for hooked in (False, True):
        model = fully_shard(Net())
        parts = [torch.optim.Muon([model.a.weight]), torch.optim.AdamW([model.b.weight])]
        if hooked:
            rest = [torch.optim.SGD([p], lr=0.1) for p in (model.a.bias, model.b.bias)]

            def update(param: Tensor, rest: Any = rest) -> None:
                for each in rest:
                    if each.param_groups[0]["params"][0] is param:
                        each.step()
                        each.zero_grad()

            for each in rest:
                each.param_groups[0]["params"][0].register_post_accumulate_grad_hook(update)
        step = fsdp_mlir.compile(model) if compiled else None
        for number in range(3):
            if step is not None:
                loss = step.backward(batch(number))
            else:
                loss = model(batch(number))
                loss.backward()
            for each in parts:
                each.step()
                each.zero_grad()
            found.append(loss.item())
        found += [whole(p).double().sum().item() for p in model.parameters()]
    return found


def steps_that_may_raise(loop: Loop, number: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    try:
        steps = [loop.step(batch(each).to(dtype)) for each in (number, number + 1)]
        return [*steps, *loop.weights()]
    except RuntimeError as error:
        return [str(error)]


class Gained(Net):
    """With a parameter that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.gain


def dtypes_after_the_first_step(compiled: bool) -> list[Any]:
    """FSDP2 trains on in mixed precision, and otherwise raises."""
    found: list[Any] = []
    bfloat16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    changes: list[Callable[[Any], Any]] = [
        lambda model: None,
        lambda model: model.bfloat16(),
        lambda model: model.float(),
        lambda model: setattr(model.gain, "data", model.gain.data.to(torch.bfloat16)),
        lambda model: setattr(model.gain, "data", model.gain.data.to(torch.float32)),
    ]
    several = [changes[0], lambda model: model.bfloat16().float(), changes[1]]
    for policy, each in (({"mp_policy": bfloat16}, changes), ({}, several)):
        model = Gained()
        loop = Loop(model, compiled, ignored={model.gain}, policy=policy, evaluation=True)
        for change in each:
            loop.model.reshard()
            loop.optimizer.zero_grad()
            change(model)
            found += steps_that_may_raise(loop, 0)
            found += [str(param.dtype) for param in model.parameters()]
    return found


def a_step_of_other_dtypes(compiled: bool) -> list[Any]:
    """Compiled after the first forward of another dtype."""
    found: list[Any] = []
    bfloat16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for policy, after in (({"mp_policy": bfloat16}, 1), ({}, 1), ({}, 0)):
        loop = Loop(Net(), compiled, policy=policy)
        for number in range(after):
            found += steps_that_may_raise(loop, number)
        model = loop.model.to(torch.bfloat16)
        loop.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if compiled:
            loop.compiled = fsdp_mlir.compile(model, optimizer=loop.optimizer, example=batch(0))
        found += steps_that_may_raise(loop, 2, torch.float32 if policy else torch.bfloat16)
    return found


class Stack(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)])

    def scaled(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def layers_that_come_and_go(compiled: bool) -> list[Any]:
    model, found = Stack(), []
    loop = Loop(model, compiled)
    first, second, third = model.layers
    for layers in ([first, second, third], [first, third], [third, second, first]):
        model.layers = nn.ModuleList(layers)
        found += [loop.step(batch(0)), loop.step(batch(1)), *loop.weights()]
    return found


def unlike_microbatches(compiled: bool) -> list[Any]:
    model = Net()
    loop, found = Loop(model, compiled), []
    for sizes in ((2, 2), (2, 1), (2, 2, 1), (1, 1)):
        batches = [batch(number, size) for number, size in enumerate(sizes)]
        if loop.compiled is not None:
            found += [float(loss) for loss in loop.compiled.accumulate(batches)]
        else:
            for number, x in enumerate(batches):
                loop.model.set_requires_gradient_sync(number == len(batches) - 1)
                loss = loop.model(x)
                loss.backward()
                found.append(loss.item())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return [*found, *loop.weights()]


# Each with a part of the line that says why it runs as FSDP2 does; empty for one that has plans.
PROGRAMS: dict[Callable[[bool], list[Any]], str] = {
    what_forward_leaves: "",
    draws_of_the_process: "",
    draws_that_decide_how_many: "draws from Python's generator of random numbers",
    norms_of_a_tied_parameter: "",
    tied_after_fully_shard: "was tied after fully_shard",
    inputs_with_gaps: "is a view with gaps, of shape",
    a_reference_model: "",
    optimizers_of_the_loop: "",
    an_optimizer_of_more: "requires grad but is no parameter of the model",
    dtypes_after_the_first_step: " is torch.bfloat16",
    a_step_of_other_dtypes: "at the first forward, the dtype with which FSDP2 goes on",
    layers_that_come_and_go: "not those of its first plan: 'layers.2.weight' is gone",
    unlike_microbatches: "reduced together differ in their form",
    a_tied_weight_in_bfloat16: 'used more than once: "a.weight"',
}
