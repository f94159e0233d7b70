"""Operators of torch.library: recorded, inlined or refused, and trained with FSDP2's bits."""

from __future__ import annotations

import inspect
import json
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdp_mlir
import numpy as np
import pytest
import torch
from fsdp_mlir import CaptureError
from torch import Tensor, nn
from torch.library import Library, custom_op
from twins import Twins

SGD = (torch.optim.SGD, {"lr": 0.1})
X = torch.linspace(-1, 1, 12).reshape(3, 4)

LIBRARY = Library("fsdp_ops", "DEF")


def operator(
    schema: str,
    body: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    *,
    key: str = "CPU",
    tags: tuple[torch.Tag, ...] = (),
) -> Any:
    """An operator of `schema`; `backward` gets the context, which has the inputs, and gradients."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=tags)
    LIBRARY.impl(name, body, key)
    if fake is not None:
        torch.library.register_fake(f"fsdp_ops::{name}", fake, lib=LIBRARY)
    if backward is not None:

        def keep(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
            ctx.inputs = inputs

        torch.library.register_autograd(
            f"fsdp_ops::{name}", backward, setup_context=keep, lib=LIBRARY
        )
    packet = getattr(torch.ops.fsdp_ops, name.partition(".")[0])
    return getattr(packet, name.partition(".")[2] or "default")


def numpy_sine(x: Tensor, scale: float = 1.0) -> Tensor:
    return torch.from_numpy(np.sin(x.numpy()) * np.float32(scale))


sine = operator(
    "sine(Tensor x, float scale=1.0) -> Tensor",
    numpy_sine,
    lambda x, scale=1.0: torch.empty_like(x),
    lambda ctx, g: (g * ctx.inputs[0].cos() * ctx.inputs[1], None),
)


def split_body(x: Tensor, other: Tensor | None = None, *, counts: list[int]) -> Any:
    parts = np.split(x.numpy(), np.cumsum(counts)[:-1], axis=1)
    base = x.numpy().sum(0) if other is None else other.numpy().sum(0)
    return [torch.from_numpy(part.copy()) for part in parts], torch.from_numpy(base), None


split = operator(
    "split.sizes(Tensor x, Tensor? other=None, *, int[] counts) -> (Tensor[], Tensor, Tensor?)",
    split_body,
    lambda x, other=None, *, counts: (
        [x.new_empty(x.shape[0], count) for count in counts],
        x.new_empty(x.shape[1]),
        None,
    ),
    lambda ctx, parts, base, nothing: (torch.cat(parts, 1) + base, None),
)


def add_numpy(total: Tensor, x: Tensor) -> None:
    total.numpy()[...] += x.detach().numpy().sum()


count = operator("count(Tensor(a!) total, Tensor x) -> ()", add_numpy, lambda total, x: None)

draws = operator(
    "draws(Tensor x) -> Tensor",
    lambda x: x + float(torch.rand(1)) * torch.from_numpy(np.ones(x.shape, np.float32)),
    torch.empty_like,
    lambda ctx, g: g,
    tags=(torch.Tag.nondeterministic_seeded,),
)


@custom_op("fsdp_ops::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x * x * x * SCALE


SCALE = 1.0
cube.register_fake(torch.empty_like)
cube.register_autograd(
    lambda ctx, g: g * 3 * ctx.x.square() * SCALE,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "x", inputs[0]),
)
LIBRARY.define("composite(Tensor x, float by) -> Tensor")
LIBRARY.impl("composite", lambda x, by: x.sin() * by, "CompositeImplicitAutograd")


def all_kinds(xs: list[Tensor], s: Any, flag: bool, *others: Any, **options: Any) -> Tensor:
    """Asserts that it gets what was given."""
    dtype, device, names, *rest = others
    other = rest[0] if rest else None  # PyTorch leaves out what is the default
    options = {"mode": "sum", "scale": 2.0, "ints": None, **options}
    assert (dtype, device, list(names)) == (torch.float32, torch.device("cpu"), ["a", "b"])
    assert (s is True) == flag
    assert options["mode"] == "sum"
    assert list(options["ints"] or [3, 4]) == [3, 4]
    result = sum(x.numpy() for x in xs) * np.float32(float(s) * options["scale"])
    return torch.from_numpy(result if other is None else result + other.numpy())


kinds = operator(
    "kinds(Tensor[] xs, Scalar s, bool flag, ScalarType dtype, Device device, str[] names, "
    "Tensor? other=None, *, str mode='sum', float scale=2.0, int[]? ints=None) -> Tensor",
    all_kinds,
    lambda xs, *others, **options: torch.empty_like(xs[0]),
)
view = operator(
    "view(Tensor(a) x) -> Tensor(a)", lambda x: x.t() if x.numpy().size else x, lambda x: x.t()
)
scale_ = operator(
    "scale_(Tensor(a!) x, float by) -> Tensor(a!)",
    lambda x, by: (np.multiply(x.numpy(), np.float32(by), out=x.numpy()), x)[1],
    lambda x, by: x,
)
seen: list[float] = []
watch = operator("watch(Tensor x) -> ()", lambda x: seen.append(x.sum()), lambda x: None)


class Kinds(torch.autograd.Function):
    """With gradients of its own around an operator that has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, s: Any, other: Tensor | None) -> Tensor:
        ctx.s = s
        rest = (torch.float32, torch.device("cpu"), ["a", "b"], other)
        return kinds([x, y], s, s is True, *rest, ints=[3, 4])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (g,) = gradients
        return g * (float(ctx.s) * 2), g * (float(ctx.s) * 2), None, None


