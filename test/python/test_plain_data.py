"""Plain data come back from JSON as they were."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

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


@pytest.mark.parametrize("value", [object(), {1}, {"a": [lambda: 0]}, 1j, torch.float32])
def test_what_is_not_plain(value: Any) -> None:
    with pytest.raises(ValueError, match=r"it.*expected None, numbers, text"):
        encoded(value, "it")
