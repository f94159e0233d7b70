"""The optimizer's state of a compiled step in this process alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import fsdp_mlir
import numpy as np
import pytest
import torch
from fsdp_mlir.frontdoor.checkpoints import Checkpoints
from fsdp_mlir.modules import weights
from fsdp_mlir.state import optimizer_state, own_step
from fsdp_mlir.state.optimizer_state import OptimizerState
from fsdp_mlir.support import build
from test_compile import BATCH, Model, compiled, loss_fn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from twins import Twins

ADAMW = (torch.optim.AdamW, {"lr": 0.01})
CONFIG = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}
SCHEDULE = {"warmup_steps": 3, "decay": "linear", "total_steps": 8}
LION = {"name": "plugin", "lr": 0.01, "options": {"beta1": 0.8}}


def trained(steps: int = 3, **options: Any) -> fsdp_mlir.Step:
    step = compiled(**options)
    for _ in range(steps):
        step(BATCH)
    return step


RESUMED: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": ADAMW},
    "config": {"optimizer": CONFIG},
    "schedule": {"optimizer": {"name": "sgd", "lr": 0.1}, "lr_schedule": SCHEDULE},
    "plugin": {"optimizer": LION},
    "groups": {
        "optimizer": {**CONFIG, "groups": [{"match": "**.bias", "weight_decay": 0.0, "lr": 0.02}]}
    },
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_goes_on(name: str) -> None:
    options = copy.deepcopy(RESUMED[name])
    if name == "plugin":
        options["optimizer"]["library"] = str(build.built("lib/liblion.so"))
    first = trained(**options)
    second = compiled(**options)
    model, state = first.full_state_dict(), copy.deepcopy(first.optimizer_state_dict())
    second.load_state_dict(model)
    second.load_optimizer_state_dict(state)
    for _ in range(3):
        assert torch.equal(first(BATCH), second(BATCH))
    third = compiled(**options)
    third.load_state_dict(model)
    again = [third(BATCH) for _ in range(3)]
    assert not torch.equal(again[-1], second(BATCH))  # the state matters


def test_the_form() -> None:
    """Parameters by the first of their names, groups as torch.optim's."""
    step = trained(optimizer=ADAMW)
    state = step.optimizer_state_dict()
    names = ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert list(state["state"]) == names
    assert all(list(s) == ["step", "exp_avg", "exp_avg_sq"] for s in state["state"].values())
    assert {float(s["step"]) for s in state["state"].values()} == {3.0}
    assert [group["params"] for group in state["param_groups"]] == [names]
    plain = torch.optim.AdamW([torch.ones(1)], lr=0.01).state_dict()["param_groups"][0]
    assert state["param_groups"][0] == {**plain, "params": names}


def test_settings_are_taken() -> None:
    model = fsdp_mlir.fully_shard(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = {"input": BATCH["x"], "y": BATCH["y"]}
    step = fsdp_mlir.compile(model, loss=loss_fn, optimizer=optimizer, example=batch)
    state = copy.deepcopy(step.optimizer_state_dict())
    assert state["state"] == {}
    state["param_groups"][0] |= {"lr": 0.0, "weight_decay": 0.1, "initial_lr": 0.5}
    step.load_optimizer_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.0 and optimizer.param_groups[0]["initial_lr"] == 0.5
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert step(batch) == step(batch)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def changed(state: dict[str, Any], change: str) -> None:
    first = state["state"]["first.weight"]
    if change == "a parameter":
        del state["state"]["first.weight"]
    elif change == "another parameter":
        state["state"]["third.weight"] = first
    elif change == "an entry":
        del first["exp_avg"]
    elif change == "a shape":
        first["exp_avg"] = torch.zeros(3)
    elif change == "groups":
        state["param_groups"][0]["params"].reverse()
    elif change == "a key":
        del state["param_groups"]


BAD = {
    "a parameter": "1 missing parameters in the optimizer state: 'first.weight'",
    "another parameter": "1 unexpected parameters in the optimizer state: 'third.weight'",
    "an entry": "1 missing entries of 'first.weight' in the optimizer state: 'exp_avg'",
    "a shape": r"'first.weight': expected shape \[4, 4\] of 'exp_avg', got \[3\]",
    "groups": "expected the parameter groups of the compiled step, got others",
    "a key": "1 missing keys in the optimizer state: 'param_groups'",
}


@pytest.mark.parametrize("change", BAD)
def test_another_state_changes_nothing(change: str) -> None:
    step = trained(optimizer=ADAMW)
    before = copy.deepcopy(step.optimizer_state_dict())
    state = copy.deepcopy(before)
    state["state"]["second.bias"]["exp_avg"] += 1
    changed(state, change)
    with pytest.raises(ValueError, match=BAD[change]):
        step.load_optimizer_state_dict(state)
    after = step.optimizer_state_dict()["state"]["second.bias"]["exp_avg"]
    assert torch.equal(after, before["state"]["second.bias"]["exp_avg"])


def test_a_schedule_needs_the_steps() -> None:
    step = trained(**RESUMED["schedule"])
    state = step.optimizer_state_dict()
    assert state["param_groups"][0].pop("steps") == 3
    with pytest.raises(ValueError, match="expected the number of steps so far as 'steps'"):
        step.load_optimizer_state_dict(state)


MOMENTUM = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}