@torch.library.triton_op("fsdp_ops::cosine", mutates_args={})
def cosine(x: Tensor) -> Tensor:
    return x.cos() * 2


cosine.register_autograd(
    lambda ctx, g: g * -2 * ctx.x.sin(),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "x", inputs[0]),
)


@custom_op("fsdp_ops::outer", mutates_args=())
def outer(x: Tensor) -> Tensor:
    return torch.ops.fsdp_ops.sine(x) * 2


outer.register_fake(torch.empty_like)
outer.register_autograd(
    lambda ctx, g: g * 2 * ctx.x.cos(),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "x", inputs[0]),
)


@custom_op("fsdp_ops::accumulate", mutates_args={"x"})
def accumulate(x: Tensor, by: Tensor) -> None:
    x.add_(by)


class Model(nn.Module):
    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(()))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.first(x)).square().mean()


def with_sine(model: nn.Module, y: Tensor) -> Tensor:
    return model.second(sine(y, 0.5)) + sine(y.t()).t()


def with_split(model: nn.Module, y: Tensor) -> Tensor:
    (left, right), base, nothing = split(y, counts=[1, 3])
    assert nothing is None
    return model.second(torch.cat([right, left], 1)) * base + right.mean()


def with_count(model: nn.Module, y: Tensor) -> Tensor:
    count(model.total, y.detach())
    return model.second(y) * model.total


def with_draws(model: nn.Module, y: Tensor) -> Tensor:
    return model.second(draws(y)) + nn.functional.dropout(y)


def with_checkpoint(model: nn.Module, y: Tensor) -> Tensor:
    def block(z: Tensor) -> Tensor:
        return model.second(draws(sine(z)))

    return torch.utils.checkpoint.checkpoint(block, y, use_reentrant=False)


def with_body(model: nn.Module, y: Tensor) -> Tensor:
    return model.second(cube(y)) + torch.ops.fsdp_ops.composite(y, 2.0)


def with_mixture(model: nn.Module, y: Tensor) -> Tensor:
    with torch.no_grad():
        mask = torch.ops.fsdp_ops.composite(y, 1.0) > 0
    return torch.where(mask, cube(model.second(sine(y))), y)


def with_kinds(model: nn.Module, y: Tensor) -> Tensor:
    return model.second(Kinds.apply(y, y * 2, 3, None)) + Kinds.apply(y, y, True, y.detach())


def with_memory(model: nn.Module, y: Tensor) -> Tensor:
    """A view that is written, a write that is returned, and one of a buffer."""
    with torch.no_grad():
        seen_from_behind = view(y.detach() * 1)
        seen_from_behind.mul_(2)
        scaled = scale_(seen_from_behind.t().clone(), 3.0)
        scaled.add_(1)
        accumulate(model.total, scaled.sum())
    return model.second(y) * seen_from_behind.t() * scaled * model.total.tanh()


def with_bodies(model: nn.Module, y: Tensor) -> Tensor:
    with torch.inference_mode():
        k = torch.ops.fsdp_ops.composite(X, 2.0)
    return model.second(cosine(outer(y))) * k.clone()


def with_watch(model: nn.Module, y: Tensor) -> Tensor:
    watch(y.detach())
    return model.second(y)


def calls(path: Path, graph: str = "graph.ir") -> list[str]:
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith("capture.json"))
        return [f"{node['op']}" for node in json.loads(archive.read(name))["nodes"]]


@pytest.mark.parametrize(
    ("body", "foreign"),
    [
        (with_sine, 2),
        (with_split, 1),
        (with_count, 1),
        (with_draws, 1),
        (with_checkpoint, 3),
        (with_body, 0),
        (with_mixture, 1),
        (with_kinds, 2),
        (with_memory, 2),
        (with_bodies, 1),
        (with_watch, 1),
    ],
)
def test_trains_as_with_fsdp2(body: Callable[..., Tensor], foreign: int, tmp_path: Path) -> None:
    twins = Twins(
        lambda: Model(body), {"x": X}, SGD, fallback="error", evaluation=True, path=tmp_path
    )
    twins.assert_equal_steps(3)
    names = calls(tmp_path / "model.pt")
    assert sum(name.startswith("fsdp_ops::") for name in names) == foreign, names


