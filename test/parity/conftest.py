"""Fixtures of the comparison with FSDP2: captures and reference runs, each made once a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
from harness import Captured, Case, Model, Run, capture, run_reference

# What the models and scripts of the tests import.
ranks.PRELOAD += [
    "front_door_ranks",
    "interchange_ranks",
    "resume_ranks",
    "parity_models",
    "transformers.models.gpt2.modeling_gpt2",
    "ranks_frozen",  # not in benchmarks, where FSDP2 collects as in a user's process
]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("test_random.py and test_any_loop.py")
    group.addoption("--random-cases", type=int, help="random cases to run (5; exhaustive: 8)")
    group.addoption("--random-seed", default="0", help="which random cases")
    group.addoption("--random-case", metavar="JSON", help="one case, as a failure printed it")
    group.addoption("--random-world", type=int, default=2, help="ranks of random loops")
    group = parser.getgroup("test_save_faults.py")
    group.addoption("--save-faults", default="some", choices=["some", "all"], help="faults to make")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.random_cases is None:
        config.option.random_cases = 8 if config.getoption("--exhaustive") else 5


@pytest.fixture(scope="session")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Captured]:
    """Captures a model, under its units and a mixed precision, at its first use."""
    made: dict[str, Captured] = {}

    def make(
        model: Model, precision: dict[str, Any] | None = None, reshard: str = "default"
    ) -> Captured:
        key = f"{model.factory}{model.kwargs}{model.units}{precision or {}}{reshard}"
        if key not in made:
            directory = tmp_path_factory.mktemp("model")
            made[key] = capture(model, directory, precision=precision, reshard=reshard)
        return made[key]

    return make


@pytest.fixture(scope="session")
def reference(captured: Callable[..., Captured]) -> Callable[..., Run]:
    """Trains a case with FSDP2 (or mode "single") at its first use."""
    made: dict[str, Run] = {}

    def make(case: Case, mode: str = "fsdp2") -> Run:
        key = f"{case}{mode}"
        if key not in made:
            made[key] = run_reference(
                captured(case.model, case.precision),
                case,
                f"reference{len(made)}",
                mode=mode,
            )
        return made[key]

    return make
