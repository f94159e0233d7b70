"""The captured initialisation gives what the factory gives at the same seed, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsdp_mlir
import pytest
import torch
from fsdp_mlir.capture.cli import main
from fsdp_mlir.models.llama import Llama, LlamaConfig
from fsdp_mlir.models.llama3 import llama3_8b
from graphs import Captured
from torch import Tensor, nn
from torchvision.models import resnet18
from transformers import GPT2Config, GPT2LMHeadModel

SEED = 11
IDS = torch.arange(64).view(2, 32)

Factory = Callable[[], nn.Module]


def llama() -> nn.Module:
    return Llama(LlamaConfig(dim=64, layers=2, heads=4, vocab=256, seq=32, hidden=171))


def gpt2() -> nn.Module:
    config = GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=256, n_positions=64, use_cache=False
    )
    config.bos_token_id = config.eos_token_id = 0
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def mean(output: Any) -> Tensor:
    return output.mean()


def captured(tmp_path: Path, factory: Factory, loss: Any = None, **inputs: Tensor) -> Captured:
    with torch.device("meta"):
        model = factory()
    path = tmp_path / "model.pt"
    summary = fsdp_mlir.capture(model, kwargs=inputs, loss=loss, init=factory, path=path)
    assert summary.weights is None
    return Captured.load(path)


def assert_same_init(capture: Captured, factory: Factory) -> None:
    torch.manual_seed(SEED)
    model = factory()
    want = dict(model.named_parameters()) | dict(model.named_buffers())
    after = torch.rand(1)
    got = capture.run_init(SEED)
    assert got.keys() == want.keys()
    different = [
        name
        for name in want
        if got[name].dtype != want[name].dtype or not torch.equal(got[name], want[name])
    ]
    assert not different, f"initial values differ: {different}"
    assert torch.equal(torch.rand(1), after), "the generator was not left as the factory leaves it"


def test_decoder_without_biases(tmp_path: Path) -> None:
    assert_same_init(captured(tmp_path, llama, tokens=IDS, targets=IDS), llama)


def test_tied_model_that_initialises_itself_twice(tmp_path: Path) -> None:
    assert_same_init(captured(tmp_path, gpt2, input_ids=IDS, labels=IDS), gpt2)


def test_convolutions_and_integer_buffers(tmp_path: Path) -> None:
    images = torch.zeros(2, 3, 64, 64)
    assert_same_init(captured(tmp_path, resnet18, mean, x=images), resnet18)


def test_attention_layer(tmp_path: Path) -> None:
    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(32, 4, 64)

    assert_same_init(captured(tmp_path, layer, mean, src=torch.zeros(2, 5, 32)), layer)


class Base(nn.Module):
    """A linear layer whose weight `initialise` changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)
        self.initialise(self.layer.weight)

    def initialise(self, weight: nn.Parameter) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


def base(change: Callable[[nn.Parameter], Any]) -> type[Base]:
    return type("Changed", (Base,), {"initialise": staticmethod(change)})


INITIALISERS = {
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "normal_": nn.init.normal_,
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "eye_": nn.init.eye_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda w: nn.init.sparse_(w, 0.5),
}


def data_rows(weight: nn.Parameter) -> None:
    weight.data.normal_()
    weight.data[2:4].fill_(0)


def row_kept_over_an_overwrite(weight: nn.Parameter) -> None:
    """A view made before the tensor is overwritten sees, and changes, the new values."""
    row, column = weight.data[1], weight.data[:, 3]
    nn.init.normal_(weight)
    row.mul_(2)
    nn.init.uniform_(weight)
    column.add_(row[0])


