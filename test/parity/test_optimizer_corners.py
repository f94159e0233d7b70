"""Optimizers with settings and state that most loops do not have: as with FSDP2, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optimizer_ranks
import pytest
from ranks import run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the cases give, by rank."""
    out = tmp_path_factory.mktemp("optimizers") / "found"
    run_ranks("optimizer_ranks", [out], 2)
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", optimizer_ranks.CASES)
def test_like_fsdp2(name: str, found: list[dict[str, Any]]) -> None:
    case = optimizer_ranks.CASES[name]
    for rank in found:
        want, got, plans = rank[name]
        assert got == want
        assert plans == case.plans
        assert len(want) == optimizer_ranks.CHANGE + 1 or not case.error
        assert not case.error or want[-1] == case.error
