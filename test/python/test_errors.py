"""What cannot be captured is one line that names the model's source line, and writes nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fsdp_mlir import CaptureError, capture
from torch import Tensor, nn


class Model(nn.Module):
    """A layer, then the function under test."""

    def __init__(self, body: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.body = body

    def forward(self, x: Tensor) -> object:
        return self.body(self.layer(x))


def branch(y: Tensor) -> Tensor:
    if y.sum() > 0:  # here
        return y.sum()
    return -y.sum()


def item(y: Tensor) -> Tensor:
    return y.sum() ** y.max().item()  # here


def boolean_index(y: Tensor) -> Tensor:
    return y[y > 0].sum()  # here


def converted(y: Tensor) -> Tensor:
    return y.sum() * float(y.detach().numpy()[0, 0])  # here


def wrong_shape(y: Tensor) -> Tensor:
    return (y @ torch.ones(3, 3)).sum()  # here


def written_known_value(y: Tensor) -> Tensor:
    index = torch.arange(4)
    index.copy_(y[0].long())
    return y.sum() ** index.max().item()  # here


def random_value(y: Tensor) -> Tensor:
    return y.sum() ** torch.randint(0, 9, (3,)).max().item()  # here


def of_another_namespace(y: Tensor) -> Tensor:
    return torch.ops.prims.sin(y).sum()  # here


@torch.library.custom_op("fsdp_mlir_test::shapeless", mutates_args=())
def shapeless(x: Tensor) -> Tensor:
    return x * 2


def unknown_shape(y: Tensor) -> Tensor:
    return shapeless(y).sum()  # here


def unusual_dtype(y: Tensor) -> Tensor:
    return y.to(torch.float8_e4m3fnuz).float().sum() + y.sum()  # here


def line_of(body: Callable[..., object]) -> str:
    lines, first = inspect.getsourcelines(body)
    offset = next(i for i, line in enumerate(lines) if "# here" in line)
    return f"test_errors.py:{first + offset}: "


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (branch, "depends on the data of a tensor"),
        (item, "depends on the data of a tensor"),
        (boolean_index, "depends on the data of a tensor"),
        (converted, "numpy"),
        (wrong_shape, "RuntimeError: "),
        (written_known_value, "depends on the data of a tensor"),
        (random_value, "depends on the data of a tensor"),
        (of_another_namespace, "expected namespace 'aten', got 'prims'"),
        (unknown_shape, "'fsdp_mlir_test.shapeless.default' has no fake kernel .*register_fake"),
        (unusual_dtype, "returns 'torch.float8_e4m3fnuz', which is not supported"),
    ],
)
def test_forward_names_the_line(
    tmp_path: Path, body: Callable[[Tensor], object], message: str
) -> None:
    with pytest.raises(CaptureError, match=message) as error:
        inputs = {"x": torch.randn(2, 4)}
        capture(Model(body), kwargs=inputs, path=tmp_path / "model.pt", assume=False)
    assert line_of(body) in str(error.value)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda y: y, "expected a floating scalar, got float32"),
        (lambda y: (y.sum(), y), "expected a scalar, got 'tuple'"),
        (lambda y: {"a": 1}, "expected a scalar, got 'dict'"),
        (lambda y: 1.0, "expected a scalar, got 'float'"),
        (lambda y: y.long().sum(), "expected a floating scalar, got int64"),
        (lambda y: y.detach().sum(), "depends on no parameter"),
    ],
)
def test_output_is_no_loss(tmp_path: Path, body: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(CaptureError, match=message) as error:
        capture(Model(body), kwargs={"x": torch.randn(2, 4)}, path=tmp_path / "model.pt")
    line = inspect.getsourcelines(Model.forward)[1]
    assert f"test_errors.py:{line}: " in str(error.value)
    assert list(tmp_path.iterdir()) == []


class Scalar(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.tensor(1.0), "parameter 'weight' is a scalar"),
        (torch.randn(3, 2).t(), "parameter 'weight' is not contiguous"),
        (torch.eye(2).to_sparse(), "parameter 'weight' has layout 'torch.sparse_coo'"),
    ],
)
def test_parameters_that_cannot_be_sharded(tmp_path: Path, weight: Tensor, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Scalar(weight), kwargs={"x": torch.randn(2, 3)}, path=tmp_path / "model.pt")


def test_no_trainable_parameter(tmp_path: Path) -> None:
    model = Model(torch.sum).requires_grad_(False)
    with pytest.raises(CaptureError, match="no parameter requires grad"):
        capture(model, kwargs={"x": torch.randn(2, 4)}, path=tmp_path / "model.pt")


@pytest.mark.parametrize(
    "value", [[torch.ones(2, 4), object()], object(), {"x": {3}}, torch.eye(2).to_sparse()]
)
def test_inputs_are_tensors(tmp_path: Path, value: object) -> None:
    with pytest.raises(CaptureError, match=r"input 'x\S*': expected a"):
        capture(Model(torch.sum), kwargs={"x": value}, path=tmp_path / "model.pt")


class Shadowed(nn.Module):
    inner = None

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.linear = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()


def test_a_module_that_an_attribute_of_the_class_hides(tmp_path: Path) -> None:
    with pytest.raises(
        CaptureError, match=r"'inner' is hidden by an attribute .* of .* 'Shadowed'"
    ):
        capture(Shadowed(), kwargs={"x": torch.randn(2, 3)}, path=tmp_path / "model.pt")


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.weights = [torch.ones(3, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.weights[0]).sum()


def test_an_unregistered_parameter(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="is no parameter of the model"):
        capture(Hidden(), kwargs={"x": torch.randn(2, 3)}, path=tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mixed_precision: {dtype: float16}", ':1:19: unknown key "dtype" in "mixed_precision"'),
        ("units: [{match: a, mixed_precision: 1}]", ":1:37: expected a mapping, false or null for"),
        (
            "units: auto\nmixed_precision: {param_dtype: bfloat16}",
            "'mixed_precision' in '.*' needs units by name or class",
        ),
        ("- a", ":1:1: expected a mapping for the config, got: a sequence"),
        ("a: [", "is not YAML"),
    ],
)
def test_config(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "fsdp.yaml"
    config.write_text(text)
    options = {"kwargs": {"x": torch.randn(2, 4)}, "path": tmp_path / "model.pt"}
    with pytest.raises(CaptureError, match=message) as error:
        capture(Model(torch.sum), config=config, **options)
    assert "fsdp.yaml" in str(error.value)
    config.write_text("units: [{match: layer}]\noptimizer: {name: adamw}\n")
    capture(Model(torch.sum), config=config, **options)


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"cannot read '.*none.yaml': no such file"):
        capture(Model(torch.sum), config=tmp_path / "none.yaml")


def test_a_failed_capture_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    inputs = {"x": torch.randn(2, 4)}
    capture(Model(torch.sum), kwargs=inputs, path=path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(CaptureError):
        capture(Model(branch), kwargs=inputs, path=path, assume=False)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_hooks_are_removed(tmp_path: Path) -> None:
    hooks = nn.modules.module
    before = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
    with pytest.raises(CaptureError):
        capture(
            Model(branch),
            kwargs={"x": torch.randn(2, 4)},
            path=tmp_path / "model.pt",
            assume=False,
        )
    assert before == (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks))
