"""What a call of a step may give: inputs apart, in one container, or one input that is one."""

from __future__ import annotations

import warnings
from collections import UserDict, namedtuple
from collections.abc import Callable
from enum import Enum
from functools import wraps
from typing import Any

import fsdp_mlir
import numpy as np
import pytest
import torch
from fsdp_mlir.frontdoor.together import NoPlan
from fsdp_mlir.step.batches import Inputs
from fsdp_mlir.step.training_step import ComputeLoss
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import BatchEncoding

SGD = (torch.optim.SGD, {"lr": 0.1})
Pair = namedtuple("Pair", ["x", "y"])


class Kind(Enum):
    MEAN = 1
    SUM = 2


class Own(dict):
    """A mapping of a class that no plan knows."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def of_batch(model: Any, batch: Any, scale: float = 1.0) -> Tensor:
    """The loss of a batch, whatever that is."""
    x, y = (batch["x"], batch["y"]) if hasattr(batch, "keys") else batch
    loss: Tensor = (model(x) - y).square().mean()
    return loss * (3 if type(batch) is Pair else scale)


class OfBatch(Model):
    def forward(self, batch: Any) -> Tensor:
        return of_batch(super().forward, batch)


def only_batch(model: nn.Module, batch: Any) -> Tensor:
    return of_batch(model, batch)


def tensor(seed: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))


def whole(model: nn.Module) -> list[Tensor]:
    params = model.parameters()
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in params]


class Pairs:
    """A model in FSDP2's loop, `loss_of(model, *args, **kwargs)`, and the same compiled."""

    def __init__(self, make: Any, loss_of: Any, **options: Any) -> None:
        self.theirs, self.loss_of = make(), loss_of
        self.optimizer = torch.optim.SGD(self.theirs.parameters(), lr=0.1)
        self.ours = fsdp_mlir.fully_shard(make())
        self.step = fsdp_mlir.compile(self.ours, optimizer=SGD, **options)

    def assert_equal(self, *args: Any, want: Any = None, **kwargs: Any) -> None:
        got = self.step(*args, **kwargs)
        given, named = want or (args, kwargs)
        loss = self.loss_of(self.theirs, *given, **named)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert torch.equal(got, loss)
        assert all(map(torch.equal, whole(self.ours), whole(self.theirs)))


