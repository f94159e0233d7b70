"""One architecture of each kind trains to FSDP2's bits; `make test-zoo` trains all."""

from __future__ import annotations

from pathlib import Path

import pytest
import zoo


@pytest.mark.parametrize("key", zoo.SUBSET)
def test_equals_fsdp2(key: str, tmp_path: Path) -> None:
    outcome = zoo.compare(key, tmp_path)
    assert (outcome.verdict, outcome.detail) == ("equal", "")
