"""What a step decides from values that are the same in every step, and what it may not decide."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asserting
import fsdp_mlir
import numpy as np
import pytest
import torch
from fsdp_mlir.support.errors import CaptureError
from graphs import Captured, assert_same_step
from torch import Tensor, nn

X = torch.linspace(-1, 1, 24).reshape(4, 6)


class Model(nn.Module):
    """A layer, and behind it a function that sees the module too."""

    def __init__(self, body: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mask", torch.tensor([True, False, True, True, False, True]))
        self.register_buffer("rows", torch.arange(24).reshape(4, 6) % 5 == 0, persistent=False)
        self.held = [torch.arange(6) % 2 == 0]
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.layer(x)).square().sum()


def capture(body: Callable[[Model, Tensor], Tensor], tmp_path: Path) -> tuple[Model, Captured]:
    model = Model(body)
    fsdp_mlir.capture(model, kwargs={"x": X}, path=tmp_path / "model.pt", assume=False)
    return model, Captured.load(tmp_path / "model.pt")


def literal_rows(_: Model, y: Tensor) -> Tensor:
    return y[torch.tensor([True, False, True, False])] * 2


def literal_floats(_: Model, y: Tensor) -> Tensor:
    return y[:, torch.linspace(0, 1, 6) > 0.3].exp()


def quotients_of_numbers(_: Model, y: Tensor) -> Tensor:
    rows = torch.div(y.shape[0], 2, rounding_mode="trunc")
    return y[:rows] * torch.div(y.shape[1], 4) + torch.pow(torch.mul(2, 3), 2)


def two_dimensions(_: Model, y: Tensor) -> Tensor:
    return y[torch.ones(4, 6).triu() > 0]


def beside_integers(_: Model, y: Tensor) -> Tensor:
    return y.unsqueeze(1)[torch.tensor([True, False, True, True]), 0, torch.tensor([0, 1, 5])]


def written(_: Model, y: Tensor) -> Tensor:
    z = y * 1
    z[torch.tensor([True, False, True, False])] = y[:2].tanh()
    z[:, torch.arange(6) < 2] += 1
    return z


def buffers(model: Model, y: Tensor) -> Tensor:
    return y[:, model.mask][:, 1:].cos() + y[model.rows].sum()


def computed_from_buffers(model: Model, y: Tensor) -> Tensor:
    return y[:, ~model.mask & model.held[0]] * y[:, model.held[0]][:, :1]


def selected(model: Model, y: Tensor) -> Tensor:
    return y.masked_select(model.mask) + y[:, model.mask.nonzero().flatten()].flatten()


def item_of_floats(_: Model, y: Tensor) -> Tensor:
    return y * 2 if torch.linspace(0, 1, 5).sum().item() > 2 else y


BODIES = [
    literal_rows,
    literal_floats,
    quotients_of_numbers,
    two_dimensions,
    beside_integers,
    written,
    buffers,
    computed_from_buffers,
    selected,
    item_of_floats,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_masks_that_do_not_change(tmp_path: Path, body: Callable[[Model, Tensor], Tensor]) -> None:
    model, captured = capture(body, tmp_path)
    assert_same_step(model, captured, {"x": X})
    assert_same_step(model, captured, {"x": X.flip(0) * 3})


def mask_of_data(_: Model, y: Tensor) -> Tensor:
    return y[y[:, 0] > 0]


def written_before(model: Model, y: Tensor) -> Tensor:
    model.mask.logical_not_()
    return y[:, model.mask]


def written_behind(model: Model, y: Tensor) -> Tensor:
    z = y[:, model.mask]
    model.mask.logical_not_()
    return z


def branch_on_a_buffer(model: Model, y: Tensor) -> Tensor:
    return y * 2 if model.mask[0] else y


def layer_drop(_: Model, y: Tensor) -> Tensor:
    return y if torch.rand([]) < 0.5 else y * 2


def size_of_a_draw(_: Model, y: Tensor) -> Tensor:
    return y[:, torch.bernoulli(torch.full((6,), 0.5)).bool()]


def branch_on_dropout(_: Model, y: Tensor) -> Tensor:
    return y if torch.dropout(y, 0.5, True).sum() > 0 else y * 2


DATA = r"'aten\.\w+\.\w+' depends on the data of a tensor, and the captured step is static; .*"
DRAW = r"a branch or a size on a random draw \('aten\.{}' at \S+:\d+\) depends on the data .*"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (mask_of_data, DATA),
        (written_before, DATA),
        (written_behind, r"'aten\.logical_not_\.default' writes a tensor whose values decide .*"),
        (branch_on_a_buffer, DATA),
        (layer_drop, DRAW.format(r"rand\.default")),
        (size_of_a_draw, DRAW.format(r"bernoulli\.default")),
        (branch_on_dropout, DATA),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_may_change_is_refused(tmp_path: Path, body: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=rf"^\S*test_static_values\.py:\d+: {message}$"):
        capture(body, tmp_path)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (asserting.asserts, 2),
        (asserting.raises, 1),
        (asserting.checks, 2),
        (asserting.check_tensor, 1),
        (asserting.assert_async, 1),
        (asserting.helpers, 2),
        (asserting.distribution, 3),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_assertions_are_calls(tmp_path: Path, body: Any, count: int) -> None:
    model, captured = capture(body, tmp_path)
    assert captured.ops().count("aten::_assert_async") == count
    assert_same_step(model, captured, {"x": X})
    with pytest.raises(RuntimeError, match=r"(does not hold: \S*asserting\.py:\d+|but got zero)"):
        of_nan = body in (asserting.raises, asserting.distribution)
        captured.run_calls({"x": X * float("nan") if of_nan else X * 1000})


def test_an_assertion_that_is_frequent(tmp_path: Path) -> None:
    """Python runs its calls by other instructions."""

    def body(model: Model, y: Tensor) -> Tensor:
        for _ in range(40):
            asserting.helpers(model, y)
        return y

    _, captured = capture(body, tmp_path)
    assert captured.ops().count("aten::_assert_async") == 80


@pytest.mark.parametrize(
    "body",
    [asserting.either, asserting.raises_in_one_case, asserting.any_of_helpers, asserting.kept],
)
def test_a_branch_is_no_assertion(tmp_path: Path, body: Any) -> None:
    with pytest.raises(CaptureError, match=DATA):
        capture(body, tmp_path)


@pytest.mark.parametrize(
    ("reader", "read"),
    [
        ("tolist", lambda t: t.tolist()),
        ("numpy", lambda t: t.numpy()),
        ("array", np.asarray),
        ("repr", repr),
        ("repr", str),
        ("format", lambda t: f"{t}"),
        ("data_ptr", lambda t: t.data_ptr()),
        ("deepcopy", copy.deepcopy),
        ("reduce_ex", pickle.dumps),
        ("reduce_ex", copy.copy),
        ("dlpack", np.from_dlpack),
        ("to_dlpack", lambda t: torch.utils.dlpack.to_dlpack(t)),
        ("repr", lambda t: repr(nn.Parameter(t, requires_grad=False))),
    ],
)
def test_a_read_that_no_dispatch_sees(
    tmp_path: Path, reader: str, read: Callable[[Tensor], Any]
) -> None:
    """Of a tensor that is neither parameter nor buffer; outside of captures it is as before."""
    before = dict(vars(Tensor))

    def body(model: Model, y: Tensor) -> Tensor:
        read(model.held[0])
        return y

    with pytest.raises(CaptureError, match=rf"'{reader}' depends on the data of a tensor"):
        capture(body, tmp_path)
    assert dict(vars(Tensor)) == before
    read(torch.ones(2))


def test_a_read_of_what_data_was_written_to(tmp_path: Path) -> None:
    def body(_: Model, y: Tensor) -> Tensor:
        table = torch.arange(6)
        table.add_(y[0].long())
        return y * table.tolist()[0]

    with pytest.raises(CaptureError, match="'tolist' depends on the data of a tensor"):
        capture(body, tmp_path)


def test_a_read_of_what_the_step_makes(tmp_path: Path) -> None:
    def body(_: Model, y: Tensor) -> Tensor:
        rows = torch.tensor([2, 0]).tolist()
        return y[rows] + len(f"{torch.ones(2, dtype=torch.int)}")

    model, captured = capture(body, tmp_path)
    assert_same_step(model, captured, {"x": X})


def test_a_message_of_torch_may_show_a_tensor(tmp_path: Path) -> None:
    def body(model: Model, y: Tensor) -> Tensor:
        try:
            torch._utils._get_device_index(model.held[0])
        except ValueError as error:
            assert "tensor([" in str(error)
        else:
            raise AssertionError
        return y

    capture(body, tmp_path)
