"""Random programs that compute with numbers which they read from tensors, beside FSDP2: values,
parameters and errors are equal. A case's name is its seed."""

from __future__ import annotations

import linecache
import math
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsdp_mlir
import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from twins import full

# Of inputs, of what the step computes, and of draws; the last two are seldom 0.
NUMBERS = [
    "(t != 0).sum().item()",
    "t.max().item()",
    "x.mean().item()",
    "loss.item()",
    "h.detach()[0, 0].item()",
    "h.detach()[0, 1].to(torch.bfloat16).item()",
    "torch.rand(()).item()",
    "torch.randint(0, 3, ()).item()",
    "(h.argmax(-1) == t).sum().item()",
    "(t > 2).any().item()",
    "(t > 3).sum().item()",
]
ARITHMETIC = [
    *("{n}", "1 - {n}", "{n} + 1", "{n} * 2", "-{n}", "abs({n})", "{n} * 1e-3", "{n} / 4"),
    *("1 / ({n} + 3)", "1 / {n}", "{n} / {m}", "{n} * {m}", "{n} - {m} * 0.3", "{n} + {m}"),
    *("max({n}, 1)", "min({n}, 2.5)", "({n} if {n} > 2 else 1)", "({n} or 1)", "({n} > {m})"),
    *("({n} == 3) + 1", "{n} // 2", "{n} ** 2", "math.sqrt(abs({n}))", "round({n})", "int({n})"),
]
TENSORS = [
    *("h", "loss", "x", "h.mean(1)", "h.double()", "h.half()", "h.to(torch.bfloat16)"),
    *("h.to(torch.complex64)", "t", "t.float()", "t.sum()", "t.to(torch.int32)", "(t > 1)"),
]
COMMON = ["{a} * {b}", "{b} * {a}", "{a} / {b}", "{b} / {a}", "{a} + {b}", "{b} - {a}"]
OTHER = [
    *("torch.mul({a}, {b})", "{a}.div({b})", "torch.sub({a}, {b})", "({a} > {b}) * 1.0"),
    *("{a}.clone().mul_({b})", "{a}.clone().div_({b})", "torch.add({a}, {b}, alpha=2)"),
    *("torch.where({a}.abs() > 0.5, {a}, {b})", "{a}.clamp(max={b})", "{a} ** {b}", "{a}[: {b}]"),
    *("torch.full_like({a}, {b})", "{a} % {b}", "{a} // {b}"),
]


def program(seed: int) -> str:
    draw = random.Random(seed)
    lines = [
        "def compute_loss(model, x, t):",
        "    h = model(x)",
        "    loss = nn.functional.cross_entropy(h, t)",
    ]
    names = [f"n{index}" for index in range(draw.randint(1, 3))]
    lines += [f"    {name} = {draw.choice(NUMBERS)}" for name in names]
    for index in range(draw.randint(1, 3)):
        number = draw.choice(ARITHMETIC).format(n=draw.choice(names), m=draw.choice(names))
        if draw.random() < 0.3:
            number = draw.choice(ARITHMETIC).format(n=f"({number})", m=draw.choice(names))
        if draw.random() < 0.1:
            lines += [
                "    try:",
                f"        e{index} = {number}",
                "    except ZeroDivisionError:",
                f"        e{index} = 7",
            ]
        else:
            lines.append(f"    e{index} = {number}")
        operators = COMMON if draw.random() < 0.5 else OTHER
        lines += [
            f"    y = {draw.choice(operators).format(a=draw.choice(TENSORS), b=f'e{index}')}",
            "    y = torch.nan_to_num((y.real if y.is_complex() else y).float(), 0.0, 1.0, -1.0)",
            "    loss = loss + y.clamp(-9, 9).mean() / 3",
        ]
    returned = f"{{'a': {draw.choice(names)}, 'e': e0}}" if draw.random() < 0.3 else "{}"
    return "\n".join([*lines, f"    return loss, {returned}", ""])


def results(compute_loss: Any, *, compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
    own = fsdp_mlir if compiled else torch.distributed.fsdp
    model = own.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = None
    if compiled:
        step = fsdp_mlir.compile(model, compute_loss=compute_loss, optimizer=optimizer)
    return list(each_result(model, optimizer, step, compute_loss))


def each_result(model: Any, optimizer: Any, step: Any, compute_loss: Any) -> Iterator[Any]:
    """Ends with an error."""
    for number in range(4):
        seeded = torch.Generator().manual_seed(number)
        x = torch.randn(6, 4, generator=seeded)
        t = torch.randint(0, 4 + (number == 2), (6,), generator=seeded)
        torch.manual_seed(number)
        try:
            if step is not None:
                loss, others = step(x, t)
            else:
                loss, others = compute_loss(model, x, t)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        except Exception as error:
            yield type(error).__name__
            return
        yield plain(loss), {name: plain(value) for name, value in others.items()}
        yield repr([full(param).tolist() for param in model.parameters()])


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, repr(value.tolist())
    return type(value), repr(value)


@pytest.mark.one_in(13)
@pytest.mark.parametrize("seed", range(312))
def test_random(seed: int, tmp_path: Path) -> None:
    text, file = program(seed), str(tmp_path / "program.py")
    Path(file).write_text(text)
    linecache.checkcache(file)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "math": math}
    exec(compile(text, file, "exec"), names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, want = (results(names["compute_loss"], compiled=each) for each in (True, False))
    assert got == want, text
