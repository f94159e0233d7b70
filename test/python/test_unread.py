"""Strings and numbers of a batch that no step reads, such as the names of its samples: one plan is
for all of them. What a step reads is a part of it."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsdp_mlir
import pytest
import torch
from test_followed import Net, captures
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["captures"]

COUNT = 6
TABLE = {"name 3": 3.0}
READ: list[Any] = []


def x_of(number: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def batch_of(number: int) -> dict[str, Any]:
    return {
        "x": x_of(number),
        "paths": [f"/data/{number}-{sample}.png" for sample in range(4)],
        "id": number * 10,
        "inner": {"name": f"name {number}", "rate": number / 8, "none": None, "flag": True},
    }


@dataclass
class Sample:
    x: Tensor
    ids: list[int]
    name: str


def mean(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def of_x(model: Any, batch: Any) -> Tensor:
    return mean(model, batch["x"])


def taken_out(model: Any, batch: Any) -> Tensor:
    batch = dict(batch)
    for key in ("paths", "id", "inner"):
        batch.pop(key)
    return mean(model, **batch)


def filtered(model: Any, batch: Any) -> Tensor:
    kept = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
    return mean(model, **kept)


def moved(model: Any, batch: Any) -> Tensor:
    there = tree_map(lambda each: each.to("cpu") if hasattr(each, "to") else each, batch)
    there["inner"] = copy.deepcopy(there["inner"])
    return mean(model, there["x"]) * len(batch["paths"])


def asked(model: Any, batch: Any) -> Tensor:
    """Of what kind they are."""
    inner = batch["inner"]
    is_text = isinstance(inner["name"], str) and not isinstance(batch["id"], float)
    return mean(model, batch["x"]) * (2 if is_text and inner["none"] is None else 1)


UNREAD = of_x, taken_out, filtered, moved, asked


def compared(model: Any, batch: Any) -> Tensor:
    return mean(model, batch["x"]) * (2 if batch["inner"]["name"] == "name 3" else 1)


def begun(model: Any, batch: Any) -> Tensor:
    return mean(model, batch["x"]) * (2 if batch["paths"][0].startswith("/data/3") else 1)


def matched(model: Any, batch: Any) -> Tensor:
    return mean(model, batch["x"]) * (2 if re.match("/data/[24]", batch["paths"][1]) else 1)


def joined(model: Any, batch: Any) -> Tensor:
    return mean(model, batch["x"]) * (2 if "/data/3" in "".join(batch["paths"]) else 1)


def looked_up(model: Any, batch: Any) -> Tensor:
    return mean(model, batch["x"]) * TABLE.get(batch["inner"]["name"], 1.0)


def written(model: Any, batch: Any) -> Tensor:
    return mean(model, batch["x"]) * (2 if "name 3" in json.dumps(batch["inner"]) else 1)


def swallowed(model: Any, batch: Any) -> Tensor:
    try:
        factor = 1 + int(batch["id"])
    except Exception:
        factor = 1
    return mean(model, batch["x"]) * factor


def calculated(model: Any, batch: Any) -> Tensor:
    return mean(model, batch["x"]) * (1 + batch["inner"]["rate"])


def kept(model: Any, batch: Any) -> Tensor:
    READ[:] = [batch["paths"]]
    return mean(model, batch["x"])


def returned(model: Any, batch: Any) -> Any:
    return {"loss": mean(model, batch["x"]), "id": batch["id"]}


READERS = (
    *(compared, begun, matched, joined, looked_up, written, swallowed, calculated, kept, returned),
)


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def trained(
    compute_loss: Callable[..., Any],
    compiled: bool,
    make: Callable[[int], Any] = batch_of,
    count: int = COUNT,
    **options: Any,
) -> list[Any]:
    torch.manual_seed(0)
    READ.clear()
    model = fsdp_mlir.fully_shard(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = None
    if compiled:
        options["compute_loss"] = compute_loss
        step = fsdp_mlir.compile(model, optimizer=optimizer, fallback="error", **options)
    found: list[Any] = []
    for number in range(count):
        batch = make(number)
        if step is not None:
            got = step(batch=batch)
        else:
            got = compute_loss(model, batch)
            (got["loss"] if isinstance(got, dict) else got).backward()
            optimizer.step()
            optimizer.zero_grad()
        parts = got if isinstance(got, dict) else {"loss": got}
        with torch.no_grad():
            found.append({key: float(value) for key, value in parts.items()} | {"read": [*READ]})
    return [*found, [param.full_tensor().tolist() for param in model.parameters()]]


@pytest.mark.parametrize("compute_loss", UNREAD)
def test_one_plan_is_for_all(compute_loss: Any, captures: list[None]) -> None:
    """The first batch is captured as it is, and again once another one has come."""
    with silent():
        assert trained(compute_loss, True, count=12) == trained(compute_loss, False, count=12)
    assert len(captures) == 2


@pytest.mark.parametrize("compute_loss", READERS)
def test_what_is_read_is_a_part_of_the_step(compute_loss: Any) -> None:
    with silent():
        assert trained(compute_loss, True) == trained(compute_loss, False)


def test_of_other_forms(captures: list[None]) -> None:
    """An argument, a dataclass, and a name that some batches do not have."""

    def of_sample(model: Any, batch: Any) -> Tensor:
        return mean(model, batch.x)

    def sample_of(number: int) -> Sample:
        return Sample(x_of(number), [number, number + 1], f"name {number}")

    def of_optional(model: Any, batch: Any) -> Tensor:
        return mean(model, batch["x"]) * (2 if batch["name"] is None else 1)

    def optional(number: int) -> dict[str, Any]:
        return {"x": x_of(number), "name": f"name {number}" if number % 3 else None}

    for compute_loss, make, count in ((of_sample, sample_of, 2), (of_optional, optional, 3)):
        captures.clear()
        with silent():
            got = trained(compute_loss, True, make, count=12)
            assert got == trained(compute_loss, False, make, count=12)
        assert len(captures) <= count


def test_kept_plans(tmp_path: Path, captures: list[None]) -> None:
    """A kept one is of the first batch, with what that has."""
    with silent():
        got = [trained(of_x, True, cache=tmp_path, count=4) for _ in range(2)]
        others = trained(of_x, True, lambda n: batch_of(n + 50), cache=tmp_path, count=4)
        assert got == [trained(of_x, False, count=4)] * 2
        assert others == trained(of_x, False, lambda n: batch_of(n + 50), count=4)
    assert len(list(tmp_path.iterdir())) == 2  # of the batches 0 and 50
