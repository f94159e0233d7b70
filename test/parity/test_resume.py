"""Checkpoints of model and optimizer, by the functions of torch.distributed.checkpoint: FSDP2's
and the front door's are alike, and either goes on from the other's, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from test_frontdoor import ADAMW, BF16, LAYERS, SGD

CASES: dict[str, dict[str, Any]] = {
    "adamw": {"calls": LAYERS, "optimizer": ADAMW},
    "adam_amsgrad": {
        "calls": LAYERS,
        "optimizer": {"name": "Adam", "lr": 1e-2, "amsgrad": True},
        "groups": {"weight_decay": 0.1, "lr": 1e-3},
    },
    "sgd_momentum": {"calls": LAYERS, "optimizer": {**SGD, "dampening": 0.1}},
    "sgd": {"calls": [], "optimizer": {"name": "SGD", "lr": 0.05}},
    "ignored": {
        "calls": LAYERS,
        "optimizer": {**ADAMW, "fused": False},
        "ignored": ["shift", "layers.0.scale"],
        "memory": True,
    },
    "offloaded": {
        "calls": [{"modules": ["layers.0"], "offload": True}, {"modules": ["layers.1"]}],
        "optimizer": ADAMW,
        "root": {"offload": True},
    },
    "largest_dim": {"calls": LAYERS, "optimizer": ADAMW, "largest_dim": True},
    "mixed": {
        "calls": [{**layer, "mp_policy": BF16} for layer in LAYERS],
        "optimizer": ADAMW,
        "root": {"mp_policy": BF16},
    },
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_resumed_runs(name: str, tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps(CASES[name]))
    run_ranks("resume_ranks", [path, tmp_path / "found"], 2)
    assert [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(2)] == [[], []]