BATCHES: dict[str, Any] = {
    "dict": lambda x, y: {"x": x, "y": y},
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "namedtuple": Pair,
    "encoding": lambda x, y: BatchEncoding({"x": x, "y": y}),
    "user_dict": lambda x, y: UserDict(x=x, y=y),
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("example", [False, True])
def test_a_function_of_one_batch(kind: str, example: bool) -> None:
    """Gets it as the loop has it, and has one plan for it."""
    made = [BATCHES[kind](tensor(seed), tensor(seed + 1)) for seed in range(3)]
    options = {"example": made[0]} if example else {}
    pair = Pairs(Model, only_batch, compute_loss=only_batch, fallback="error", **options)
    for batch in made:
        pair.assert_equal(batch)
    assert len(pair.step._cache) == 1


@pytest.mark.parametrize("kind", BATCHES)
def test_a_function_of_one_batch_and_options(kind: str) -> None:
    pair = Pairs(Model, of_batch, compute_loss=of_batch, fallback="error")
    for seed in range(2):
        pair.assert_equal(BATCHES[kind](tensor(seed), tensor(seed + 1)))


@pytest.mark.parametrize("kind", ["dict", "tuple", "namedtuple"])
def test_a_model_of_one_batch(kind: str) -> None:
    pair = Pairs(OfBatch, lambda model, batch: model(batch), fallback="error")
    for seed in range(2):
        pair.assert_equal(BATCHES[kind](tensor(seed), tensor(seed + 1)))
    losses = [BATCHES[kind](tensor(seed), tensor(seed)) for seed in range(2)]
    assert [loss.shape for loss in pair.step.accumulate(losses)] == [torch.Size()] * 2
    assert pair.step.accumulate(losses[:1])[0].shape == torch.Size()


def popping(model: Any, batch: Any, scale: float = 1.0) -> Tensor:
    y = batch.pop("y")
    loss: Tensor = (model(**batch) - y).square().mean() * scale
    return loss


@pytest.mark.parametrize("kind", ["dict", "encoding", "user_dict"])
def test_a_function_that_takes_a_key_out(kind: str) -> None:
    """Of the caller's mapping, as with FSDP2."""
    pair = Pairs(Model, popping, compute_loss=popping, fallback="error", evaluation=True)
    for seed in range(3):
        ours, theirs = (BATCHES[kind](tensor(seed), tensor(seed + 1)) for _ in range(2))
        pair.assert_equal(ours, want=((theirs,), {}))
        assert list(ours) == list(theirs) == ["x"]
    several = [BATCHES[kind](tensor(seed), tensor(seed)) for seed in range(2)]
    pair.step.accumulate(several)
    pair.step.evaluate(evaluated := BATCHES[kind](tensor(0), tensor(1)))
    assert [list(each) for each in (*several, evaluated)] == [["x"]] * 3


def test_a_key_with_the_name_of_an_option() -> None:
    """Stays in the batch."""
    pair = Pairs(Model, of_batch, compute_loss=of_batch, fallback="error")
    for seed in range(2):
        pair.assert_equal({"x": tensor(seed), "y": tensor(seed + 1), "scale": 2.0})


def test_a_container_that_is_taken_out() -> None:
    """It may have been changed then."""

    def taking(model: Any, batch: Any) -> Tensor:
        beside = batch.pop("beside")
        return model(batch["x"]).sum() * beside.pop("y").mean()

    pair = Pairs(Model, taking, compute_loss=taking)
    ours, theirs = ({"x": tensor(0), "beside": {"y": tensor(1)}} for _ in range(2))
    held = ours["beside"]
    with pytest.warns(UserWarning, match="input 'batch' is changed in forward"):
        pair.assert_equal(ours, want=((theirs,), {}))
    assert list(ours) == list(theirs) == ["x"] and not held


def test_a_batch_that_comes_twice() -> None:
    """The second microbatch finds no key that the first has taken out."""

    def either(model: Any, batch: Any) -> Tensor:
        y = batch.pop("y", None)
        return model(batch["x"]).sum() if y is None else (model(batch["x"]) * y).sum()

    pair = Pairs(Model, either, compute_loss=either)
    pair.step.accumulate([{"x": tensor(0), "y": tensor(1)} for _ in range(2)])
    batch = {"x": tensor(0), "y": tensor(1)}
    with pytest.warns(UserWarning, match="without a plan"):
        losses = pair.step.accumulate([batch, batch])
    again = {"x": tensor(0), "y": tensor(1)}
    assert losses == [either(pair.theirs, again), either(pair.theirs, again)]


def test_a_batch_that_another_input_holds() -> None:
    def taking(model: Any, first: Any, second: Any) -> Tensor:
        y = first.pop("y")
        return (model(first["x"]) * y).sum() * (2 if "y" in second.get("inner", second) else 1)

    for among in (lambda batch: batch, lambda batch: {"inner": batch}):
        pair = Pairs(Model, taking, compute_loss=taking)
        apart = [{"x": tensor(0), "y": tensor(1)} for _ in range(4)]
        pair.assert_equal(
            first=apart[0],
            second=among(apart[1]),
            want=((), {"first": apart[2], "second": among(apart[3])}),
        )
        ours, theirs = ({"x": tensor(0), "y": tensor(1)} for _ in range(2))
        with pytest.warns(UserWarning, match="without a plan"):
            pair.assert_equal(
                first=ours,
                second=among(ours),
                want=((), {"first": theirs, "second": among(theirs)}),
            )


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a_tensor": lambda batch: batch.update(z=batch["x"] * 2),
    "an_empty_list": lambda batch: batch.setdefault("z", []),
    "a_copy": lambda batch: batch.update(inner=dict(batch["inner"])),
    "an_empty_item": lambda batch: batch["inner"].pop("none"),
    "a_key_and_another": lambda batch: batch.update(z={"y": batch.pop("y")}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_function_that_changes_its_batch(name: str) -> None:
    def changing(model: Any, batch: Any) -> Tensor:
        CHANGES[name](batch)
        return model(batch["x"]).sum()

    def made() -> Any:
        return {"x": tensor(0), "y": tensor(1), "inner": {"none": []}}

    pair = Pairs(Model, changing, compute_loss=changing)
    ours, theirs = made(), made()
    inner = ours["inner"], theirs["inner"]
    with pytest.warns(UserWarning, match="input 'batch' is changed in forward"):
        pair.assert_equal(ours, want=((theirs,), {}))
    assert list(ours) == list(theirs) and inner[0] == inner[1]
    assert (ours["inner"] is inner[0]) == (theirs["inner"] is inner[1])


def test_a_sequence_of_one_input() -> None:
    """Is what a model has as its input; a function of the loop's batch gets the sequence."""

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum()

    pair = Pairs(Model, loss_of, loss=torch.sum, fallback="error")
    for given in ([tensor(0)], (tensor(0),), {"arg0": tensor(0)}):
        pair.assert_equal(given, want=((tensor(0),), {}))
    pair = Pairs(Model, loss_of, loss=torch.sum, fallback="error")
    pair.assert_equal({"x": tensor(0)}, want=((tensor(0),), {}))

    def first(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).sum()

    pair = Pairs(Model, first, compute_loss=first, fallback="error")
    pair.assert_equal([tensor(0)])


def test_lists_of_any_length() -> None:
    """What the first is, the later ones are too."""

    class Sums(Model):
        def forward(self, xs: list[Tensor]) -> Tensor:
            return sum(super(Sums, self).forward(x).mean() for x in xs)  # type: ignore[return-value]

    pair = Pairs(Sums, lambda model, xs: model(xs), fallback="error")
    for count in (2, 3, 1):
        pair.assert_equal([tensor(seed) for seed in range(count)])


def test_a_mapping_of_an_unknown_class() -> None:
    pair = Pairs(Model, only_batch, compute_loss=only_batch)
    with pytest.warns(UserWarning, match="input 'batch': expected a tensor, got 'Own'"):
        pair.assert_equal(Own(x=tensor(0), y=tensor(1)))


def test_what_may_be_either() -> None:
    """One line tells how to say it."""

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return (output - y).square().mean()

    class Entry(Model):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return super().forward(batch["x"])

    pair = Pairs(Entry, None, loss=loss, fallback="error")
    with pytest.raises(TypeError, match=r"inputs of forward, got 'x', 'z'; a batch .* as batch=b"):
        pair.step({"x": tensor(0), "z": tensor(1)})
    pair.step(batch={"x": tensor(0)}, y=tensor(1))
    inputs = Inputs(Model(), None)
    assert list(inputs.named(([tensor(0)],), {})) == ["arg0"]
    with pytest.raises(TypeError, match=r"got 2 by position; a batch .* as x=batch"):
        inputs.named(([tensor(0), tensor(1)],), {})


def test_hooks_may_take_inputs_apart() -> None:
    model = Model()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: ((kwargs["pixels"],), {}), with_kwargs=True
    )
    assert list(Inputs(model, None).named(({"pixels": tensor(0)},), {})) == ["pixels"]


def test_names_of_the_first_call() -> None:
    """Are those of a sequence, too, whatever the order of the signature."""

    class Beside(Model):
        def forward(self, x: Any, *, beside: Any = None) -> Tensor:
            return super().forward(x) + beside

    inputs = Inputs(Beside(), None)
    inputs.named((), {"x": 1, "beside": 2})
    assert inputs.named(([3, 4],), {}) == {"x": 3, "beside": 4}
    whole_batch = Inputs(Model(), ComputeLoss(only_batch))
    whole_batch.named((), {"batch": {"x": 1}})
    assert whole_batch.named(({"x": 2},), {}) == {"batch": {"x": 2}}


CONSTANTS = [2.0, -0.0, 3, True, None, "sum", np.float32(0.1), np.float64(0.1), np.int64(2)]
CONSTANTS += [Kind.SUM, torch.float64, torch.Size([4, 4])]


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda value: f"{type(value).__name__} {value}")
@pytest.mark.parametrize("by_name", [False, True])
def test_what_is_no_tensor(constant: Any, by_name: bool) -> None:
    """Is part of the step, wherever it is among the inputs."""

    def loss_of(model: nn.Module, scale: Any, x: Tensor, more: Any = None) -> Tensor:
        loss = model(x).sum()
        if isinstance(scale, (int, float, np.generic)):
            loss = loss * (scale + 1)
        loss = loss.to(scale).float() if isinstance(scale, torch.dtype) else loss
        loss = loss.expand(scale).mean() if isinstance(scale, torch.Size) else loss
        return loss * 2 if scale in ("sum", Kind.SUM) or more else loss

    pair = Pairs(Model, loss_of, compute_loss=loss_of, fallback="error")
    for seed in range(2):
        given = {"scale": constant, "x": tensor(seed), "more": False}
        if by_name:
            pair.assert_equal(**given)
        else:
            pair.assert_equal(*given.values())
    assert len(pair.step._cache) == 1


