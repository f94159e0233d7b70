"""The recorded step is what ATen runs on plain tensors, not what it runs under a dispatch mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice, product
from pathlib import Path
from typing import Any

import fsdp_mlir
import pytest
import torch
import torch.nn.functional as F
from fsdp_mlir.record.plain import composites
from fsdp_mlir.support.errors import CaptureError
from graphs import Captured
from kernel_calls import op_db
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CLASSES, IGNORED = 7, 3


class Weighted(nn.Module):
    """The loss of images or tokens of which some do not count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.output = nn.Linear(8, CLASSES)
        self.register_buffer("weight", torch.rand(CLASSES))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            self.output(x).transpose(1, 2),
            targets,
            weight=self.weight,
            ignore_index=IGNORED,
            label_smoothing=0.1,
        )


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(CLASSES, (4, 12), generator=generator)
    return {"x": torch.randn(4, 12, 8, generator=generator), "targets": targets}


def test_the_mean_of_weighted_and_smoothed_losses(tmp_path: Path) -> None:
    """Of the targets that count the weights are added up, as many as there are."""
    inputs = batch(0)
    fsdp_mlir.capture(Weighted(), kwargs=inputs, path=tmp_path / "model.pt")
    calls = Captured.load(tmp_path / "model.pt").record["nodes"]
    selected = [call for call in calls if call["op"].startswith("aten::masked_select")]
    counted = int((inputs["targets"] != IGNORED).sum())
    assert [call["outs"][0]["shape"] for call in selected] == [[counted]]


def test_the_composite_that_stands_in_for_atens() -> None:
    """It has ATen's bits, for the arguments that it answers and for all others."""
    model = Weighted()
    for seed in range(20):
        x, targets = batch(seed).values()
        shares = torch.softmax(x[..., :CLASSES], -1).transpose(1, 2)
        for arguments in (
            {"weight": model.weight, "ignore_index": IGNORED, "label_smoothing": 0.1},
            {"weight": model.weight, "label_smoothing": 0.1},
            {"weight": model.weight, "label_smoothing": 0.1, "reduction": "sum"},
            {"ignore_index": IGNORED, "label_smoothing": 0.1},
            {"weight": model.weight, "ignore_index": IGNORED},
            {"weight": model.weight, "label_smoothing": 0.1, "target": shares},
        ):
            arguments = {"target": targets, **arguments}
            losses, gradients = [], []
            for context in (nullcontext(), composites()):
                with context:
                    loss = F.cross_entropy(model.output(x).transpose(1, 2), **arguments)
                losses.append(loss)
                gradients.append(torch.autograd.grad(loss, list(model.output.parameters())))
            assert torch.equal(*losses), arguments
            assert all(map(torch.equal, *gradients)), arguments


class Applied(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.value = nn.Parameter(torch.tensor([0.5]))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.layer(x), self.value[0]).sum() + self.value[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda x, value: x.prod(-1), "the derivative of 'aten.prod' depends on the data"),
        (lambda x, value: x.prod(), "the derivative of 'aten.prod' depends on the data"),
        (
            lambda x, value: x.masked_fill(x > 0, value),
            "the derivative of 'aten.masked_fill' by its value depends on the data",
        ),
    ],
)
def test_derivatives_that_the_data_decides(
    tmp_path: Path, body: Callable[[Tensor, Tensor], Tensor], message: str
) -> None:
    with pytest.raises(CaptureError, match=f"test_plain.py:\\d+: {message}"):
        fsdp_mlir.capture(Applied(body), kwargs={"x": torch.ones(2, 8)}, path=tmp_path / "m.pt")


@pytest.mark.parametrize("name", ["quantile", "nanquantile"])
def test_a_quantile_among_equal_elements(tmp_path: Path, name: str) -> None:
    """Its derivative goes to one of them: ATen selects, and sorts under a mode."""
    message = f"test_plain.py:\\d+: the derivative of 'aten.{name}[^']*' goes to another one"
    for level in (0.3, torch.tensor([0.3, 0.5])):

        def body(x: Tensor, value: Tensor, level: Any = level) -> Tensor:
            return getattr(torch, name)(x.relu(), level, dim=1)

        def metric(x: Tensor, value: Tensor, level: Any = level) -> Tensor:
            return x * getattr(torch, name)(x.detach(), level, dim=1).mean()

        kwargs = {"x": torch.randn(4, 8)}
        with pytest.raises(CaptureError, match=message):
            fsdp_mlir.capture(Applied(body), kwargs=kwargs, path=tmp_path / "m.pt")
        fsdp_mlir.capture(Applied(metric), kwargs=kwargs, path=tmp_path / "m.pt")


def test_products_and_fills_without_that_derivative(tmp_path: Path) -> None:
    def body(x: Tensor, value: Tensor) -> Tensor:
        filled = x.masked_fill(x > 0, value.detach()).masked_fill(x < -1, 2.0)
        return filled * x.detach().prod(-1, keepdim=True)

    fsdp_mlir.capture(Applied(body), kwargs={"x": torch.ones(2, 8)}, path=tmp_path / "m.pt")


class Seen(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def results(operator: Any, sample: Any, *, equal: bool) -> list[Tensor | None]:
    """What the operator returns for a sample, and its gradients; with whole numbers, some of which
    are `equal`."""

    def fresh(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.detach().clone()
        if equal and value.is_floating_point():
            value = value.round()
        return value.requires_grad_(value.is_floating_point())

    torch.manual_seed(0)
    arguments, args, kwargs = tree_map(fresh, (sample.input, sample.args, sample.kwargs))
    leaves = [
        leaf
        for leaf in tree_leaves((arguments, args, kwargs))
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    made = operator.op(arguments, *args, **kwargs)
    outs = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
    differentiable = [
        out
        for out in outs
        if out.requires_grad and out.is_floating_point() and out.layout == torch.strided
    ]
    found: list[Tensor | None] = [*outs]
    if differentiable:
        ones = [torch.randn(out.shape, dtype=out.dtype) for out in differentiable]
        found += torch.autograd.grad(differentiable, leaves, ones, allow_unused=True)
    return found


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.layout != torch.strided:
        return a.layout == b.layout
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and bool(((a == b) | ((a != a) & (b != b))).all())


def samples(operator: Any) -> Iterator[Any]:
    grad = operator.supports_autograd
    yield from islice(operator.sample_inputs("cpu", torch.float32, requires_grad=grad), 40)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_all_operators_that_pytorch_has_samples_of() -> None:
    compared, different, refused = 0, set(), set()
    for operator in op_db:
        if operator.name.startswith(("empty", "new_empty", "jiterator")):
            continue  # of any content; of GPUs alone
        for sample, equal in product(samples(operator), (False, True)):
            try:
                want = results(operator, sample, equal=equal)
            except (RuntimeError, TypeError, ValueError):
                continue  # PyTorch's samples hold for its own way to differentiate
            try:
                with composites(), Seen():
                    got = results(operator, sample, equal=equal)
            except CaptureError:
                refused.add(operator.name)
                continue
            compared += 1
            if len(got) != len(want) or not all(map(same_bits, got, want)):
                different.add(operator.name)
    assert compared > 10000
    assert refused == {"quantile", "nanquantile"}
    # Refused above.
    assert different == {"masked_fill", "prod", "masked.prod"}
