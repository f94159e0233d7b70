"""The strides that capture gives results are those of the CPU's kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fsdp_mlir
import pytest
import torch
import torch.nn.functional as F
from fsdp_mlir.record.strides import corrected
from graphs import Captured, assert_same_step, eager_ops
from kernel_calls import FEW, SLOW, UNSEEN_VIEWS, Compared, compare, op_db
from torch import Tensor, nn


def compare_some(operators: list[str]) -> Compared:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        compared = compare(FEW, 2, operators)
    finally:
        torch.set_num_threads(threads)
    assert not compared.wrong, [messages[0] for messages in compared.wrong.values()]
    assert not compared.unseen_views - UNSEEN_VIEWS
    return compared


# OpInfo's names; kernel_calls.py as a script compares the slow ones too.
OPERATORS = sorted({op.name for op in op_db if not op.name.startswith(SLOW)})


def test_some_operators() -> None:
    """Every sixth, and all that are known to need a correction or to be views."""
    known = {name.split("::")[-1].split(".")[0] for name in UNSEEN_VIEWS}
    known |= {func._schema.name.split("::")[-1].strip("_") for func in corrected()}
    some = [name for name in OPERATORS if name.split(".")[-1] in known]
    compared = compare_some(sorted({*some, *OPERATORS[::6]}))
    assert compared.calls > 500
    assert "aten::unsafe_split" in compared.unseen_views


@pytest.mark.exhaustive
def test_every_operator() -> None:
    """Most corrections are needed by some call; kernel_calls.py as a script needs every one."""
    compared = compare_some(OPERATORS)
    assert compared.calls > 3000
    assert len(compared.corrected & corrected()) > len(corrected()) / 2


class Transposed(nn.Module):
    """A loss of a transposed result, and a layer whose backward views the loss's gradient."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x.transpose(1, 2)).transpose(1, 2), y)


LOSSES = {
    "mse_loss": F.mse_loss,
    "huber_loss": F.huber_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "logsigmoid": lambda x, y: (F.logsigmoid(x) * y).mean(),
    "softplus": lambda x, y: (F.softplus(x) * y).mean(),
    "glu": lambda x, y: (F.glu(x, 1) * F.glu(y, 1)).mean(),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_of_transposed_results(tmp_path: Path, loss: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, inputs = Transposed(loss), {"x": torch.randn(2, 8, 6), "y": torch.randn(2, 4, 6)}
    fsdp_mlir.capture(model, kwargs=inputs, path=tmp_path / "model.pt")
    captured = Captured.load(tmp_path / "model.pt")
    assert captured.ops() == eager_ops(model, inputs)
    assert_same_step(model, captured, inputs)


class ReadsStorage(nn.Module):
    """Reads what a kernel allocated in the order in which it lies there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        (made,) = torch.autograd.grad(
            F.mse_loss(x.t(), self.weight.t(), reduction="sum"), self.weight, create_graph=True
        )
        made = made.as_strided((24,), (1,)) if made.is_contiguous() else made.t().flatten()
        return (made * torch.arange(24)).sum()


def test_layout_decides_a_branch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = ReadsStorage(), {"x": torch.randn(4, 6)}
    fsdp_mlir.capture(model, kwargs=inputs, path=tmp_path / "model.pt")
    assert_same_step(model, Captured.load(tmp_path / "model.pt"), inputs)
