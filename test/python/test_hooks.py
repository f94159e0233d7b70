"""Hooks of gradients and optimizers, settings that change, and optimizers that no plan has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import fsdp_mlir
import pytest
import torch
from fsdp_mlir import CaptureError
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from twins import Twins, full

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


CALLS: list[Any] = []


def observe(*args: Any) -> None:
    CALLS.append(args)


def accumulation(param: Tensor) -> Any:
    """What adds to a parameter's gradient. Its hooks end with it, so the parameter keeps it."""
    param.node = torch.autograd.graph.get_gradient_edge(param).node  # type: ignore[attr-defined]
    return param.node  # type: ignore[attr-defined]


def paired(optimizer: Any = (torch.optim.SGD, {"lr": 0.1}), **options: Any) -> Twins:
    return Twins(Model, BATCH, optimizer, **options)


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
    handle.remove()
    fsdp_mlir.capture(model, kwargs=BATCH, path=tmp_path / "model.pt")


def test_hooks_of_a_frozen_parameter_are_never_called(tmp_path: Path) -> None:
    model = Model()
    model.first.bias.register_hook(halve)
    model.first.bias.requires_grad_(False)
    fsdp_mlir.capture(model, kwargs=BATCH, path=tmp_path / "model.pt")


@pytest.mark.parametrize("late", [True, False])
def test_hooks_on_reduced_gradients_are_called(late: bool) -> None:
    seen: list[Tensor] = []

    def register(model: Any) -> None:
        model.second.weight.register_post_accumulate_grad_hook(lambda p: seen.append(full(p.grad)))

    pair = paired(example=None)
    if late:
        pair.assert_equal_steps()
    pair.change(register)
    pair.assert_equal_steps()
    assert len(seen) == 4
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[2], seen[3])


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


OPTIMIZER_HOOKS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "pre": lambda o: o.register_step_pre_hook(observe),
    "post": lambda o: o.register_step_post_hook(observe),
    "global_pre": lambda _: register_optimizer_step_pre_hook(observe),
    "global_post": lambda _: register_optimizer_step_post_hook(observe),
    "wrapped_step": lambda o: replace_step(o, stepping(o)),
    "other_step": lambda o: replace_step(o, MethodType(method, o)),
    "other_step_with_a_scheduler": scheduled,
}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("name", OPTIMIZER_HOOKS)
def test_optimizer_hooks(name: str, early: bool, handles: list[Any]) -> None:
    """Before the first step, and after it."""
    pair = paired(example=None, fallback="error")
    if not early:
        pair.assert_equal_steps()
    made = [handle for handle in pair.change_optimizer(OPTIMIZER_HOOKS[name]) if handle]
    handles += made
    CALLS.clear()
    pair.assert_equal_steps()
    assert len(CALLS) == (8 if name.startswith("global") else 4 if made else 0)
    for handle in made:
        handle.remove()
    pair.assert_equal_steps()


def lesser_group(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"].pop())


SETTINGS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "amsgrad": lambda o: (o.state.clear(), o.param_groups[1].update(amsgrad=True)),
    "fused": lambda o: [group.update(fused=True) for group in o.param_groups],
    "fused_one": lambda o: o.param_groups[0].update(fused=True),
    "a_lesser_group": lesser_group,
    "state_cleared": lambda o: o.state.clear(),
    "state_loaded": lambda o: o.load_state_dict(o.state_dict()),
    "state_written": lambda o: [s["exp_avg"].mul_(2.0) for s in o.state.values()],
}


def two_groups(model: Any) -> torch.optim.Optimizer:
    groups = [{"params": [*module.parameters()]} for module in (model.first, model.second)]
    return torch.optim.AdamW(groups)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_change(name: str) -> None:
    pair = paired(two_groups, fallback="error")
    pair.change_optimizer(lambda o: o.param_groups[0].update(name="first", foreach=True, lr=0.01))
    pair.assert_equal_steps()
    pair.change_optimizer(SETTINGS[name])
    pair.assert_equal_steps(3)


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


@pytest.mark.parametrize("early", [True, False], ids=["scheduled_before", "scheduled_after"])
@pytest.mark.parametrize("name", FOLLOWED)
def test_settings_are_followed(name: str, early: bool) -> None:
    """A scheduler that moves momentum or betas at each step, and a change by hand."""
    kind, options, changed = FOLLOWED[name]
    pair = paired((kind, {"lr": 0.1, **options}), example=None, fallback="error")
    schedulers = pair.change_optimizer(one_cycle) if early else []
    pair.assert_equal_steps(1)
    schedulers = schedulers or pair.change_optimizer(one_cycle)
    for number in range(5):
        for scheduler in schedulers:
            scheduler.step()
        if number == 2:
            pair.change_optimizer(lambda o: o.param_groups[0].update(changed))
        pair.assert_equal_steps(1)
    assert len(pair.step._cache) == 1


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_momentum_comes_and_goes(momentum: float) -> None:
    pair = paired((torch.optim.SGD, {"lr": 0.1, "momentum": momentum}), fallback="error")
    pair.assert_equal_steps()
    for value in (0.9 - momentum, momentum):
        pair.change_optimizer(lambda o, value=value: o.param_groups[0].update(momentum=value))
        pair.assert_equal_steps()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.AdamW, {}),
    ],
)
def test_a_learning_rate_that_is_a_tensor(kind: Any, options: Any) -> None:
    """And moves, as schedulers do it."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return kind(model.parameters(), lr=torch.tensor(0.1), **options)

    pair = paired(make, fallback="error")
    schedulers = pair.change_optimizer(lambda o: one_cycle(o, cycle_momentum=False))
    for _ in range(5):
        pair.assert_equal_steps(1)
        for scheduler in schedulers:
            scheduler.step()


OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_of_no_plan(name: str) -> None:
    """They make their own step, with gradients of a plan."""
    pair = paired(OTHERS[name], fallback="error")
    pair.assert_equal_steps(3)
    assert all(made is not None for made in pair.step._cache.values())
