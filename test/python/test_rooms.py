"""The check of what folders of the runtime and the Python package include finds what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import rooms


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(rooms, "ROOT", tmp_path)
    for room, may in {"Upper": "Lower", "Lower": "no other room"}.items():
        write(tmp_path / f"lib/Runtime/{room}/README.md", f"May include: {may}.\n")
        write(tmp_path / f"include/fsdp/Runtime/{room}/Base.h", "#include <vector>\n")
    write(tmp_path / "include/fsdp/Runtime/Upper/Top.h", '#include "fsdp/Runtime/Lower/Base.h"\n')
    for room, may in {".": "upper", "upper": "lower", "lower": "no other room"}.items():
        page = f'"""A room.\n\nMay include: {may}.\n"""\n'
        write(tmp_path / f"python/fsdp_mlir/{room}/__init__.py", page)
    write(tmp_path / "python/fsdp_mlir/lower/base.py", "import fsdp_mlir_of_another\n")
    write(tmp_path / "python/fsdp_mlir/upper/top.py", "from fsdp_mlir.lower.base import base\n")
    return tmp_path


def test_what_is_allowed(tree: Path) -> None:
    assert list(rooms.errors()) == []


@pytest.mark.parametrize("path", ["fsdp/Runtime/Upper/Top.h", "../Upper/Private.h"])
def test_an_include_of_an_upper_room(tree: Path, path: str) -> None:
    write(tree / "lib/Runtime/Lower/Base.cpp", f'#include <vector>\n#include "{path}"\n')
    (error,) = rooms.errors()
    assert error == "lib/Runtime/Lower/Base.cpp:2: Lower may not include what is in Upper"


@pytest.mark.parametrize(
    ("text", "room"),
    [
        ("from fsdp_mlir.upper.top import top", "upper"),
        ("from fsdp_mlir.upper import top", "upper"),
        ("from fsdp_mlir import upper", "upper"),
        ("import fsdp_mlir.upper.top", "upper"),
        ("def late():\n    import fsdp_mlir.upper.top", "upper"),
        ("import fsdp_mlir", "fsdp_mlir"),
        ("from fsdp_mlir import compile", "fsdp_mlir"),
        ("from ..upper import top", "fsdp_mlir"),
    ],
)
def test_an_import_of_an_upper_room(tree: Path, text: str, room: str) -> None:
    write(tree / "python/fsdp_mlir/lower/base.py", f"import torch\n{text}\n")
    line = 1 + len(text.splitlines())
    (error,) = rooms.errors()
    assert (
        error == f"python/fsdp_mlir/lower/base.py:{line}: lower may not include what is in {room}"
    )


def test_an_import_by_the_package_itself(tree: Path) -> None:
    write(tree / "python/fsdp_mlir/front.py", "from fsdp_mlir.lower.base import base\n")
    (error,) = rooms.errors()
    assert error == "python/fsdp_mlir/front.py:1: fsdp_mlir may not include what is in lower"


@pytest.mark.parametrize(
    ("page", "other", "names"),
    [
        ("lib/Runtime/Lower/README.md", "Upper", "Lower, Upper"),
        ("python/fsdp_mlir/lower/__init__.py", "fsdp_mlir", "fsdp_mlir, lower, upper"),
    ],
)
def test_a_circle(tree: Path, page: str, other: str, names: str) -> None:
    text = (tree / page).read_text()
    write(tree / page, text.replace("no other room", other))
    (error,) = rooms.errors()
    assert error == f"rooms that may include each other in a circle: {names}"


@pytest.mark.parametrize(
    "page", ["lib/Runtime/Lower/README.md", "python/fsdp_mlir/lower/__init__.py"]
)
def test_an_unknown_room(tree: Path, page: str) -> None:
    text = (tree / page).read_text()
    write(tree / page, text.replace("no other room", "Cellar"))
    assert list(rooms.errors()) == [f"{page}: no room 'Cellar'"]


def test_a_room_without_a_page(tree: Path) -> None:
    write(tree / "python/fsdp_mlir/cellar/wine.py", "")
    with pytest.raises(SystemExit, match=r"cellar/__init__\.py: expected a line 'May include:'"):
        list(rooms.errors())
