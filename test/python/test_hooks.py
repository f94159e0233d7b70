"""Hooks that a compiled step would not call, and settings that change after `compile`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import fsdp_mlir
import pytest
import torch
from fsdp_mlir import CaptureError, CompileError
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

BATCH = {"x": torch.linspace(-1, 1, 12).reshape(3, 4)}
LINE = r"\S*test_hooks\.py:\d+: "


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).mean()


def halve(grad: Tensor) -> Tensor:
    return grad / 2


def observe(*args: Any) -> None:
    pass


def accumulation(param: Tensor) -> Any:
    """What adds to a parameter's gradient. Its hooks end with it, so the parameter keeps it."""
    param.node = torch.autograd.graph.get_gradient_edge(param).node  # type: ignore[attr-defined]
    return param.node  # type: ignore[attr-defined]


def compiled(model: nn.Module, optimizer: Any = (torch.optim.SGD, {"lr": 0.1})) -> fsdp_mlir.Step:
    fsdp_mlir.fully_shard(model)
    return fsdp_mlir.compile(model, optimizer=optimizer, example=BATCH)


GRADIENT_HOOKS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "register_hook": (
        lambda m: m.first.weight.register_hook(halve),
        "'first.weight' has the hook 'halve' of register_hook, .* FSDP2 never calls it",
    ),
    "post_accumulate": (
        lambda m: m.second.bias.register_post_accumulate_grad_hook(observe),
        "'second.bias' has the hook 'observe' of register_post_accumulate_grad_hook",
    ),
    "node": (
        lambda m: accumulation(m.first.bias).register_hook(observe),
        "'first.bias' has the hook 'observe' of AccumulateGrad.register_hook",
    ),
    "node_before": (
        lambda m: accumulation(m.first.bias).register_prehook(observe),
        "'first.bias' has the hook 'observe' of AccumulateGrad.register_prehook",
    ),
    "several_tensors": (
        lambda m: torch.autograd.graph.register_multi_grad_hook(tuple(m.parameters()), observe),
        "'first.weight' has the hook .* of register_hook",
    ),
}


@pytest.mark.parametrize("name", GRADIENT_HOOKS)
def test_gradient_hooks(name: str, tmp_path: Path) -> None:
    register, message = GRADIENT_HOOKS[name]
    model = Model()
    handle = register(model)
    with pytest.raises(CaptureError, match=message) as raised:
        fsdp_mlir.capture(model, kwargs=BATCH, path=tmp_path / "model.pt")
    if name != "several_tensors":
        raised.match(f"^{LINE}")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CaptureError, match=message):
        compiled(model)
    handle.remove()
    fsdp_mlir.capture(model, kwargs=BATCH, path=tmp_path / "model.pt")


def test_hooks_of_a_frozen_parameter_are_never_called() -> None:
    model = Model()
    model.first.bias.register_hook(halve)
    model.first.bias.requires_grad_(False)
    compiled(model)(BATCH)


@pytest.fixture
def handles() -> Iterator[list[Any]]:
    """What is appended is removed at the end."""
    made: list[Any] = []
    yield made
    for handle in made:
        handle.remove()


def stepping(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    own = optimizer.step

    @functools.wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return step


def method(self: torch.optim.Optimizer, closure: Any = None) -> None:
    pass


def replace_step(optimizer: torch.optim.Optimizer, step: Any) -> None:
    optimizer.step = step  # type: ignore[method-assign]


def scheduled(optimizer: torch.optim.Optimizer) -> None:
    replace_step(optimizer, MethodType(method, optimizer))
    torch.optim.lr_scheduler.LinearLR(optimizer)


OPTIMIZER_HOOKS: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], str]] = {
    "pre": (lambda o: o.register_step_pre_hook(observe), "'observe' of Optimizer.register_step_pr"),
    "post": (lambda o: o.register_step_post_hook(observe), "'observe' of .*register_step_post"),
    "global_pre": (
        lambda o: register_optimizer_step_pre_hook(observe),
        "'observe' of register_optimizer_step_pre_hook",
    ),
    "global_post": (
        lambda o: register_optimizer_step_post_hook(observe),
        "'observe' of register_optimizer_step_post_hook",
    ),
    "wrapped_step": (lambda o: replace_step(o, stepping(o)), "optimizer.step is 'step'"),
    "other_step": (lambda o: replace_step(o, MethodType(method, o)), "optimizer.step is 'method'"),
    "other_step_with_a_scheduler": (scheduled, "optimizer.step is 'method'"),
}


@pytest.mark.parametrize("name", OPTIMIZER_HOOKS)
def test_optimizer_hooks(name: str, handles: list[Any]) -> None:
    """Before `compile`, and after it."""
    change, message = OPTIMIZER_HOOKS[name]
    for before in (True, False):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = None if before else compiled(model, optimizer)
        handle = change(optimizer)
        handles += [handle] if handle else []
        with pytest.raises(CompileError, match=f"^{LINE}.*{message}.* would be lost"):
            step(BATCH) if step else compiled(model, optimizer)
        if handle:
            handle.remove()
        if step and handle:
            step(BATCH)


