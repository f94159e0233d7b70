"""One rank of programs that differ from a plain training loop in what is around their steps.

    around_ranks.py OUT

Runs each of PROGRAMS with FSDP2 and compiled, and writes to OUT.<rank> what both give, and the
warnings of the compiled one, by the program's name (JSON).
"""

from __future__ import annotations

import collections
import json
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsdp_mlir
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

SGD = (torch.optim.SGD, {"lr": 0.1})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.b(torch.tanh(self.a(x)))).square().mean()

    def scaled(self, x: Tensor) -> Tensor:
        return x


def batch(number: int, size: int = 4) -> Tensor:
    seed = number + 10 * dist.get_rank()
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Loop:
    """A model and its step: FSDP2's with `count` microbatches, or the compiled one."""

    def __init__(
        self, model: Any, compiled: bool, optimizer: Any = SGD, count: int = 1, **options: Any
    ) -> None:
        ignored = options.pop("ignored", set())
        policy = options.pop("policy", {})
        self.model, self.count = fully_shard(model, ignored_params=ignored, **policy), count
        self.optimizer = optimizer[0](model.parameters(), **optimizer[1])
        if count > 1:
            options["gradient_accumulation_steps"] = count
        self.compiled = None
        if compiled:
            self.compiled = fsdp_mlir.compile(model, optimizer=self.optimizer, **options)

    def step(self, x: Tensor) -> float:
        if self.compiled is not None:
            return float(self.compiled(x))
        total = 0.0
        for part in x.chunk(self.count):
            loss = self.model(part)
            (loss / self.count).backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.tensor(total / self.count, dtype=loss.dtype).item()

    def evaluate(self, x: Tensor) -> float:
        if self.compiled is not None:
            loss = float(self.compiled.evaluate(x))
        else:
            self.model.eval()
            with torch.no_grad():
                loss = float(self.model(x))
            self.model.train()
        self.model.reshard()  # the root, which FSDP2 keeps unsharded for a backward
        return loss

    def backward(self, x: Tensor) -> None:
        if self.compiled is not None:
            self.compiled.backward(x)
        else:
            self.model(x).backward()

    def weights(self) -> list[float]:
        return [whole(p).double().sum().item() for p in self.model.parameters()]


def betas_of_a_loaded_state(compiled: bool) -> list[Any]:
    loop = Loop(Net(), compiled, (torch.optim.AdamW, {"lr": 0.1}))
    losses = [loop.step(batch(0))]
    options = checkpoint.StateDictOptions(full_state_dict=True)
    model, optimizer = checkpoint.get_state_dict(loop.model, loop.optimizer, options=options)
    checkpoint.set_state_dict(
        loop.model,
        loop.optimizer,
        model_state_dict=model,
        optim_state_dict=optimizer,
        options=options,
    )
    assert isinstance(loop.optimizer.param_groups[0]["betas"], list)
    return [*losses, loop.step(batch(0))]


class Holding(Net):
    def __init__(self) -> None:
        super().__init__()
        self.constant = torch.ones(8)
        self.register_buffer("buffer", torch.ones(8))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.constant * self.buffer


def other_memory(compiled: bool) -> list[Any]:
    """In the same tensors: of a constant, of a buffer, and of the optimizer's state."""
    loop = Loop(Holding(), compiled, (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}))
    model, losses = loop.model, [loop.step(batch(0))]
    changes: list[Callable[[], Any]] = [
        lambda: setattr(model.constant, "data", model.constant * 2),
        lambda: model.constant.set_(model.constant * 2),
        lambda: setattr(model.buffer, "data", model.buffer * 2),
        lambda: model.buffer.set_(model.buffer * 2),
        lambda: torch.utils.swap_tensors(model.buffer, model.buffer * 2),
        lambda: torch.utils.swap_tensors(model.constant, model.constant * 2),
        lambda: [
            setattr(state["momentum_buffer"], "_local_tensor", -state["momentum_buffer"].to_local())
            for state in loop.optimizer.state.values()
        ],
    ]
    for change in changes:
        with torch.no_grad():
            change()
        losses.append(loop.step(batch(0)))
    return [*losses, *loop.weights()]


def hooks_of_microbatches(compiled: bool) -> list[Any]:
    loop, calls = Loop(Net(), compiled, count=3), []

    def hook(param: Tensor) -> None:
        calls.append(1)
        param.grad.mul_(0.5)

    loop.model.a.weight.register_post_accumulate_grad_hook(hook)
    return [loop.step(batch(0, 6)), loop.step(batch(1, 6)), len(calls), *loop.weights()]


def gradients_from_before(compiled: bool) -> list[Any]:
    loop = Loop(Net(), compiled, count=3)
    for number in range(3):
        loop.backward(batch(number, 2))
        loop.step(batch(number + 1, 6))
    return [loop.step(batch(0, 6)), *loop.weights()]


