"""Capture proves that the recorded step is what the model does, or names the line where not."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdp_mlir
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations


class Net(nn.Module):
    """A linear layer, and what a test adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.linear(x)).square().mean()

    def step(self, x: Tensor) -> Tensor:
        return x


def captured(model: nn.Module, tmp_path: Path, **options: Any) -> fsdp_mlir.CaptureSummary:
    torch.manual_seed(0)
    options = {"path": tmp_path / "model.pt", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return fsdp_mlir.capture(model, [torch.randn(3, 4)], **options)


# --- refused


class PythonLayerDrop(Net):
    def step(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.01 else x * 2


class NumpyScale(Net):
    def step(self, x: Tensor) -> Tensor:
        return x * float(np.random.rand())


class RankScale(Net):
    def step(self, x: Tensor) -> Tensor:
        return x * (1 + int(os.environ.get("RANK", "0")))


class ManualSeed(Net):
    def step(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return F.dropout(x)


class ForkedSeed(Net):
    def step(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            return F.dropout(x)


class Counter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def step(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls < 100 else x * 2


class ClassCounter(Net):
    calls = 0

    def step(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return x if self.calls < 100 else x * 2


CALLS = 0


class GlobalCounter(Net):
    def step(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return x if CALLS < 100 else x * 2


class NestedCounter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"history": [0]}

    def step(self, x: Tensor) -> Tensor:
        self.state["history"].append(len(self.state["history"]))
        return x


class Previous(Net):
    def __init__(self) -> None:
        super().__init__()
        self.previous: Tensor | None = None

    def step(self, x: Tensor) -> Tensor:
        y = x if self.previous is None else x + self.previous
        self.previous = x.detach()
        return y


class FirstBatch(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None

    def step(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.detach().std()
        return x / self.scale


class Clamped(Net):
    def step(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x)


class Teacher(Net):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 4).requires_grad_(False)

    def step(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.linear.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return x - self.teacher(x)


class MaxNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, max_norm=1.0)

    def step(self, x: Tensor) -> Tensor:
        return x + self.embedding(torch.arange(3))


class DataAssigned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def step(self, x: Tensor) -> Tensor:
        self.mean.data = x.detach().mean(0)
        return x - self.mean


class WeightDataAssigned(Net):
    def step(self, x: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data * 0.5
        return self.linear(x)


class InnerBackward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def step(self, x: Tensor) -> Tensor:
        self.head(x.detach()).sum().backward()
        return x + self.head(x)


class SavesGradient(torch.autograd.Function):
    kept: list[Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: nn.Module) -> Tensor:
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.model.factor += 1
        return grad * ctx.model.factor, None


class _RunsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, head: nn.Module) -> Tensor:
        ctx.head = head
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            ctx.head(x.detach()).sum().backward()
        return grad, None


class BackwardInBackward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def step(self, x: Tensor) -> Tensor:
        return _RunsBackward.apply(x, self.head)


class StateInBackward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 0

    def step(self, x: Tensor) -> Tensor:
        return SavesGradient.apply(x, self)


class ViewedBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("all", torch.zeros(2, 4))
        self.register_buffer("first", self.all[0])

    def step(self, x: Tensor) -> Tensor:
        self.all.add_(1)
        return x + self.first


class ViewedAttribute(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("all", torch.zeros(2, 4))
        self.first = self.all[0]

    def step(self, x: Tensor) -> Tensor:
        self.all.add_(1)
        return x + self.first


class WeightView(Net):
    def __init__(self) -> None:
        super().__init__()
        self.diagonal = self.linear.weight.detach().diagonal()

    def step(self, x: Tensor) -> Tensor:
        return x * self.diagonal


class Synchronised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(4)

    def step(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scripting is deprecated
            self.scripted = torch.jit.script(nn.Linear(4, 4))

    def step(self, x: Tensor) -> Tensor:
        return self.scripted(x)


class ArrayInPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = np.ones(4, dtype=np.float32)

    def step(self, x: Tensor) -> Tensor:
        self.scale *= 2
        return x


class ListedParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.linear.weight]

    def step(self, x: Tensor) -> Tensor:
        return x @ self.weights[0]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (PythonLayerDrop, r"test_proof.py:48: the step depends on numbers that .*'random.random'"),
        (NumpyScale, r"test_proof.py:53: the step depends on numbers that .*'np.random.rand'"),
        (RankScale, r"test_proof.py:\d+: the step is not the same each time: .* another rank"),
        (ManualSeed, r"test_proof.py:\d+: 'torch.manual_seed' in the step"),
        (ForkedSeed, r"test_proof.py:\d+: 'torch.fork_rng' in the step"),
        (Counter, "attribute 'calls' changes in each step"),
        (ClassCounter, r"attribute 'ClassCounter.calls' changes in each step"),
        (GlobalCounter, r"attribute '.*test_proof.CALLS' changes in each step"),
        (NestedCounter, r"attribute 'state\['history'\]\[\d\]' changes in each step"),
        (Previous, r"the captured step is not what eager PyTorch does: .* a second step differs"),
        (FirstBatch, r"the captured step is not what eager PyTorch does: .* a second step differs"),
        (Clamped, r"test_proof.py:\d+: parameter 'linear.weight' is written by 'aten.clamp_"),
        (Teacher, r"test_proof.py:\d+: parameter 'teacher.weight' is written by 'aten.lerp_"),
        (MaxNorm, r"test_proof.py:\d+: parameter 'embedding.weight' is written by 'aten.embedding"),
        (DataAssigned, "'mean' was given other memory or another shape in forward"),
        (WeightDataAssigned, "'linear.weight' was given other memory"),
        (InnerBackward, "backward.. ran inside forward and left a gradient in 'head.weight'"),
        (StateInBackward, "attribute 'factor' changes in each step"),
        (ViewedBuffer, "'first' shares memory with 'all', which the step changes in place"),
        (ViewedAttribute, r"'\(constant\).0' shares memory with 'all', which the step changes"),
        (WeightView, r"'\(constant\).0' shares memory with 'linear.weight', which the step trains"),
        (Synchronised, "module 'norm' is a SyncBatchNorm in train mode"),
        (BackwardInBackward, r"backward\(\) ran inside backward and left a .* in 'head.weight'"),
        (Scripted, "module 'scripted' is a ScriptModule"),
        (ArrayInPlace, r"'scale' changes in each step \(from float32\[4\] \w{16} to float32\[4\] "),
        (ListedParameter, r"test_proof.py:\d+: parameter 'linear.weight' is read by a reference"),
    ],
)
def test_refused(model: type[nn.Module], expected: str, tmp_path: Path) -> None:
    with pytest.raises(fsdp_mlir.CaptureError, match=expected) as error:
        captured(model(), tmp_path)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
    assert (CALLS, ClassCounter.calls) == (0, 0)


# --- right, and so captured


class CachedMask(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        self.length = 0

    def step(self, x: Tensor) -> Tensor:
        if self.mask is None or self.length != x.shape[0]:
            self.mask, self.length = torch.ones(x.shape[0], 4).triu() * 2, x.shape[0]
        return x * self.mask


class UnusedDraw(Net):
    def step(self, x: Tensor) -> Tensor:
        return x * 2 if random.random() < 0.0 else x


class BufferAverage(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def step(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return self.norm(x) / self.steps


class SplitBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        flat = torch.zeros(8)
        self.register_buffer("low", flat[:4])
        self.register_buffer("high", flat[4:])

    def step(self, x: Tensor) -> Tensor:
        self.low.add_(1)
        return x + self.low - self.high


class GradientPenalty(Net):
    def step(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(self.linear(x).sum(), self.linear.weight, create_graph=True)
        return x + slope.square().sum()


class Spectral(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = parametrizations.spectral_norm(nn.Linear(4, 4))

    def step(self, x: Tensor) -> Tensor:
        return self.other(x)


class WeightNormed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = parametrizations.weight_norm(nn.Linear(4, 4))

    def step(self, x: Tensor) -> Tensor:
        return self.other(x)


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.linear.register_forward_hook(lambda _module, _args, output: output * 2)
        self.last.register_full_backward_hook(lambda _module, grads, _out: (grads[0] * 2,))

    def step(self, x: Tensor) -> Tensor:
        return self.last(x)


class Dropped(Net):
    def step(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3)


@pytest.mark.parametrize(
    "model",
    [
        CachedMask,
        UnusedDraw,
        BufferAverage,
        SplitBuffer,
        GradientPenalty,
        Spectral,
        WeightNormed,
        Hooked,
        Dropped,
    ],
)
def test_right_programs_are_captured(model: type[nn.Module], tmp_path: Path) -> None:
    made = model()
    summary = captured(made, tmp_path)
    assert summary.checked
    mask: Callable[[nn.Module], Any] = lambda m: getattr(m, "mask", None)  # noqa: E731
    assert mask(made) is None  # nothing of the capture stays in the model


def test_loss_reads_the_model_s_own_state(tmp_path: Path) -> None:
    """What a loss function reads of the model is its state, not a copy from the capture."""
    model = BufferAverage()
    model.linear.bias.requires_grad_(False)
    bias = model.linear.bias

    def loss(output: Tensor) -> Tensor:
        return output * model.steps + model.linear.weight.square().sum() + bias.sum()

    summary = captured(model, tmp_path, loss=loss)
    assert summary.constants == ()


def test_stored_output_is_a_warning(tmp_path: Path) -> None:
    """A tensor that forward keeps and nothing reads: the step's numbers are right without it."""

    class Kept(Net):
        def step(self, x: Tensor) -> Tensor:
            self.last = x
            return x

    model = Kept()
    with pytest.warns(
        UserWarning, match="attribute 'last' was set in forward, and no later step"
    ) as made:
        fsdp_mlir.capture(model, [torch.randn(3, 4)], path=tmp_path / "model.pt")
    assert made[0].filename == __file__
    assert not hasattr(model, "last")


class Recurrent(Net):
    """A recurrent layer over the batch: LSTMs are one call, others are calls for each row."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(4, 4, batch_first=True, **options)

    def step(self, x: Tensor) -> Tensor:
        return self.layer(x[None])[0][0]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "dropout": 0.5, "bidirectional": True}])
def test_recurrent_layers(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    assert captured(Recurrent(kind, **options), tmp_path).checked


def test_a_conversion_to_the_dtype_it_has(tmp_path: Path) -> None:
    class Converted(Net):
        def step(self, x: Tensor) -> Tensor:
            self.linear = self.linear.to(x.dtype)
            return self.linear(x)

    assert captured(Converted(), tmp_path).checked


def test_a_conversion_in_forward_is_refused(tmp_path: Path) -> None:
    class Converted(Net):
        def step(self, x: Tensor) -> Tensor:
            return self.linear.double()(x.double())

    with pytest.raises(fsdp_mlir.CaptureError, match=r"test_proof.py:\d+: "):
        captured(Converted(), tmp_path)


def test_cache_without_data_is_refused(tmp_path: Path) -> None:
    """Whether a cache holds what the next step would compute shows only by running two steps."""
    with pytest.raises(fsdp_mlir.CaptureError, match=r"'mask'.* changed in forward.* check=True"):
        captured(CachedMask(), tmp_path, check=False)


def test_check_wants_data(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(fsdp_mlir.CaptureError, match="expected a model and inputs with data"):
        captured(model, tmp_path, check=True)


def test_wrong_recording_names_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that was recorded with another number is found by running it."""
    from fsdp_mlir.record import trace

    record = trace.Recorder._record

    def wrong(self: Any, func: Any, values: list[Any], result: Any, origin: Any) -> None:
        if func is torch.ops.aten.mul.Tensor and isinstance(values[1], int):
            values = [values[0], 3]
        record(self, func, values, result, origin)

    class Doubled(Net):
        def step(self, x: Tensor) -> Tensor:
            return x * 2

    monkeypatch.setattr(trace.Recorder, "_record", wrong)
    expected = (
        r"test_proof.py:\d+: the captured step is not .* first call that differs is 'aten::mul'"
    )
    with pytest.raises(fsdp_mlir.CaptureError, match=expected):
        captured(Doubled(), tmp_path)


def test_generators_are_as_before(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(1)
    model = UnusedDraw()
    torch.manual_seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist()
    fsdp_mlir.capture(model, [torch.ones(3, 4)], path=tmp_path / "model.pt")
    assert torch.equal(torch.random.get_rng_state(), torch.manual_seed(0).get_state())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


class Loaded(Net):
    """A recording under fake tensors does not hold what torch.load makes there."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def step(self, x: Tensor) -> Tensor:
        return x * torch.load(self.path)


def test_a_recording_that_does_not_run(tmp_path: Path) -> None:
    torch.save(torch.full((4,), 2.0), tmp_path / "scale.pt")
    with pytest.raises(fsdp_mlir.CaptureError, match="the recorded step does not run: ") as raised:
        captured(Loaded(tmp_path / "scale.pt"), tmp_path)
    assert "\n" not in str(raised.value)


class Conjugated(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("z", torch.complex(torch.ones(4), torch.ones(4)).conj())

    def step(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x * self.z.resolve_conj()).select(-1, 1)


def test_a_conjugated_buffer(tmp_path: Path) -> None:
    """Its bits are those that it stands for."""
    assert captured(Conjugated(), tmp_path).checked