def test_operator_runs_in_each_step_and_evaluation() -> None:
    seen = []

    def body(x: Tensor) -> Tensor:
        seen.append(x.numpy().copy())
        return torch.from_numpy(x.numpy() * 2)

    watched = operator("watched(Tensor x) -> Tensor", body, torch.empty_like, lambda ctx, g: g * 2)
    twins = Twins(lambda: Model(lambda m, y: watched(y)), {"x": X}, SGD, fallback="error")
    seen.clear()
    twins.step(x=X)
    assert len(seen) == 1


def test_operator_without_results_runs_in_each_step() -> None:
    twins = Twins(lambda: Model(with_watch), {"x": X}, SGD, fallback="error")
    seen.clear()
    twins.step(x=X)
    twins.step(x=X)
    assert len(seen) == 2


@pytest.mark.parametrize("save", [[], ["fsdp_ops::sine"]])
def test_activation_checkpoint(save: list[str], tmp_path: Path) -> None:
    """What draws is never made again."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(sine(draws(x).exp()))

    def make() -> nn.Module:
        model = Model(lambda m, y: m.second(y))
        model.second = Block(4, 4)
        with torch.no_grad():
            model.second.weight.fill_(0.5)
            model.second.bias.zero_()
        return model

    checkpoint = {"match": "second", "save": save}
    options = {"activation_checkpoint": checkpoint, "path": tmp_path, "fallback": "error"}
    Twins(make, {"x": X}, SGD, **options).assert_equal_steps(2)
    lines = (tmp_path / "plan.json").read_text().splitlines()
    again = [line for line in lines if '"recompute": true' in line and "fsdp_ops::" in line]
    assert len(again) == (0 if save else 1), again
    assert not any("draws" in line for line in again)


def test_kernel_that_raises_ends_the_step_with_its_words() -> None:
    failing = []

    def body(x: Tensor) -> Tensor:
        if failing:
            raise ValueError("the kernel has\nhad enough")
        return torch.from_numpy(x.numpy().copy())

    fails = operator("fails(Tensor x) -> Tensor", body, torch.empty_like, lambda ctx, g: g)
    twins = Twins(lambda: Model(lambda m, y: fails(y)), {"x": X}, SGD, fallback="error")
    twins.assert_equal_steps(1)
    failing.append(True)
    with pytest.raises(RuntimeError, match=r"step 2: fsdp_ops::fails .*ValueError: the kernel has"):
        twins.step(x=X)


def test_another_value_that_an_inlined_kernel_reads_is_another_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FSDP2's model runs the kernel itself, with the new value."""
    twins = Twins(lambda: Model(with_body), {"x": X}, SGD, fallback="error")
    twins.assert_equal_steps(1)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    twins.assert_equal_steps(1)


@pytest.mark.parametrize("body", [with_sine, with_body])
def test_plan_is_not_kept_for_later_processes(body: Callable[..., Tensor], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="it calls operators of other libraries"):
        Twins(lambda: Model(body), {"x": X}, SGD, fallback="error", cache=tmp_path)


# --- what is refused


def line_of(body: Callable[..., object]) -> str:
    lines, first = inspect.getsourcelines(body)
    return f"test_operators.py:{first + next(i for i, s in enumerate(lines) if '# here' in s)}: "


def refusal(body: Callable[[nn.Module, Tensor], Tensor], tmp_path: Path, **options: Any) -> str:
    with pytest.raises(CaptureError) as raised:
        fsdp_mlir.capture(Model(body), kwargs={"x": X}, path=tmp_path / "model.pt", **options)
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 500
    assert not (tmp_path / "model.pt").exists()
    return message


