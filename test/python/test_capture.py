"""The captured step is the eager step, bit for bit, for models of several kinds."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import fsdp_mlir
import pytest
import torch
import torch.nn.functional as F
from fsdp_mlir.models.gpt2 import gpt2_debug, gpt2_debug_dropout
from fsdp_mlir.models.llama import llama_debug
from fsdp_mlir.support.files import file_hash
from fsdp_mlir.text import batches
from graphs import Captured, assert_same_step, eager_ops
from torch import Tensor, nn


def tokens(*names: str, vocab: int = 256) -> dict[str, Tensor]:
    return dict(zip(names, batches(32, 2, vocab, shift=int("targets" in names)), strict=True))


def capture(model: nn.Module, tmp_path: Path, **options: object) -> Captured:
    path = tmp_path / "model.pt"
    fsdp_mlir.capture(model, path=path, **options)
    return Captured.load(path)


def test_llama_is_eager(tmp_path: Path) -> None:
    model, inputs = llama_debug(), tokens("tokens", "targets")
    captured = capture(model, tmp_path, kwargs=inputs)
    assert captured.ops() == eager_ops(model, inputs)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in captured.ops()
    assert_same_step(model, captured, inputs)


def test_other_data_than_the_example(tmp_path: Path) -> None:
    model, inputs = llama_debug(seed=3), tokens("tokens", "targets")
    captured = capture(model, tmp_path, kwargs={k: torch.zeros_like(v) for k, v in inputs.items()})
    assert_same_step(model, captured, inputs)


def test_gpt2_ties_are_one_parameter(tmp_path: Path) -> None:
    model, inputs = gpt2_debug(), tokens("input_ids", "labels")
    captured = capture(model, tmp_path, kwargs=inputs)
    tied = {p["name"]: p["aliases"] for p in captured.record["params"] if p["aliases"]}
    assert tied == {"transformer.wte.weight": ["lm_head.weight"]}
    assert captured.ops() == eager_ops(model, inputs)
    assert_same_step(model, captured, inputs)


def test_gpt2_dropout_draws_in_eager_order(tmp_path: Path) -> None:
    model, inputs = gpt2_debug_dropout(), tokens("input_ids", "labels")
    captured = capture(model, tmp_path, kwargs=inputs)
    assert captured.ops().count("aten::bernoulli_") == 7
    assert captured.ops() == eager_ops(model, inputs)
    assert_same_step(model, captured, inputs, seed=7)
    assert not torch.equal(captured.run(inputs, 1)[0], captured.run(inputs, 2)[0])


class TransposedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)).square().sum()


def test_batch_norm_of_a_view_is_dense(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = TransposedNorm(), {"x": torch.randn(2, 4, 6)}
    captured = capture(model, tmp_path, kwargs=inputs)
    assert captured.ops() == eager_ops(model, inputs)
    assert_same_step(model, captured, inputs)


def test_resnet_updates_batch_norm_buffers(tmp_path: Path) -> None:
    resnet18 = pytest.importorskip("torchvision").models.resnet18
    torch.manual_seed(0)
    model, inputs = resnet18(num_classes=10).train(), {"x": torch.randn(4, 3, 32, 32)}

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, torch.tensor([1, 2, 3, 4]))

    captured = capture(model, tmp_path, kwargs=inputs, loss=loss)
    before = captured.weights["bn1.running_mean"].clone()
    assert captured.ops() == eager_ops_with_copy(model, inputs, loss)
    assert_same_step(model, captured, inputs, loss)
    assert not torch.equal(captured.weights["bn1.running_mean"], before)
    assert captured.weights["bn1.num_batches_tracked"] == 1
    assert captured.record["buffers"][-1]["name"] == "(constant).0"


def eager_ops_with_copy(model: nn.Module, inputs: dict[str, Tensor], loss: object) -> list[str]:
    """Eager's ops; the one tensor literal of the loss is captured as a copy of a constant."""
    ops = eager_ops(model, inputs, loss)
    ops.insert(ops.index("aten::_log_softmax"), "aten::clone")
    return ops


