"""The optimizer's state of a compiled step in this process alone."""

from __future__ import annotations

import copy
from typing import Any

import fsdp_mlir
import pytest
import torch
from fsdp_mlir.support import build
from test_compile import BATCH, compiled, loss_fn

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
