"""What is around the steps of a loop, and what these leave behind: as with FSDP2, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import around_ranks
import pytest
from ranks import run_ranks

REASONS = {program.__name__: reason for program, reason in around_ranks.PROGRAMS.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the programs give, by rank."""
    out = tmp_path_factory.mktemp("around") / "found"
    run_ranks("around_ranks", [out], 2)
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", REASONS)
def test_like_fsdp2(name: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        want, got, _ = rank[name]
        assert got == want
        assert len(want) > 1
    told = found[0][name][2]
    assert bool(told) == bool(REASONS[name]), told
    assert all(REASONS[name] in line for line in told)
