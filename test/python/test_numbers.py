"""Numbers among a step's inputs that change from call to call, as FSDP2's step takes them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import fsdp_mlir
import pytest
import torch
from fsdp_mlir import fully_shard
from fsdp_mlir.frontdoor import planning
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[..., Any]
LABELS = torch.arange(6) % 3


def weighted(model: nn.Module, x: Tensor, beta: float) -> Any:
    output = model(x)
    return F.cross_entropy(output, LABELS) + beta * output.square().mean()


def on_each_side(model: nn.Module, x: Tensor, beta: float) -> Any:
    hidden = model(x * beta - beta / 3)
    hidden = (beta - hidden) + (hidden - beta) * (1 + beta) + hidden / beta + beta / (2 + hidden**2)
    hidden *= beta
    hidden.add_(beta).sub_(2 * beta)
    near = torch.where(hidden > beta, hidden, beta)
    return torch.mul(F.cross_entropy(hidden + near, LABELS), beta)


def scheduled(model: nn.Module, x: Tensor, step: int) -> Any:
    """Arithmetic in Python, and comparisons whose outcome is the same in most steps."""
    beta = min(1.0, step / 4)
    rate = 0.5 * (1 + math.cos(math.pi * step / 100)) if step > 1 else 0.0
    output = model(x)
    loss = F.cross_entropy(output, LABELS) * beta
    if rate:
        loss = loss + rate * output.abs().mean() ** 2
    if step % 5 == 4:
        loss = loss + output.mean()
    return loss


def returned(model: nn.Module, x: Tensor, beta: float, step: int) -> Any:
    loss = beta * F.cross_entropy(model(x), LABELS)
    return loss, {
        "beta": beta,
        "next": step + 1,
        "late": step > 100,
        "weighted": loss.item() * beta,
        "unused": -beta,
    }


def integers(model: nn.Module, x: Tensor, n: int) -> Any:
    output = model(x)
    picked = (LABELS * n - n) % 3
    kept = torch.where(n % 3 == LABELS, output[:, 0], n)
    return F.cross_entropy(output, picked) / n + kept.mean() + (n * output).mean()


def of_one_element(model: nn.Module, x: Tensor, beta: float) -> Any:
    """Of tensors without dimensions, which decide a dtype as numbers do not."""
    output = model(x)
    mean = output.mean()
    half = output.to(torch.bfloat16).mean()
    hits = (output.argmax(-1) == LABELS).sum()
    return F.cross_entropy(output, LABELS) + mean * beta + half * beta + 0 * (hits * beta) + half


def low_precision(model: nn.Module, x: Tensor, beta: float) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    return F.cross_entropy((output * beta).float() + beta * output, LABELS) * beta


def chosen(model: nn.Module, x: Tensor, beta: float) -> Any:
    output = model(x)
    wide = output.double().where(output > 0, beta)
    narrow = output[0, 0].where(x.sum() > 0, beta) + torch.where(output > 0, beta, output)
    return F.cross_entropy(output, LABELS) + wide.mean() + narrow.mean(), wide


def tried(model: nn.Module, x: Tensor, n: int) -> Any:
    output = F.cross_entropy(model(x), LABELS)
    try:
        return output * int(n)
    except Exception:
        return output


def shifted(model: nn.Module, x: Tensor, n: int) -> Any:
    output = F.cross_entropy(model(x), LABELS)
    try:
        return output * (n & 3)
    except TypeError:
        return output


def caught(model: nn.Module, x: Tensor, n: int) -> Any:
    try:
        rate = 1 / n
    except ZeroDivisionError:
        rate = 1.0
    return F.cross_entropy(model(x), LABELS) * rate


def of_its_class(model: nn.Module, x: Tensor, n: float) -> Any:
    loss = F.cross_entropy(model(x), LABELS)
    return loss * n if type(n) is float else loss


def of_its_class_and_small(model: nn.Module, x: Tensor, n: float) -> Any:
    loss = F.cross_entropy(model(x), LABELS)
    return loss if type(n) is float and n < 0.5 else loss * n


def as_a_size(model: nn.Module, x: Tensor, n: int) -> Any:
    return F.cross_entropy(model(x[:n]), LABELS[:n])


def as_a_count(model: nn.Module, x: Tensor, n: int) -> Any:
    return sum(F.cross_entropy(model(x), LABELS) for _ in range(n))


def as_text(model: nn.Module, x: Tensor, n: int) -> Any:
    return F.cross_entropy(model(x), LABELS), f"{n}"


def of_an_operator(model: nn.Module, x: Tensor, n: int) -> Any:
    return F.cross_entropy(model(x), LABELS, label_smoothing=n / 100)


def kept(model: Any, x: Tensor, n: int) -> Any:
    model.n = n
    return F.cross_entropy(model(x), LABELS), model.n


def in_a_list(model: nn.Module, x: Tensor, n: int) -> Any:
    return F.cross_entropy(model(x), LABELS) * torch.tensor([1.0, n]).sum()


def among_others(model: nn.Module, x: Tensor, n: int, beta: float) -> Any:
    return beta * F.cross_entropy(model(x[:n]), LABELS[:n])


CASES: list[tuple[Loss, Sequence[tuple[Any, ...]], int]] = [
    (weighted, [(0.1,), (0.2,), (0.30000001,), (1e-8,), (-3.0,), (float("inf"),), (0.1,)], 2),
    (on_each_side, [(0.1 * n,) for n in range(1, 7)], 2),
    (scheduled, [(n,) for n in range(12)], 5),
    (returned, [(0.1 * n, n) for n in range(6)], 2),
    (in_a_list, [(n,) for n in range(1, 8)], 2),
    (kept, [(n,) for n in range(1, 8)], 2),
    (integers, [(n,) for n in range(1, 8)], 2),
    (of_one_element, [(0.7 * n,) for n in range(6)], 2),
    (low_precision, [(0.7 * n,) for n in range(6)], 2),
    (chosen, [(1.0,), (2.0,), (0.1,), (1e30,), (1e-300,)], 2),
    (weighted, [(n % 2,) for n in range(4)] + [(n / 3,) for n in range(4)], 3),
]


class Counted:
    """How often a step is captured."""

    def __init__(self) -> None:
        self.count = 0
        self._capture = planning.capture

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._capture(*args, **kwargs)


def _results(
    loss: Loss, calls: Sequence[tuple[Any, ...]], *, compiled: bool, **options: Any
) -> tuple[list[Any], list[str], int]:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    counted = Counted()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = []
        with mock.patch.object(planning, "capture", counted):
            step = fsdp_mlir.compile(model, compute_loss=loss, optimizer=optimizer, **options)
            for number, numbers in enumerate(calls):
                x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
                if compiled:
                    results.append(step(x, *numbers))
                else:
                    value = loss(model, x, *numbers)
                    first = value[0] if isinstance(value, tuple) else value
                    first.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    results.append(value)
    results += [param.full_tensor().detach().clone() for param in model.parameters()]
    lines = [str(each.message) for each in caught if "without a plan" in str(each.message)]
    return [_plain(each) for each in results], lines, counted.count


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.detach().contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return type(value), value


@pytest.mark.parametrize(
    ("loss", "calls", "captures"), CASES, ids=[f"{c[0].__name__}-{i}" for i, c in enumerate(CASES)]
)
@pytest.mark.parametrize(
    "fuse", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["calls", ""]
)
def test_a_number_of_each_call(loss: Loss, calls: Any, captures: int, fuse: bool) -> None:
    options = {} if fuse else {"schedule": {"fuse": "none"}}
    got, lines, count = _results(loss, calls, compiled=True, **options)
    want, _, _ = _results(loss, calls, compiled=False)
    assert lines == []
    assert got == want
    assert count == captures


@pytest.mark.parametrize(
    "loss",
    [as_a_size, as_a_count, as_text, of_an_operator],
)
def test_a_number_of_one_value(loss: Loss) -> None:
    """What is more than a tensor could be is a part of the step, and each value another step."""
    calls = [(n,) for n in (1, 2, 1, 3, 4, 5, 6, 7, 8, 9, 2, 10)]
    got, lines, _ = _results(loss, calls, compiled=True)
    want, _, _ = _results(loss, calls, compiled=False)
    assert got == want
    assert len(lines) == 1
    assert "'n' is used as more than a tensor" in lines[0] and "test_numbers.py:" in lines[0]


@pytest.mark.parametrize("loss", [tried, shifted, caught, of_its_class, of_its_class_and_small])
def test_a_number_that_another_would_differ_from(loss: Loss) -> None:
    """Where the recorded step takes a way that it takes for no other number."""
    kind = float if loss in (of_its_class, of_its_class_and_small) else int
    calls = [(kind(n),) for n in (2, 0, 1, 5, 3)]
    got, lines, _ = _results(loss, calls, compiled=True)
    want, _, _ = _results(loss, calls, compiled=False)
    assert got == want
    assert lines == []


def unused(model: nn.Module, x: Tensor, n: float) -> Any:
    rate = 1 / n
    return F.cross_entropy(model(x), LABELS) + (0 if n > 100 else n), n > rate


def too_large(model: nn.Module, x: Tensor, n: float) -> Any:
    output = model(x)
    return F.cross_entropy(output, LABELS) + torch.where(output > 0, output, n).mean()


@pytest.mark.parametrize(
    ("loss", "wrong", "error"),
    [(unused, 0.0, ZeroDivisionError), (too_large, -1e39, RuntimeError)],
)
def test_an_error_for_some_numbers(loss: Loss, wrong: float, error: type[Exception]) -> None:
    """Comes as FSDP2's does, before anything is trained, and the plan serves the other numbers."""
    calls = [(2.0,), (3.0,), (4.0,)]
    _, lines, count = _results(loss, calls, compiled=True)
    assert (lines, count) == ([], 2)
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = fsdp_mlir.compile(model, compute_loss=loss, optimizer=optimizer)
    x = torch.randn(6, 4)
    for number in (2.0, 3.0):
        step(x, number)
    before = [param.full_tensor().clone() for param in model.parameters()]
    with warnings.catch_warnings(), pytest.raises(error):
        warnings.simplefilter("ignore")
        step(x, wrong)
    model.reshard()  # after a forward that failed
    for param, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.full_tensor(), was)