class Growing(Net):
    """Keeps, in Python, the largest batch so far."""

    largest = 0

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, int] = {}

    def scaled(self, x: Tensor) -> Tensor:
        self.largest = max(self.largest, len(x))
        self.sizes["largest"] = self.largest
        self.last = (len(x), [len(x)])  # which nothing reads
        return x * torch.linspace(0, 1, self.sizes["largest"])[: len(x), None]


class Caching(Net):
    """Keeps a table, and in a buffer another one, of the first batches that are as large."""

    table: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", None)

    def scaled(self, x: Tensor) -> Tensor:
        if self.table is None or len(x) > len(self.table):
            self.table = torch.linspace(0, 1, len(x))
        if self.first is None:
            self.first = torch.linspace(1, 2, len(x))
        return x * self.table[: len(x), None] * self.first.sum()


def sizes(loop: Loop) -> list[float]:
    return [loop.step(batch(n, size)) for n, size in enumerate((4, 4, 2, 2, 6, 6, 4, 2, 6))]


def a_largest_batch(compiled: bool) -> list[Any]:
    loop = Loop(Growing(), compiled, fallback="error") if compiled else Loop(Growing(), False)
    model = loop.model
    return [*sizes(loop), model.largest, model.sizes, list(model.last), *loop.weights()]


def tables_of_the_first(compiled: bool) -> list[Any]:
    loop = Loop(Caching(), compiled, fallback="error") if compiled else Loop(Caching(), False)
    model = loop.model
    found = [*sizes(loop), model.table.tolist(), model.first.tolist(), *loop.weights()]
    if loop.compiled is not None:
        assert all(loop.compiled._cache.values())
        assert loop.compiled._plan("update", [{"arg0": batch(0, 6)}], list(model.parameters()))
    return found


class Taking(Net):
    def __init__(self, items: Iterator[int]) -> None:
        super().__init__()
        self.items = collections.deque([items])

    def scaled(self, x: Tensor) -> Tensor:
        return x * next(self.items[0])


def iterators(compiled: bool) -> list[Any]:
    found: list[Any] = []
    for items in (iter(range(1, 99)), iter([1, 2, 3, 4, 5]), (n for n in range(1, 99))):
        loop = Loop(Taking(items), compiled)
        found += [loop.step(batch(n)) for n in range(3)]
        found.append(next(items))
    return found