class Toy(nn.Module):
    """Odd sizes, a frozen, an unused and a twice-used parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 13)
        self.frozen.requires_grad_(False)
        self.twice = nn.Linear(13, 13)
        self.unused = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(13))
        self.register_buffer("offset", torch.full((13,), 0.25), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(F.relu(self.first(x))) * self.scale
        x = self.twice(self.frozen(x)) + self.offset
        return x.square().mean()


def test_frozen_unused_and_uneven(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Toy(), {"x": torch.randn(5, 7)}
    captured = capture(model, tmp_path, kwargs=inputs)
    params = captured.record["params"]
    # FSDP2's order: children before the parameters of their parent.
    assert [p["name"] for p in params] == [
        *(f"{m}.{k}" for m in ("first", "frozen", "twice", "unused") for k in ("weight", "bias")),
        "scale",
    ]
    assert [p["requires_grad"] for p in params] == [True] * 2 + [False] * 2 + [True] * 5
    assert captured.record["grads"] == [0, 1, 4, 5, 8]
    assert captured.record["buffers"] == [
        {"name": "offset", "shape": [13], "dtype": "float32", "persistent": False}
    ]
    assert captured.ops() == eager_ops(model, inputs)
    assert_same_step(model, captured, inputs)


class Odd(nn.Module):
    """Arguments that are hard to write down: infinities, NaN, strings, lists, optional tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.table = torch.arange(6.0)  # neither parameter nor buffer

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(x @ self.weight, approximate="tanh") * self.table
        mask = torch.full((6,), True).logical_and(torch.ones(6, 6, dtype=torch.bool).tril())
        masked = y.masked_fill(~mask, float("-inf")).softmax(-1)
        y = y + torch.nan_to_num(masked, nan=2.3e-308, posinf=float("inf"))
        y = torch.where(y.isnan(), torch.full_like(y, float("nan")), y)
        y = y[:, torch.tensor([0, 2, 4])] * torch.tensor(1.5) * torch.tensor(1.5)
        y = torch.cat(y.unsqueeze(0).unbind(1), dim=-1).unsqueeze_(0).to(torch.float64)
        a, b = torch.split(y, [4, 14], dim=-1)
        a = a.clone().mul_(2).add_(True)
        return torch.maximum(a.sum(), b.sum()).to(torch.float32)


