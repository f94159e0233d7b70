"""The optimizer's state of a compiled step in this process alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import fsdp_mlir
import pytest
import torch
from fsdp_mlir.support import build
from test_compile import BATCH, Model, compiled, loss_fn

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
