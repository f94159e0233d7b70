"""Plain data come back from JSON as they were."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_mlir.support.plain_data import decoded, encoded


def there_and_back(value: Any) -> Any:
    return decoded(json.loads(json.dumps(encoded(value, "it"), allow_nan=False)))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, -(1 << 80), 0.1, -0.0, 5e-324, "a\ud800b", ""],
        (1, (2, [3]), ()),
        {"a": {"$tuple": [1]}, "b": {"$": 2}},
        {1: "a", (2, 3): b"\x00\xff", None: {"x": 1.5}},
        {"$float": "nan"},
        {"$dict": []},
        float("inf"),
        -float("inf"),
        {},
        [],
    ],
)
def test_there_and_back(value: Any) -> None:
    got = there_and_back(value)
    assert got == value
    assert repr(got) == repr(value)  # the types, too


def test_others() -> None:
    assert math.isnan(there_and_back(float("nan")))
    for given in (Counter({2: 1, 5: 3}), Counter("aab"), Counter()):
        counter = there_and_back(given)
        assert type(counter) is Counter and counter == given
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64):
        for shape in ((), (0, 2), (2, 3)):
            tensor = torch.ones(shape).to(dtype)
            got = there_and_back(tensor)
            assert got.dtype == dtype and got.shape == tensor.shape and torch.equal(got, tensor)


@pytest.mark.parametrize(
    "value",
    [
        np.float64(0.1),
        np.float32("nan"),
        np.bool_(True),
        np.int64(-5),
        np.str_("a\u00e9"),
        np.str_(""),
        np.datetime64("2026-01-02"),
        np.complex64(1 + 2j),
        np.arange(6, dtype=">u2").reshape(2, 3).T,
        np.zeros((0, 3), np.float16),
        np.array(2.5),
        np.array([["a", "bcd"]]),
    ],
)
def test_numpy_s(value: Any) -> None:
    got = there_and_back(value)
    assert type(got) is type(value) and got.dtype == value.dtype and got.shape == value.shape
    assert got.tobytes() == value.tobytes()


def test_a_state_of_numpy_s_generator() -> None:
    generator = np.random.RandomState(3)
    other = np.random.RandomState(4)
    other.set_state(there_and_back(generator.get_state()))
    assert other.rand() == generator.rand()


ODD = np.array([(1, 2.0)], [("a", "i4"), ("b", "f4")])


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), "object"),
        ({1}, "set"),
        ({"a": [lambda: 0]}, "function"),
        (1j, "complex"),
        (torch.float32, "torch.dtype"),
        (ODD, "numpy.ndarray"),
        (ODD[0], "numpy.void"),
        (np.array([None]), "numpy.ndarray"),
    ],
)
def test_what_is_not_plain(value: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"it.*expected None, numbers, text.*got '{name}'"):
        encoded(value, "it")
