"""Numbers that a loss function takes from tensors, to return them or to compute with them, as
FSDP2's step does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import fsdp_mlir
import pytest
import torch
from fsdp_mlir import fully_shard
from torch import Tensor, nn
from torch.nn import functional as F

LABELS = torch.arange(6) % 3
HISTORY: list[float] = []


def of_one_tensor(model: nn.Module, x: Tensor) -> Any:
    output = model(x)
    loss, hits = F.cross_entropy(output, LABELS), output.argmax(-1) == LABELS
    return loss, {
        "loss": loss.item(),
        "accuracy": hits.float().mean().item(),
        "hits": hits.sum().item(),
        "any": hits.any().item(),
        "row": output.detach()[0],
    }


def of_several(model: nn.Module, x: Tensor) -> Any:
    output = model(x)
    loss, hits = F.cross_entropy(output, LABELS), output.argmax(-1) == LABELS
    total = sum(loss.item() * weight for weight in (1, 2.5))
    return {
        "loss": loss,
        "percent": round(100 * hits.sum().item() / len(x), 2),
        "double": hits.sum().item() * 2 if isinstance(hits.sum().item() * 2, int) else None,
        "total": total - output.mean().item() ** 2,
        "perplexity": math.exp(loss.item()) if isinstance(loss.item(), float) else None,
        "negative": [-abs(output[0, 0].item()), 7 // (1 + hits.sum().item())],
    }


def of_one_element(model: nn.Module, x: Tensor) -> Any:
    loss = F.cross_entropy(model(x), LABELS)
    return loss, loss.detach().reshape(1).item(), x.sum().item()


def kept(model: nn.Module, x: Tensor) -> Any:
    loss = F.cross_entropy(model(x), LABELS)
    HISTORY.append(loss.item())
    return loss, HISTORY[-1]


def kept_and_read(model: nn.Module, x: Tensor) -> Any:
    loss, count = kept(model, x)
    return loss, count * bool(HISTORY)


def in_the_loss(model: nn.Module, x: Tensor) -> Any:
    loss = F.cross_entropy(model(x), LABELS)
    return loss * loss.item(), 0


def by_a_count(model: nn.Module, x: Tensor) -> Any:
    """As loops divide by the number of tokens; it is another one in each batch."""
    count = (x > 0).sum().item()
    loss = F.cross_entropy(model(x), LABELS, reduction="sum") / max(count, 1)
    return (loss if count > 2 else loss * 0), {"count": count, "share": count / x.numel()}


def of_draws(model: nn.Module, x: Tensor) -> Any:
    """As mixup does."""
    part = torch.rand(()).item()
    output = part * model(x) + (1 - part) * model(x.flip(0))
    kept = torch.randint(1, 9, (1,)).item()
    return F.cross_entropy(output, LABELS) * kept / 8, {"part": part}


def in_arithmetic(model: nn.Module, x: Tensor) -> Any:
    output = model(x)
    loss, largest = F.cross_entropy(output, LABELS), output.detach().abs().max().item()
    ratio = 3 / (largest + (output > 0).sum().item()) - loss.item() / 4
    low = (output.to(torch.bfloat16) * ratio).float().mean() + (output.double() / ratio).mean()
    counts = LABELS * ratio + LABELS / (x > 0).sum().item() + output.argmax(-1).sum().item()
    return loss + low.float() + (counts * output[:, 0]).mean() - ratio, ratio


def of_lists(model: nn.Module, x: Tensor) -> Any:
    output = model(x)
    losses = F.cross_entropy(output, LABELS, reduction="none")
    counts = (x > 0).sum(1).tolist()
    loss = sum(each / (count + 1) for each, count in zip(losses, counts, strict=True))
    longest = max(min(2, count) for count in counts)
    for low, high in output.detach()[:2, :2].tolist():
        loss = loss * (1.5 if low < high else 1)
    rounded = [round(each, 3) for each in output[:, :longest].mean(0).tolist()]
    return loss, {"losses": losses.tolist(), "rows": output[:2].tolist(), "rounded": rounded}


def as_tensors(model: nn.Module, x: Tensor) -> Any:
    output = model(x)
    loss, count = F.cross_entropy(output, LABELS), (x > 0).sum().item()
    share = torch.tensor(count / x.numel(), device=x.device)
    parts = torch.tensor([loss.item(), 1.0, count], dtype=torch.float64)
    counts = torch.as_tensor(count) + torch.tensor((count, 2))
    share += 1
    return loss * share + (parts * output.double()).mean() + (counts * output[:, :2]).sum(), share


def tensors_in_lists(model: nn.Module, x: Tensor) -> Any:
    """As losses are weighed by their values."""
    output = model(x)
    losses = [F.cross_entropy(output, LABELS), output.square().mean()]
    weights = torch.tensor(losses).softmax(0) + torch.tensor([(x > 0).sum(), 1]).sum()
    corners = torch.tensor([[output[0, 0], output[0, 1]], (output[1, 0], 2)], dtype=torch.float64)
    rows = torch.as_tensor([row.max() for row in output] + [losses[0].item(), 0.5])
    bits = torch.tensor((losses[0] > 0, losses[1].isnan()))
    loss = sum(a * b for a, b in zip(weights, losses, strict=True))
    return loss + corners.mean() + rows.sum() * bits.sum(), weights


def tensors_as_small_integers(model: nn.Module, x: Tensor) -> Any:
    return model(x).square().mean() * torch.tensor([(x > 0).sum()], dtype=torch.int32), 0


def as_small_integers(model: nn.Module, x: Tensor) -> Any:
    loss = F.cross_entropy(model(x), LABELS)
    return loss * torch.tensor(loss.argmax().item() + 1, dtype=torch.int32), 0


def by_a_cast(model: nn.Module, x: Tensor) -> Any:
    """In a module that compares `float`, as above."""
    loss = F.cross_entropy(model(x), LABELS)
    return loss, float(loss)


def as_text(model: nn.Module, x: Tensor) -> Any:
    loss = F.cross_entropy(model(x), LABELS)
    return loss, f"{loss.item():.3f}"


def as_a_power(model: nn.Module, x: Tensor) -> Any:
    loss = F.cross_entropy(model(x), LABELS)
    return loss ** loss.item(), 0


def by_its_class(model: nn.Module, x: Tensor) -> Any:
    loss = F.cross_entropy(model(x), LABELS)
    number = loss.item()
    return loss * (2 if type(number) is float else 1), number


def as_an_index(model: nn.Module, x: Tensor) -> Any:
    loss = F.cross_entropy(model(x), LABELS)
    return loss, [1, 2, 3][(loss > 100).item()]


def _results(compute_loss: Callable[..., Any], *, compiled: bool) -> tuple[list[Any], list[str]]:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = None
    results = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if compiled:
            step = fsdp_mlir.compile(model, compute_loss=compute_loss, optimizer=optimizer)
        for number in range(3):
            torch.manual_seed(number)
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
            if step is not None:
                results.append(step(x))
                continue
            value = compute_loss(model, x)
            (value["loss"] if isinstance(value, dict) else value[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(value)
    lines = [str(each.message) for each in caught]
    return results, [line for line in lines if "without a plan" in line]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return ("tensor", value.tolist()) if isinstance(value, Tensor) else (type(value), value)


@pytest.mark.parametrize(
    "compute_loss",
    [
        *(of_one_tensor, of_several, of_one_element),
        *(kept, in_the_loss, by_a_count, of_draws, in_arithmetic, of_lists, as_tensors),
        tensors_in_lists,
    ],
)
def test_used(compute_loss: Callable[..., Any]) -> None:
    (want, _), (got, lines) = (_results(compute_loss, compiled=each) for each in (False, True))
    assert _plain(got) == _plain(want)
    assert lines == []


@pytest.mark.parametrize(
    ("compute_loss", "text"),
    [
        (kept_and_read, "test_items.HISTORY', and reads or changes it by __len__"),
        (as_a_power, "depends on the data"),
        (by_its_class, "'by_its_class' asks for the class of a number"),
        (as_text, "depends on the data"),
        (as_small_integers, "depends on the data"),
        (tensors_as_small_integers, "the data of a tensor is read, as by torch.tensor"),
        (by_a_cast, "depends on the data"),
        (as_an_index, "depends on the data"),
    ],
)
def test_used_otherwise(compute_loss: Callable[..., Any], text: str) -> None:
    """Runs as FSDP2 does, after a line that names the place."""
    (want, _), (got, lines) = (_results(compute_loss, compiled=each) for each in (False, True))
    assert _plain(got) == _plain(want)
    assert len(lines) == 1 and "test_items." in lines[0] and text in lines[0]


@pytest.mark.parametrize("leaves", [False, True], ids=["returns", "leaves"])
def test_numbers_of_calls_with_one_plan(leaves: bool) -> None:
    """Calls whose graphs are equal each return, and leave in the model, numbers of their own."""

    def compute_loss(model: Any, x: Tensor, number: int) -> Any:
        if leaves:
            model.last = {"number": number}
        return model(x).square().mean(), {"number": number, "text": f"n{number}"}

    torch.manual_seed(0)
    model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fsdp_mlir.compile(model, compute_loss=compute_loss, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in (1, 1, 2, 2, 1, 2, 1):
            _, returned = step(torch.ones(2, 4), number)
            assert returned == {"number": number, "text": f"n{number}"}
            assert not leaves or model.last == {"number": number}
    assert len(step._plans._made) == 1


def difference(first: int, second: int, loss: Tensor) -> Tensor:
    return loss * ((second - first) / 1e9)


def product(first: int, second: int, loss: Tensor) -> Tensor:
    return loss * (first * 2**20 * 2**20 + second * 2**20)


def alone(first: int, second: int, loss: Tensor) -> Tensor:
    return loss * first + loss / second


@pytest.mark.parametrize("calculation", [difference, product, alone])
def test_large_integers(calculation: Callable[..., Tensor]) -> None:
    """Python neither rounds them nor lets them overflow; no tensor takes what has over 64 bits."""

    def compute_loss(model: nn.Module, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return calculation(first.max().item(), second.max().item(), model(x).square().mean())

    results: list[list[Any]] = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = fsdp_mlir.compile(model, compute_loss=compute_loss, optimizer=optimizer)
        results.append([])
        for begin in (3, 5, 2**40 + 1, 2**53 + 3, 2**60 + 7):
            first = torch.tensor([begin, 1])
            given = torch.ones(2, 4), first, first + 1234567891
            try:
                loss = step(*given) if compiled else compute_loss(model, *given).detach()
                results[-1].append(loss.item())
            except OverflowError:
                results[-1].append("OverflowError")
    assert results[0] == results[1]
    assert ("OverflowError" in results[0]) == (calculation is product)


def test_large_integers_written_to_a_part() -> None:
    """Places in a tensor are small, until something else is written there."""

    def compute_loss(model: nn.Module, x: Tensor) -> Any:
        output = model(x)
        places = output.argmax(1)
        places[:1].fill_(10**18)
        return output.square().mean() * (places.max().item() * 20)

    step = _step(compute_loss)
    with pytest.raises(OverflowError):
        step(torch.ones(2, 4))


def _step(compute_loss: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fsdp_mlir.compile(model, compute_loss=compute_loss, optimizer=optimizer)


def test_divided_by_nothing() -> None:
    """A tensor would be infinite where Python raises an error."""

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        return loss * (1 / (x > 2).sum().item()) + loss * (2 / loss.round().item())

    torch.manual_seed(0)
    model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fsdp_mlir.compile(model, compute_loss=compute_loss, optimizer=optimizer)
    x = torch.linspace(-3, 3, 8).reshape(2, 4)
    assert step(x).isfinite()
    for other in (x / 2, x.new_zeros(2, 4)):
        with pytest.raises(ZeroDivisionError):
            step(other)
    model.reshard()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()  # and so is the loss
    with pytest.raises(ZeroDivisionError):
        step(x)


def test_handler_of_errors() -> None:
    """The code that asks for a size goes another way if that is an error."""

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        count = (x > 0).sum().item()
        try:
            rows = x[: range(9)[count]]
        except Exception:
            rows = x * 2
        return model(rows).square().mean() * count

    (want, _), (got, _) = (_results(_alone(compute_loss), compiled=each) for each in (False, True))
    assert _plain(got) == _plain(want)


def _alone(compute_loss: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda model, x: (compute_loss(model, x), None)
