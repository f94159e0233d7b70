"""The policy that compile reads back from what torch's fully_shard made of a model."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import fsdp_mlir
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from fsdp_mlir import CompileError
from fsdp_mlir.modules import sharding, weights
from fsdp_mlir.state import optimizers, own_step
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import ProcessGroupAllocAllGather

AXES = ("replicate", "shard")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.act = nn.Tanh()
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.act(x))


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """One rank of a group of four, none of which need be there: nothing communicates."""
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def mesh(*sizes: int, names: bool = True) -> Any:
    return fsdp_mlir.init_device_mesh(
        "cpu", sizes, mesh_dim_names=AXES[-len(sizes) :] if names else None
    )


def test_it_is_torchs() -> None:
    assert inspect.unwrap(fsdp_mlir.fully_shard) is inspect.unwrap(
        torch.distributed.fsdp.fully_shard
    )
    assert fsdp_mlir.FSDPModule is torch.distributed.fsdp.FSDPModule
    assert fsdp_mlir.MixedPrecisionPolicy is torch.distributed.fsdp.MixedPrecisionPolicy
    assert fsdp_mlir.CPUOffloadPolicy is torch.distributed.fsdp.CPUOffloadPolicy
    assert fsdp_mlir.init_device_mesh is torch.distributed.device_mesh.init_device_mesh


NOT_COMPILED: dict[str, Callable[[Any], Any]] = {
    "'param_dtype_override_fn'": lambda model: fsdp_mlir.fully_shard(
        model,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, param_dtype_override_fn=lambda param: torch.float32
        ),
    ),
    "'param_dtype' torch.float8_e4m3fn": lambda model: fsdp_mlir.fully_shard(
        model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float8_e4m3fn)
    ),
    "more than one mesh": lambda model: (
        fsdp_mlir.fully_shard(model.head, mesh=mesh(4)),
        fsdp_mlir.fully_shard(model, mesh=mesh(2, 2)),
    ),
    "'mp_policy' of 'act', which manages no parameters,": lambda model: (
        fsdp_mlir.fully_shard(
            model.act, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16)
        ),
        fsdp_mlir.fully_shard(model),
    ),
    "set_all_reduce_hook": lambda model: fsdp_mlir.fully_shard(
        model, mesh=mesh(2, 2)
    ).set_all_reduce_hook(print),
    "set_custom_all_gather": lambda model: fsdp_mlir.fully_shard(model).set_custom_all_gather(
        ProcessGroupAllocAllGather(None)
    ),
    "set_reduce_scatter_unused_params": lambda model: fsdp_mlir.fully_shard(
        model
    ).set_reduce_scatter_unused_params(True),
    "set_reshard_after_backward on some modules only": lambda model: (
        fsdp_mlir.fully_shard(model.head),
        fsdp_mlir.fully_shard(model).set_reshard_after_backward(False, recurse=False),
    ),
}


@pytest.mark.parametrize("reason", NOT_COMPILED)
def test_not_compiled(reason: str) -> None:
    """Such a model trains as FSDP2 does."""
    model = Model()
    NOT_COMPILED[reason](model)
    with pytest.raises(NotImplementedError, match=f"^{reason}.* not compiled"):
        sharding.config_of(model)


def test_modules_by_exact_names() -> None:
    model = Model()
    assert fsdp_mlir.fully_shard(model.layers[0], reshard_after_forward=4) is model.layers[0]
    pair = [model.layers[1], model.head]
    assert fsdp_mlir.fully_shard(pair, reshard_after_forward=2) is pair
    assert fsdp_mlir.fully_shard(model) is model
    assert isinstance(model, Model) and type(model).__name__ == "FSDPModel"
    assert sharding.config_of(model) == {
        "units": [
            {"match": "layers.0", "reshard_after_forward": True},
            {"match": ["layers.1", "head"], "reshard_after_forward": 2},
        ]
    }


def test_offload_of_each_call() -> None:
    model = Model()
    fsdp_mlir.fully_shard(model.head, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fsdp_mlir.fully_shard(model.layers[0])
    fsdp_mlir.fully_shard(model)
    assert sharding.config_of(model)["units"] == [
        {"match": "layers.0"},
        {"match": "head", "cpu_offload": True},
    ]
    model = Model()
    fsdp_mlir.fully_shard(model.head)
    fsdp_mlir.fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert sharding.config_of(model) == {
        "cpu_offload": True,
        "units": [{"match": "head", "cpu_offload": False}],
    }


def test_precision_of_each_call() -> None:
    model = Model()
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp_mlir.fully_shard(model.layers[0])
    fsdp_mlir.fully_shard(
        model.layers[1], mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False)
    )
    fsdp_mlir.fully_shard(model.head, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float16))
    fsdp_mlir.fully_shard(model, mp_policy=low)
    none = {"mixed_precision": False}
    assert sharding.config_of(model) == {
        "mixed_precision": {
            "param_dtype": "bfloat16",
            "reduce_dtype": "float32",
            "cast_forward_inputs": True,
        },
        "units": [
            {"match": "layers.0", **none},
            {"match": "layers.1", **none},
            {
                "match": "head",
                "mixed_precision": {"output_dtype": "float16", "cast_forward_inputs": True},
            },
        ],
    }


def test_reshard_to_one_is_false(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    fsdp_mlir.fully_shard(model.head, reshard_after_forward=1)
    fsdp_mlir.fully_shard(model)
    assert sharding.config_of(model)["units"] == [{"match": "head", "reshard_after_forward": False}]
    assert "reshard_after_forward=1 (int) means" in caplog.text


def test_mesh() -> None:
    model, two = Model(), mesh(2, 2)
    fsdp_mlir.fully_shard(model, mesh=two)
    assert sharding.config_of(model) == {"mesh": {"replicate": 2, "shard": 2}}
    assert sharding.mesh_of(model) is two
    assert sharding.ranks_of(model, 4) == [0, 1, 2, 3]


def test_a_mesh_of_some_ranks() -> None:
    model = Model()
    fsdp_mlir.fully_shard(model, mesh=mesh(2, 2)["replicate"])
    assert sharding.ranks_of(model, 4) == [0, 2]
    assert "mesh" not in sharding.config_of(model)


def test_ignored_parameters() -> None:
    model = Model()
    ignored = {model.head.bias, *model.layers[1].parameters()}
    for module in (*model.layers, model.head):
        fsdp_mlir.fully_shard(module, ignored_params=ignored)
    fsdp_mlir.fully_shard(model, ignored_params=ignored)
    assert sharding.config_of(model) == {
        "units": [{"match": "layers.0"}, {"match": "head"}],
        "ignore": ["layers.1.weight", "layers.1.bias", "head.bias"],
    }


def test_a_call_is_needed() -> None:
    with pytest.raises(CompileError, match="that fully_shard was called on, found no call"):
        sharding.config_of(Model())


def test_division_of_each_module() -> None:
    model = Model()
    fsdp_mlir.fully_shard(list(model.layers))
    fsdp_mlir.fully_shard(model)
    model.set_gradient_divide_factor(8.0)
    model.layers[0].set_force_sum_reduction_for_comms(True)
    assert sharding.config_of(model) == {
        "gradient_divide_factor": 8.0,
        "units": [
            {
                "match": ["layers.0", "layers.1"],
                "gradient_divide_factor": None,
                "force_sum_reduction_for_comms": True,
            },
        ],
    }


@pytest.mark.parametrize("recurse", [True, False])
def test_reshard_after_forward(recurse: bool) -> None:
    model = Model()
    for module in (*model.layers, model):
        fsdp_mlir.fully_shard(module)
    model.set_reshard_after_forward(True, recurse=recurse)
    model.layers[1].set_reshard_after_forward(False)
    config = sharding.config_of(model)
    assert config["reshard_after_forward"] is True
    own = {"reshard_after_forward": True} if recurse else {}
    assert config["units"] == [
        {"match": "layers.0", **own},
        {"match": "layers.1", "reshard_after_forward": False},
    ]


def test_reshard_after_backward() -> None:
    model = Model()
    fsdp_mlir.fully_shard(model.head)
    fsdp_mlir.fully_shard(model)
    model.set_reshard_after_backward(False)
    assert sharding.config_of(model)["reshard_after_backward"] is False
    model.set_reshard_after_backward(True)
    assert "reshard_after_backward" not in sharding.config_of(model)


def test_reductions() -> None:
    model = fsdp_mlir.fully_shard(Model())
    assert sharding.reduces_now(model, sharding.groups(model))
    for method in ("set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward"):
        getattr(model, method)(False)
        assert not sharding.reduces_now(model, sharding.groups(model))
        getattr(model, method)(True)
        assert sharding.reduces_now(model, sharding.groups(model))


def test_ignored_by_the_inner_call_only() -> None:
    """The outer call does not look into modules that have a call of their own."""
    model = Model()
    fsdp_mlir.fully_shard(model.head, ignored_params={model.head.bias})
    fsdp_mlir.fully_shard(model)
    assert sharding.config_of(model)["ignore"] == ["head.bias"]


# ---------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------


def optimizer_config(spec: Any, model: nn.Module) -> dict[str, Any]:
    optimizer = optimizers.instance_of(spec, model)
    assert optimizer is not None
    return optimizers.config_of(optimizer, weights.parameters(model))


def test_optimizer_settings() -> None:
    model = Model()
    adam = {"lr": 0.1, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.01, "amsgrad": True}
    assert optimizer_config((torch.optim.Adam, adam | {"fused": True}), model) == (
        {"name": "adam", "fused": True, "maximize": False, **adam}
    )
    assert optimizer_config(torch.optim.AdamW, model)["weight_decay"] == 0.01
    decoupled = torch.optim.Adam(model.parameters(), decoupled_weight_decay=True)
    assert optimizer_config(decoupled, model)["name"] == "adamw"
    assert optimizer_config(torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5)), model) == {
        "name": "sgd",
        "lr": 0.5,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
    }


def test_optimizer_groups() -> None:
    model = Model()
    groups = [
        {"params": [*model.layers.parameters(), model.head.weight]},
        {"params": [model.head.bias], "lr": 0.5},
    ]
    config = optimizer_config(torch.optim.SGD(groups, lr=0.1), model)
    assert config["lr"] == 0.1
    assert [(group["match"], group["lr"]) for group in config["groups"]] == [(["head.bias"], 0.5)]


BAD_OPTIMIZERS: list[tuple[Callable[[nn.Module], Any], type[Exception], str]] = [
    (lambda m: 3, CompileError, "expected an optimizer of torch.optim .* got 3"),
    (lambda m: (torch.optim.SGD, {"lr": -1.0}), ValueError, "Invalid learning rate"),
    (lambda m: (torch.optim.SGD, {"rl": 1.0}), TypeError, "'rl'"),
    (lambda m: lambda params: 3, CompileError, "expected an optimizer of torch.optim"),
    (lambda m: torch.optim.SGD(Model().parameters()), CompileError, "not the model's"),
]


@pytest.mark.parametrize(("make", "kind", "message"), BAD_OPTIMIZERS)
def test_bad_optimizers(
    make: Callable[[nn.Module], Any], kind: type[Exception], message: str
) -> None:
    model = Model()
    with pytest.raises(kind, match=message):
        optimizers.check_params(
            optimizers.instance_of(make(model), model), weights.parameters(model)
        )


class Sgd(torch.optim.SGD):
    pass


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_step_post_hook(lambda *args: None)
    return optimizer


def replaced(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step = lambda: None
    return optimizer


def keeps_gradients(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.zero_grad = lambda set_to_none=True: None
    return optimizer


def having(kind: type[torch.optim.Optimizer], **settings: Any) -> Callable[[Any], Any]:
    """With settings that come after the constructor."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = kind(model.parameters())
        optimizer.param_groups[0].update(settings)
        return optimizer

    return made


