"""Captures for a GPU, on a machine without one: the operators that PyTorch would run there."""

from __future__ import annotations

import json
import subprocess
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from device_models import Asking, attention
from fsdp_mlir import CaptureError, capture
from harness import BIN
from ranks import run_module
from torch import Tensor, nn

H100 = {"device": "cuda", "device_arch": "sm_90"}
TOKENS = torch.arange(128).reshape(2, 64)


def record(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("capture.json"))
        loaded: dict[str, Any] = json.loads(archive.read(name))
        return loaded


def calls(path: Path) -> Counter[str]:
    return Counter(node["op"].removeprefix("aten::") for node in record(path)["nodes"])


def captured(model: nn.Module, tmp_path: Path, **inputs: Tensor) -> Counter[str]:
    path = tmp_path / "model.pt"
    capture(model, kwargs=inputs, path=path, **H100)
    return calls(path)


def by_command(
    path: Path, *arguments: str, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """In a process of its own: PyTorch orders attention kernels once."""
    inputs = ["--inputs", "tokens=int64[2,64]<128", "targets=int64[2,64]<128"]
    options = [*arguments, "-o", path, *inputs]
    folder = Path(__file__).parent
    return run_module("fsdp_mlir.capture", *options, folder=folder, variables=variables)


def test_norm_dropout_and_their_backward(tmp_path: Path) -> None:
    found = captured(attention(dropout=0.5), tmp_path, tokens=TOKENS, targets=TOKENS)
    expected = ("_fused_rms_norm", "_fused_rms_norm_backward", "native_dropout")
    assert all(found[name] == 1 for name in (*expected, "native_dropout_backward")), found
    assert "bernoulli_" not in found and "pow" not in found


# What PyTorch 2.15 takes, by sdp_utils.cpp: on sm_90 cuDNN comes first, and takes half precision
# with dropout in sixteenths and heads in eights; flash takes no mask, and pads heads to eights.
@pytest.mark.parametrize(
    ("model", "kernel"),
    [
        ({}, "cudnn"),
        ({"dropout": 0.5}, "cudnn"),
        ({"dropout": 0.1}, "flash"),
        ({"masked": True, "causal": False}, "cudnn"),
        ({"masked": True, "causal": False, "dropout": 0.1}, "efficient"),
        ({"head": 20}, "flash"),
        ({"dtype": "float32"}, "efficient"),
        ({"dtype": "float64"}, None),
    ],
)
def test_attention_of_an_h100(model: dict[str, Any], kernel: str | None, tmp_path: Path) -> None:
    found = captured(attention(**model), tmp_path, tokens=TOKENS, targets=TOKENS)
    attentions = {name: count for name, count in found.items() if "attention" in name}
    name = f"_scaled_dot_product_{kernel}_attention"
    assert attentions == ({name: 1, f"{name}_backward": 1} if kernel else {})


def test_attention_of_an_a100(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    arguments = ["--model", "device_models:attention", "--device", "cuda", "--device-arch", "sm_80"]
    done = by_command(path, *arguments)
    assert done.returncode == 0, done.stderr
    assert calls(path)["_scaled_dot_product_flash_attention_backward"] == 1
    version = torch.__version__.split("+")[0]
    device = {"type": "cuda", "arch": "sm_80", "torch": version, "numerics": {}}
    assert record(path)["device"] == device


def test_a_user_may_turn_kernels_off(tmp_path: Path) -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        found = captured(attention(), tmp_path, tokens=TOKENS, targets=TOKENS)
    assert found["_scaled_dot_product_flash_attention"] == 1


def test_a_checkpoint_runs_attention_again(tmp_path: Path) -> None:
    model = attention(checkpointed=True)
    found = captured(model, tmp_path, tokens=TOKENS, targets=TOKENS)
    assert found["_scaled_dot_product_cudnn_attention"] == 2
    assert found["_scaled_dot_product_cudnn_attention_backward"] == 1
    # But what was drawn is drawn once.
    model = attention(checkpointed=True, dropout=0.5)
    found = captured(model, tmp_path, tokens=TOKENS, targets=TOKENS)
    assert found["native_dropout"] == 1
    assert found["_scaled_dot_product_cudnn_attention"] == 1


def test_batch_norm_is_cudnns(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.layers(x).square().mean()
            return loss

    found = captured(Net(), tmp_path, x=torch.randn(2, 3, 8, 8))
    assert found["cudnn_batch_norm"] == 1 and found["cudnn_batch_norm_backward"] == 1


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.rnn(x)[0].sum()
        return loss


def test_an_rnn_is_captured_without_cudnn(tmp_path: Path) -> None:
    x = torch.randn(3, 2, 8)
    with pytest.raises(CaptureError, match=r"test_device_capture.py:\d+: .*'lstm' of cuDNN"):
        captured(Recurrent(), tmp_path, x=x)
    with torch.backends.cudnn.flags(enabled=False):
        found = captured(Recurrent(), tmp_path, x=x)
    assert found["_thnn_fused_lstm_cell"] == found["_thnn_fused_lstm_cell_backward_impl"] == 3


def of_positions(x: Tensor) -> Tensor:
    """Branches on values that the step makes on the GPU, and sizes by them."""
    at = torch.arange(8, device=x.device)
    assert at.device.type == "cuda" and not isinstance(at, torch._subclasses.FakeTensor)
    at += 1
    if bool((at > 0).all()) and int(at[2]) == 3:
        x = x[:, at[at > 4] - 1]
    return x.narrow(1, 0, at.tolist()[1])


def of_cuda(x: Tensor) -> Tensor:
    assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    assert x.is_cuda and x.device == torch.device("cuda", torch.cuda.current_device())
    with torch.autocast(x.device.type, torch.bfloat16):
        y = x @ x.T
    assert y.dtype == torch.bfloat16
    return y * torch.tensor(2.0, device=x.device)


def of_the_cpus_integers(x: Tensor) -> Tensor:
    return x[:, torch.arange(4).flip(0).to(x.device)]


@pytest.mark.parametrize("body", [of_positions, of_cuda, of_the_cpus_integers])
def test_what_a_model_asks(body: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    captured(Asking(body), tmp_path, x=torch.randn(2, 8))
    assert not torch.cuda.is_available() or torch.cuda.device_count()  # as before


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda x: x + torch.rand(8).to(x.device), "'aten.rand.default' draws on the CPU"),
        (
            lambda x: x + torch.linspace(0, 1, 8).exp().to(x.device),
            "computes on the CPU, in a step that is captured for a GPU",
        ),
        (
            lambda x: x.bfloat16() * torch.tensor(0.3),
            "takes a number from a tensor of torch.float32 on the CPU and gives torch.bfloat16",
        ),
        (lambda x: x + torch.zeros(8), "found at least two devices, cuda:0 and cpu"),
    ],
)
def test_what_the_cpu_would_compute_is_refused(
    body: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        captured(Asking(body), tmp_path, x=torch.randn(2, 8))
    assert "test_device_capture.py" in str(caught.value)
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device: expected cpu or cuda, got 'tpu'"),
        ({"device": "cuda"}, "device_arch: expected the GPU's architecture, such as 'sm_90'"),
        ({"device": "cuda", "device_arch": "90"}, "expected one such as 'sm_90', got '90'"),
        ({"device_arch": "sm_90"}, "device_arch: expected none for the CPU, got 'sm_90'"),
        ({"torch_version": "2.10"}, "torch_version: expected one from 2.11 to the installed 2."),
        ({"torch_version": "3.0"}, "torch_version: expected one from 2.11 .*, got '3.0'"),
        ({"torch_version": "new"}, "torch_version: expected one from 2.11 .*, got 'new'"),
        ({**H100, "check": True}, "check: a step that is captured for 'cuda' is not run beside"),
    ],
)
def test_options(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = Asking(F.relu)
    with pytest.raises(CaptureError, match=message):
        capture(model, kwargs={"x": torch.ones(2, 8)}, path=tmp_path / "model.pt", **options)


@pytest.mark.parametrize(
    ("version", "norm", "reduced"),
    [("2.11", "bfloat16", "bf16"), ("2.14.1", "bfloat16", "bf16"), (None, "float32", "f32")],
)
def test_the_fsdp2_of_a_version(
    version: str | None, norm: str, reduced: str, tmp_path: Path
) -> None:
    """Since 2.15 a norm's gradient stays wide, and the parameters' dtype is that of reductions.
    Bits beside FSDP2 of torch 2.11 were compared by hand: docs/gpu-status.md."""
    config, path = tmp_path / "config.yaml", tmp_path / "model.pt"
    config.write_text("units: [{match: body}]\nmixed_precision: {param_dtype: bfloat16}\n")
    model = Asking(nn.RMSNorm(8))
    inputs = {"x": torch.ones(2, 8)}
    capture(model, kwargs=inputs, config=config, path=path, torch_version=version)
    command = [BIN / "fsdp-opt", path, "--config", config, "--world-size", "2"]
    options = {"capture_output": True, "text": True, "check": True}
    sharded = subprocess.run([*command, "--level", "sharded"], **options).stdout
    reductions = [line for line in sharded.splitlines() if "fsdp.reduce_scatter" in line]
    assert len(reductions) == 2
    assert all(f"reduce_dtype = {reduced}" in line for line in reductions)
    plan = json.loads(subprocess.run([*command, "--emit", "plan"], **options).stdout)
    assert plan["captured_for"]["torch"] == version or version is None
    gradients = {entry["name"]: entry.get("grad_dtype", "bfloat16") for entry in plan["params"]}
    assert gradients == {
        "linear.weight": "bfloat16",
        "linear.bias": "bfloat16",
        "body.weight": norm,
    }


def test_attention_that_an_older_version_takes_otherwise(tmp_path: Path) -> None:
    """Of torch 2.11 cuDNN takes any dropout; asked with FakeCuda built against it, and seen on a
    GPU: docs/gpu-status.md."""

    def take(dropout: float, dtype: str = "bfloat16", version: str = "2.11") -> Counter[str]:
        model, path = attention(dropout=dropout, dtype=dtype), tmp_path / "model.pt"
        inputs = {"tokens": TOKENS, "targets": TOKENS}
        capture(model, kwargs=inputs, path=path, torch_version=version, **H100)
        return calls(path)

    refusal = r"flash_attention.*dropout 0\.1 .*torch 2\.11 takes cuDNN's.*sixteenths"
    with pytest.raises(CaptureError, match=refusal):
        take(0.1)
    assert take(0.1, version="2.15")["_scaled_dot_product_flash_attention"] == 1
    assert take(0.125)["_scaled_dot_product_cudnn_attention"] == 1
    assert take(0.1, dtype="float32")["_scaled_dot_product_efficient_attention"] == 1


@pytest.mark.parametrize(
    ("version", "by_channels", "copies"),
    [("2.11", True, 3), ("2.11", False, 1), (None, True, 0), (None, False, 0)],
)
def test_group_norm_of_a_version(
    version: str | None, by_channels: bool, copies: int, tmp_path: Path
) -> None:
    """Before 2.15 CUDA copied an image laid out by channels, and a gradient that is expanded."""
    path, model = tmp_path / "model.pt", Asking(nn.GroupNorm(2, 4))
    x = torch.ones(2, 4, 4, 8)
    if by_channels:
        model = Asking(nn.GroupNorm(2, 8))
        model.linear.register_forward_hook(lambda module, args, out: out.permute(0, 3, 1, 2))
    capture(model, kwargs={"x": x}, path=path, torch_version=version, **H100)
    found = calls(path)
    assert (found["native_group_norm"], found["clone"]) == (1, copies)


@pytest.mark.parametrize("device", [{}, H100])
def test_group_norm_of_a_version_that_is_not_known(device: dict[str, Any], tmp_path: Path) -> None:
    """And of 2.11 where code calls the operator itself, which copies nothing."""

    def norm(x: Tensor) -> Tensor:
        one = torch.ones(4, device=x.device)
        return torch.native_group_norm(x, one, one, 2, 4, 32, 2, 1e-5)[0]

    options: dict[str, Any] = {"kwargs": {"x": torch.ones(2, 4, 4, 8)}, **device}
    options["path"] = tmp_path / "model.pt"
    for body, version in ((lambda x: F.group_norm(x, 2), "2.13"), (norm, "2.11")):
        capture(Asking(lambda x, body=body: body(x) * x), torch_version=version, **options)
        with pytest.raises(CaptureError, match=r"native_group_norm_backward.* a copy in another"):
            capture(Asking(body), torch_version=version, **options)


@pytest.mark.parametrize("device", [{}, H100])
def test_gradients_of_a_version(device: dict[str, Any], tmp_path: Path) -> None:
    """At a bound, clamp has the gradient 1 before 2.15, and 0 since."""

    def take(body: Callable[[Tensor], Tensor], version: str | None) -> Counter[str]:
        path, inputs = tmp_path / "model.pt", {"x": torch.rand(2, 8)}
        capture(Asking(body), kwargs=inputs, path=path, torch_version=version, **device)
        return calls(path)

    def names(found: Counter[str]) -> dict[str, int]:
        kept = ("ge", "gt", "le", "lt")
        return {name: found[name] for name in kept if found[name]}

    def body(x: Tensor) -> Tensor:
        return (x.clamp(-1, 1) + x.clamp_min(0) + x.clamp_max(2)) * (x > 0)

    assert names(take(body, "2.11")) == {"ge": 2, "gt": 1, "le": 2}
    assert names(take(body, None)) == {"gt": 3, "lt": 2}
    with pytest.raises(CaptureError, match=r"backward of clamp .*2\.13 takes is not known"):
        take(body, "2.13")
    for other, name in (
        (lambda x: x.clamp(min=torch.zeros(8, device=x.device)), "clamp with tensors as bounds"),
        (lambda x: x.cumprod(1), "cumprod"),
    ):
        with pytest.raises(CaptureError, match=f"backward of {name} is what torch 2.15 takes"):
            take(other, "2.11")
        take(other, None)


def test_padding_of_an_image_laid_out_by_channels(tmp_path: Path) -> None:
    model, image = Asking(nn.ReflectionPad2d(1)), torch.ones(2, 4, 4, 8)
    inputs: dict[str, Any] = {"kwargs": {"x": image}, "path": tmp_path / "model.pt"}
    capture(model, torch_version="2.11", **inputs)
    model.linear.register_forward_hook(lambda module, args, out: out.permute(0, 3, 1, 2))
    capture(model, **inputs)
    capture(model, torch_version="2.11", **inputs, **H100)
    with pytest.raises(CaptureError, match=r"by channels is .*2\.11 takes one that gives it row"):
        capture(model, torch_version="2.11", **inputs)


def test_another_gpu_is_another_process(tmp_path: Path) -> None:
    captured(Asking(F.relu), tmp_path, x=torch.ones(2, 8))
    with pytest.raises(CaptureError, match=r"has captured for 'sm_90'.*capture for 'sm_80' in an"):
        capture(
            Asking(F.relu),
            kwargs={"x": torch.ones(2, 8)},
            path=tmp_path / "other.pt",
            device="cuda",
            device_arch="sm_80",
        )


def test_without_what_is_built(tmp_path: Path) -> None:
    arguments = ["--model", "device_models:attention", "--device", "cuda", "--device-arch", "sm_90"]
    elsewhere = {"FSDP_MLIR_BUILD": str(tmp_path)}
    done = by_command(tmp_path / "model.pt", *arguments, variables=elsewhere)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "_fake_cuda.so" in done.stderr and "run make build" in done.stderr


def plan_of(model: str, tmp_path: Path, *options: str) -> Path:
    done = by_command(tmp_path / "model.pt", "--model", f"device_models:{model}", *options)
    assert done.returncode == 0, done.stderr
    plan = tmp_path / "plan.json"
    (tmp_path / "config.yaml").write_text(
        "units: [{match: block}]\noptimizer: {name: sgd, lr: 0.1}\n"
    )
    command = [BIN / "fsdp-opt", tmp_path / "model.pt", "--config", tmp_path / "config.yaml"]
    subprocess.run([*command, "--world-size", "2", "--emit", "plan", "-o", plan], check=True)
    return plan


def run(plan: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [BIN / "fsdp-run", plan, "--steps", "2", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("model", ["attention", "feedforward"])
def test_a_plan_runs_on_its_device_alone(model: str, tmp_path: Path) -> None:
    plan = plan_of(model, tmp_path, "--device", "cuda", "--device-arch", "sm_90")
    version = torch.__version__.split("+")[0]
    written = json.loads(plan.read_text())["captured_for"]
    assert written == {"device": "cuda", "arch": "sm_90", "torch": version}
    done = run(plan)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert 'captured for the device "cuda" (sm_90)' in done.stderr
    assert "expected --device cuda or --any-device, got --device cpu" in done.stderr
    if model == "feedforward":  # the CPU has all of its operators
        done = run(plan, "--any-device")
        assert done.returncode == 0, done.stderr


def test_a_plan_of_another_pytorch_is_warned_of(tmp_path: Path) -> None:
    plan = plan_of("feedforward", tmp_path)
    document = json.loads(plan.read_text())
    assert document["captured_for"]["device"] == "cpu" and "arch" not in document["captured_for"]
    done = run(plan)
    assert done.returncode == 0 and "captured with" not in done.stderr
    document["captured_for"]["torch"] = "2.11.0"
    del document["digest"]
    plan.write_text(json.dumps(document))
    done = run(plan)
    version = torch.__version__.split("+")[0]
    assert done.returncode == 0, done.stderr
    assert f"captured with torch 2.11.0, executed by torch {version}" in done.stderr
