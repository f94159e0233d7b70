"""Inputs that hold tensors: they are compiled, as tensors beside each other are."""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import fsdp_mlir
import pytest
import torch
from fsdp_mlir.step.batches import Inputs, split
from torch import Tensor, nn
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput
from twins import Twins

SGD = (torch.optim.SGD, {"lr": 0.1})
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: Tensor
    scale: float = field(default=1.0, repr=False)
    more: Any = None


class Holder:
    """No container that is known."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __repr__(self) -> str:
        return f"Holder({self.x})"


class Reads(nn.Module):
    """A layer on all tensors of its input, times all numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, given: Any, beside: Tensor) -> Tensor:
        return self.read(given) + self.layer(beside).sum()

    def read(self, given: Any) -> Tensor | float:
        if isinstance(given, Tensor):
            return self.layer(given).square().sum() if given.dim() else given * 2
        if isinstance(given, (Sample, Holder, BatchEncoding)):
            assert type(given) is not BatchEncoding or given.input_ids is given["input_ids"]
            given = dict(given) if isinstance(given, BatchEncoding) else vars(given)
        if isinstance(given, dict):
            given = list(given.values())
        if isinstance(given, (list, tuple)):
            return sum(map(self.read, given))
        return float(given) if isinstance(given, (int, float)) else len(str(given or ""))


def tensor(seed: int = 0) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))


NESTED: dict[str, Any] = {
    "dict": lambda x: {"u": x, "v": [x * 2, None], "name": "q", "of": (torch.tensor(3.0), 2)},
    "tuple": lambda x: (x, x + 1),
    "list": lambda x: [x, [x.t().contiguous().t()]],
    "namedtuple": lambda x: Pair(x, 3),
    "ordered": lambda x: OrderedDict(b=x, a=x * 2),
    "defaultdict": lambda x: defaultdict(list, a=[x]),
    "dataclass": lambda x: Sample(x, 2.0, {"z": x}),
    "encoding": lambda x: BatchEncoding({"input_ids": x}),
    "output": lambda x: BaseModelOutput(last_hidden_state=x, hidden_states=(x, x)),
    "no_tensor": lambda x: {"sizes": [3, 4], "name": "q"},
}


@pytest.mark.parametrize("kind", NESTED)
def test_steps_are_eager_steps(kind: str) -> None:
    """With other data there is no other plan."""
    batch = {"given": NESTED[kind](tensor()), "beside": tensor(1)}
    pair = Twins(Reads, batch, SGD, fallback="error")
    for seed in range(3):
        pair.batch = {"given": NESTED[kind](tensor(seed)), "beside": tensor(seed + 1)}
        pair.assert_equal_steps()
    assert len(pair.step._cache) == 1


def test_each_number_is_another_plan() -> None:
    pair = Twins(Reads, {"given": Sample(tensor()), "beside": tensor(1)}, SGD, fallback="error")
    for scale in (1.0, 2.0, 1.0, 3.0):
        pair.batch = {**pair.batch, "given": Sample(tensor(), scale)}
        pair.assert_equal_steps()
    assert len(pair.step._cache) == 3


def test_strings_that_vary() -> None:
    """FSDP2 makes the step once there were as many as a model has plans; one line says so."""
    pair = Twins(Reads, {"given": [tensor(), "a"], "beside": tensor(1)}, SGD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(11):
            pair.batch = {"given": [tensor(index), "a" * (1 + index)], "beside": tensor(index)}
            pair.assert_equal_steps()
    told = [str(each.message) for each in caught if "without a plan" in str(each.message)]
    assert len(told) == 1 and "have had more than 8 values" in told[0]
    assert len(pair.step._cache) <= 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Holder, "input 'given': expected a tensor, got 'Holder'"),
        (
            lambda x: {"a": [x, Holder(x)]},
            r"input 'given\['a'\]\[1\]': expected a t.* got 'Holder'",
        ),
        (lambda x: Sample(x.requires_grad_()), r"input 'given.x' requires grad: expected data"),
    ],
)
def test_other_objects_are_refused_once(given: Any, message: str) -> None:
    """By their class, whatever they hold."""
    pair = Twins(Reads, {"given": given(tensor()), "beside": tensor(1)}, SGD, example=None)
    with pytest.warns(UserWarning, match=f"without a plan: .*{message}") as caught:
        for seed in range(3):
            pair.batch = {"given": given(tensor(seed)), "beside": tensor(1)}
            pair.assert_equal_steps()
    assert len([w for w in caught if "without a plan" in str(w.message)]) == 1
    assert len(pair.step._cache) == 1


def test_what_forward_changes() -> None:
    """Is for FSDP2: the caller sees it."""

    class Sets(Reads):
        def forward(self, given: Any, beside: Tensor) -> Tensor:
            given["v"] = given["u"] * 2
            return super().forward(given["v"], beside)

    model = Sets()
    fsdp_mlir.fully_shard(model)
    step = fsdp_mlir.compile(model, optimizer=SGD)
    with pytest.warns(UserWarning, match="without a plan: .*input 'given' is changed in forward"):
        step(given={"u": tensor()}, beside=tensor(1))


def test_microbatches() -> None:
    batch: dict[str, Any] = {"given": {"u": torch.arange(8.0).reshape(4, 2), "name": "q"}}
    batch["of"] = Sample(torch.arange(4.0))
    first, second = split(batch, 2)
    assert torch.equal(second["given"]["u"], batch["given"]["u"][2:])
    assert first["given"]["name"] == "q" and torch.equal(first["of"].x, batch["of"].x[:2])
    assert split(batch, 1)[0]["given"] is batch["given"]
    with pytest.raises(ValueError, match=r"input 'given\['u'\]': expected a number of samples"):
        split(batch, 3)


def test_forms() -> None:
    """Equal in every process, and only for equal containers."""
    x = tensor()
    cycle: list[Any] = [x]
    cycle.append(cycle)
    values = [[x], (x,), [x, 1], [x, 1.0], [x, True], {"a": x}, {"b": x}, Pair(x, x), [[x]], cycle]
    values += [Sample(x), Sample(x, 2.0), defaultdict(list, a=x), defaultdict(dict, a=x)]
    form = Inputs(nn.Identity(), None).form
    forms = [repr(form({"given": value})) for value in values]
    assert len(set(forms)) == len(values) and not any(" at 0x" in text for text in forms)
    assert form({"given": Holder(x)}) == form({"given": Holder(x + 1)})
    assert form({"given": defaultdict(lambda: 0)}) == form({"given": defaultdict(lambda: 1)})


def test_microbatches_of_a_list_of_samples() -> None:
    """Whose tensors have other sizes than the batch: halves of each would be no samples."""
    batch = {"x": torch.zeros(4, 3), "boxes": [{"at": torch.zeros(2, 4)} for _ in range(4)]}
    with pytest.raises(ValueError, match=r"input 'boxes\[0\]\['at'\]': expected 4 samples"):
        split(batch, 2)