@pytest.mark.parametrize(
    ("fused", "dropped"),
    [(False, "all"), (False, "one"), (False, "none"), (True, "all"), (True, "none")],
)
def test_momentum_begins_after_a_skipped_step(fused: bool, dropped: str) -> None:
    """With the first update of each parameter, not with the first step."""
    weights = []
    for skips in (False, True):
        model = fsdp_mlir.fully_shard(Model())
        optimizer = torch.optim.SGD(model.parameters(), fused=fused, **MOMENTUM)
        scaler = {"init_scale": 64.0}
        step = fsdp_mlir.compile(model, loss=loss_fn, optimizer=optimizer, grad_scaler=scaler)
        step(BATCH)
        if dropped == "all":
            optimizer.state.clear()
        elif dropped == "one":
            del optimizer.state[next(iter(optimizer.state))]
        if skips:
            step({**BATCH, "x": BATCH["x"] * float("inf")})
            assert step.skipped
        step(BATCH)
        step(BATCH)
        weights.append([param.full_tensor() for param in model.parameters()])
    assert all(map(torch.equal, *weights))


def test_state_that_comes_after_a_skipped_step() -> None:
    """The session has made no update, and has momentum nevertheless."""
    options: dict[str, Any] = {
        "optimizer": (torch.optim.SGD, MOMENTUM),
        "grad_scaler": {"init_scale": 64.0},
    }
    first = trained(2, **options)
    model, state = first.full_state_dict(), copy.deepcopy(first.optimizer_state_dict())
    second = compiled(**options)
    second({**BATCH, "x": BATCH["x"] * float("inf")})
    assert second.skipped
    second.load_state_dict(model)
    second.load_optimizer_state_dict(state)
    for _ in range(2):
        assert torch.equal(first(BATCH), second(BATCH))


@pytest.mark.parametrize("missing", [True, False])
def test_a_parameter_without_momentum_is_saved(missing: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"loss": loss_fn, "fallback": "error"}
    steps = []
    for _ in range(2):
        model = fsdp_mlir.fully_shard(Model())
        optimizer = torch.optim.SGD(model.parameters(), **MOMENTUM)
        step = fsdp_mlir.compile(model, optimizer=optimizer, **options)
        steps.append(step)
        if len(steps) == 1:
            step(BATCH)
            first = next(iter(optimizer.state))
            if missing:
                del optimizer.state[first]
            else:
                optimizer.state[first]["momentum_buffer"] = None
            step.save(tmp_path)
    assert steps[1].load(tmp_path) is not None
    for _ in range(3):
        assert torch.equal(steps[0](BATCH), steps[1](BATCH))


def test_fused_momentum_of_some_parameters() -> None:
    """As of torch.optim, whose error is a TypeError."""
    model = fsdp_mlir.fully_shard(Model())
    optimizer = torch.optim.SGD(model.parameters(), fused=True, **MOMENTUM)
    step = fsdp_mlir.compile(model, loss=loss_fn, optimizer=optimizer)
    step(BATCH)
    del optimizer.state[next(iter(optimizer.state))]
    with pytest.raises(RuntimeError, match="momentum buffers of all parameters of a group or of"):
        step(BATCH)


# ---------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------


class Parts(Model):
    """With a part that no step uses, and another that may be wrapped."""

    def __init__(self, *, wrapped: bool = False) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(4, 4)
        if wrapped:
            self.first = checkpoint_wrapper(self.first)