class Twice(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


def contexts(compiled: bool) -> list[Any]:
    loop = Loop(Net(), compiled)
    losses = [loop.step(batch(0))]
    for context in (
        Twice(),
        torch.device("cpu"),
        torch.autograd.graph.saved_tensors_hooks(
            lambda x: x * 0 if x.is_floating_point() else x, lambda x: x
        ),
        torch.autograd.set_detect_anomaly(True),
    ):
        with context:
            losses.append(loop.step(batch(1)))
        losses.append(loop.step(batch(2)))
    return [*losses, *loop.weights()]


class Attending(Net):
    def forward(self, x: Tensor) -> Tensor:
        heads = self.a(x).view(1, 2, 4, 4)
        made = F.scaled_dot_product_attention(heads, heads, heads)
        return (made.reshape(4, 8) @ self.b.weight).square().mean()


def kernels_of_attention(compiled: bool) -> list[Any]:
    loop = Loop(Attending(), compiled, (torch.optim.SGD, {"lr": 1.0}))
    losses = [loop.step(batch(n)) for n in range(3)]
    with sdpa_kernel(SDPBackend.MATH):
        losses += [loop.step(batch(n)) for n in range(5)]
    return [*losses, *loop.weights()]


def after_a_forward_that_raised(compiled: bool) -> list[Any]:
    loop = Loop(Net(), compiled)
    losses = [loop.step(batch(0))]
    try:
        loop.model(torch.ones(4, 9))
    except RuntimeError:
        losses.append(-1)
    return [*losses, loop.step(batch(1)), loop.step(batch(2, 6)), *loop.weights()]


class Sharded(Net):
    """With another size of the shards on each rank, and a parameter that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)
        self.more = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, 7))
        self.one, self.two = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(7) * 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.more(x) * self.one + self.two
        return super().forward(x)


def exchange(model: Any) -> None:
    model.a, model.b = model.b, model.a


def reorder(model: Any) -> None:
    model.more.add_module("1", model.more._modules.pop("1"))


def exchange_in_a_container(model: Any) -> None:
    members = model.more._modules
    members["2"], members["3"] = members["3"], members["2"]


def modules_in_other_places(compiled: bool) -> list[Any]:
    found: list[Any] = []
    for change, optimizer in (
        (exchange, (torch.optim.AdamW, {"lr": 0.1})),
        (reorder, (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})),
        (exchange_in_a_container, SGD),
    ):
        model = Sharded()
        fully_shard(model.a)
        fully_shard(model.b)
        ignored = {model.one, model.two}
        loop = Loop(model, compiled, optimizer, ignored=ignored, evaluation=True)
        found += [loop.step(batch(0)), loop.step(batch(0, 2))]
        saved = [part(x) for x in model.state_dict().values()]
        change(model)
        found += [loop.step(batch(1)), loop.evaluate(batch(2)), loop.step(batch(3))]
        change(model)  # which the plan of the other size has not seen
        found += [loop.step(batch(0, 2)), loop.evaluate(batch(2)), loop.step(batch(1))]
        change(model)
        found += [loop.step(batch(0, 2)), loop.evaluate(batch(2)), *loop.weights()]
        found += [x.double().sum().item() for x in saved]
    return found


class Tripled(DefaultReduceScatter):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kw: Any) -> Any:
        return super().__call__(output_tensor, input_tensor.mul_(3), *args, **kw)


class Doubled(DefaultAllGather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kw: Any) -> Any:
        return super().__call__(output_tensor, input_tensor.mul(2), *args, **kw)


def settings_after_the_first_step(compiled: bool) -> list[Any]:
    found: list[Any] = []
    settings: list[Callable[[Any], Any]] = [
        lambda model: model.set_force_sum_reduction_for_comms(True),
        lambda model: model.set_gradient_divide_factor(4.0),
        lambda model: model.set_reduce_scatter_divide_factor(8.0),
        lambda model: model.a.set_force_sum_reduction_for_comms(True),
        lambda model: model.a.set_gradient_divide_factor(1.0),
        lambda model: model.set_reshard_after_forward(False),
        lambda model: model.a.set_custom_reduce_scatter(Tripled()),
        lambda model: model.set_custom_all_gather(Doubled()),
    ]
    model = Net()
    fully_shard(model.a)
    loop = Loop(model, compiled, evaluation=True)
    for setting in (lambda model: None, *settings):
        setting(model)
        found += [loop.step(batch(0)), loop.step(batch(1)), loop.evaluate(batch(2))]
    return [*found, *loop.weights()]


def gradients_that_are_off(compiled: bool) -> list[Any]:
    loop = Loop(Net(), compiled)
    found: list[Any] = []
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            try:
                found.append(loop.step(batch(0)))
            except RuntimeError as error:
                found.append(str(error))
    return [*found, *loop.weights()]


# With what the line says that tells of a step without a plan; empty where there is none.
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
    np.random.rand(700)


def at_random() -> None:
    while random.random() < 0.5:
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
        for number in range(3):
            if step is not None:
                found.append(step(batch(number)).item())
            else:
                loss = model(batch(number))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
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

    found = []
    step = None
    if compiled:
        step = fsdp_mlir.compile(model, optimizer=optimizer, compute_loss=compute_loss)
    for number in range(3):
        if step is not None:
            loss = step(batch(number))
        else:
            loss = compute_loss(model, batch(number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found += [loss.item(), scale.item()]
    return found


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
    found = []
    for number in range(3):
        if step is not None:
            loss = step(batch(number))
        else:
            loss = compute_loss(model, batch(number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    return found


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


PROGRAMS: dict[Callable[[bool], list[Any]], str] = {
    betas_of_a_loaded_state: "",
    other_memory: "",
    hooks_of_microbatches: "a hook of register_post_accumulate_grad_hook is called with",
    gradients_from_before: "gradients of each microbatch are added to those that are there",
    a_largest_batch: "",
    tables_of_the_first: "",
    iterators: "takes an item from",
    contexts: "around the call",
    kernels_of_attention: "",
    modules_in_other_places: "",
    settings_after_the_first_step: "set_custom_",
    gradients_that_are_off: "gradients are off around the call",
    after_a_forward_that_raised: "",
    what_forward_leaves: "",
    draws_of_the_process: "",
    draws_that_decide_how_many: "draws from Python's generator of random numbers",
    norms_of_a_tied_parameter: "",
    tied_after_fully_shard: "was tied after fully_shard",
    inputs_with_gaps: "is a view with gaps, of shape",
    a_reference_model: "the step calls 'Net', which fully_shard was called on and which is not",
    optimizers_of_the_loop: "",
    an_optimizer_of_more: "requires grad but is no parameter of the model",
}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for program in PROGRAMS:
        results = []
        for compiled in (False, True):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    results.append(program(compiled))
                except (RuntimeError, TypeError, AssertionError) as error:
                    results.append([f"{type(error).__name__}: {error}"])
        told = [str(each.message) for each in caught if "without a plan" in str(each.message)]
        found[program.__name__] = [*results, told]
    Path(f"{sys.argv[1]}.{dist.get_rank()}").write_text(json.dumps(found))
    dist.destroy_process_group()
