"""The entry of a kept plan is what was written, or none."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fsdp_mlir.frontdoor.plan_cache import PlanCache
from fsdp_mlir.frontdoor.planning import Captured
from fsdp_mlir.step.outputs import Outputs
from torch import nn

KEY = "0123abcd"


@pytest.fixture
def cache(tmp_path: Path) -> PlanCache:
    source = tmp_path / "source"
    source.mkdir()
    (source / "plan.json").write_text("{}")
    made = PlanCache(tmp_path / "cache", nn.Linear(4, 4), None)
    captured = Captured(
        "digest", {}, (Outputs(keeps=False), Outputs(keeps=False)), warnings=["careful"]
    )
    made.add(KEY, source, captured, set(sys.modules) - {"json", "safetensors.torch"})
    return made


@pytest.fixture
def entry(cache: PlanCache, tmp_path: Path) -> Path:
    return tmp_path / "cache" / KEY / "entry.json"


def test_a_whole_entry_is_taken(cache: PlanCache) -> None:
    folder = cache.find(KEY)
    assert folder is not None
    with pytest.warns(UserWarning, match="careful"):
        captured = cache.captured(folder)
    assert captured is not None and captured.digest == "digest"


def test_every_bit_of_an_entry_counts(cache: PlanCache, entry: Path) -> None:
    whole = entry.read_bytes()
    end = whole.index(b'"loaded"')  # many modules follow, which are alike
    for at in range(end):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        entry.write_bytes(damaged)
        assert cache.find(KEY) is None and cache.captured(entry.parent) is None, at


DAMAGES: dict[str, Callable[[str], str]] = {
    "less": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "outputs"}),
    "null": lambda text: json.dumps({**json.loads(text), "outputs": None}),
    "list": lambda text: "[]",
    "deep": lambda text: "[" * 100_000,
    "none": lambda text: "",
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("hashed", [True, False])
def test_an_entry_of_another_form(
    name: str, hashed: bool, cache: PlanCache, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has, _, text = entry.read_text().partition("\n")
    entry.write_text(f"{has}\n{DAMAGES[name](text)}")
    if hashed:  # whoever wrote it gave it a hash
        monkeypatch.setattr("fsdp_mlir.frontdoor.plan_cache._hashed", lambda key, text: has)
    assert cache.captured(entry.parent) is None


def test_an_entry_under_another_name(cache: PlanCache, entry: Path) -> None:
    entry.parent.rename(entry.parent.with_name("another"))
    assert cache.find("another") is None
