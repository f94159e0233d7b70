"""Branches on what a step computes: a plan goes one way; where another one is to be taken, FSDP2
makes the step from what was there before it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import fsdp_mlir
import pytest
import torch
import torch.nn.functional as F
from fsdp_mlir.capture.cli import parser
from fsdp_mlir.frontdoor.plan import Compiled
from graphs import Captured, assert_same_step
from torch import Tensor, nn


class Net(nn.Module):
    """Its branch is taken for inputs above about 3. What a step draws and writes before that is
    part of it."""

    def __init__(self, *, in_forward: bool = True, keeps: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.in_forward, self.keeps = in_forward, keeps
        self.calls = 0
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps:
            self.calls += 1
            self.seen = x.mean().detach()
        first = F.normalize(self.a(x) * 2) * self.a(x).norm(dim=1, keepdim=True)
        hidden = self.dropout(torch.relu(self.norm(first)))
        if self.in_forward:
            if torch.isnan(hidden).any() or torch.isinf(hidden).any():
                hidden = torch.nan_to_num(hidden)
            if first.abs().max() > 10:
                hidden = hidden.clamp(max=0.5) * self.calls
        return self.b(hidden)


def squares(y: Tensor) -> Tensor:
    return y.square().mean()


def by_number(y: Tensor) -> Any:
    loss = squares(y)
    size = loss.item()
    if not math.isfinite(size) or 2 * size - 1 >= y.shape[0] * 50:
        loss = loss.sqrt()
    return loss, {"size": size, "huge": size > 1e9}


def by_counts(y: Tensor) -> Tensor:
    """Of numbers that are no bools, and in a loop."""
    loss = squares(y)
    while (y.detach().abs() > 20).sum():
        y = y / 2
        loss = loss + squares(y) / 4
    return loss


class OfTensors(nn.Module):
    """In place after it was read."""

    def forward(self, y: Tensor) -> Tensor:
        loss = squares(y)
        big = loss.detach() > 200
        if big:
            loss = loss / 2
        big.logical_not_()
        return loss * (1 + big)


def step_by_step(
    scales: Sequence[float],
    loss: Callable[..., Any],
    *,
    compiled: bool,
    keeps: bool = True,
    **options: Any,
) -> list[Any]:
    """What a loop sees: losses, numbers, buffers, what forward leaves, and the generator."""
    model = fsdp_mlir.fully_shard(Net(in_forward=loss is squares, keeps=keeps))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = None
    if compiled:
        step = fsdp_mlir.compile(model, optimizer=optimizer, loss=loss, **options)
    torch.manual_seed(1)
    found: list[Any] = []
    for number, scale in enumerate(scales):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number)) * scale
        if step is not None:
            value = step(x)
        else:
            value = loss(model(x))
            (value[0] if isinstance(value, tuple) else value).backward()
            if "max_norm" in options:
                nn.utils.clip_grad_norm_(model.parameters(), options["max_norm"])
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.utils._pytree.tree_map_only(Tensor, Tensor.tolist, value))
        found += [model.calls, model.seen.item(), torch.get_rng_state().tolist()]
        found += [buffer.tolist() for buffer in model.buffers()]
    found += [param.full_tensor().tolist() for param in model.parameters()]
    return [*found, optimizer.state_dict()["state"][0]["exp_avg"].full_tensor().tolist()]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An element for each step that a plan has made."""
    made: list[None] = []
    leave = Compiled.leave

    def noted(self: Compiled, *args: Any) -> None:
        made.append(None)
        leave(self, *args)

    monkeypatch.setattr(Compiled, "leave", noted)
    return made


