"""The check of what folders of the runtime include finds what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import rooms


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {"ROOT": ".", "SOURCES": "lib", "HEADERS": "include"}.items():
        monkeypatch.setattr(rooms, name, tmp_path / value)
    for room, may in {"Upper": "Lower", "Lower": "no other room"}.items():
        (tmp_path / "lib" / room).mkdir(parents=True)
        (tmp_path / "lib" / room / "README.md").write_text(f"May include: {may}.\n")
        (tmp_path / "include" / room).mkdir(parents=True)
    (tmp_path / "include/Upper/Top.h").write_text('#include "fsdp/Runtime/Lower/Base.h"\n')
    return tmp_path


def test_what_is_allowed(tree: Path) -> None:
    assert list(rooms.errors()) == []


@pytest.mark.parametrize("path", ["fsdp/Runtime/Upper/Top.h", "../Upper/Private.h"])
def test_an_include_of_an_upper_room(tree: Path, path: str) -> None:
    (tree / "lib/Lower/Base.cpp").write_text(f'#include <vector>\n#include "{path}"\n')
    (error,) = rooms.errors()
    assert error == "lib/Lower/Base.cpp:2: Lower may not include what is in Upper"


def test_a_circle(tree: Path) -> None:
    (tree / "lib/Lower/README.md").write_text("May include: Upper.\n")
    (error,) = rooms.errors()
    assert error == "rooms that may include each other in a circle: Lower, Upper"


def test_an_unknown_room(tree: Path) -> None:
    (tree / "lib/Lower/README.md").write_text("May include: Cellar.\n")
    assert list(rooms.errors()) == ["lib/Runtime/Lower/README.md: no room 'Cellar'"]