def test_hard_arguments(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Odd(), {"x": torch.randn(6, 6)}
    captured = capture(model, tmp_path, kwargs=inputs)
    assert 'value="nan"' in captured.text and "value=2.3e-308" in captured.text
    assert "value=-inf" in captured.text
    constants = [b["name"] for b in captured.record["buffers"]]
    assert constants == ["(constant).0", "(constant).1", "(constant).2"]
    assert_same_step(model, captured, inputs)
    assert_same_step(model, captured, inputs)  # a step leaves its constants as they were


class PseudoInverse(nn.Module):
    """Calls an overload that only the type of an absent argument tells from another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.pinv(self.layer(x)).sum()


def test_overloads_of_absent_arguments(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = PseudoInverse(), {"x": torch.randn(4, 6)}
    captured = capture(model, tmp_path, kwargs=inputs)
    assert "aten::linalg_pinv" in captured.ops()
    assert_same_step(model, captured, inputs)


class Masked(nn.Module):
    """Branches on, and is shaped by, values that follow from literals alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(6)
        position[1:3] += 4
        position = position.view(2, 3).t().contiguous().view(-1)
        keep = (position % 2 == 0).nonzero().squeeze(-1)
        y = self.layer(x)
        y = y[:, keep] if bool((position >= 0).all()) else -y
        count = torch.zeros(6, dtype=torch.int64)
        count += (x > 0).sum(0)  # no longer known
        return (y * int(keep[-1])).sum() + (y[:, :1] * count).sum()


def test_branches_on_literals(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Masked(), {"x": torch.randn(3, 6)}
    captured = capture(model, tmp_path, kwargs=inputs)
    assert captured.ops() == eager_ops(model, inputs)
    assert_same_step(model, captured, inputs)
    assert_same_step(model, captured, {"x": torch.randn(3, 6)})


class Complex(nn.Module):
    """Rotary embeddings by complex numbers, a mixing by FFT, complex scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        angles = torch.outer(torch.arange(6), 1e4 ** -torch.linspace(0, 1, 4))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.filter = nn.Parameter(torch.randn(4, 8, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.turns
        x = torch.view_as_real(pairs * 1j + (0.5 - 2j)).flatten(-2)
        spectrum = torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.filter)
        x = x + torch.fft.irfft(spectrum, n=x.shape[1], dim=1)
        y = torch.fft.fft2(x.to(torch.complex64)).conj()
        turned = y.real + y.imag.abs() + y.angle() + (y * y.sgn()).abs()
        return self.last(turned).square().mean() + (x * (1 + 1j)).abs().sum()


def test_complex_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Complex(), {"x": torch.randn(2, 6, 8)}
    captured = capture(model, tmp_path, kwargs=inputs)
    types = {out["dtype"] for node in captured.record["nodes"] for out in node["outs"] if out}
    assert {entry["dtype"] for entry in captured.record["buffers"]} == {"complex64"} < types
    assert_same_step(model, captured, inputs)


def test_positional_inputs_are_numbered(tmp_path: Path) -> None:
    model = llama_debug()
    inputs = tokens("tokens", "targets")
    path = tmp_path / "model.pt"
    fsdp_mlir.capture(model, (inputs["tokens"],), {"targets": inputs["targets"]}, path=path)
    record = Captured.load(path).record
    assert [entry["name"] for entry in record["inputs"]] == ["arg0", "targets"]
    first = record["inputs"][0]
    assert first["low"] == int(inputs["tokens"].min())
    assert first["high"] == int(inputs["tokens"].max()) + 1


def test_eval_mode_is_captured(tmp_path: Path) -> None:
    model, inputs = gpt2_debug_dropout().eval(), tokens("input_ids", "labels")
    captured = capture(model, tmp_path, kwargs=inputs)
    assert captured.record["training"] is False
    assert "aten::bernoulli_" not in captured.ops()
    assert_same_step(model, captured, inputs)


def test_the_model_is_left_alone(tmp_path: Path) -> None:
    model, inputs = llama_debug(), tokens("tokens", "targets")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    capture(model, tmp_path, kwargs=inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, before[k]) for k, tensor in model.state_dict().items())


def test_record_matches_the_graph(tmp_path: Path) -> None:
    model, inputs = llama_debug(), tokens("tokens", "targets")
    captured = capture(model, tmp_path, kwargs=inputs)
    record = captured.record
    graph = torch._C.parse_ir(captured.text)
    calls = [node for node in graph.nodes() if node.kind().startswith("aten::")]
    assert [call.kind() for call in calls] == captured.ops()
    assert len(list(graph.inputs())) == sum(len(record[k]) for k in ("params", "buffers", "inputs"))
    for call, node in zip(calls, record["nodes"], strict=True):
        assert call.schema().startswith(
            f"{node['op']}{node['overload'] and '.'}{node['overload']}("
        )
        assert len(list(call.inputs())) == len(torch._C.parse_schema(call.schema()).arguments)
    (output,) = graph.outputs()
    assert len(list(output.node().inputs())) == 1 + len(record["grads"])
    assert record["weights"]["hash"] == file_hash(tmp_path / record["weights"]["path"])

    # Shapes: run the calls one by one on real tensors.
    shapes = iter(run_shapes(captured, inputs))
    for node in record["nodes"]:
        for out in node["outs"]:
            assert next(shapes) == (out["shape"], out["dtype"]), node


def run_shapes(captured: Captured, inputs: dict[str, Tensor]) -> list[tuple[list[int], str]]:
    """Shape and dtype of every tensor that the calls give, in order."""
    names = re.findall(r"(%v\d+) : Tensor", captured.text)
    head = captured.text[: captured.text.index("  %result")]
    kinds = ", ".join("Tensor" for _ in names)
    text = f"{head}  %all : ({kinds}) = prim::TupleConstruct({', '.join(names)})\n  return (%all)\n"
    function = torch._C._create_function_from_graph("all", torch._C.parse_ir(text))
    with torch.no_grad():
        results = function(*captured.arguments(inputs))
    return [(list(t.shape), str(t.dtype).removeprefix("torch.")) for t in results]


def test_origins(tmp_path: Path) -> None:
    captured = capture(llama_debug(), tmp_path, kwargs=tokens("tokens", "targets"))
    record = captured.record
    nodes = record["nodes"]
    begin = record["backward_begin"]
    assert nodes[begin]["op"] == "aten::ones_like"

    def modules(op: str, part: list[dict]) -> list[str]:
        return [record["modules"][node["module"]] for node in part if node["op"] == op]

    silu = modules("aten::silu", nodes[:begin])
    assert silu == ["layers.0.feed_forward", "layers.1.feed_forward"]
    assert modules("aten::silu_backward", nodes[begin:]) == silu[::-1]
    assert modules("aten::mm", nodes[:begin])[:3] == [f"layers.0.attention.w{k}" for k in "qkv"]
    source = Path(fsdp_mlir.__file__).parent / "models" / "llama.py"
    lines = source.read_text().splitlines()
    for op in ("aten::silu", "aten::silu_backward"):
        node = next(n for n in nodes if n["op"] == op)
        assert record["files"][node["file"]].endswith("llama.py")
        assert "F.silu" in lines[node["line"] - 1]


def test_archive_runs_as_torchscript(tmp_path: Path) -> None:
    model, inputs = llama_debug(), tokens("tokens", "targets")
    captured = capture(model, tmp_path, kwargs=inputs)
    with torch.no_grad():
        loss, *_ = torch.jit.load(str(tmp_path / "model.pt")).forward(*captured.arguments(inputs))
    assert torch.equal(loss, captured.run(inputs)[0])


def test_capture_twice_is_the_same_file(tmp_path: Path) -> None:
    model, inputs = llama_debug(), tokens("tokens", "targets")
    first = capture(model, tmp_path, kwargs=inputs)
    second = capture(model, tmp_path, kwargs=inputs)
    assert first.text == second.text
    assert first.record == second.record
    # The folder's name is not that of a temporary file, so that the bytes do not depend on the run.
    assert {name.partition("/")[0] for name in ZipFile(tmp_path / "model.pt").namelist()} == {
        "archive"
    }


def test_a_module_under_two_names(tmp_path: Path) -> None:
    """The model is as it was after the capture, with each of its attributes restored once."""

    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(4, 4)
            self.second = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)).sum()

    model, inputs = Shared(), {"x": torch.ones(2, 4)}
    before = dict(model.named_parameters())
    captured = capture(model, tmp_path, kwargs=inputs)
    assert all(param is before[name] for name, param in model.named_parameters())
    assert_same_step(model, captured, inputs)


class Renaming(nn.Module):
    """With an inner module that may change its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.inner.mask).mean()


def rename(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")


def transpose(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].t()


def annotate(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    metadata["version"] = 2


@pytest.mark.parametrize("hook", [rename, transpose])
def test_a_state_dict_of_other_names(hook: Any, tmp_path: Path) -> None:
    model = Renaming()
    model.inner.register_state_dict_post_hook(hook)
    message = (
        rf"test_capture.py:\d+: module 'inner' saves itself under other .* by '{hook.__name__}': "
    )
    with pytest.warns(UserWarning, match=message) as made:
        fsdp_mlir.capture(model, [torch.ones(2, 4)], path=tmp_path / "model.pt")
    assert made[0].filename == __file__


def test_a_state_dict_of_the_same_names(tmp_path: Path) -> None:
    model = Renaming()
    model.inner.register_state_dict_post_hook(annotate)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fsdp_mlir.capture(model, [torch.ones(2, 4)], path=tmp_path / "model.pt")