RARELY = [1.0, 1.0, 100.0, 1.0, 100.0, 100.0, 1.0, 1.0]


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}], ids=["", "clipped"])
@pytest.mark.parametrize("loss", [squares, by_number, by_counts, OfTensors()])
def test_rarely_otherwise(loss: Any, options: dict[str, Any], planned: list[None]) -> None:
    want = step_by_step(RARELY, loss, compiled=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step_by_step(RARELY, loss, compiled=True, **options) == want
    # All but those with another way and the one that begins the count of calls.
    assert len(planned) >= 4


def test_first_guess_is_wrong(planned: list[None]) -> None:
    """The example says which way it is."""
    scales = [100.0] * 6
    want = step_by_step(scales, squares, compiled=False)
    assert step_by_step(scales, squares, compiled=True) == want
    assert len(planned) >= 5


def test_always_otherwise(planned: list[None]) -> None:
    """After it has been in vain for some steps, FSDP2 makes them, with a line."""
    scales = [1.0, 1.0] + [100.0] * 12
    want = step_by_step(scales, squares, compiled=False, keeps=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert step_by_step(scales, squares, compiled=True, keeps=False) == want
    lines = [str(each.message) for each in caught if "without a plan" in str(each.message)]
    assert len(lines) == 1 and "decides a branch" in lines[0]
    assert len(planned) == 2


@pytest.mark.parametrize("form", ["backward", "evaluate"])
def test_other_calls(form: str, planned: list[None]) -> None:
    def run(compiled: bool) -> list[Any]:
        model = fsdp_mlir.fully_shard(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"loss": squares, "optimizer": optimizer, "evaluation": form == "evaluate"}
        step = fsdp_mlir.compile(model, **options) if compiled else None
        found: list[Any] = []
        for number, scale in enumerate([1.0, 1.0, 100.0, 1.0] * 3):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number)) * scale
            if form == "evaluate" and number % 2:
                model.eval()
                with torch.no_grad():
                    value = squares(model(x)) if step is None else step.evaluate(x)
                model.train()
                model.reshard()
            elif step is not None:
                value = step.backward(x)
            else:
                value = squares(model(x))
                value.backward()
            found += [value.item(), [b.tolist() for b in model.buffers()]]
            grads = [param.grad for param in model.parameters()]
            found.append([each is not None and each.full_tensor().tolist() for each in grads])
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        return found

    assert run(True) == run(False)
    assert len(planned) >= 3


class Writing(Net):
    """Writes its input, before a branch."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)


class Caught(Net):
    """Calculates what may be an error, which it expects."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        try:
            size = math.exp(self.a(x).abs().max().item() * 20)
        except OverflowError:
            size = math.inf
        return y.abs().sqrt() if size > 1e100 else y


class Kept(Net):
    """Keeps what may be an error, which it expects."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        try:
            self.size = math.exp(self.a(x).abs().max().item() * 20)
        except OverflowError:
            self.size = math.inf
        return y


class Looked(Net):
    """Looks up what a branch keeps in range: has no plan."""

    def forward(self, x: Tensor) -> Tensor:
        places = self.a(x).abs().amax(1).long()
        if places.max() > 15:
            places = places.clamp(max=15)
        return super().forward(x) * F.embedding(places, self.b.weight.t())


class Largest(Net):
    """Looks up where its largest elements are, which is in range whatever it computes."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        top, places = hidden.max(1)
        _, order = hidden[:, :4].topk(2)
        alone = torch.zeros_like(hidden).scatter(1, places[:, None], top[:, None])
        kinds = (
            F.one_hot(hidden.argmin(1), 16) + alone + F.embedding(places, self.b.weight.t()).sum()
        )
        extra = self.b(kinds) + hidden.gather(1, order).sum()
        return super().forward(x) + extra / 1000


class LargestValue(Net):
    """What `max` gives alone is no place."""

    def forward(self, x: Tensor) -> Tensor:
        size = (self.a(x).abs() * 2).long().max()
        if size < 64:
            x = x * (1 + F.one_hot(size, 64)[:8])
        return super().forward(x)