def twice(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


def written(x: Tensor) -> Tensor:
    x.numpy()[...] += 1
    return torch.from_numpy(x.numpy().copy())


WRONG: dict[str, tuple[Any, str]] = {
    "shape": (
        operator(
            "w_shape(Tensor x) -> Tensor",
            twice,
            lambda x: x.new_empty(4, 3),
            lambda ctx, g: g.view(3, 4),
        ),
        r"its fake kernel gives float32\[4, 3\] as result 0, its kernel float32\[3, 4\]",
    ),
    "dtype": (
        operator(
            "w_dtype(Tensor x) -> Tensor",
            twice,
            lambda x: torch.empty_like(x, dtype=torch.float64),
            lambda ctx, g: g.float(),
        ),
        r"its fake kernel gives float64\[3, 4\] as result 0, its kernel float32\[3, 4\]",
    ),
    "strides": (
        operator(
            "w_strides(Tensor x) -> Tensor",
            lambda x: torch.from_numpy(np.asfortranarray(x.numpy() * 2)),
            torch.empty_like,
            lambda ctx, g: g,
        ),
        r"its kernel float32\[3, 4\] of strides \[1, 3\]",
    ),
    "alias": (
        operator(
            "w_alias(Tensor x) -> Tensor",
            lambda x: torch.from_numpy(x.numpy()),
            torch.empty_like,
            lambda ctx, g: g,
        ),
        "result 0 shares memory with argument 'x'",
    ),
    "write": (
        operator("w_write(Tensor x) -> Tensor", written, torch.empty_like, lambda ctx, g: g),
        "it writes argument 'x', expected a schema that says so",
    ),
    "random": (
        operator(
            "w_random(Tensor x) -> Tensor",
            lambda x: torch.from_numpy(x.numpy() * float(torch.rand(1))),
            torch.empty_like,
            lambda ctx, g: g,
        ),
        "it draws random numbers, expected an operator with the tag nondeterministic_seeded",
    ),
    "python's random": (
        operator(
            "w_python(Tensor x) -> Tensor",
            lambda x: torch.from_numpy(x.numpy() * np.float32(random.random())),
            torch.empty_like,
            lambda ctx, g: g,
        ),
        "it draws random numbers",
    ),
    "body": (
        operator(
            "w_body(Tensor x) -> Tensor",
            lambda x: x.sum(0),
            torch.empty_like,
            lambda ctx, g: g.expand(3, 4),
        ),
        r"its fake kernel gives float32\[3, 4\], its kernel float32\[4\]",
    ),
    "no fake kernel": (
        operator("w_nofake(Tensor x) -> Tensor", twice, None, lambda ctx, g: g),
        "has no fake kernel and cannot be captured; register one with torch.library.register_fake",
    ),
    "no autograd": (
        operator("w_nograd(Tensor x) -> Tensor", lambda x: x.sin(), torch.empty_like),
        "it has no autograd kernel",
    ),
    "data-dependent": (
        operator(
            "w_data(Tensor x) -> Tensor",
            lambda x: torch.from_numpy(x.numpy()[x.numpy() > 0]),
            lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()),
            lambda ctx, g: g,
        ),
        "depends on the data of a tensor",
    ),
    "number": (
        operator("w_number(Tensor x) -> int", lambda x: int(x.numpy().sum()), lambda x: 3),
        "it returns 'int', expected tensors alone",
    ),
    "device": (
        operator(
            "w_device(Tensor x) -> Tensor",
            twice,
            lambda x: torch.empty(3, 4, device="meta"),
            lambda ctx, g: g,
        ),
        "",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_kernel_that_is_not_what_is_said_of_it(case: str, tmp_path: Path) -> None:
    wrong, message = WRONG[case]

    def body(model: nn.Module, y: Tensor) -> Tensor:
        return model.second(y) + wrong(y).sum()  # here

    text = refusal(body, tmp_path, check=True)
    assert line_of(body) in text, text
    assert re.search(message, text), text
    assert "fsdp_ops" in text or case == "device"


ODD: dict[str, tuple[str, Callable[..., Any], str]] = {
    "generator": (
        "o_generator(Tensor x, Generator? generator=None) -> Tensor",
        lambda op, y: op(y, torch.Generator()),
        "argument 'generator' is a 'Generator'",
    ),
    "dictionary": (
        "o_dictionary(Tensor x, Dict(str, Tensor) others) -> Tensor",
        lambda op, y: op(y, {"y": y}),
        "argument 'others' is a 'dict'",
    ),
    "nested list": (
        "o_nested(Tensor x, int[][] sizes) -> Tensor",
        lambda op, y: op(y, [[1], [2]]),
        "argument 'sizes' is of type 'List",
    ),
    "tensor and number": (
        "o_number(Tensor x) -> (Tensor, float)",
        lambda op, y: op(y)[0],
        "it returns 'float'",
    ),
    "parameter": (
        "o_write(Tensor(a!) x) -> Tensor",
        lambda op, y: op(BIAS[0]),
        "parameter 'first.bias' is written by",
    ),
}
BIAS: list[Tensor] = []


@pytest.mark.parametrize("case", ODD)
def test_what_a_graph_has_not(case: str, tmp_path: Path) -> None:
    schema, call, message = ODD[case]
    made = operator(schema, lambda x, *rest: twice(x), lambda x, *rest: torch.empty_like(x))

    def body(model: nn.Module, y: Tensor) -> Tensor:
        BIAS[:] = [model.first.bias]
        with torch.no_grad():
            other = call(made, y.detach())
        return model.second(y) + other

    text = refusal(body, tmp_path)
    assert "test_operators.py:" in text
    assert message in text
