"""`fsdp_mlir.compile` in this process alone: the step's interface, its state, and misuse."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsdp_mlir
import pytest
import torch
import torch.distributed as dist
from fsdp_mlir import CaptureError, CompileError
from fsdp_mlir.frontdoor import planning
from fsdp_mlir.models.llama import llama_debug
from fsdp_mlir.state import optimizers
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from twins import Twins

SGD = (torch.optim.SGD, {"lr": 0.1})
BATCH = {"x": torch.linspace(-1, 1, 12).reshape(3, 4), "y": torch.tensor([0, 1, 1])}


class Model(nn.Module):
    """Two layers; the second has its weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)
        self.same = self.second
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.full((2,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        table = torch.tensor([0.5, 2.0])
        return self.second(torch.tanh(self.first(x))) * self.scale * table


def loss_fn(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, y)


def sharded(model: nn.Module) -> nn.Module:
    fsdp_mlir.fully_shard(model)
    return model


def compiled(**options: Any) -> fsdp_mlir.Step:
    options = {"loss": loss_fn, "optimizer": SGD, "example": BATCH, **options}
    return fsdp_mlir.compile(sharded(Model()), **options)


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict) -> Tensor:
    loss = loss_fn(model(batch["x"]), batch["y"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def assert_same_state(step: fsdp_mlir.Step, model: nn.Module) -> None:
    want = model.state_dict()
    for got in (step.state_dict(), step.full_state_dict()):
        assert list(got) == list(want)
        for name, tensor in want.items():
            assert torch.equal(whole(got[name]), tensor), name


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_steps_are_eager_steps() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled()
    assert_same_state(step, model)
    for call in (
        lambda: step(**BATCH),
        lambda: step(BATCH),
        lambda: step(BATCH["x"], BATCH["y"]),
        lambda: step(list(BATCH.values())),
        lambda: step(BATCH["x"], y=BATCH["y"]),
    ):
        loss = call()
        assert loss.shape == () and loss.dtype == torch.float32 and not loss.is_inference()
        assert torch.equal(loss, eager_step(model, optimizer, BATCH))
    assert_same_state(step, model)


def test_a_data_loader_with_workers() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled()
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(12, 4, generator=generator), torch.randint(2, (12,), generator=generator)
    )
    losses = [step(batch) for batch in DataLoader(data, batch_size=3, num_workers=2)]
    assert len(losses) == 4
    for loss, (x, y) in zip(losses, DataLoader(data, batch_size=3), strict=True):
        assert torch.equal(loss, eager_step(model, optimizer, {"x": x, "y": y}))


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        lambda model: torch.optim.Adam,
        lambda model: partial(torch.optim.AdamW, lr=0.01, fused=True),
        lambda model: (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_optimizers(make: Callable[[nn.Module], Any]) -> None:
    model = Model()
    ours = sharded(copy.deepcopy(model))
    optimizer = optimizers.instance_of(make(model), model)
    assert optimizer is not None
    step = fsdp_mlir.compile(ours, loss=loss_fn, optimizer=make(ours), example=BATCH)
    for _ in range(3):
        assert torch.equal(step(BATCH), eager_step(model, optimizer, BATCH))
    assert_same_state(step, model)


def test_the_configs_optimizer() -> None:
    model = Model()
    step = compiled(optimizer={"name": "sgd", "lr": 0.1})
    eager_step(model, torch.optim.SGD(model.parameters(), lr=0.1), BATCH)
    step(BATCH)
    assert_same_state(step, model)


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


def test_exchanged_modules_whose_state_is_the_plans() -> None:
    model = sharded(Square())
    options = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    step = fsdp_mlir.compile(model, optimizer=options)
    step(BATCH["x"])
    model.first, model.second = model.second, model.first
    with pytest.raises(CompileError, match="a parameter is not what the plan expects"):
        step(BATCH["x"])


def test_more_plans_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a factor that is another one in each step: without a capture, and with FSDP2's bits."""
    captures = []
    capture = planning.capture

    def counted(*args: Any, **options: Any) -> Any:
        captures.append(1)
        return capture(*args, **options)

    monkeypatch.setattr(planning, "capture", counted)
    monkeypatch.setattr("fsdp_mlir.frontdoor.plans.LIMIT", 2)
    model, other = sharded(Square()), sharded(Square())
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    step = fsdp_mlir.compile(model, optimizer=SGD)
    for number in range(4):
        for each in (model, other):
            each.set_gradient_divide_factor(1.0 + number)
        if number < 2:
            loss = step(BATCH["x"])
        else:
            with pytest.warns(UserWarning, match=r"there are 2 plans of the model already"):
                loss = step(BATCH["x"])
        want = other(BATCH["x"])
        want.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss, want.detach())
    assert len(captures) == 2


def test_clipping_shows_the_norm() -> None:
    model = Model()
    step = compiled(max_norm=0.01)
    assert step.grad_norm is None
    loss_fn(model(BATCH["x"]), BATCH["y"]).backward()
    step(BATCH)
    assert step.grad_norm == nn.utils.clip_grad_norm_(model.parameters(), 0.01).item()


@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_a_gradient_scaler(max_norm: float | None) -> None:
    """In float32 a power of two changes no bits; the second batch is not finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, backoff_factor=0.25)
    model = Model()
    step = compiled(grad_scaler=scaler, max_norm=max_norm)
    optimizer = SGD[0](model.parameters(), **SGD[1])
    assert step.loss_scale is None
    for number in range(3):
        batch = {**BATCH, "x": BATCH["x"] * (float("inf") if number == 1 else 1.0)}
        scaler.scale(loss_fn(model(batch["x"]), batch["y"])).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        step(batch)
        assert step.skipped == (number == 1)
        assert step.loss_scale == before
        assert_same_state(step, model)
    assert scaler.get_scale() == 16.0
    # One that has taken steps before goes on.
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0, "_growth_tracker": 2})
    step = compiled(grad_scaler=scaler, max_norm=max_norm)
    scales = []
    for _ in range(2):
        step(BATCH)
        scales.append(step.loss_scale)
    assert scales == [8.0, 16.0]
    assert compiled(grad_scaler=torch.amp.GradScaler("cpu", enabled=False)).loss_scale is None


def test_evaluation() -> None:
    step = compiled(evaluation=True, gradient_accumulation_steps=2)
    model = Model().eval()
    assert torch.equal(step.evaluate(BATCH), loss_fn(model(BATCH["x"]), BATCH["y"]))
    assert torch.equal(step.full_state_dict()["first.weight"], model.first.weight)
    assert torch.equal(compiled().evaluate(BATCH), loss_fn(model(BATCH["x"]), BATCH["y"]))


def test_positional_inputs_and_model_loss() -> None:
    class WithLoss(Model):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return loss_fn(super().forward(x), y)

    step = fsdp_mlir.compile(sharded(WithLoss()), optimizer=SGD, example=(BATCH["x"], BATCH["y"]))
    model = Model()
    want = eager_step(model, torch.optim.SGD(model.parameters(), lr=0.1), BATCH)
    assert torch.equal(step(BATCH["x"], BATCH["y"]), want)


def test_a_model_on_meta() -> None:
    with torch.device("meta"):
        meta = Model()
    sharded(meta)
    with pytest.raises(CompileError, match="expected init="):
        fsdp_mlir.compile(meta, loss=loss_fn, optimizer=SGD, example=BATCH)
    before = torch.get_rng_state()
    step = fsdp_mlir.compile(
        meta, loss=loss_fn, optimizer=SGD, example=BATCH, init=Model, init_seed=0
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_state(step, Model())


def test_files_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / 'a step\'s \\ "files"'
    compiled(path=folder)
    names = {path.name for path in folder.iterdir()}
    assert names == {"policy.yaml", "model.pt", "model.safetensors", "plan.json"}


def test_units_by_themselves(tmp_path: Path) -> None:
    model = sharded(llama_debug())
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    options = {"example": {"tokens": tokens, "targets": tokens}, "optimizer": SGD}
    fsdp_mlir.compile(model, units="auto", path=tmp_path, **options)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert {unit["name"] for unit in plan["units"]} == {"(root)", "layers.0", "layers.1"}
    model = llama_debug()
    fsdp_mlir.fully_shard(model.layers[0])
    with pytest.raises(CompileError, match="'units' follows from the other arguments"):
        fsdp_mlir.compile(sharded(model), units="auto", **options)


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("comm", ["shm", "gloo"])
def test_state_outlives_the_step(comm: str, offloads: bool) -> None:
    model = Model()
    offload = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()
    fsdp_mlir.fully_shard(model, offload_policy=offload)
    step = fsdp_mlir.compile(model, loss=loss_fn, optimizer=SGD, comm=comm, fallback="error")
    step(BATCH)
    state = step.state_dict()
    copies = {name: tensor.clone() for name, tensor in state.items()}
    del step
    gc.collect()
    trained = model.state_dict()
    for name, tensor in copies.items():
        assert torch.equal(state[name], tensor) and torch.equal(trained[name], tensor)


def test_deleting_a_step_frees_its_memory() -> None:
    def mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:")

    before = mapped()
    step = compiled()
    step(BATCH)
    optimizer = step.optimizer_state_dict()
    assert mapped() > before
    del step, optimizer
    assert mapped() == before


def test_parameters_are_there_once() -> None:
    """The step's memory takes the place of that which FSDP2 made."""
    model = sharded(Model())
    (group,) = model._get_fsdp_state()._fsdp_param_groups
    before = [weakref.ref(param._sharded_param_data) for param in group.fsdp_params]
    step = fsdp_mlir.compile(model, loss=loss_fn, optimizer=SGD, example=BATCH)
    gc.collect()
    assert [tensor() for tensor in before] == [None] * len(before)
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = [line.split()[0].split("-") for line in maps if "memfd:" in line]
    for param in model.parameters():
        at = param.to_local().data_ptr()
        assert any(int(begin, 16) <= at < int(end, 16) for begin, end in shared)
    step(BATCH)


def test_arguments_that_are_no_tensors() -> None:
    """Each value is another plan."""

    class Scaled(Model):
        def forward(self, x: Tensor, scale: float = 1.0, name: str | None = None) -> Tensor:
            return super().forward(x) * (scale if name is None else 2.0)

    def make() -> nn.Module:
        return Scaled()

    for given in ({"scale": 3.0, "name": None}, {"scale": 0.5, "name": "two"}):
        pair = Twins(make, {"x": BATCH["x"], **given}, SGD, loss=torch.mean, fallback="error")
        pair.assert_equal_steps()
        pair.batch = {**pair.batch, "scale": 4.0}
        pair.assert_equal_steps()


def test_a_loss_that_calls_the_model() -> None:
    def compute_loss(model: nn.Module, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return loss_fn(model(x) + model.scale, y) * scale

    model = Model()
    step = compiled(loss=None, compute_loss=compute_loss, example=None, fallback="error")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for factor in (0.5, 2.0):
        scale = torch.tensor(factor)
        want = compute_loss(model, **BATCH, scale=scale)
        want.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(step(**BATCH, scale=scale), want)
    assert_same_state(step, model)


def test_inputs_that_may_be_missing() -> None:
    def scaled(output: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        return nn.functional.cross_entropy(output, y, weight)

    model = Model()
    step = compiled(loss=scaled, example=None, fallback="error")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = torch.tensor([0.25, 1.0])
    for more in ({}, {"weight": weight}, {}, {"weight": None}, {"weight": 2 * weight}):
        want = scaled(model(BATCH["x"]), BATCH["y"], **more)
        want.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(step({**BATCH, **more}), want)
    with pytest.raises(TypeError, match="expected the inputs 'x', 'y', got 'x', 0"):
        step(x=BATCH["x"])


def test_a_literal_of_a_dtype_that_numpy_lacks() -> None:
    class Literal(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.tensor([0.5, 2.0], dtype=torch.bfloat16)

    model = Literal()
    step = fsdp_mlir.compile(sharded(Literal()), loss=loss_fn, optimizer=SGD, fallback="error")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert torch.equal(step(BATCH), eager_step(model, optimizer, BATCH))
    assert_same_state(step, model)


def test_microbatches_together() -> None:
    model = Model()
    step = compiled(example=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    half = {name: x[:2] for name, x in BATCH.items()}
    for microbatches in ([BATCH] * 3, [BATCH, half], [half]):
        want = [loss_fn(model(batch["x"]), batch["y"]) for batch in microbatches]
        for loss in want:
            loss.backward()
        got = step.accumulate(microbatches)
        assert len(got) == len(want) and all(map(torch.equal, got, want))
        step.update()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_state(step, model)


def test_load_state_dict() -> None:
    step = compiled()
    saved = step.full_state_dict()
    first = step(BATCH)
    assert not torch.equal(step(BATCH), first)
    step.load_state_dict(saved)
    assert torch.equal(step(BATCH), first)
    with pytest.raises(ValueError, match="1 missing keys in the state dict: 'calls'"):
        step.load_state_dict({name: x for name, x in saved.items() if name != "calls"})
    with pytest.raises(ValueError, match="1 unexpected keys in the state dict: 'more'"):
        step.load_state_dict({**saved, "more": torch.ones(1)})
    with pytest.raises(ValueError, match=r"'first.bias': expected shape \[4\], got \[1\]"):
        step.load_state_dict({**saved, "first.bias": torch.ones(1)})
    others = {name: x + 1 for name, x in saved.items()}
    before = step.full_state_dict()
    with pytest.raises(ValueError, match="'more'"):
        step.load_state_dict({**others, "more": torch.ones(1)})
    assert all(torch.equal(before[name], x) for name, x in step.full_state_dict().items())


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "expected the inputs 'x', 'y', got 0 by position"),
        ((BATCH["x"],), {}, "got 1 by position"),
        ((), {**BATCH, "z": BATCH["x"]}, "got 'x', 'y', 'z'"),
        ((BATCH["x"],), BATCH, "got 'x', 'y', 1 by position"),
        ((BATCH["x"], BATCH["y"], BATCH["y"]), {}, "got 3 by position"),
    ],
)
def test_batches_of_other_names(args: Any, kwargs: Any, message: str) -> None:
    step = compiled()
    with pytest.raises(TypeError, match=message):
        step(*args, **kwargs)
    step(BATCH)  # nothing has begun


@pytest.mark.parametrize(
    "batch",
    [
        (BATCH["x"], 3),
        (BATCH["x"][:2], BATCH["y"]),
        (BATCH["x"].double(), BATCH["y"]),
        (BATCH["x"][:, :3], BATCH["y"]),
    ],
)
def test_batches_that_the_model_refuses(batch: Any) -> None:
    """It says so itself, and what comes after goes on."""
    model = Model()
    step = compiled()
    with pytest.raises(Exception) as want:
        loss_fn(model(batch[0]), batch[1])
    with (
        pytest.warns(UserWarning, match="FSDPModel runs as FSDP2 does, without a plan: "),
        pytest.raises(type(want.value)) as got,
    ):
        step(*batch)
    assert str(got.value) == str(want.value)
    sharded_model = step._model
    sharded_model.reset_iter_state()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.calls.zero_()
    sharded_model.calls.zero_()
    assert torch.equal(step(BATCH), eager_step(model, optimizer, BATCH))


def test_microbatches_share_the_samples() -> None:
    step = compiled(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"'x': expected a number of samples that 2 microb.*\[3, "):
        step(BATCH)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"loss": None, "example": BATCH["x"]}, CaptureError, "is no loss"),
        ({"optimizer": 3}, CompileError, "expected an optimizer"),
        ({"optimizer": {"name": "adagrad"}}, CompileError, 'policy.yaml:.*got: "adagrad"'),
        ({"max_norm": -1.0}, ValueError, "max_norm: expected a number of at least 0, got -1.0"),
        ({"mesh": {}}, CompileError, "'mesh' follows from the other arguments"),
        ({"clip_grad_norm": 1.0}, CompileError, "'clip_grad_norm' follows from the other argum"),
        ({"no_such_option": 1}, CompileError, 'unknown key "no_such_option"'),
        ({"example": {"x": {3}}}, CaptureError, "'x': expected a tensor"),
        ({"fallback": "none"}, ValueError, "expected 'eager' or 'error', got 'none'"),
        ({"comm": "nccl"}, ValueError, "comm: expected 'shm' or 'gloo', got 'nccl'"),
    ],
)
def test_bad_arguments(options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        compiled(**{"fallback": "error", **options})


def test_a_model_without_policy() -> None:
    with pytest.raises(CompileError, match="that fully_shard was called on, found no call"):
        fsdp_mlir.compile(Model(), loss=loss_fn, optimizer=SGD, example=BATCH)


def test_ranks_that_torchrun_did_not_start() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
    try:
        with pytest.raises(CompileError, match="has 4 ranks, the environment 1: expected ranks"):
            compiled()
    finally:
        dist.destroy_process_group()


def test_build_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FSDP_MLIR_BUILD", str(tmp_path))
    with pytest.raises(CompileError, match="run make build"):
        compiled()


def test_an_operator_that_fails() -> None:
    """An index that is out of range is an error of the step, and the last."""
    step = compiled()
    with pytest.raises(RuntimeError, match="rank 0: step 1: aten::nll_loss_forward"):
        step(BATCH["x"], torch.tensor([0, 1, 7]))
    over = "cannot be used any more: rank 0: step 1: aten::nll_loss_forward"
    with pytest.raises(RuntimeError, match=over):
        step(BATCH)
    with pytest.raises(RuntimeError, match=over):
        step({name: tensor[:2] for name, tensor in BATCH.items()})  # which has no plan yet


def test_without_an_optimizer() -> None:
    """The loop uses the gradients itself."""
    step = compiled(optimizer=None)
    step.backward(BATCH)
    assert len(step._cache) == 1  # the example has the plan of backward
    for call in (step, step.update, step.save, step.load, step.optimizer_state_dict):
        arguments = (
            (BATCH,) if call is step else ("folder",) if call in (step.save, step.load) else ()
        )
        with pytest.raises(TypeError, match="expected an optimizer in compile"):
            call(*arguments)


def test_a_unit_is_sharded_after_the_first_forward() -> None:
    """As where a head is replaced after an evaluation: FSDP2 initialises it by itself."""
    losses = []
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for compiles in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        for part in (model[0], model[2], model):
            torch.distributed.fsdp.fully_shard(part)
        model(x).sum().backward()
        model.zero_grad()
        model[2] = torch.distributed.fsdp.fully_shard(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = lambda output: output.square().mean()  # noqa: E731
        step = None
        if compiles:
            step = fsdp_mlir.compile(model, loss=loss, optimizer=optimizer, fallback="error")
        for _ in range(3):
            if step is not None:
                losses.append(step(x).item())
                continue
            value = loss(model(x))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
    assert losses[:3] == losses[3:]
    assert losses[2] < losses[1] < losses[0]
