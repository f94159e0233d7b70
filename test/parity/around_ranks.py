"""One rank of programs that differ from a plain training loop in what is around their steps.

    around_ranks.py OUT

Runs each of PROGRAMS with FSDP2 and compiled, and writes to OUT.<rank> what both give, and the
warnings of the compiled one, by the program's name (JSON).
"""

from __future__ import annotations

import collections
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import around_models
import called_collectives
import other_models
import outside_units
import torch
import torch.distributed as dist
from around_loop import SGD, Loop, Net, batch, part
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


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


# As those of around_models.py.
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
    **around_models.PROGRAMS,
    **other_models.PROGRAMS,
    **called_collectives.PROGRAMS,
    **outside_units.PROGRAMS,
}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for program in PROGRAMS if dist.get_world_size() == 2 else outside_units.OF_FOUR:
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
