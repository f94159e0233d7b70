"""Compiled steps, eager ones, evaluation, freezing, shapes, state dicts and settings in a random
order, beside FSDP2 alone: every loss, parameter and optimizer state has its bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import run_ranks

CASES = {
    "sgd": {"optimizer": "sgd", "mixed": False, "max_norm": None},
    "adamw": {"optimizer": "adamw", "mixed": True, "max_norm": None},
    "clipped": {"optimizer": "adam", "mixed": False, "max_norm": 0.5},
    "outside": {"optimizer": "rmsprop", "mixed": False, "max_norm": 0.5},
}
ACTIONS = 14


@pytest.mark.parametrize(("seed", "comm"), [(1, "shm"), (2, "shm"), (3, "gloo")])
@pytest.mark.parametrize("name", CASES)
def test_random_loops(name: str, seed: int, comm: str, tmp_path: Path) -> None:
    case = {**CASES[name], "seed": seed, "actions": ACTIONS, "comm": comm}
    path = tmp_path / "case.json"
    path.write_text(json.dumps(case))
    run_ranks("interleaved_ranks", [path, tmp_path / "found"], 2)
    found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(2)]
    assert found == [[], []], f"seed {seed}"