def test_hooks_of_an_optimizers_state() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled(model, optimizer)
    state = step.optimizer_state_dict()
    handle = optimizer.register_load_state_dict_pre_hook(observe)
    with pytest.raises(CompileError, match=f"^{LINE}.*Optimizer.register_load_state_dict_pre"):
        step.load_optimizer_state_dict(state)
    handle.remove()
    optimizer.register_state_dict_post_hook(observe)
    with pytest.raises(CompileError, match=f"^{LINE}.*Optimizer.register_state_dict_post"):
        step.optimizer_state_dict()


SETTINGS: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], str]] = {
    "amsgrad": (
        lambda o: o.param_groups[1].update(amsgrad=True),
        "group 1 .* amsgrad=False, got True; compile it again",
    ),
    "fused": (lambda o: o.param_groups[0].update(fused=True), "fused=False, got True"),
    "capturable": (lambda o: o.param_groups[0].update(capturable=True), "capturable=False"),
    "a_group": (
        lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        "has 3 parameter groups, the step was compiled with 2",
    ),
    "a_parameter": (
        lambda o: o.param_groups[1]["params"].append(nn.Parameter(torch.ones(1))),
        "group 1 of the optimizer has other parameters",
    ),
    "a_lesser_group": (lambda o: o.param_groups[0]["params"].pop(), "group 0 .* other parameters"),
    "lr_of_tensor": (lambda o: o.param_groups[0].update(lr=torch.tensor(0.1)), "a tensor as 'lr'"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_change(name: str) -> None:
    change, message = SETTINGS[name]
    model = Model()
    groups = [{"params": [*module.parameters()]} for module in (model.first, model.second)]
    optimizer = torch.optim.AdamW(groups)
    step = compiled(model, optimizer)
    optimizer.param_groups[0].update(name="first", foreach=True, lr=0.01)
    step(BATCH)
    change(optimizer)
    before = {key: tensor.clone() for key, tensor in step.state_dict().items()}
    with pytest.raises((CompileError, NotImplementedError), match=message):
        step(BATCH)
    assert all(torch.equal(before[key], tensor) for key, tensor in step.state_dict().items())


def one_cycle(optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8, **options)


FOLLOWED: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "sgd": (
        torch.optim.SGD,
        {"momentum": 0.9},
        {"weight_decay": 0.1, "dampening": 0.5, "maximize": True},
    ),
    "nesterov": (
        torch.optim.SGD,
        {"momentum": 0.9, "foreach": True},
        {"nesterov": True, "weight_decay": 0.1},
    ),
    "adam": (torch.optim.Adam, {}, {"eps": 1e-3, "weight_decay": 0.1, "maximize": True}),
    "adamw": (torch.optim.AdamW, {"fused": True}, {"eps": 1e-3, "weight_decay": 0.5}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True, "foreach": True}, {"betas": (0.5, 0.9)}),
}


def equal_steps(
    step: fsdp_mlir.Step, eager: nn.Module, optimizer: torch.optim.Optimizer, count: int
) -> Iterator[int]:
    """Trains both, and yields after each step; their losses and parameters are equal."""
    for number in range(count):
        loss = eager(**BATCH)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(step(BATCH), loss.detach())
        yield number
    state = step.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in eager.state_dict().items())


@pytest.mark.parametrize("early", [True, False], ids=["scheduled_before", "scheduled_after"])
@pytest.mark.parametrize("name", FOLLOWED)
def test_settings_are_followed(name: str, early: bool) -> None:
    """A scheduler that moves momentum or betas at each step, and a change by hand."""
    kind, options, changed = FOLLOWED[name]
    eager, ours = Model(), Model()
    optimizers = [kind(m.parameters(), lr=0.1, **options) for m in (eager, ours)]
    schedulers = [one_cycle(optimizer) for optimizer in optimizers] if early else []
    step = compiled(ours, optimizers[1])
    schedulers = schedulers or [one_cycle(optimizer) for optimizer in optimizers]
    for number in equal_steps(step, eager, optimizers[0], 6):
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            scheduler.step()
            if number == 2:
                optimizer.param_groups[0].update(changed)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_momentum_neither_comes_nor_goes(momentum: float) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    step = compiled(model, optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9 - momentum
    with pytest.raises(CompileError, match=f"compiled with momentum={momentum}, .* momentum; comp"):
        step(BATCH)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.Adam, {"fused": True}),
    ],
)
def test_a_learning_rate_that_is_a_tensor(kind: Any, options: Any) -> None:
    """And moves, as schedulers do it."""
    eager, ours = Model(), Model()
    optimizers = [kind(m.parameters(), lr=torch.tensor(0.1), **options) for m in (eager, ours)]
    step = compiled(ours, optimizers[1])
    schedulers = [one_cycle(optimizer, cycle_momentum=False) for optimizer in optimizers]
    for _ in equal_steps(step, eager, optimizers[0], 5):
        for scheduler in schedulers:
            scheduler.step()


def test_tensor_rates_of_the_unfused_adam() -> None:
    model = Model()
    adam = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    with pytest.raises(NotImplementedError, match="a tensor as 'lr'"):
        compiled(model, adam)