def without_maximize(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters())
    del optimizer.param_groups[0]["maximize"]
    return optimizer


def with_state(**state: Any) -> Callable[[Any], Any]:
    """Of all parameters, or of all in the forms that a function of the parameter gives."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(model.parameters())
        for param in model.parameters():
            zeros = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }
            own = {key: x(param) if callable(x) else x for key, x in state.items()}
            optimizer.state[param] = {**zeros, **own}
        return optimizer

    return made


def hook_on_gradient(model: nn.Module) -> torch.optim.Optimizer:
    model.head.bias.register_post_accumulate_grad_hook(lambda param: None)
    return torch.optim.SGD(model.parameters())


OUTSIDE: list[tuple[Callable[[Any], Any], str]] = [
    (lambda m: torch.optim.RMSprop(m.parameters()), "'RMSprop' is not SGD, Adam or AdamW"),
    (lambda m: Sgd(m.parameters()), "'Sgd' is not SGD, Adam or AdamW"),
    (hooked, "the hook '<lambda>' of Optimizer.register_step_post_hook"),
    (replaced, "'<lambda>' as optimizer.step"),
    (lambda m: torch.optim.Adam(m.parameters(), capturable=True), "'capturable'"),
    (lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1)), "a tensor as 'lr'"),
    (lambda m: torch.optim.SGD(m.head.parameters()), "a parameter that requires grad and is not"),
    (hook_on_gradient, "a hook of register_post_accumulate_grad_hook"),
    (keeps_gradients, "'<lambda>' as optimizer.zero_grad"),
    (having(torch.optim.SGD, lr=np.float32(0.1)), "'float32' as 'lr', whose arithmetic"),
    (having(torch.optim.Adam, betas=(0.5, np.float16(0.5))), "'float16' as 'betas', whose"),
    (having(torch.optim.SGD, lr=True), "'bool' as 'lr', whose arithmetic"),
    (having(torch.optim.SGD, lr=2**60), f"{2**60} as 'lr'"),
    (having(torch.optim.SGD, weight_decay=torch.ones(())), "a tensor as 'weight_decay'"),
    (having(torch.optim.SGD, lr=torch.ones((), requires_grad=True)), "a tensor as 'lr'"),
    (having(torch.optim.SGD, weight_decay=float("nan")), "nan as 'weight_decay'"),
    (having(torch.optim.SGD, lr=1e30), "1e+30 as 'lr'"),
    (having(torch.optim.SGD, dampening=-(2**60)), f"{-(2**60)} as 'dampening'"),
    (having(torch.optim.SGD, lr=float("inf")), "inf as 'lr'"),
    (having(torch.optim.SGD, lr=-1.0), "-1.0 as 'lr'"),
    (having(torch.optim.Adam, betas=(0.5, 1.0)), "1.0 as 'betas'"),
    (having(torch.optim.Adam, betas=torch.ones(2)), "a tensor as 'betas'"),
    (having(torch.optim.SGD, maximize=1), "'int' as 'maximize'"),
    (having(torch.optim.SGD, fused=True, foreach=True), "'fused' with 'foreach'"),
    (
        having(torch.optim.SGD, nesterov=True, momentum=0.9, dampening=0.5),
        "'dampening' with 'nesterov'",
    ),
    (without_maximize, "a group without 'maximize'"),
    (with_state(step=1.0), "'float' as 'step'"),
    (with_state(step=lambda _: torch.ones(1)), "'step' in torch.float32 of shape [1] on 'cpu'"),
    (with_state(step=torch.ones(())), "'step' of one parameter that is another's too"),
    (with_state(exp_avg=None), "'exp_avg' of a parameter in another form"),
    (with_state(exp_avg_sq=lambda p: torch.zeros(1)), "'exp_avg_sq' of a parameter in another"),
    (with_state(), ""),
    (having(torch.optim.SGD, nesterov=True), ""),
    (having(torch.optim.SGD, lr=np.float64(0.1), momentum=0), ""),
    (having(torch.optim.Adam, betas=[0.5, 0.9], lr=1), ""),
    (lambda m: torch.optim.SGD(m.parameters(), momentum=0.9), ""),
    (lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1), fused=True), ""),
]


@pytest.mark.parametrize(("make", "reason"), OUTSIDE)
def test_optimizers_that_make_their_own_step(make: Callable[[Any], Any], reason: str) -> None:
    model = Model()
    found = own_step.why(make(model), list(model.parameters()))
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_fully_shard_alone_in_a_process() -> None:
    assert os.environ.get("RANK") is None
    dist.destroy_process_group()
    try:
        model = Model()
        fsdp_mlir.fully_shard(model)
        assert dist.get_world_size() == 1
        assert sharding.config_of(model) == {}
        dist.destroy_process_group()
    finally:
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