def loop(
    kind: Any = torch.optim.AdamW,
    *,
    wrapped: bool = False,
    frozen: bool = False,
    mesh: Any = None,
    **settings: Any,
) -> tuple[fsdp_mlir.Step, torch.nn.Module, torch.optim.Optimizer]:
    model = Parts(wrapped=wrapped)
    model.first.requires_grad_(not frozen)
    fsdp_mlir.fully_shard(model, mesh=mesh)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = kind(params, **{"lr": 0.01, **settings})
    return fsdp_mlir.compile(model, loss=loss_fn, optimizer=optimizer), model, optimizer


@pytest.mark.parametrize("method", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_load_drops_gradients_that_are_not_reduced(method: str, tmp_path: Path) -> None:
    fsdp_mlir.fully_shard(torch.nn.Linear(1, 1))  # makes the process group
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    step, model, _ = loop(mesh=mesh)
    step(BATCH)
    step.save(tmp_path)
    want = [step(BATCH) for _ in range(3)]
    getattr(model, method)(False)
    step.backward(BATCH)
    getattr(model, method)(True)
    found = step.load(tmp_path)
    assert found is not None and all(param.grad is None for param in model.parameters())
    assert [step(BATCH) for _ in range(3)] == want


def test_the_loop_s_own_updates_are_steps(tmp_path: Path) -> None:
    step, model, optimizer = loop()
    for count in range(1, 4):
        step.backward(BATCH)
        step.backward(BATCH)
        optimizer.step()
        optimizer.step()  # of gradients that have already been counted
        optimizer.zero_grad()
        assert step.steps == count
        step.save(tmp_path)
    step.backward(BATCH)
    step.update()
    assert step.steps == 4
    step.backward(BATCH)
    step(BATCH)  # has those gradients too
    assert step.steps == 5
    step(BATCH)
    assert step.steps == 6 and not own_step.why(optimizer, list(model.parameters()))
    assert step.load(tmp_path) is not None and step.steps == 3


def test_back_to_before_a_parameter_had_state(tmp_path: Path) -> None:
    step, model, optimizer = loop()
    step(BATCH)
    step.save(tmp_path)
    want = [step(BATCH) for _ in range(2)]
    for param in model.unused.parameters():
        param.grad = torch.ones_like(param)
    step.update()
    step.save(tmp_path)
    assert step.load(tmp_path / "step-1") is not None
    assert not any(optimizer.state.get(param) for param in model.unused.parameters())
    assert [step(BATCH) for _ in range(2)] == want
    assert step.load(tmp_path / "step-4") is not None
    assert all(optimizer.state.get(param) for param in model.unused.parameters())


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("saved", [True, False])
def test_amsgrad_is_the_checkpoint_s(started: bool, saved: bool, tmp_path: Path) -> None:
    first, *_ = loop(amsgrad=saved)
    first(BATCH)
    first.save(tmp_path)
    second, _, optimizer = loop(amsgrad=not saved)
    if started:
        second(BATCH)
    assert second.load(tmp_path) is not None
    assert optimizer.param_groups[0]["amsgrad"] == saved
    assert [second(BATCH) for _ in range(2)] == [first(BATCH) for _ in range(2)]


def test_amsgrad_without_its_state() -> None:
    step, _, optimizer = loop()
    step(BATCH)
    optimizer.param_groups[0]["amsgrad"] = True
    state = OptimizerState(step._model, optimizer, None, None, 1)
    with pytest.raises(ValueError, match=r"'first.weight': expected 'max_exp_avg_sq' in its state"):
        state.check(state.state_dict(), saved=True)


def test_a_learning_rate_of_numpy_s(tmp_path: Path) -> None:
    losses = []
    for _ in range(2):
        step, _, optimizer = loop()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: np.cos(epoch / 9))
        found = step.load(tmp_path)
        if found is None:
            step(BATCH)
            scheduler.step()
            step.save(tmp_path, extra=scheduler.state_dict())
        else:
            assert type(optimizer.param_groups[0]["lr"]) is np.float64
            scheduler.load_state_dict(found.extra)
        losses.append([step(BATCH) for _ in range(2)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("old", [True, False])
def test_names_are_those_of_state_dict(
    wrapped: bool, old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With checkpoint_wrapper too, whose prefix checkpoints of earlier versions have."""
    with monkeypatch.context() as patched:
        if old:
            patched.setattr(weights, "saved_name", lambda name: name)
            patched.setattr(optimizer_state, "saved_name", lambda name: name)
        first, model, _ = loop(wrapped=True)
        first(BATCH)
        path = Path(first.save(tmp_path).result())
    manifest = (path / "manifest.json").read_text()
    assert ("_checkpoint_wrapped_module" in manifest) == old
    assert all(f'"{name}"' in manifest for name in model.state_dict()) == (not old)
    second, *_ = loop(wrapped=wrapped)
    if old and not wrapped:
        with pytest.raises(ValueError, match=r"first\.weight"):
            second.load(tmp_path)
        return
    assert second.load(tmp_path) is not None
    assert [second(BATCH) for _ in range(2)] == [first(BATCH) for _ in range(2)]


def test_a_checkpoint_without_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As earlier versions saved it."""
    first, *_ = loop()
    first(BATCH)
    first.save(tmp_path)
    text = Checkpoints._text

    def old(self: Checkpoints, found: dict[str, Any], **options: Any) -> dict[str, Any]:
        made = text(self, found, **options)
        del made["forms"]
        return made

    monkeypatch.setattr(Checkpoints, "_text", old)
    second, _, optimizer = loop()
    assert second.load(tmp_path) is not None
    assert all(type(state["exp_avg"]) is DTensor for state in optimizer.state.values())
    assert [second(BATCH) for _ in range(2)] == [first(BATCH) for _ in range(2)]


@pytest.mark.parametrize("frozen", [True, False])
def test_what_was_frozen_since_is_named(frozen: bool, tmp_path: Path) -> None:
    first, *_ = loop(frozen=frozen)
    first(BATCH)
    path = first.save(tmp_path).result()
    second, *_ = loop(frozen=not frozen)
    places = "no group, .* group 0" if frozen else "group 0, .* none"
    with pytest.raises(ValueError, match=f"{path}: .* got others: 'first.weight' in {places}"):
        second.load(tmp_path)


class Averaging(torch.optim.AdamW):
    """Has more state than its class, which is not like the parameter."""

    odd: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for state in self.state.values():
            state["mean"] = state.get("mean", 0) + state["exp_avg"].mean(0, keepdim=True)
            state["norms"] = torch.cat([state.get("norms", torch.ones(0)), torch.ones(1)])
            if self.odd is not None:
                state["odd"] = self.odd
        return result


def test_a_subclass_has_state_of_its_own(tmp_path: Path) -> None:
    first, model, theirs = loop(Averaging)
    first(BATCH)
    first.save(tmp_path)
    first(BATCH)
    second, other, optimizer = loop(Averaging)
    assert second.load(tmp_path) is not None
    second(BATCH)
    assert first(BATCH) == second(BATCH)
    for param, same in zip(model.parameters(), other.parameters(), strict=True):
        want, got = theirs.state[param], optimizer.state[same]
        assert want.keys() == got.keys()
        if not want:
            continue
        assert got["mean"].placements == want["mean"].placements
        assert torch.equal(got["mean"].full_tensor(), want["mean"].full_tensor())
        assert type(got["norms"]) is torch.Tensor and torch.equal(got["norms"], want["norms"])
    assert first.load(tmp_path) is not None  # when 'norms' are more


class Odd(torch.Tensor):
    pass


def test_state_of_which_the_form_is_not_kept(tmp_path: Path) -> None:
    step, _, optimizer = loop(Averaging)
    optimizer.odd = torch.ones(2).as_subclass(Odd)
    step(BATCH)
    with pytest.raises(ValueError, match=r"first.weight.odd: expected a torch.Tensor .* 'Odd'"):
        step.save(tmp_path)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    optimizer.odd = distribute_tensor(torch.ones(2), mesh)
    step(BATCH)
    with pytest.raises(ValueError, match=r"first.weight.odd: .* the parameter's mesh"):
        step.save(tmp_path)


class Scaled(torch.nn.Module):
    """Its own parameter is the first of the model, and the last of the plan."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 4)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale).square().mean()


@pytest.mark.parametrize("optimizer", [ADAMW, (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})])
def test_the_order_of_what_is_made(optimizer: Any) -> None:
    Twins(Scaled, {"x": torch.ones(2, 8)}, optimizer).assert_equal_steps()
