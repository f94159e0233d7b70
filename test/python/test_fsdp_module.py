"""The methods of a module after fully_shard: those of torch.distributed.fsdp.FSDPModule."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import fsdp_mlir
import pytest
import torch
import torch.distributed.fsdp
from fsdp_mlir import sharding
from torch import nn

METHODS = [name for name in dir(torch.distributed.fsdp.FSDPModule) if not name.startswith("_")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def sharded() -> Any:
    """Units "0", "1" and the root's."""
    model = nn.Sequential(Block(), Block(), nn.Linear(4, 4))
    for block in model[:2]:
        fsdp_mlir.fully_shard(block)
    return fsdp_mlir.fully_shard(model)


def test_the_methods_are_torchs() -> None:
    def parameters(owner: type, name: str) -> list[tuple[str, Any, Any]]:
        signature = inspect.signature(inspect.unwrap(getattr(owner, name)))
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    assert len(METHODS) > 20
    for name in METHODS:
        theirs = parameters(torch.distributed.fsdp.FSDPModule, name)
        assert parameters(fsdp_mlir.FSDPModule, name) == theirs, name


def test_the_class_is_the_modules_too() -> None:
    model = sharded()
    assert isinstance(model, nn.Sequential) and isinstance(model, fsdp_mlir.FSDPModule)
    assert isinstance(model[0], Block) and isinstance(model[0], fsdp_mlir.FSDPModule)
    assert type(model[0]) is type(model[1]) and not isinstance(model[2], fsdp_mlir.FSDPModule)
    assert model(torch.ones(1, 4)).shape == (1, 4)
    assert type(model[:1]) is nn.Sequential
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(model)


def test_division_of_each_module() -> None:
    model = sharded()
    model.set_gradient_divide_factor(8.0)
    model[0].set_force_sum_reduction_for_comms(True)
    model[1].set_gradient_divide_factor(8)
    assert sharding.config_of(model, 1) == {
        "gradient_divide_factor": 8.0,
        "units": [
            {
                "match": "0",
                "gradient_divide_factor": None,
                "force_sum_reduction_for_comms": True,
            },
            {"match": "1"},
        ],
    }
    with pytest.warns(FutureWarning, match="Use `set_gradient_divide_factor` instead"):
        model[0].set_reduce_scatter_divide_factor(8.0)
    assert "gradient_divide_factor" not in sharding.config_of(model, 1)["units"][0]


@pytest.mark.parametrize("recurse", [True, False])
def test_reshard_after_forward(recurse: bool) -> None:
    model = sharded()
    model.set_reshard_after_forward(True, recurse=recurse)
    model[1].set_reshard_after_forward(False)
    config = sharding.config_of(model, 1)
    assert config["reshard_after_forward"] is True
    own = {"reshard_after_forward": True} if recurse else {}
    assert config["units"] == [
        {"match": "0", **own},
        {"match": "1", "reshard_after_forward": False},
    ]
    with pytest.raises(ValueError, match="reshard_after_forward should be a bool, got"):
        model.set_reshard_after_forward(2)


def test_reshard_after_backward() -> None:
    model = sharded()
    model.set_reshard_after_backward(False)
    assert sharding.config_of(model, 1)["reshard_after_backward"] is False
    model[0].set_reshard_after_backward(True)
    with pytest.raises(NotImplementedError, match="not supported on some modules only"):
        sharding.config_of(model, 1)
    model.set_reshard_after_backward(True)
    assert "reshard_after_backward" not in sharding.config_of(model, 1)


OF_THE_LOOP: dict[str, Callable[[Any], Any]] = {
    "set_requires_gradient_sync": lambda m: m.set_requires_gradient_sync(False),
    "set_requires_all_reduce": lambda m: m.set_requires_all_reduce(False, recurse=False),
    "set_is_last_backward": lambda m: m.set_is_last_backward(False),
    "set_manual_backward_finalization": lambda m: m.set_manual_backward_finalization(True),
    "set_reduce_scatter_unused_params": lambda m: m.set_reduce_scatter_unused_params(True),
    "finalize_backward": lambda m: m.finalize_backward(),
    "reset_iter_state": lambda m: m.reset_iter_state(),
    "unshard": lambda m: m.unshard(async_op=True),
    "reshard": lambda m: m.reshard(),
    "set_custom_all_gather": lambda m: m.set_custom_all_gather(None),
    "set_custom_reduce_scatter": lambda m: m.set_custom_reduce_scatter(None),
    "set_all_reduce_hook": lambda m: m.set_all_reduce_hook(print),
}


@pytest.mark.parametrize("method", OF_THE_LOOP)
def test_what_a_step_does_not_follow(method: str) -> None:
    with pytest.raises(NotImplementedError, match=f"^{method}: a compiled step does not follow"):
        OF_THE_LOOP[method](sharded())


def test_defaults_may_be_said() -> None:
    model = sharded()
    config = sharding.config_of(model, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
        model.set_is_last_backward(True)
        model.set_manual_backward_finalization(False)
        model.set_reduce_scatter_unused_params(False)
        model.set_force_sum_reduction_for_comms(False)
    assert sharding.config_of(model, 1) == config


def test_what_has_no_effect_says_so() -> None:
    model = sharded()
    with pytest.warns(UserWarning, match="set_modules_to_forward_prefetch has no effect"):
        model[0].set_modules_to_forward_prefetch([model[1]])
    with pytest.raises(ValueError, match="Expects FSDPModule but got"):
        model[0].set_modules_to_backward_prefetch([model[2]])


def test_a_change_after_compile_is_told() -> None:
    model = sharded()
    sharding.mark_compiled(model)
    with pytest.warns(UserWarning, match="steps that are compiled already do not follow it"):
        model[0].set_gradient_divide_factor(4.0)
