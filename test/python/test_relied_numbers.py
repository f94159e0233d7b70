"""Numbers that Python code reads of tensors that no step computes: a plan serves equal ones."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_mlir import capture
from fsdp_mlir.support.errors import CaptureError
from torch import Tensor, nn
from twins import Twins

SGD = (torch.optim.SGD, {"lr": 0.1})
X = {"x": torch.linspace(-1, 1, 32).reshape(4, 8)}
OTHER = "values that decide a shape or a branch"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 8)
        self.register_buffer("stride", torch.tensor(2))
        self.register_buffer("kernel", torch.tensor([3, 1]))

    def forward(self, x: Tensor, sizes: Tensor | None = None) -> Tensor:
        return self.of(self.a(x), x, sizes).square().mean()

    def of(self, hidden: Tensor, x: Tensor, sizes: Tensor | None) -> Tensor:
        raise NotImplementedError


class OfBuffers(Net):
    """As the convolutions of EnCodec have theirs."""

    def of(self, hidden: Tensor, x: Tensor, sizes: Tensor | None) -> Tensor:
        if self.stride > 1:
            hidden = hidden[:, :: int(self.stride)]
        return nn.functional.pad(hidden, (0, math.ceil(self.kernel[0] / self.stride)))


class OfSizes(Net):
    """As vision models split the patches of a batch by image."""

    def of(self, hidden: Tensor, x: Tensor, sizes: Tensor | None) -> Tensor:
        assert sizes is not None
        parts = hidden.split(sizes.tolist())
        return torch.stack([part.sum() * (1 + index) / 16 for index, part in enumerate(parts)])


class OfALimit(Net):
    def of(self, hidden: Tensor, x: Tensor, sizes: Tensor | None) -> Tensor:
        assert sizes is not None
        return hidden if sizes.max() <= 3 else hidden.abs().sqrt()


class Handled(Net):
    """By an error that forward itself handles."""

    def of(self, hidden: Tensor, x: Tensor, sizes: Tensor | None) -> Tensor:
        assert sizes is not None
        try:
            if sizes.max() > 3:
                raise ValueError("too many")
        except ValueError:
            hidden = hidden.abs().sqrt()
        return hidden


def run(pair: Twins, sizes: list[int]) -> list[str]:
    """The warnings of two steps."""
    pair.batch = X | {"sizes": torch.tensor(sizes)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair.assert_equal_steps()
    return [str(each.message) for each in caught if "without a plan" in str(each.message)]


def test_buffers() -> None:
    pair = Twins(OfBuffers, X, SGD, fallback="error")
    pair.assert_equal_steps()
    pair = Twins(OfBuffers, X, SGD)
    for stride in (2, 1, 2):
        pair.change(lambda model, stride=stride: model.stride.fill_(stride))
        pair.assert_equal_steps()


@pytest.mark.parametrize(
    ("model", "other"), [(OfSizes, [2, 2]), (OfALimit, [4, 0]), (Handled, [4, 0])]
)
def test_inputs(model: type[Net], other: list[int]) -> None:
    pair = Twins(model, X | {"sizes": torch.tensor([1, 3])}, SGD, fallback="error")
    for sizes in ([1, 3], other, [1, 3], other):
        assert run(pair, sizes) == []
    assert len(pair.step._plans._made) == 2


def test_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plan has its own."""
    pair = Twins(OfSizes, X | {"sizes": torch.tensor([1, 3])}, SGD, evaluation=True)
    for sizes in ([1, 3], [2, 2], [3, 1]):
        assert run(pair, sizes) == []
    monkeypatch.setattr("fsdp_mlir.step.eager.evaluate", None)
    for sizes in ([2, 2], [1, 3], [3, 1], [1, 3]):
        pair.theirs.eval()
        with torch.no_grad():
            want = pair.theirs(X["x"], torch.tensor(sizes))
        pair.theirs.train()
        assert torch.equal(pair.step.evaluate(X["x"], sizes=torch.tensor(sizes)), want)


class InModes(OfSizes):
    mode = "plain"

    def of(self, hidden: Tensor, x: Tensor, sizes: Tensor | None) -> Tensor:
        return super().of(hidden * 2 if self.mode == "twice" else hidden, x, sizes)


def test_after_a_change() -> None:
    """Of the model, whose plans are for what it was."""
    pair = Twins(InModes, X | {"sizes": torch.tensor([1, 3])}, SGD, fallback="error")
    for mode in ("plain", "twice", "plain"):
        pair.change(lambda model, mode=mode: setattr(model, "mode", mode))
        for sizes in ([1, 3], [2, 2], [3, 1], [2, 2]):
            assert run(pair, sizes) == []
    assert len(pair.step._plans._made) == 6


def test_too_many_values() -> None:
    """Those that there are plans for have them all the same."""
    forms = [[1, 1, 2], [2, 1, 1], [1, 2, 1], [0, 2, 2], [2, 0, 2], [2, 2, 0], [4, 0, 0]]
    pair = Twins(OfSizes, X | {"sizes": torch.tensor(forms[0])}, SGD)
    lines = [run(pair, sizes) for sizes in [*forms, *forms]]
    assert list(map(len, lines)) == [0, 0, 0, 0, 0, 1] + [0] * 8 and OTHER in lines[5][0]
    assert len(pair.step._plans._made) == 5


