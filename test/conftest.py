"""The order of the files: those that take long begin first, lest one runs on alone at the end.

Which tests run: those marked `exhaustive`, and of the cases of a test marked `one_in(n)` all but
each n-th, are left to `make test-all`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

# Of few tests; of the others those with the most take the longest.
LONG = (
    "test_adapters.py",
    "test_complex.py",
    "test_cpu_capability.py",
    "test_gpu_plans.py",
    "test_loops.py",
    "test_reached.py",
    "test_strides.py",
    "test_zoo.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", action="store_true", help="run what only make test-all runs, too"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "exhaustive: of a product of cases of which others run each factor"
    )
    config.addinivalue_line(
        "markers", "one_in(n): of many cases that one mechanism decides; n is prime to each factor"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--exhaustive"):
        runs = without_exhaustive(items)
        config.hook.pytest_deselected(items=list(set(items) - set(runs)))
        items[:] = runs  # the last line counts the others
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in LONG, -tests[item.path]))


def without_exhaustive(items: list[pytest.Item]) -> list[pytest.Item]:
    """Those that `make test` runs. A case that is asked for by its name runs."""
    runs, cases = [], Counter[tuple[Any, ...]]()
    for item in items:
        if item.get_closest_marker("exhaustive"):
            continue
        if sampled := item.get_closest_marker("one_in"):
            test = (item.path, getattr(item, "originalname", item.name))
            cases[test] += 1
            if (cases[test] - 1) % sampled.args[0]:
                continue
        runs.append(item)
    return runs
