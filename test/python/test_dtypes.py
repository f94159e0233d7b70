"""Every dtype and kind of argument that capture writes compiles and runs, or capture refuses it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import fsdp_mlir
import pytest
import torch
from fsdp_mlir.archive.torchscript import _DTYPES
from fsdp_mlir.record.operators import is_composite
from fsdp_mlir.record.scalars import rounds_number, with_scalars
from fsdp_mlir.support.errors import CaptureError
from graphs import Captured
from safetensors.torch import save_file
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
LACKING = (torch.complex32, torch.complex128)  # in safetensors


class Holder(nn.Module):
    """Computes with a buffer of some dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("held", torch.tensor([1.0, 2.0, 0.0, 4.0]).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        held = torch.view_as_real(self.held)[..., 0] if self.held.is_complex() else self.held
        return (self.weight * x * held.to(torch.float32)).sum()


class Calling(nn.Module):
    """Makes one call whose arguments are of some kind."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.weight * x).sum()


def loss_of_run(model: nn.Module, folder: Path) -> float:
    """The first loss of the compiled model, which is eager's."""
    x = torch.arange(8, dtype=torch.float32).reshape(2, 4)
    fsdp_mlir.capture(model, kwargs={"x": x}, path=folder / "model.pt")
    save_file({"x": x}, folder / "data.safetensors")
    plan, metrics = folder / "plan.json", folder / "metrics.jsonl"
    build = ROOT / "build" / "bin"
    data = ["--data", folder / "data.safetensors", "--metrics", metrics]
    for command in (
        [build / "fsdp-opt", folder / "model.pt", "--emit", "plan", "-o", plan],
        [build / "fsdp-run", plan, "--nproc", "1", "--steps", "1", *data],
    ):
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    loss = json.loads(metrics.read_text().splitlines()[0])["loss"]
    assert loss == pytest.approx(model(x).item(), rel=1e-8)  # 9 digits are written
    return loss


@pytest.mark.parametrize("dtype", _DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    if dtype in LACKING:
        with pytest.raises(CaptureError, match=r"'held' is of dtype complex\d+, which safetensors"):
            fsdp_mlir.capture(
                Holder(dtype), kwargs={"x": torch.ones(2, 4)}, path=tmp_path / "model.pt"
            )
        return
    assert loss_of_run(Holder(dtype), tmp_path) != 0


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "infinity": lambda h: h.masked_fill(h > 6, -torch.inf).softmax(-1),
    "nan": lambda h: torch.full_like(h, torch.nan).nan_to_num(2.0) * h,
    "complex": lambda h: (h * (0.5 + 2j)).imag + (h - 1.5j).abs(),
    "complex64": lambda h: torch.view_as_real(torch.view_as_complex(h.view(-1, 2, 2)) * 1j),
    "complex128": lambda h: (h.to(torch.complex128) * 1j).abs(),
    "fft": lambda h: torch.fft.irfft(torch.fft.rfft(h)),
    "bool": lambda h: h.softmax(-1).masked_fill(torch.ones(4, dtype=torch.bool), 0.5) * h,
    "bool_scatter": lambda h: (
        h * torch.ones(2, 4, dtype=torch.bool).scatter(-1, torch.tensor([[1], [3]]), False)
    ),
    "bool_scatter_in_place": lambda h: (
        h * torch.zeros(2, 4, dtype=torch.bool).scatter_(-1, torch.tensor([[1], [3]]), True)
    ),
    "bool_index_fill": lambda h: (
        h * torch.ones(2, 4, dtype=torch.bool).index_fill(1, torch.tensor([0, 2]), False)
    ),
    "memory_format": lambda h: h.view(1, 2, 2, 2).contiguous(memory_format=torch.channels_last),
    "lists": lambda h: h.sum([0, 1]) + h[:, None, [True, False, True, True]].sum(),
    "number_first": lambda h: (
        torch.add(0.3333, h, alpha=0.7) * torch.sub(1, h) + torch.div(2.3, h.cosh())
    ),
    "number_before_bfloat16": lambda h: torch.add(0.3333, h.bfloat16(), alpha=0.7).float(),
    "number_before_scalar": lambda h: h * torch.mul(0.3333, h.bfloat16().sum()),
    "number_before_integers": lambda h: h * torch.sub(0.3333, h.detach().long()),
    "string": lambda h: nn.functional.gelu(h, approximate="tanh"),
}


@pytest.mark.parametrize("kind", CALLS)
def test_arguments(kind: str, tmp_path: Path) -> None:
    loss_of_run(Calling(CALLS[kind]), tmp_path)


@pytest.mark.parametrize(
    ("dtype", "number", "calls"),
    [
        (torch.bfloat16, 0.9, ["aten::mul", "aten::copy_"]),
        (torch.float16, 3001, ["aten::mul", "aten::copy_"]),
        (torch.bfloat16, 0.375, ["aten::mul_"]),
        (torch.float32, 0.9, ["aten::mul_"]),
    ],
)
def test_numbers_that_a_dtype_does_not_have(
    tmp_path: Path, dtype: torch.dtype, number: float, calls: list[str]
) -> None:
    """`mul_` with a Scalar rounds it to the dtype, unlike eager's `x *= 0.9`."""

    def call(y: Tensor) -> Tensor:
        z = y.to(dtype)
        z *= number
        return z.float()

    fsdp_mlir.capture(Calling(call), kwargs={"x": torch.ones(2, 4)}, path=tmp_path / "model.pt")
    ops = Captured.load(tmp_path / "model.pt").ops()
    first = 1 if dtype == torch.float32 else 2  # behind the model's own product, and the cast
    assert ops[first : first + len(calls)] == calls
    loss_of_run(Calling(call), tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scalar_overloads_have_the_bits_of_wrapped_numbers(dtype: torch.dtype) -> None:
    """All but those of which `rounds_number` says it, of the operators that are recorded."""
    x = (torch.arange(1, 4001) / 613).to(dtype)
    compared = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        packet, _, overload = operator.partition(".")
        func = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if namespace != "aten" or func is None:
            continue
        schema = func._schema
        types = [str(formal.type) for formal in schema.arguments]
        defaults = all(formal.has_default_value() for formal in schema.arguments[2:])
        if types[:2] != ["Tensor"] * 2 or not defaults:
            continue
        if is_composite(func):
            continue
        values = [x, 0.9, *(formal.default_value for formal in schema.arguments[2:])]
        try:
            scalar, _ = with_scalars(func, list(values), x, None)
            want = func(x.clone(), 0.9)
        except (CaptureError, RuntimeError):
            continue  # it has none, or takes no such tensors
        assert torch.equal(want, scalar(x.clone(), 0.9)) != rounds_number(func, values), func
        compared.append(str(func))
    in_place = {f"aten.{name}_.Tensor" for name in ("add", "sub", "mul", "div")}
    assert in_place <= set(compared)
