"""The order of the files: those that take long begin first, lest one runs on alone at the end.

Which tests run: those marked `exhaustive` are left to `make test-all`.
"""

from __future__ import annotations

from collections import Counter

import pytest

# Of few tests; of the others those with the most take the longest.
LONG = (
    "test_adapters.py",
    "test_cpu_capability.py",
    "test_gpu_plans.py",
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--exhaustive"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)  # the last line counts them
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in LONG, -tests[item.path]))
