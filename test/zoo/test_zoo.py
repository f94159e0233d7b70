"""One architecture of each kind trains to FSDP2's bits; `make test-zoo` trains all."""

from __future__ import annotations

from pathlib import Path

import pytest
import zoo


def test_the_page_has_every_architecture() -> None:
    path = Path(__file__).parents[2] / "docs" / "models.md"
    outcomes = zoo.written(path)
    assert [each.key for each in outcomes] == list(zoo.BY_KEY)
    assert zoo.page(outcomes) == path.read_text()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("key", zoo.SUBSET)
def test_equals_fsdp2(key: str, tmp_path: Path) -> None:
    outcome = zoo.compare(key, tmp_path)
    assert (outcome.verdict, outcome.detail) == ("equal", "")
