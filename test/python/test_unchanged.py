"""A model that changes after `compile`: the next step is FSDP2's on the changed model."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import twins
from fsdp_mlir.frontdoor import plans, together
from fsdp_mlir.step.eager import eval_mode
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


class Twins(twins.Twins):
    """With the model of this file."""

    def __init__(self, make: Callable[[], nn.Module] = Model, **options: Any) -> None:
        super().__init__(make, BATCH, SGD, **options)


@torch.no_grad()
def load_others(model: nn.Module) -> None:
    model.load_state_dict({name: x + 1 for name, x in model.state_dict().items()})


@torch.no_grad()
def scale(model: nn.Module) -> None:
    model.head.weight.mul_(0.5)


def assign_others(model: nn.Module) -> None:
    state = {name: x + 1 for name, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


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


# What becomes another plan, or is followed as it is.
FOLLOWED: dict[str, Callable[[Any], Any]] = {
    "eval": lambda m: m.eval(),
    "eval_of_one": lambda m: m.drop.eval(),
    "eval_and_back": lambda m: (m.eval(), m(BATCH["x"]), m.train()),
    "frozen": lambda m: m.head.bias.requires_grad_(False),
    "loaded": load_others,
    "assigned": assign_others,
    "scaled": scale,
    "write_through_data": write_data,
    "statistics": lambda m: m(BATCH["x"]),
    "buffer": set_attribute("norm.running_var", torch.ones(4) * 3),
    "module_of_no_state": set_attribute("drop", nn.Identity()),
    "new_module": lambda m: m.blocks.append(nn.Tanh()),
    "constant": write_table,
    "other_table": set_attribute("table", torch.full((4,), 2.0)),
    "table": set_attribute("table", torch.ones(6, 4)),
    "dropout": set_attribute("drop.p", 0.5),
    "attribute": set_attribute("blocks.1.gain", 3.0),
    "setting": set_attribute("config.scale", 3.0),
    "forward": lambda m: setattr(m.blocks[0], "forward", MethodType(scaled, m.blocks[0])),
    "hook": lambda m: m.blocks[0].register_forward_hook(double),
    "gradients": lambda m: (m(BATCH["x"]).backward(), m.zero_grad()),
}
# What no plan has: FSDP2 itself goes on.
WITHOUT_PLAN: dict[str, Callable[[Any], Any]] = {
    "new_parameter": lambda m: m.register_parameter("more", nn.Parameter(torch.ones(1))),
    "module": lambda m: setattr(m, "head", nn.Linear(4, 1).requires_grad_(False)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FOLLOWED)
def test_a_change_is_followed(name: str) -> None:
    pair = Twins(fallback="error")
    pair.assert_equal_steps()
    pair.change(FOLLOWED[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.assert_equal_steps(3)


@pytest.mark.parametrize("name", WITHOUT_PLAN)
def test_what_has_no_plan_goes_on(name: str) -> None:
    pair = Twins()
    pair.assert_equal_steps()
    torch.manual_seed(1)
    pair.change(lambda model: (torch.manual_seed(1), WITHOUT_PLAN[name](model)))
    with pytest.warns(UserWarning, match="runs as FSDP2 does, without a plan: "):
        pair.assert_equal_steps(3)


def test_state_behind_an_eager_forward() -> None:
    """Which leaves the root's parameters unsharded."""
    pair = Twins(max_norm=0.5)
    pair.step(BATCH)
    with torch.no_grad():
        pair.ours(BATCH["x"])
    state = pair.step.optimizer_state_dict()
    assert state["param_groups"][0]["params"] == [n for n, _ in pair.theirs.named_parameters()]
    pair.step.load_optimizer_state_dict(state)
    pair.step.backward(BATCH)
    with torch.no_grad():
        pair.ours(BATCH["x"])
    pair.step.update()
    assert pair.step.grad_norm and all(p.grad is None for p in pair.ours.parameters())


@pytest.mark.parametrize("holds_array", [False, True])
def test_a_state_dict_from_before_the_first_step(holds_array: bool) -> None:
    """It goes on being the model's, as with FSDP2; an array of NumPy keeps what it has."""
    pair = Twins(example=None)
    state, theirs = pair.ours.state_dict(), pair.theirs.state_dict()
    before = {name: state[name] for name, _ in pair.ours.named_parameters()}
    arrays = [x.to_local().numpy() for x in before.values()] if holds_array else []
    values = [array.copy() for array in arrays]
    pair.assert_equal_steps()
    if holds_array:
        assert all((array == value).all() for array, value in zip(arrays, values, strict=True))
        return
    for name, kept in before.items():
        assert torch.equal(kept.to_local(), theirs[name].to_local()), name
    pair.ours.load_state_dict(before, strict=False)
    pair.assert_equal_steps()


