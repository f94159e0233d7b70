"""What variables of the environment are to a step: those that it reads decide it, others do not."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import fsdp_mlir
import pytest
from fsdp_mlir.frontdoor import planning
from test_held_state import SGD, Base, X
from test_proof import Net, UnusedDraw, captured
from torch import Tensor
from twins import Twins


class OfEnvironment(Base):
    def __init__(self, take: Callable[[], float]) -> None:
        super().__init__()
        self.take = take

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x).mean() * self.take()

    def note(self) -> None:
        print(os.environ["NOTE"])


READERS: dict[str, Callable[[], float]] = {
    "an item": lambda: float(os.environ["FACTOR"]),
    "getenv": lambda: float(os.getenv("FACTOR", "1.0")),
    "bytes": lambda: float(os.environb[b"FACTOR"]),
    "a test": lambda: 3.0 if "NEW_FACTOR" in os.environ else 1.0,
    "a copy": lambda: float({**os.environ}.get("NEW_FACTOR", 1.0)),
    "a count": lambda: float(len(os.environ)),
    "a helper": lambda: float(os.path.expandvars("$FACTOR")),
}


@pytest.mark.parametrize("name", READERS)
def test_a_change_of_the_environment_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FACTOR", "1.0")
    pair = Twins(lambda: OfEnvironment(READERS[name]), X, SGD, fallback="error")
    pair.assert_equal_steps(1)
    monkeypatch.setenv("FACTOR", "2.0")
    pair.assert_equal_steps(1)
    monkeypatch.setenv("NEW_FACTOR", "3.0")
    pair.assert_equal_steps(1)
    monkeypatch.delenv("NEW_FACTOR")
    pair.assert_equal_steps(1)


def test_variables_that_the_step_does_not_read_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop may set some in each step. The model names the environment, as transformers' do."""
    monkeypatch.setenv("FACTOR", "1.0")
    pair = Twins(lambda: OfEnvironment(READERS["an item"]), X, SGD, fallback="error")
    with mock.patch.object(planning, "capture", side_effect=AssertionError("a capture")):
        for step in range(3):
            monkeypatch.setenv("NOTE", str(step))
            pair.assert_equal_steps(1)


# --- fsdp_mlir.capture, which records the step as another rank, too


class UnusedDrawBesideTheRank(UnusedDraw):
    def log(self, line: str) -> None:
        if os.environ.get("RANK") == "0":
            print(line)


def test_the_rank_that_the_check_sets_is_not_what_a_draw_leaves(tmp_path: Path) -> None:
    captured(UnusedDrawBesideTheRank(), tmp_path)


class StoredDraw(Net):
    def step(self, x: Tensor) -> Tensor:
        os.environ["FSDP_MLIR_TEST_DRAWN"] = str(random.random())
        return x


def test_a_draw_that_is_left_in_a_variable(tmp_path: Path) -> None:
    expected = r"test_environment.py:81: 'random.random' is used as more than a tensor may be"
    with pytest.raises(fsdp_mlir.CaptureError, match=expected):
        captured(StoredDraw(), tmp_path)
    assert "FSDP_MLIR_TEST_DRAWN" not in os.environ
