"""Fixtures of the comparison with FSDP2: captures and reference runs, each made once a session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Captured, Case, Model, Run, capture, run_reference


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("test_random.py")
    group.addoption("--random-cases", type=int, default=8, help="random models to train")
    group.addoption("--random-seed", default="0", help="which random models")
    group.addoption("--random-case", metavar="JSON", help="one model, as a failure printed it")


@pytest.fixture(scope="session")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Model], Captured]:
    """Captures a model at its first use."""
    made: dict[str, Captured] = {}

    def make(model: Model) -> Captured:
        key = f"{model.factory}{model.kwargs}"
        if key not in made:
            made[key] = capture(model, tmp_path_factory.mktemp("model"))
        return made[key]

    return make


@pytest.fixture(scope="session")
def reference(captured: Callable[[Model], Captured]) -> Callable[..., Run]:
    """Trains a case with FSDP2 (or mode "single") at its first use."""
    made: dict[str, Run] = {}

    def make(case: Case, mode: str = "fsdp2") -> Run:
        key = f"{case}{mode}"
        if key not in made:
            made[key] = run_reference(
                captured(case.model), case, f"reference{len(made)}", mode=mode
            )
        return made[key]

    return make
