"""A model that changes after `compile`: without a say in the step, or an error at the next one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import fsdp_mlir
import pytest
import torch
from fsdp_mlir import CompileError
from torch import Tensor, nn

GAIN = 1.0
SETTINGS = SimpleNamespace(gain=1.0)
BATCH = {"x": torch.linspace(-1, 1, 24).reshape(6, 4)}
SGD = (torch.optim.SGD, {"lr": 0.1})


def scaled_loss(output: Tensor) -> Tensor:
    return helper(output) * SETTINGS.gain


def helper(output: Tensor) -> Tensor:
    return output * GAIN


class Block(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gain = 2.0
        self.note = "none"

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.gain * self.factor


class Model(nn.Module):
    """With what may change: modes that matter, settings, a table beside the buffers."""

    def __init__(self, dropout: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(4) if dropout else nn.LayerNorm(4)
        self.drop = nn.Dropout(0.25) if dropout else nn.Identity()
        self.head = nn.Linear(4, 1)
        self.table = torch.linspace(1, 2, 4)
        self.config = SimpleNamespace(scale=2.0, name="tiny")
        self.order = ["blocks"]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.head(self.drop(self.norm(x)) * self.table) * self.config.scale).mean()


def compiled(model: nn.Module, **options: Any) -> fsdp_mlir.Step:
    fsdp_mlir.fully_shard(model)
    return fsdp_mlir.compile(model, optimizer=SGD, example=BATCH, **options)


@torch.no_grad()
def load_others(model: nn.Module) -> None:
    model.load_state_dict({name: x + 1 for name, x in model.state_dict().items()})


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    model.head.weight.clamp_(-0.1, 0.1)


def replace_data(model: nn.Module) -> None:
    model.head.bias.data = torch.ones(1)


def write_data(model: nn.Module) -> None:
    model.head.weight.data.mul_(0.5)


@torch.no_grad()
def write_table(model: nn.Module) -> None:
    model.table[1] = 7.0


def scaled(self: nn.Module, x: Tensor) -> Tensor:
    return self.linear(x)


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def look(module: nn.Module, *args: Any) -> None:
    pass


def set_attribute(path: str, value: Any) -> Callable[[nn.Module], None]:
    def change(model: Any) -> None:
        owner, _, name = path.rpartition(".")
        at = model
        for part in owner.split(".") if owner else []:
            at = at[int(part)] if part.isdigit() else getattr(at, part)
        setattr(at, name, value)

    return change


STOPS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "eval": (lambda m: m.eval(), r"^the model is in eval mode, .* it was train mode|in train mode"),
    "eval_of_one": (lambda m: m.drop.eval(), "^module 'drop' is in eval mode, the step was comp"),
    "frozen": (
        lambda m: m.head.bias.requires_grad_(False),
        "'head.bias': requires_grad is False, the step was compiled with True",
    ),
    "all_frozen": (lambda m: m.requires_grad_(False), "requires_grad is False"),
    "loaded": (load_others, "'blocks.0.linear.weight' of the model was written"),
    "clamped": (clamp, "'head.weight' of the model was written"),
    "data": (replace_data, "'head.bias' of the model was written"),
    "write_through_data": (write_data, "'head.weight' of the model was written"),
    "dtype": (lambda m: m.double(), "of the model was written"),
    "statistics": (lambda m: m(BATCH["x"]), "'norm.running_mean' of the model was written"),
    "buffer": (
        set_attribute("norm.running_var", torch.ones(4) * 3),
        "'norm.running_var' of the model was written",
    ),
    "parameter": (
        set_attribute("head.weight", nn.Parameter(torch.ones(1, 4))),
        "'head.weight' of the model was written",
    ),
    "new_parameter": (
        lambda m: m.register_parameter("more", nn.Parameter(torch.ones(1))),
        "'more' is new, gone or at another place",
    ),
    "less": (set_attribute("head.bias", None), "'head.bias' is new, gone"),
    "module": (set_attribute("head", nn.Linear(4, 1)), "'head.weight' of the model was written"),
    "module_of_no_state": (
        set_attribute("drop", nn.Identity()),
        "^module 'drop' is another one, .* in module 'drop' at ",
    ),
    "new_module": (lambda m: m.blocks.append(nn.Tanh()), "^module 'blocks.2' is new"),
    "constant": (write_table, r"'\(constant\).0' of the constant of the graph was written"),
    "other_table": (
        set_attribute("table", torch.full((4,), 2.0)),
        r"attribute 'table' is a tensor of shape \[4\], .* which changes a constant of the graph",
    ),
    "table": (set_attribute("table", torch.ones(3, 4)), "attribute 'table' is a tensor"),
    "dropout": (set_attribute("drop.p", 0.5), r"'drop.p' is 0.5, the step was compiled with 0.25"),
    "attribute": (
        set_attribute("blocks.1.gain", 3.0),
        r"'blocks.1.gain' is 3.0, .* 'aten::mul\(%v\d+, 2.0\) .* at \S*test_unchanged.py:\d+, now",
    ),
    "setting": (set_attribute("config.scale", 3.0), "'config.scale' is 3.0"),
    "forward": (
        lambda m: setattr(m.blocks[0], "forward", MethodType(scaled, m.blocks[0])),
        "attribute 'blocks.0.forward' is ",
    ),
    "hook": (
        lambda m: m.blocks[0].register_forward_hook(double),
        r"^\S*test_unchanged.py:\d+: the hook 'double' of register_forward_hook of module "
        "'blocks.0' was registered after",
    ),
    "gradient_hook": (
        lambda m: m.head.weight.register_hook(lambda grad: grad * 2),
        "parameter 'head.weight' has the hook .* of register_hook",
    ),
    "post_accumulate_hook": (
        lambda m: m.head.weight.register_post_accumulate_grad_hook(look),
        "'head.weight' has the hook 'look' of register_post_accumulate_grad_hook",
    ),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_change_that_matters_stops_the_step(name: str) -> None:
    change, message = STOPS[name]
    model = Model()
    step = compiled(model)
    step(BATCH)
    step(BATCH)
    before = {key: tensor.clone() for key, tensor in step.state_dict().items()}
    change(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            step(BATCH)
    after = step.state_dict()
    assert all(torch.equal(after[key], x) for key, x in before.items())


def test_hooks_of_every_module() -> None:
    step = compiled(Model())
    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        with pytest.raises(CompileError, match="'double' of register_module_forward_hook of every"):
            step(BATCH)
    finally:
        handle.remove()
    step(BATCH)


def test_another_forward_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    step = compiled(Model())
    monkeypatch.setattr(Block, "forward", scaled)
    with pytest.raises(CompileError, match=r"^\S*test_unchanged.py:\d+: forward of 'Block' is ano"):
        step(BATCH)


def test_a_loss_that_is_a_module() -> None:
    model, loss = nn.Linear(4, 3), nn.CrossEntropyLoss(label_smoothing=0.1)
    fsdp_mlir.fully_shard(model)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = loss

        def forward(self, output: Tensor) -> Tensor:
            return self.inner(output, output.detach().softmax(-1))

    batch = {"input": BATCH["x"]}
    step = fsdp_mlir.compile(model, loss=Loss(), optimizer=SGD, example=batch)
    step(batch)
    loss.label_smoothing = 0.0
    with pytest.raises(CompileError, match=r"\(loss\).inner.label_smoothing' is 0.0, .* with 0.1"):
        step(batch)


def closing_over(factor: float) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    def loss(output: Tensor) -> Tensor:
        return output * factor

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    return loss, change


class Weighted:
    weight = 2.0

    def __call__(self, output: Tensor) -> Tensor:
        return output * self.weight


CLOSED, CHANGE_CLOSED = closing_over(2.0)
OTHER_CLOSED, CHANGE_OTHER = closing_over(2.0)
WEIGHTED = Weighted()
OUTSIDE: dict[str, tuple[Any, Callable[[pytest.MonkeyPatch], None], str]] = {
    "class": (None, lambda patch: patch.setattr(Block, "factor", 3.0), "'Block.factor' is 3.0, "),
    "global": (
        scaled_loss,
        lambda patch: patch.setitem(globals(), "GAIN", 3.0),
        "'test_unchanged.GAIN' is 3.0, the step was compiled with 1.0",
    ),
    "global_object": (
        scaled_loss,
        lambda patch: patch.setattr(SETTINGS, "gain", 3.0),
        "'test_unchanged.SETTINGS.gain' is 3.0",
    ),
    "function": (
        scaled_loss,
        lambda patch: patch.setitem(globals(), "helper", torch.neg),
        "'test_unchanged.helper' is <built-in method neg",
    ),
    "closure": (CLOSED, lambda _: CHANGE_CLOSED(3.0), "'closing_over.<locals>.loss.factor' is 3.0"),
    "closure_of_its_kind": (  # the same code, another variable
        lambda output: OTHER_CLOSED(CLOSED(output)),
        lambda _: CHANGE_OTHER(3.0),
        "'closing_over.<locals>.loss.factor' is 3.0",
    ),
    "loss": (
        WEIGHTED,
        lambda patch: patch.setattr(WEIGHTED, "weight", 3.0, raising=False),
        r"'\(loss\).weight' is 3.0, the step was compiled with absent",
    ),
    "class_of_the_loss": (
        Weighted(),
        lambda patch: patch.setattr(Weighted, "weight", 3.0),
        "'Weighted.weight' is 3.0, the step was compiled with 2.0",
    ),
    "partial": (
        PARTIAL := partial(torch.mul, other=2.0),
        lambda patch: patch.setitem(PARTIAL.keywords, "other", 3.0),
        r"'\(loss\).other' is 3.0",
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_the_code_reads_from_outside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, change, message = OUTSIDE[name]
    step = compiled(Model(), **({} if loss is None else {"loss": loss}))
    step(BATCH)
    change(monkeypatch)
    for _ in range(2):
        with pytest.raises(CompileError, match=f"^{message}"):
            step(BATCH)


def test_autocast() -> None:
    step = compiled(Model())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(CompileError, match=r"on with torch.bfloat16 here, .* compiled with off"),
    ):
        step(BATCH)
    step(BATCH)


def test_what_is_undone_does_not_matter() -> None:
    model = Model()
    step = compiled(model)
    model.eval()
    with pytest.raises(CompileError, match="eval mode"):
        step(BATCH)
    model.train()
    step(BATCH)


def equal_steps(step: fsdp_mlir.Step, eager: nn.Module) -> None:
    optimizer = SGD[0](eager.parameters(), **SGD[1])
    loss = eager(BATCH["x"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(step(BATCH), loss.detach())
    state = step.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in eager.state_dict().items())


PASSES: dict[str, Callable[[Any, fsdp_mlir.Step], Any]] = {
    "modes_that_no_module_reads": lambda m, step: m.eval(),
    "own_values": lambda m, step: m.load_state_dict(step.full_state_dict()),
    "own_values_in_new_memory": lambda m, step: m.load_state_dict(
        step.full_state_dict(), assign=True
    ),
    "forward_in_eval_mode": lambda m, step: (m.eval(), m(BATCH["x"]), m.train()),
    "gradients": lambda m, step: m(BATCH["x"]).backward(),
    "state_dict_hooks": lambda m, step: m.register_state_dict_post_hook(lambda *args: None),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_change_without_a_say_is_passed_over(name: str) -> None:
    model = Model(dropout=False)
    eager = copy.deepcopy(model)
    step = compiled(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            equal_steps(step, eager)
            PASSES[name](model, step)
        equal_steps(step, eager)


WARNS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (set_attribute("blocks.0.note", "one"), "'blocks.0.note' is 'one', .* not follow"),
    "setting": (set_attribute("config.name", "large"), "'config.name' is 'large'"),
    "list": (lambda m: m.order.append("head"), r"'order' is \['blocks', 'head'\]"),
    "hook": (
        lambda m: m.blocks[0].register_forward_hook(look),
        "'look' of register_forward_hook .* which will not call it",
    ),
}


@pytest.mark.parametrize("name", WARNS)
def test_a_change_that_may_be_meant_warns_once(name: str) -> None:
    change, message = WARNS[name]
    model = Model(dropout=False)
    eager = copy.deepcopy(model)
    step = compiled(model)
    change(model)
    with pytest.warns(UserWarning, match=message):
        equal_steps(step, eager)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        change(model)
        equal_steps(step, eager)


def test_evaluation_in_eval_mode() -> None:
    """The mode is that of evaluation in any case; values and settings matter as for a step."""
    model = Model()
    eager = copy.deepcopy(model).eval()
    step = compiled(model, evaluation=True)
    model.eval()
    assert torch.equal(step.evaluate(BATCH), eager(BATCH["x"]).detach())
    model.config.scale = 4.0
    with pytest.raises(CompileError, match=r"'config.scale' is 4.0"):
        step.evaluate(BATCH)
    assert not model.drop.training
    model.config.scale = 2.0
    clamp(model)
    with pytest.raises(CompileError, match=r"'head.weight' of the model was written"):
        step.evaluate(BATCH)
