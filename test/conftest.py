"""The order of the files: those that take long begin first, lest one runs on alone at the end."""

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in LONG, -tests[item.path]))