def now_and_then(model: nn.Module, x: Tensor, n: int) -> Any:
    loss = F.cross_entropy(model(x), LABELS)
    return loss * 2 if n % 4 == 3 and f"{loss.item()}" else loss * n


def never(model: nn.Module, x: Tensor, n: int) -> Any:
    loss = F.cross_entropy(model(x), LABELS)
    return loss * n if f"{loss.item()}" else loss


def huge(model: nn.Module, x: Tensor, n: int) -> Any:
    return F.cross_entropy(model(x), LABELS) * 2**63 * n


@pytest.mark.parametrize(("loss", "captures"), [(now_and_then, 4), (never, 3), (huge, 3)])
def test_what_has_no_plan_for_another_reason(loss: Loss, captures: int) -> None:
    """Is not captured again for each number, and has one line."""
    calls = [(n,) for n in range(1, 13)]
    got, lines, count = _results(loss, calls, compiled=True)
    want, _, _ = _results(loss, calls, compiled=False)
    assert got == want
    assert len(lines) == 1, lines
    assert count == captures


def test_numbers_of_both_kinds() -> None:
    calls = [(2 + n % 3, 0.1 * n) for n in range(12)]
    got, lines, count = _results(among_others, calls, compiled=True)
    want, _, _ = _results(among_others, calls, compiled=False)
    assert got == want
    assert lines == []
    assert count == 5
