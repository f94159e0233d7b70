"""What is around the steps of a loop, and what these leave behind: as with FSDP2, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import around_ranks
import outside_units
import pytest
from ranks import run_ranks

OF_FOUR = {program.__name__: reason for program, reason in outside_units.OF_FOUR.items()}
REASONS = {program.__name__: reason for program, reason in around_ranks.PROGRAMS.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the programs give, by rank."""
    out = tmp_path_factory.mktemp("around") / "found"
    run_ranks("around_ranks", [out], 2)
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", REASONS)
def test_like_fsdp2(name: str, found: list[dict[str, Any]]) -> None:
    assert_like_fsdp2([rank[name] for rank in found], REASONS[name])


@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks_like_fsdp2(name: str, tmp_path: Path) -> None:
    run_ranks("around_ranks", [tmp_path / "found"], 4)
    found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(4)]
    assert_like_fsdp2([rank[name] for rank in found], OF_FOUR[name])


def assert_like_fsdp2(found: list[Any], reason: str) -> None:
    for want, got, _ in found:
        assert got == want
        assert len(want) > 1
    told = found[0][2]
    assert bool(told) == bool(reason), told
    assert all(reason in line for line in told)
