"""Which modules need FSDP2's autograd function at their entry, and what it leaves in the graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from fsdp_mlir import capture
from fsdp_mlir.models.llama import llama_debug
from graphs import Captured
from torch import Tensor, nn


def captured(path: Path, model: nn.Module, inputs: dict[str, Tensor], units: object) -> Captured:
    config = path / "config.yaml"
    config.write_text(yaml.safe_dump({"units": units}))
    capture(model, kwargs=inputs, config=config, path=path / "model.pt")
    return Captured.load(path / "model.pt")


class Shared(nn.Module):
    """Two modules that are given one value, of which they make the `uses`."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        self.uses = uses
        self.enc = nn.Linear(4, 4)
        self.first = Twice(uses)
        self.second = Twice(uses)

    def forward(self, x: Tensor) -> Tensor:
        mem = self.enc(x)
        out = self.second(self.first(x, mem), mem=mem)
        return (out + mem if self.uses == "later" else out).square().sum()


class Twice(nn.Module):
    def __init__(self, uses: str) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.uses = uses

    def forward(self, h: Tensor, mem: Tensor) -> Tensor:
        if self.uses == "never":
            return self.a(h)
        return self.a(h) * (mem if self.uses == "once" else mem.sin() * mem)


@pytest.mark.parametrize(
    ("uses", "entries"),
    [
        ("once", {}),
        ("never", {"second": "mem"}),
        ("twice", {"first": "mem"}),
        ("later", {"first": "mem", "second": "mem"}),
    ],
)
@pytest.mark.parametrize("units", [[], [{"match": "first"}], [{"match": ["first", "second"]}]])
def test_what_needs_an_entry(
    tmp_path: Path, uses: str, entries: dict[str, str], units: list
) -> None:
    """It is the same whatever the units are."""
    record = captured(tmp_path, Shared(uses), {"x": torch.randn(2, 4)}, units).record
    assert record["entries"] == entries


def test_units_are_named(tmp_path: Path) -> None:
    units = [{"match": ["first", "enc"]}, {"match": "second.*"}]
    record = captured(tmp_path, Shared("once"), {"x": torch.randn(2, 4)}, units).record
    assert record["units"] == [["enc", "first"], ["second.a"]]


def test_no_call_of_its_own(tmp_path: Path) -> None:
    """Where no unit needs an entry, the graph is that without units."""
    tokens = torch.randint(0, 256, (2, 8))
    inputs = {"tokens": tokens, "targets": tokens}
    units = [{"match": "layers.*"}, {"match": "layers.*.attention"}]
    texts = [captured(tmp_path, llama_debug(), inputs, given).text for given in ([], units)]
    assert texts[0] == texts[1]


def test_modules_and_lines_stay(tmp_path: Path) -> None:
    """Each call of forward belongs to the module and line that it belongs to without units."""
    inputs = {"x": torch.randn(2, 4)}
    records = [
        captured(tmp_path, Shared("twice"), inputs, units).record
        for units in ([], [{"match": ["first", "second"]}])
    ]
    attributes = [
        [
            (node["op"], node["module"], node["line"])
            for node in record["nodes"][: record["backward_begin"]]
        ]
        for record in records
    ]
    assert attributes[0] == attributes[1]