def test_each_value_by_position_is_another_plan() -> None:
    def loss_of(model: nn.Module, x: Tensor, scale: float) -> Tensor:
        return model(x).sum() * scale

    pair = Pairs(Model, loss_of, compute_loss=loss_of, fallback="error")
    for scale in (2.0, 3.0, 2.0, 2, np.float64(2.0)):
        pair.assert_equal(tensor(0), scale)
    assert len(pair.step._cache) == 4


def test_unlike_microbatches_are_told_of_once() -> None:
    pair = Pairs(Model, None, loss=torch.sum)
    unlike = [tensor(0), tensor(1)[:2]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batches in (unlike, [*unlike, tensor(2)], [tensor(0)] * 2):
            pair.step.accumulate(batches)
    told = [str(each.message) for each in caught if "without a plan" in str(each.message)]
    assert len(told) == 1 and "microbatches that are reduced together differ" in told[0]
    strict = Pairs(Model, None, loss=torch.sum, fallback="error")
    with pytest.raises(NoPlan, match="differ in their form"):
        strict.step.accumulate(unlike)
    assert all(param.grad is None for param in strict.ours.parameters())
    strict.step.accumulate([tensor(0)] * 2)


def _weighted(model: nn.Module, x: Tensor, weight: Tensor | None = None) -> Tensor:
    out = model(x).square()
    return (out if weight is None else out * weight).mean()


@wraps(_weighted)
def _handing_on(model: nn.Module, *inputs: Tensor) -> Tensor:
    return _weighted(model, *inputs)


@pytest.mark.parametrize("first", range(5))
def test_an_input_by_position_and_by_name(first: int) -> None:
    """Of a function that calls the model, they are the same, whichever came first."""
    x, weight = tensor(0), tensor(1)
    calls: list[Any] = [((x,), {}), ((x, weight), {}), ((), {"x": x}), ((x,), {"weight": weight})]
    calls.append(((), {"weight": weight, "x": x}))
    pair = Pairs(Model, _weighted, compute_loss=_weighted, fallback="error")
    for args, kwargs in calls[first:] + calls[:first]:
        pair.assert_equal(*args, **kwargs)
    assert len(pair.step._cache) == 2


def test_a_function_that_hands_inputs_on_by_position() -> None:
    pair = Pairs(Model, _handing_on, compute_loss=_handing_on, fallback="error")
    for seed in range(2):
        pair.assert_equal(tensor(seed), tensor(seed + 1))


class InTurn(nn.Module):
    """What it computes depends on the order in which its inputs come."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        for each in others.values():
            x = x * 1.5 + (len(each) if isinstance(each, str) else each)
        return self.layer(x).square().mean()


def _of_any_name(model: nn.Module, **batch: Any) -> Tensor:
    return model(**batch)


@pytest.mark.parametrize("compute_loss", [None, _of_any_name])
def test_the_order_of_inputs_of_any_name(compute_loss: Any) -> None:
    loss = {"compute_loss": compute_loss} if compute_loss else {}
    pair = Pairs(InTurn, _of_any_name, fallback="error", **loss)
    a, b = tensor(1), tensor(2)
    for seed in range(3):
        x = tensor(seed)
        pair.assert_equal(x=x, b=b, name="abc", scale=2.5, a=a)
        pair.assert_equal(x=x, a=a, scale=2.5, b=b, name="abc")
        pair.assert_equal(x=x, b=b, name="abc", scale=3.5, a=a)
    # One more for the number, which each order has among its inputs from then on.
    assert len(pair.step._cache) <= 4


def _in_turn(x: Tensor, named: dict[str, Any]) -> Tensor:
    for each in named.values():
        x = x * 1.5 + each
    return x


class Wrapped(nn.Module):
    """What a decorator has put around its forward sees the order of names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def _forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.layer(x).square().mean()

    @wraps(_forward)
    def forward(self, x: Tensor, **named: Any) -> Tensor:
        return self._forward(_in_turn(x, named), **named)


class Hooked(Wrapped):
    """A hook sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(
            lambda _, args, named: ((_in_turn(args[0], named),), named), with_kwargs=True
        )

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self._forward(x, a, b)


@pytest.mark.parametrize("kind", [Wrapped, Hooked])
def test_the_order_of_names_before_forward(kind: Any) -> None:
    pair = Pairs(kind, lambda model, *args, **named: model(*args, **named), fallback="error")
    x, a, b = tensor(0), tensor(1), tensor(2)
    for _ in range(2):
        pair.assert_equal(x, a=a, b=b)
        pair.assert_equal(x, b=b, a=a)
    assert len(pair.step._cache) == 2