def copied_from_itself(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.copy_(weight.flip(0))
        weight.copy_(weight)


def replaced_data(weight: nn.Parameter) -> None:
    weight.data = torch.randn(6, 8) + torch.tensor([0.0, -0.0, 1.5, 2, 3, 4, 5, float("inf")])
    weight.data.clamp_(max=1)


CHANGES = {
    f.__name__: f
    for f in (data_rows, row_kept_over_an_overwrite, copied_from_itself, replaced_data)
}


@pytest.mark.parametrize("name", [*INITIALISERS, *CHANGES])
def test_weight_is_changed_by(name: str, tmp_path: Path) -> None:
    model = base((INITIALISERS | CHANGES)[name])
    assert_same_init(captured(tmp_path, model, x=torch.zeros(3, 8)), model)


def test_padding_index_and_shared_parameter(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 8, padding_idx=3)
            self.out = nn.Linear(8, 16, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.embed(ids)).sum()

    capture = captured(tmp_path, Model, ids=torch.zeros(2, 4, dtype=torch.int64))
    assert [p["aliases"] for p in capture.record["params"]] == [["out.weight"]]
    assert_same_init(capture, Model)


def test_overwritten_values_take_no_memory(tmp_path: Path) -> None:
    """What GPT-2's constructors draw is dead before the model draws anew, on new storage."""
    capture = captured(tmp_path, gpt2, input_ids=IDS, labels=IDS)
    assert capture.init is not None
    nodes = list(torch._C.parse_ir(capture.init).nodes())
    draws = [n for n in nodes if n.kind() in ("aten::normal_", "aten::uniform_")]
    targets = [n.inputsAt(0).debugName() for n in draws]
    assert len(targets) > 20
    assert len(set(targets)) == len(targets)
    # Allocated where it is drawn, and no allocation is for nothing.
    for before, node in pairwise(nodes):
        if node.kind() in ("aten::normal_", "aten::uniform_"):
            assert before.kind() == "aten::empty"
    written = {i.debugName() for n in nodes for i in n.inputs()}
    empties = [n.output().debugName() for n in nodes if n.kind() == "aten::empty"]
    assert set(empties) <= written


def test_constants_of_the_step_are_initialised(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.register_buffer("count", torch.tensor(3))
            self.register_buffer("wide", torch.arange(4).expand(2, -1), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight * torch.tensor([1.0, 1.0, -2.5, float("nan")])).sum()

    capture = captured(tmp_path, Model, x=torch.zeros(2, 4))
    got = capture.run_init(SEED)
    want = torch.tensor([1.0, 1.0, -2.5, float("nan")])
    torch.testing.assert_close(got["(constant).0"], want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got["count"], torch.tensor(3))
    assert torch.equal(got["wide"], torch.arange(4).expand(2, -1))


def test_random_state_is_left_alone(tmp_path: Path) -> None:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, 4)

    model = nn.Linear(4, 4, device="meta")
    torch.manual_seed(3)
    want = torch.rand(1)
    torch.manual_seed(3)
    fsdp_mlir.capture(
        model, [torch.zeros(2, 4)], loss=mean, init=seeded, path=tmp_path / "model.pt"
    )
    assert torch.equal(torch.rand(1), want)


def test_model_built_under_another_default_dtype(tmp_path: Path) -> None:
    def bfloat16() -> nn.Module:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return nn.Linear(4, 4)
        finally:
            torch.set_default_dtype(torch.float32)

    capture = captured(tmp_path, bfloat16, mean, input=torch.zeros(2, 4, dtype=torch.bfloat16))
    assert_same_init(capture, bfloat16)


def test_model_converted_after_it_was_built(tmp_path: Path) -> None:
    def bfloat16() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)

    capture = captured(tmp_path, bfloat16, mean, input=torch.zeros(2, 4, dtype=torch.bfloat16))
    assert_same_init(capture, bfloat16)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            lambda: nn.Linear(4, 5),
            r"expected parameter 'weight' of float32\[4, 4\], got .*\[5, 4\]",
        ),
        (lambda: nn.Linear(4, 4, bias=False), r"expected 2 parameters as in the model, got 1"),
        (lambda: nn.Linear(4, 4).double(), r"got parameter 'weight' of float64\[4, 4\]"),
        (lambda: nn.Linear(4, 4, device="meta"), r"'weight' .* is on 'meta', expected 'cpu'"),
        (lambda: 3, r"init: expected a torch.nn.Module, got 'int'"),
        (lambda: 1 / 0, r"init: ZeroDivisionError: division by zero"),
    ],
)
def test_another_model_is_refused(factory: Any, message: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 4, device="meta")
    path = tmp_path / "model.pt"
    with pytest.raises(fsdp_mlir.CaptureError, match=message):
        fsdp_mlir.capture(model, [torch.zeros(2, 4)], loss=mean, init=factory, path=path)
    assert not path.exists()


def test_initialisation_that_depends_on_data_is_refused(tmp_path: Path) -> None:
    """trunc_normal_ draws again until every element is inside its bounds."""
    model = base(nn.init.trunc_normal_)
    with pytest.raises(fsdp_mlir.CaptureError, match=r"depends on the data of a tensor.*--no-init"):
        captured(tmp_path, model, x=torch.zeros(3, 8))


def test_a_model_with_weights_needs_no_init(tmp_path: Path) -> None:
    fsdp_mlir.capture(nn.Linear(4, 4), [torch.zeros(2, 4)], loss=mean, path=tmp_path / "model.pt")
    capture = Captured.load(tmp_path / "model.pt")
    assert capture.record["init"] is None and capture.init is None


def test_command_line_captures_init_on_meta(tmp_path: Path) -> None:
    words = ["--model", "fsdp_mlir.models.llama:llama_debug", "--meta", "--inputs"]
    words += ["tokens=int64[2,32]<256", "targets=int64[2,32]<256", "-o"]
    assert main([*words, str(tmp_path / "with.pt")]) == 0
    assert main([*words, str(tmp_path / "without.pt"), "--no-init"]) == 0
    assert_same_init(Captured.load(tmp_path / "with.pt"), llama)
    assert Captured.load(tmp_path / "without.pt").record["init"] is None


def test_large_model_is_captured_without_memory(tmp_path: Path) -> None:
    """Four layers of Llama-3-8B hold 7.7 GB; each weight is drawn twice, as eagerly."""
    capture = captured(tmp_path, lambda: llama3_8b(4), input_ids=IDS, labels=IDS)
    kinds = [node["op"] for node in capture.record["init"]["nodes"]]
    assert kinds.count("aten::normal_") >= 2 * 7 * 2
