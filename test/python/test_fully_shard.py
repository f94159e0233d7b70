"""`fsdp_mlir.fully_shard` records what torch.distributed.fsdp.fully_shard would do, and refuses
what it refuses."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import fsdp_mlir
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from fsdp_mlir import CompileError, optimizers, sharding, weights
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

AXES = ("replicate", "shard")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WithParameter(nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.p = nn.Parameter(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.p


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


def outcome(shard: Callable[..., Any], build: Callable[[Any], Any]) -> tuple[type, str] | None:
    """The error of `build(shard)`."""
    try:
        build(shard)
    except Exception as error:
        return type(error), str(error)
    return None


def twice(shard: Any) -> None:
    model = Model()
    shard(model.head, mesh=mesh(4))
    shard(model.head, mesh=mesh(4))


MISUSE: dict[str, Callable[[Any], Any]] = {
    "a container": lambda shard: shard(Model().layers, mesh=mesh(4)),
    "twice": twice,
    "no modules": lambda shard: shard([], mesh=mesh(4)),
    "no module": lambda shard: shard(3, mesh=mesh(4)),
    "no mesh": lambda shard: shard(Model(), mesh=3),
    "three axes": lambda shard: shard(
        Model(), mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2, 1))
    ),
    "axes without names": lambda shard: shard(Model(), mesh=mesh(2, 2, names=False)),
    "by position": lambda shard: shard(Model(), mesh(4)),
    "reshard to a word": lambda shard: shard(Model(), mesh=mesh(4), reshard_after_forward="x"),
    "reshard to 3": lambda shard: shard(Model(), mesh=mesh(4), reshard_after_forward=3),
    "reshard to 0": lambda shard: shard(Model(), mesh=mesh(4), reshard_after_forward=0),
    "reshard to 4 of 2": lambda shard: shard(Model(), mesh=mesh(2, 2), reshard_after_forward=4),
    "a scalar": lambda shard: shard(WithParameter(torch.ones(())), mesh=mesh(4)),
    "not contiguous": lambda shard: shard(WithParameter(torch.ones(4, 2).t()), mesh=mesh(4)),
    "a placement": lambda shard: shard(Model(), mesh=mesh(4), shard_placement_fn=lambda p: 3),
    "an uneven placement": lambda shard: shard(
        WithParameter(torch.ones(4, 6)), mesh=mesh(4), shard_placement_fn=lambda p: Shard(1)
    ),
    "an unknown argument": lambda shard: shard(Model(), mesh=mesh(4), no_such_argument=1),
}


@pytest.mark.parametrize("build", MISUSE.values(), ids=MISUSE)
def test_errors_are_torchs(build: Callable[[Any], Any]) -> None:
    theirs = outcome(torch.distributed.fsdp.fully_shard, build)
    assert theirs is not None
    assert outcome(fsdp_mlir.fully_shard, build) == theirs


def test_signature_is_torchs() -> None:
    def parameters(function: Any) -> list[tuple[str, Any, str]]:
        signature = inspect.signature(inspect.unwrap(function))
        return [(p.name, p.kind, repr(p.default)) for p in signature.parameters.values()]

    assert parameters(fsdp_mlir.fully_shard) == parameters(torch.distributed.fsdp.fully_shard)
    assert fsdp_mlir.MixedPrecisionPolicy is torch.distributed.fsdp.MixedPrecisionPolicy
    assert fsdp_mlir.CPUOffloadPolicy is torch.distributed.fsdp.CPUOffloadPolicy
    assert fsdp_mlir.init_device_mesh is torch.distributed.device_mesh.init_device_mesh


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("mp_policy", MixedPrecisionPolicy(param_dtype_override_fn=lambda param: None)),
        ("mp_policy", MixedPrecisionPolicy(param_dtype=torch.int64)),
        ("dp_mesh_dims", torch.distributed.fsdp.DataParallelMeshDims(shard="shard")),
    ],
)
def test_not_supported_yet(argument: str, value: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"'{argument}'"):
        fsdp_mlir.fully_shard(Model(), mesh=mesh(4), **{argument: value})


@pytest.mark.parametrize("argument", ["mp_policy", "offload_policy"])
def test_policies_have_a_type(argument: str) -> None:
    with pytest.raises(TypeError, match=f"'{argument}', got 3"):
        fsdp_mlir.fully_shard(Model(), mesh=mesh(4), **{argument: 3})


def test_modules_by_exact_names() -> None:
    model = Model()
    assert fsdp_mlir.fully_shard(model.layers[0], reshard_after_forward=4) is model.layers[0]
    pair = [model.layers[1], model.head]
    assert fsdp_mlir.fully_shard(pair, reshard_after_forward=2) is pair
    assert fsdp_mlir.fully_shard(model) is model
    assert isinstance(model, Model) and type(model).__name__ == "FSDPModel"
    assert sharding.config_of(model, 4) == {
        "units": [
            {"match": "layers.0", "reshard_after_forward": True},
            {"match": ["layers.1", "head"], "reshard_after_forward": 2},
        ]
    }
    assert sharding.mesh_of(model) is None


def test_offload_of_each_call() -> None:
    model = Model()
    fsdp_mlir.fully_shard(model.head, offload_policy=CPUOffloadPolicy())
    fsdp_mlir.fully_shard(model.layers[0])
    fsdp_mlir.fully_shard(model)
    assert sharding.config_of(model, 4)["units"] == [
        {"match": "layers.0"},
        {"match": "head", "cpu_offload": True},
    ]
    model = Model()
    fsdp_mlir.fully_shard(model.head)
    fsdp_mlir.fully_shard(model, offload_policy=CPUOffloadPolicy())
    assert sharding.config_of(model, 4) == {
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
    fsdp_mlir.fully_shard(model, mp_policy=low, reshard_after_forward=True)
    none = {"mixed_precision": False}
    assert sharding.config_of(model, 4) == {
        "mixed_precision": {
            "param_dtype": "bfloat16",
            "reduce_dtype": "float32",
            "cast_forward_inputs": True,
        },
        "reshard_after_forward": True,
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
    assert sharding.config_of(model, 4)["units"] == [
        {"match": "head", "reshard_after_forward": False}
    ]
    assert "reshard_after_forward=1 (int) means" in caplog.text


def test_mesh() -> None:
    model, two = Model(), mesh(2, 2)
    fsdp_mlir.fully_shard(model, mesh=two)
    assert sharding.config_of(model, 4) == {"mesh": {"replicate": 2, "shard": 2}}
    assert sharding.mesh_of(model) is two
    with pytest.raises(NotImplementedError, match="a 'mesh' of all 8 ranks"):
        sharding.config_of(model, 8)


def test_ignored_parameters() -> None:
    model = Model()
    ignored = {model.head.bias, *model.layers[1].parameters()}
    for module in (*model.layers, model.head):
        fsdp_mlir.fully_shard(module, ignored_params=ignored)
    fsdp_mlir.fully_shard(model, ignored_params=ignored)
    assert sharding.config_of(model, 4) == {
        "units": [{"match": "layers.0"}, {"match": "head"}],
        "ignore": ["layers.1.weight", "layers.1.bias", "head.bias"],
    }


def test_root_is_needed() -> None:
    model = Model()
    fsdp_mlir.fully_shard(model.head)
    with pytest.raises(CompileError, match="fully_shard on the model itself"):
        sharding.config_of(model, 4)


def test_calls_are_bottom_up() -> None:
    model = Model()
    fsdp_mlir.fully_shard(model)
    fsdp_mlir.fully_shard(model.head)
    with pytest.raises(CompileError, match=r"'head.weight': .* bottom-up"):
        sharding.config_of(model, 4)


def test_one_mesh() -> None:
    model = Model()
    fsdp_mlir.fully_shard(model.head, mesh=mesh(4))
    fsdp_mlir.fully_shard(model, mesh=mesh(2, 2))
    with pytest.raises(CompileError, match="expected one mesh"):
        sharding.config_of(model, 4)


def test_ignored_by_the_inner_call_only() -> None:
    """The outer call does not look into modules that have a call of their own."""
    model = Model()
    fsdp_mlir.fully_shard(model.head, ignored_params={model.head.bias})
    fsdp_mlir.fully_shard(model)
    assert sharding.config_of(model, 4)["ignore"] == ["head.bias"]


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


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


BAD_OPTIMIZERS: list[tuple[Callable[[nn.Module], Any], type[Exception], str]] = [
    (lambda m: 3, CompileError, "expected an optimizer of torch.optim .* got 3"),
    (lambda m: (torch.optim.SGD, {"lr": -1.0}), ValueError, "Invalid learning rate"),
    (lambda m: (torch.optim.SGD, {"rl": 1.0}), TypeError, "'rl'"),
    (lambda m: lambda params: 3, CompileError, "expected an optimizer of torch.optim"),
    (lambda m: torch.optim.RMSprop(m.parameters()), NotImplementedError, "'RMSprop'"),
    (lambda m: torch.optim.SGD(m.head.parameters()), CompileError, "'layers.0.weight' is missing"),
    (lambda m: torch.optim.SGD(Model().parameters()), CompileError, "not the model's"),
    (lambda m: torch.optim.Adam(m.parameters(), capturable=True), NotImplementedError, "'capt"),
    (stepped, CompileError, "before its first step"),
]


@pytest.mark.parametrize(("make", "kind", "message"), BAD_OPTIMIZERS)
def test_bad_optimizers(
    make: Callable[[nn.Module], Any], kind: type[Exception], message: str
) -> None:
    model = Model()
    with pytest.raises(kind, match=message):
        optimizer_config(make(model), model)


def test_fully_shard_needs_no_process_group() -> None:
    assert os.environ.get("RANK") is None
    dist.destroy_process_group()
    try:
        model = Model()
        fsdp_mlir.fully_shard(model)
        assert sharding.config_of(model, 1) == {}
    finally:
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
