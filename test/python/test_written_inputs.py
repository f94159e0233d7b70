"""Inputs that forward writes: the caller's tensors have it, as FSDP2's do, or there is no plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdp_mlir
import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from twins import full


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


def masked(model: Any, x: Tensor, t: Tensor) -> Tensor:
    """Padding is ignored, as the losses of many language models do."""
    t[t == 3] = -100
    return nn.functional.cross_entropy(model(x).flatten(0, -2), t.flatten())


def mapped(model: Any, x: Tensor, t: Tensor) -> Tensor:
    t[t == 3] = 0
    return nn.functional.cross_entropy(model(x).flatten(0, -2), t.flatten())


def read(model: Any, x: Tensor, t: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, -2), t.flatten())


def negated(model: Any, x: Tensor, t: Tensor) -> Tensor:
    t.mul_(2)
    return model(x).mean() * t.float().mean()


def asked(model: Any, x: Tensor, t: Tensor) -> Tensor:
    weight = t.float().requires_grad_()
    hidden = model(x).flatten(0, -2).mean(1) * weight.flatten()
    return hidden.mean() + torch.autograd.grad(hidden.sum(), weight, create_graph=True)[0].mean()


def dense(tokens: Tensor) -> tuple[Tensor, Tensor]:
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def with_gaps(tokens: Tensor) -> tuple[Tensor, Tensor]:
    return tokens[:, :-1].contiguous(), tokens[:, 1:]


def overlapping(tokens: Tensor) -> tuple[Tensor, Tensor]:
    return tokens[:, :-1], tokens[:, 1:]


def parts(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Without gaps, of one memory."""
    return tokens.flatten()[:-4], tokens.flatten()[4:]


def transposed(tokens: Tensor) -> tuple[Tensor, Tensor]:
    x, t = dense(tokens)
    return x, t.t().contiguous().t()


def negative(tokens: Tensor) -> tuple[Tensor, Tensor]:
    x, t = dense(tokens)
    return x, torch._neg_view(t)