class Masked(nn.Module):
    """Its loss is that of some places alone, as of masked tokens; `kept` chooses among features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 6)
        self.register_buffer("kept", torch.arange(6) > 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.linear(x)[mask][:, self.kept].square().mean()


MASKED = {"x": torch.linspace(-1, 1, 20).view(5, 4), "mask": torch.arange(5) > 2}


def test_masks_that_leave_another_number() -> None:
    mask = torch.tensor([True, False, True, False, False])
    batch = {"x": torch.linspace(-1, 1, 20).view(5, 4), "mask": mask}
    pair = twins.Twins(Masked, batch, SGD, fallback="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.assert_equal_steps()
        batch["mask"] = mask.flip(0)  # other places, of the same number
        pair.assert_equal_steps()
    batch["mask"] = ~mask
    pair.assert_equal_steps()
    batch["mask"] = mask
    pair.change(lambda model: model.kept.logical_not_())
    pair.assert_equal_steps()
    pair.change(lambda model: model.kept.fill_(True))
    pair.assert_equal_steps()


def test_values_that_are_refused() -> None:
    batch = {"x": torch.linspace(-1, 1, 24).view(6, 4), "mask": torch.arange(6) > 0}
    pair = twins.Twins(Masked, batch, SGD, fallback="error")
    for count in range(5):
        batch["mask"] = torch.arange(6) > count
        pair.assert_equal_steps()
    batch["mask"] = torch.arange(6) >= 0
    with pytest.raises(together.NoPlan, match="values that decide a shape"):
        pair.step(batch)
    batch["mask"] = torch.arange(6) > 2
    pair.assert_equal_steps()


@pytest.mark.parametrize(
    "line",
    ["import a_package.settings as s", "from . import settings as s", "from .settings import s"],
)
def test_what_an_import_in_forward_reads(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "settings.py").write_text(
        "import types\ngain = 2.0\ns = types.SimpleNamespace(gain=2.0)"
    )
    (package / "models.py").write_text(
        "from torch import nn\n"
        "class Scaled(nn.Linear):\n"
        "    def forward(self, x):\n"
        f"        {line}\n"
        "        return (super().forward(x) * s.gain).mean()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "a_package"]:
        monkeypatch.delitem(sys.modules, name)
    models, settings = (import_module(f"a_package.{name}") for name in ("models", "settings"))

    def made() -> nn.Module:
        torch.manual_seed(0)
        return models.Scaled(4, 2)

    pair = twins.Twins(made, BATCH, SGD)
    pair.assert_equal_steps()
    settings.gain = settings.s.gain = 3.0
    pair.assert_equal_steps()


def test_a_global_with_the_name_of_an_attribute() -> None:
    """The model reads the attribute `linear`; the global `linear` of its file is another thing."""
    pair = twins.Twins(Masked, {**MASKED}, SGD)
    captured = pair.step._plans._made[0].captured
    for number in range(3):
        globals()["linear"] = torch.tensor(float(number))
        pair.assert_equal_steps()
    (made,) = pair.step._plans._made
    assert made.captured is captured  # and not captured again


def test_another_dtype() -> None:
    """Before the first forward FSDP2 takes it; the memory of a plan has the one before."""
    pair = Twins()
    pair.change(lambda model: model.double())
    pair.batch = {"x": BATCH["x"].double()}
    with pytest.warns(UserWarning, match=r"is torch.float64\[4, 4\] and was torch.float32\[4, 4\]"):
        pair.assert_equal_steps()


def test_gradients_stay_where_the_loop_left_them() -> None:
    """FSDP2 adds to what is there; so does the next step."""
    pair = Twins()
    pair.change(lambda model: (torch.manual_seed(0), model(BATCH["x"]).backward()))
    pair.assert_equal_steps()


def test_hooks_of_every_module() -> None:
    pair = Twins()
    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        pair.assert_equal_steps()
    finally:
        handle.remove()
    pair.assert_equal_steps()


def test_another_forward_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Twins()
    monkeypatch.setattr(Block, "forward", scaled)
    pair.assert_equal_steps()


def test_a_loss_that_is_a_module() -> None:
    inner = nn.CrossEntropyLoss(label_smoothing=0.1)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, output: Tensor) -> Tensor:
            return self.inner(output, output.detach().softmax(-1))

    class Scores(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Scores(4, 3)

    pair = Twins(make, loss=Loss())
    pair.assert_equal_steps()
    inner.label_smoothing = 0.0
    pair.assert_equal_steps()


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


class Loop:
    """Its loss reads `weight` by another method; `steps` and `history` are its own."""

    def __init__(self) -> None:
        self.weight, self.steps, self.history = 2.0, 0, []

    def loss(self, output: Tensor) -> Tensor:
        return self.weighted(output)

    def weighted(self, output: Tensor) -> Tensor:
        return output * self.weight

    def train(self, step: Callable[..., Tensor]) -> Tensor:
        self.steps += 1
        self.history.append(step(BATCH))
        return self.history[-1]


CLOSED, CHANGE_CLOSED = closing_over(2.0)
OTHER_CLOSED, CHANGE_OTHER = closing_over(2.0)
WEIGHTED = Weighted()


def of_modules(output: Tensor) -> Tensor:
    return output * HOLDER.HOLDER.SETTINGS.gain


LOOP = Loop()
HOLDER = ModuleType("holder")
HOLDER.HOLDER, HOLDER.SETTINGS = HOLDER, SETTINGS
OUTSIDE: dict[str, tuple[Any, Callable[[pytest.MonkeyPatch], None]]] = {
    "class": (None, lambda patch: patch.setattr(Block, "factor", 3.0)),
    "global": (
        scaled_loss,
        lambda patch: patch.setitem(globals(), "GAIN", 3.0),
    ),
    "global_object": (
        scaled_loss,
        lambda patch: patch.setattr(SETTINGS, "gain", 3.0),
    ),
    "module_that_holds_itself": (
        of_modules,
        lambda patch: patch.setattr(SETTINGS, "gain", 3.0),
    ),
    "function": (
        scaled_loss,
        lambda patch: patch.setitem(globals(), "helper", torch.neg),
    ),
    "closure": (CLOSED, lambda _: CHANGE_CLOSED(3.0)),
    "closure_of_its_kind": (  # the same code, another variable
        lambda output: OTHER_CLOSED(CLOSED(output)),
        lambda _: CHANGE_OTHER(3.0),
    ),
    "loss": (
        WEIGHTED,
        lambda patch: patch.setattr(WEIGHTED, "weight", 3.0, raising=False),
    ),
    "class_of_the_loss": (
        Weighted(),
        lambda patch: patch.setattr(Weighted, "weight", 3.0),
    ),
    "method": (LOOP.loss, lambda patch: patch.setattr(LOOP, "weight", 3.0)),
    "partial": (
        PARTIAL := partial(torch.mul, other=2.0),
        lambda patch: patch.setitem(PARTIAL.keywords, "other", 3.0),
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", OUTSIDE)
def test_what_the_code_reads_from_outside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, change = OUTSIDE[name]
    pair = Twins(**({} if loss is None else {"loss": loss}))
    pair.assert_equal_steps()
    change(monkeypatch)
    pair.assert_equal_steps()


def test_what_a_loop_counts_needs_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    pair = Twins(loss=loop.loss, fallback="error")
    pair.assert_equal_steps()
    monkeypatch.setattr(plans.Plans, "compile", None)
    loop.train(pair.step)
    loop.train(pair.step)


@pytest.mark.parametrize("name", ["attribute", "hook"])
def test_autocast(name: str) -> None:
    pair = Twins()
    pair.assert_equal_steps(1)
    for change in (lambda _: None, FOLLOWED[name]):
        pair.change(change)
        with torch.autocast("cpu", torch.bfloat16):
            pair.assert_equal_steps(1)
    pair.assert_equal_steps(1)


UNREAD: dict[str, Callable[[Any], Any]] = {
    "attribute": set_attribute("blocks.0.note", "one"),
    "list": lambda m: m.order.append("head"),
    "state_dict_hooks": lambda m: m.register_state_dict_post_hook(lambda *args: None),
    "modes_that_no_module_reads": lambda m: m.eval(),
    "a_hook_that_looks_on": lambda m: m.blocks[0].register_forward_hook(look),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_change_without_a_say_needs_no_plan(name: str) -> None:
    pair = Twins(partial(Model, dropout=False), fallback="error")
    pair.assert_equal_steps()
    for _ in range(2):
        pair.change(UNREAD[name])
        if name == "a_hook_that_looks_on":
            with pytest.warns(UserWarning, match="'look' of register_forward_hook .* not call it"):
                pair.assert_equal_steps()
        else:
            pair.assert_equal_steps()
    assert len({id(made.session) for made in pair.step._cache.values()}) == 1


class Sharing(nn.Module):
    """Two layers share a buffer, and an attribute holds another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        scale = torch.ones(4)
        self.first.register_buffer("scale", scale)
        self.second.register_buffer("scale", scale)
        self.register_buffer("kept", torch.ones(4))
        self.alias = self.kept
        self.register_buffer("own", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.first.scale + self.second.scale * self.own
        return (self.second(x) + (self.kept - 2 * self.alias).sum()).mean()


SHARED: dict[str, tuple[Callable[[Any], Any], int]] = {
    "in_one_layer": (lambda m: setattr(m.second, "scale", m.second.scale * 3), 2),
    "in_the_other": (lambda m: setattr(m.first, "scale", m.first.scale * 3), 2),
    "beside_an_attribute": (lambda m: setattr(m, "kept", torch.full((4,), 3.0)), 2),
    "for_itself": (lambda m: setattr(m, "own", torch.full((4,), 3.0)), 1),
}


@pytest.mark.parametrize("name", SHARED)
def test_another_buffer(name: str) -> None:
    """One that is held in several places is compiled again if they no longer hold the same."""
    change, plans_made = SHARED[name]
    pair = Twins(Sharing, fallback="error")
    pair.assert_equal_steps()
    for _ in range(2):
        pair.change(change)
        pair.assert_equal_steps()
    assert len(pair.step._plans._made) >= plans_made
    assert (len(pair.step._plans._made) == 1) == (plans_made == 1)


def test_another_buffer_than_a_teachers() -> None:
    scale = torch.ones(4)
    teacher = nn.Linear(4, 1).requires_grad_(False)
    teacher.register_buffer("scale", scale)

    def make() -> nn.Module:
        model = Sharing()
        model.own = scale
        return model

    def loss(output: Tensor) -> Tensor:
        return output * teacher(teacher.scale).sum()

    pair = Twins(make, fallback="error", loss=loss)
    pair.assert_equal_steps()
    pair.change(lambda m: setattr(m, "own", torch.full((4,), 3.0)))
    pair.assert_equal_steps()
    assert len(pair.step._plans._made) == 2


def test_a_buffer_that_requires_grad() -> None:
    pair = Twins(Sharing)
    pair.assert_equal_steps()
    pair.change(lambda m: m.own.requires_grad_())
    with pytest.warns(UserWarning, match="buffer 'own' requires grad but is no parameter"):
        pair.assert_equal_steps()
    assert torch.equal(pair.ours.own.grad, pair.theirs.own.grad)


def test_a_limit_of_plans() -> None:
    pair = Twins(partial(Model, dropout=False))
    for number in range(plans.LIMIT - 1):
        pair.change(set_attribute("norm.eps", 1e-3 + number))
        pair.assert_equal_steps(1)
    pair.change(set_attribute("norm.eps", 0.5))
    with pytest.warns(UserWarning, match=r"are 8 plans of the model already; .*norm.eps. is 0.5, "):
        pair.assert_equal_steps(2)


def test_evaluation() -> None:
    """The mode is that of evaluation in any case; values and settings matter as for a step."""
    pair = Twins(evaluation=True)

    def assert_equal() -> None:
        modes = [module.training for module in pair.ours.modules()]
        got = pair.step.evaluate(BATCH)
        assert [module.training for module in pair.ours.modules()] == modes
        with eval_mode(pair.theirs), torch.no_grad():
            assert torch.equal(got, pair.theirs(**BATCH))

    assert_equal()
    pair.change(lambda model: model.eval())
    assert_equal()
    pair.change(lambda model: model.train())
    pair.assert_equal_steps()
    assert_equal()
    pair.change(scale)
    assert_equal()
    pair.change(set_attribute("config.scale", 4.0))
    assert_equal()
    pair.assert_equal_steps()