class Sized(Net):
    """No step can be recorded for the first guess, whose size is what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        classes = max((self.a(x).abs().max() / 5).long() + 1, 16)
        kinds = F.one_hot(x.argmax(1), classes)[:, :16]
        return super().forward(x) + self.b(kinds.to(x.dtype))


@pytest.mark.parametrize(
    ("kind", "plans"),
    [
        *((Writing, True), (Caught, True), (Kept, True), (Looked, False)),
        *((Largest, True), (LargestValue, False), (Sized, True)),
    ],
)
def test_what_is_put_back(kind: type[Net], plans: bool, planned: list[None]) -> None:
    def run(compiled: bool) -> list[Any]:
        model = fsdp_mlir.fully_shard(kind(keeps=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = fsdp_mlir.compile(model, loss=squares, optimizer=optimizer) if compiled else None
        found: list[Any] = []
        # The first example shows a way that the second one does not take.
        first = 1.0 if kind in (Caught, Kept, LargestValue, Sized) else 100.0
        for number, scale in enumerate([first, 1.0, 100.0, 1.0, 1.0, 1.0, 100.0, 1.0]):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number)) * scale
            if step is not None:
                value = step(x)
            else:
                value = squares(model(x))
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
            found += [value.item(), x.tolist(), [b.tolist() for b in model.buffers()]]
            found.append(getattr(model, "size", None))
        return found

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run(True) == run(False)
    lines = [str(each.message) for each in caught if "without a plan" in str(each.message)]
    assert bool(lines) != plans
    assert (len(planned) >= 3) == plans


@pytest.mark.parametrize(
    "options",
    [{"fallback": "error"}, {"grad_scaler": True}, {"optimizer": {"name": "adamw", "lr": 0.1}}],
    ids=lambda each: next(iter(each)),
)
def test_refused_where_nothing_else_makes_the_step(options: dict[str, Any]) -> None:
    model = fsdp_mlir.fully_shard(Net())
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss": squares} | options
    step = fsdp_mlir.compile(model, **given)
    with pytest.raises(
        (fsdp_mlir.CaptureError, fsdp_mlir.CompileError), match="depends on the data"
    ):
        step(torch.randn(4, 8))


class Branch(nn.Module):
    """What decides a branch, and numbers that follow from integers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 8)
        self.register_buffer("heads", torch.tensor(2))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        y = self.a(x)
        if y.detach().abs().max() > 10:
            y = y.sqrt()
        assert y.sum().item() * 2 <= 1e6
        if (y.max().item() < 1e3) + (y.min().item() > -1e3) >= 2:  # of bools, which are numbers
            y = y * 2
        rows = y.view(-1, int(self.heads), 4)[:, : lengths.max().item()]
        return squares(rows)


@pytest.mark.parametrize("assume", [True, False])
def test_capture(assume: bool, tmp_path: Any) -> None:
    """For other processes: the step stops where it is otherwise, which a warning says."""
    path = tmp_path / "model.pt"
    inputs = {"x": torch.randn(16, 8), "lengths": torch.tensor([1, 2])}
    model, arguments = Branch(), {"path": path, "assume": assume}
    if not assume:
        with pytest.raises(fsdp_mlir.CaptureError, match="depends on the data"):
            fsdp_mlir.capture(model, kwargs=inputs, **arguments)
        return
    with pytest.warns(UserWarning, match=r"step is: (\S*test_branches\.py:\d+,? ){3}and 1 more; a"):
        done = fsdp_mlir.capture(model, kwargs=inputs, **arguments)
    assert done.checked
    captured = Captured.load(path)
    assert_same_step(model, captured, inputs)
    for other in ({"x": inputs["x"] * 100}, {"lengths": torch.tensor([1, 1])}):
        with pytest.raises(RuntimeError, match=r"data decide otherwise .*test_branches\.py:\d+"):
            captured.run_calls(inputs | other)
    captured.weights["heads"].fill_(1)
    with pytest.raises(RuntimeError, match=r"data decide otherwise .*test_branches\.py:\d+"):
        captured.run_calls(inputs)


class Counted(nn.Module):
    """By integers of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        y = self.a(x)
        count, longest = lengths.sum().item(), lengths.max().item()
        loss = y.square().sum() / count + y.max() * (0.5 * count - 1) * torch.rand(()).item()
        return loss if 2 * longest > count else loss.sqrt()


def test_capture_of_counts(tmp_path: Any) -> None:
    """A step for other processes computes with these numbers, and stops for a branch alone."""
    path = tmp_path / "model.pt"
    inputs = {"x": torch.randn(16, 8), "lengths": torch.tensor([1, 4])}
    model = Counted()
    with pytest.warns(UserWarning, match=r"step is: \S*test_branches\.py:\d+; a"):
        assert fsdp_mlir.capture(model, kwargs=inputs, path=path).checked
    captured = Captured.load(path)
    for lengths in ([1, 4], [7, 2], [0, 1]):
        assert_same_step(model, captured, inputs | {"lengths": torch.tensor(lengths)})
    with pytest.raises(RuntimeError, match=r"data decide otherwise .*test_branches\.py:\d+"):
        captured.run_calls(inputs | {"lengths": torch.tensor([2, 2])})


class Drawn(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return (y * 2 if torch.rand(()).item() < 0.5 else y).square().mean()


def test_a_branch_on_a_draw(tmp_path: Any) -> None:
    with pytest.raises(fsdp_mlir.CaptureError, match="branch or a size on a random draw"):
        fsdp_mlir.capture(Drawn(4, 4), (torch.randn(2, 4),), path=tmp_path / "model.pt")


def test_option() -> None:
    given = ["--model", "module:Model", "--inputs", "x=float32[2]"]
    parse = parser().parse_args
    assert parse(given).assume and not parse([*given, "--no-assume"]).assume