def trained(loss: Any, made: Callable[[Tensor], Any], *, ours: bool) -> tuple[Any, ...]:
    model: Any = Words()
    (fsdp_mlir if ours else torch.distributed.fsdp).fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fsdp_mlir.compile(model, compute_loss=loss, optimizer=optimizer) if ours else None
    found: list[Any] = []
    for number in range(3):
        tokens = torch.randint(0, 10, (4, 9), generator=torch.Generator().manual_seed(number))
        batch = made(tokens)
        if step is not None:
            value = step(*batch)
        else:
            value = loss(model, *batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((value.item(), tokens.tolist(), *(each.tolist() for each in batch)))
    found += [full(param).tolist() for param in model.parameters()]
    return found, step and len(step._plans._made)


@pytest.mark.parametrize(
    ("loss", "made", "plans"),
    [
        *((masked, dense, 1), (masked, transposed, 1), (masked, with_gaps, 0)),
        *((mapped, overlapping, 0), (mapped, parts, 0), (negated, negative, 0)),
        *((read, with_gaps, 1), (read, overlapping, 1), (read, parts, 1), (asked, dense, 1)),
    ],
)
def test_the_caller_has_what_is_written(loss: Any, made: Any, plans: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got, count = trained(loss, made, ours=True)
    want, _ = trained(loss, made, ours=False)
    assert got == want and count == plans
    lines = [str(each.message) for each in caught if "without a plan" in str(each.message)]
    assert len(lines) == (not plans)
    assert plans or "is written in forward and" in lines[0]


class Told(Tensor):
    """A class that code may ask for, as those of torchvision's tv_tensors are."""


def by_class(model: Any, x: Tensor, t: Tensor) -> Tensor:
    return read(model, x, t) * (2 if isinstance(x, Told) else 1)


@pytest.mark.parametrize("first", [Tensor, Told])
def test_inputs_of_other_classes(first: type[Tensor]) -> None:
    def made(tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, t = dense(tokens)
        kinds.append(first if not kinds else Told)
        return x.as_subclass(kinds[-1]), t

    kinds: list[type[Tensor]] = []
    with pytest.warns(UserWarning, match="input 'x' is of class Told, expected a plain tensor"):
        got, plans = trained(by_class, made, ours=True)
    kinds.clear()
    assert got == trained(by_class, made, ours=False)[0]
    assert plans == (first is Tensor)


HELD: dict[str, Tensor] = {}


def holding(model: Any, x: Tensor, t: Tensor) -> Tensor:
    """Reads elsewhere what it has written."""
    return masked(model, x, t) * (HELD["labels"] >= 0).sum()


@pytest.mark.parametrize("first", [0, 1])
def test_an_input_that_is_held_elsewhere(first: int) -> None:
    def made(tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, t = dense(tokens)
        HELD["labels"] = t if calls.pop() >= first else torch.arange(-3, 5)
        return x, t

    calls = [2, 1, 0]
    with pytest.warns(UserWarning, match="without a plan|for this call"):
        got, plans = trained(holding, made, ours=True)
    calls = [2, 1, 0]
    assert got == trained(holding, made, ours=False)[0]
    assert plans == first


def test_an_evaluation_that_writes_what_is_held_elsewhere() -> None:
    def loss(model: Any, x: Tensor, t: Tensor) -> Tensor:
        held = model.held
        return (read if model.training else masked)(model, x, t) * (held >= 0).sum()

    found = []
    for ours in (True, False):
        model: Any = Words()
        model.held = torch.arange(8).reshape(2, 4)
        (fsdp_mlir if ours else torch.distributed.fsdp).fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"compute_loss": loss, "optimizer": optimizer, "evaluation": True}
        step = fsdp_mlir.compile(model, **options) if ours else None
        losses = []
        for number in range(4):
            x, t = torch.arange(8).reshape(2, 4), torch.arange(8).reshape(2, 4)
            value = step(x, t) if step else loss(model, x, t)
            if not step:
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
            model.held = t if number > 1 else model.held
            model.eval()
            value = step.evaluate(x, t) if step else loss(model, x, t)
            model.train()
            losses.append((value.item(), t.tolist()))
        found.append(losses)
    assert found[0] == found[1]


def test_the_gradient_of_an_input() -> None:
    """The caller's tensor would have it."""

    def loss(model: Any, x: Tensor) -> Tensor:
        x.requires_grad_()
        return model(x).square().mean()

    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        model: Any = nn.Linear(4, 4)
        (fsdp_mlir if ours else torch.distributed.fsdp).fully_shard(model)
        x = torch.ones(4, 4)
        if ours:
            optimizer = torch.optim.SGD(model.parameters())
            step = fsdp_mlir.compile(model, compute_loss=loss, optimizer=optimizer)
            with pytest.warns(UserWarning, match="'x' is made to require grad in forward"):
                step.backward(x)
        else:
            loss(model, x).backward()
        found.append((x.requires_grad, x.grad.tolist()))
    assert found[0] == found[1]


def test_a_capture_for_another_process(tmp_path: Path) -> None:
    """There nobody has the inputs afterwards."""

    def loss(output: Tensor, x: Tensor) -> Tensor:
        return output.mean() * x.requires_grad_().mean()

    done = fsdp_mlir.capture(
        nn.Linear(4, 4),
        args=(torch.ones(4, 4),),
        kwargs={"x": torch.ones(4)},
        loss=loss,
        path=tmp_path / "model.pt",
    )
    assert done.path.exists()


def test_a_nested_tensor() -> None:
    model: Any = fsdp_mlir.fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fsdp_mlir.compile(
        model, compute_loss=lambda m, x: m(x).to_padded_tensor(0.0).mean(), optimizer=optimizer
    )
    x = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    want = model(x).to_padded_tensor(0.0).mean()
    with pytest.warns(UserWarning, match="input 'x' is a nested tensor"):
        assert torch.equal(step(x), want.detach())