def test_inputs_of_the_same_branch() -> None:
    pair = Twins(OfALimit, X | {"sizes": torch.tensor([1, 3])}, SGD, fallback="error")
    assert run(pair, [2, 2]) == []


class AsOperands(Net):
    """As what is divided by the number of tokens; only how the sizes compare decides a branch."""

    def of(self, hidden: Tensor, x: Tensor, sizes: Tensor | None) -> Tensor:
        assert sizes is not None
        if sizes.max().item() > sizes.min().item() + 4:
            hidden = hidden.sqrt()
        scaled = hidden * (2 / self.stride.item()) - x.abs().max().item() * hidden.max().item()
        return scaled / sizes.sum().item()


def test_operands() -> None:
    pair = Twins(AsOperands, X | {"sizes": torch.tensor([1, 3])}, SGD, fallback="error")
    for sizes in ([1, 3], [2, 2], [5, 4], [7, 4]):
        assert run(pair, sizes) == []
    assert len(pair.step._plans._made) == 1


class Replaced(Net):
    """The loop puts another tensor there; `kind` says where that is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def set(self, sizes: list[int]) -> None:
        if self.kind == "buffer":
            self.kernel = torch.tensor(sizes)
        else:
            self.given = torch.tensor(sizes)

    def of(self, hidden: Tensor, x: Tensor, sizes: Tensor | None) -> Tensor:
        held = self.kernel if self.kind == "buffer" else self.given
        if self.kind == "mask":
            return hidden[:, :2][:, held > 1]
        return hidden[:, : held.max().item()]


@pytest.mark.parametrize("kind", ["buffer", "attribute", "mask"])
def test_replaced(kind: str) -> None:
    def made() -> Net:
        model = Replaced(kind)
        model.set([2, 1])
        return model

    pair = Twins(made, X, SGD)
    for sizes in ([2, 1], [3, 2], [3, 2], [2, 1], [1, 2], [5, 1], [3, 2]):
        pair.change(lambda model, sizes=sizes: model.set(sizes))
        pair.assert_equal_steps()
    assert len(pair.step._plans._made) > 1


class OfItsOwn(Net):
    def of(self, hidden: Tensor, x: Tensor, sizes: Tensor | None) -> Tensor:
        return hidden.abs() ** hidden.abs().max().item()


class OfFloats(Net):
    def of(self, hidden: Tensor, x: Tensor, sizes: Tensor | None) -> Tensor:
        return hidden.abs() ** x.abs().max().item()


class Written(Net):
    """A size."""

    def of(self, hidden: Tensor, x: Tensor, sizes: Tensor | None) -> Tensor:
        self.stride.add_(1)
        return hidden.repeat(int(self.stride), 1)


class Counted(Net):
    """An operand."""

    def of(self, hidden: Tensor, x: Tensor, sizes: Tensor | None) -> Tensor:
        self.stride.add_(1)
        return hidden * int(self.stride)


def test_an_operand_that_each_step_counts() -> None:
    pair = Twins(Counted, X, SGD)
    pair.assert_equal_steps(6)
    assert len(pair.step._plans._made) == 1


@pytest.mark.parametrize("model", [OfItsOwn, OfFloats, Written])
def test_what_steps_change_has_no_plan(model: type[Net]) -> None:
    with pytest.warns(UserWarning, match="the captured step is static"):
        pair = Twins(model, X, SGD)
    pair.assert_equal_steps()


class Seeded(Net):
    def of(self, hidden: Tensor, x: Tensor, sizes: Tensor | None) -> Tensor:
        assert sizes is not None
        rows = int(0.5 * sizes.sum().item())
        torch.manual_seed(rows)
        return hidden[:rows]


class Gone(Net):
    def of(self, hidden: Tensor, x: Tensor, sizes: Tensor | None) -> Tensor:
        assert sizes is not None
        rows = int(0.5 * sizes.sum().item())
        return hidden[:rows] * float(hidden.detach().numpy().max())


@pytest.mark.parametrize(("model", "why"), [(Seeded, "manual_seed"), (Gone, "numpy")])
def test_what_has_no_plan_for_another_reason(model: type[Net], why: str) -> None:
    """The number that is read first is not the reason, and is tried once."""
    batch = X | {"sizes": torch.tensor([3, 3])}
    with pytest.warns(UserWarning, match=f"without a plan: .*{why}"):
        pair = Twins(model, batch, SGD)
    pair.assert_equal_steps()


def test_what_runs_elsewhere_relies_on_none(tmp_path: Path) -> None:
    """Nobody compares them there."""
    for model, batch in ((OfBuffers, X), (OfLimitAlone, X)):
        with pytest.raises(CaptureError, match="depends on the data of a tensor"):
            capture(model(), kwargs=batch, path=tmp_path / "model.pt", assume=False)


class OfLimitAlone(Net):
    def of(self, hidden: Tensor, x: Tensor, sizes: Any) -> Tensor:
        return hidden if (x > 9).any() else hidden.abs()
