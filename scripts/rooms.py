"""Checks that a folder of the runtime or the Python package includes only what its page allows.

    python scripts/rooms.py

A page ends with "May include: A, B." or "May include: no other room.". That of lib/Runtime/<Room>
is its README.md, and holds for the room's sources and for its headers in
include/fsdp/Runtime/<Room>; headers that lie in no room may be included by all. That of
python/fsdp_mlir/<room> is the docstring of its __init__.py. The package's own modules are a room as
well, fsdp_mlir. The rooms of each form no circle.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "fsdp_mlir"


@dataclass(frozen=True)
class Building:
    """Rooms that may include each other. `tops` have a folder for each room, the first of them with
    the page; `whole` is the room of the files of the first that lie in no folder, if they are one.
    `included` yields line and room of each include in a file's text."""

    tops: tuple[str, ...]
    page: str
    suffixes: tuple[str, ...]
    included: Callable[[str], Iterator[tuple[int, str]]]
    whole: str = ""

    def folders(self, room: str) -> list[Path]:
        return [ROOT / top / ("" if room == self.whole else room) for top in self.tops]

    def rooms(self) -> set[str]:
        files = [path for top in self.tops for path in (ROOT / top).glob("*/*")]
        found = {path.parent.name for path in files if path.suffix in self.suffixes}
        return found | {self.whole} - {""}

    def allowed(self, room: str) -> set[str]:
        page = self.folders(room)[0] / self.page
        text = page.read_text() if page.exists() else ""
        found = re.search(r"^May include: (.*)\.$", text, re.MULTILINE)
        if found is None:
            where = page.relative_to(ROOT)
            raise SystemExit(f"rooms: error: {where}: expected a line 'May include:'")
        return set() if found[1] == "no other room" else set(found[1].split(", "))

    def errors(self) -> Iterator[str]:
        rooms = {room: self.allowed(room) for room in sorted(self.rooms())}
        yield from circles(rooms)
        for room, needs in rooms.items():
            folders = self.folders(room)
            for unknown in sorted(needs - rooms.keys()):
                page = folders[0] / self.page
                yield f"{page.relative_to(ROOT)}: no room '{unknown}'"
            paths = [path for folder in folders for path in folder.glob("*.*")]
            for path in sorted(path for path in paths if path.suffix in self.suffixes):
                for line, other in self.included(path.read_text()):
                    if other not in {room, *needs}:
                        where = f"{path.relative_to(ROOT)}:{line}"
                        yield f"{where}: {room} may not include what is in {other}"


def headers(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.match(r'#include "(?:fsdp/Runtime|\.\.)/(\w+)/', line):
            yield number, found[1]


def imports(text: str) -> Iterator[tuple[int, str]]:
    """Of the package's modules; those that lie in no folder, and relative ones, are its own."""
    folders = {path.parent.name for path in (ROOT / PYTHON.tops[0]).glob("*/__init__.py")}
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = PACKAGE if node.level else node.module
            names = [f"{module}.{alias.name}" for alias in node.names]
        for package, *inside in (name.split(".") for name in names):
            if package == PACKAGE:
                yield node.lineno, inside[0] if inside and inside[0] in folders else PACKAGE


RUNTIME = Building(
    ("lib/Runtime", "include/fsdp/Runtime"), "README.md", (".h", ".cpp", ".cu"), headers
)
PYTHON = Building((f"python/{PACKAGE}",), "__init__.py", (".py",), imports, whole=PACKAGE)


def circles(rooms: dict[str, set[str]]) -> Iterator[str]:
    left = dict(rooms)
    while free := [room for room, needs in left.items() if not needs & left.keys()]:
        for room in free:
            del left[room]
    if left:
        yield f"rooms that may include each other in a circle: {', '.join(sorted(left))}"


def errors() -> Iterator[str]:
    for building in (RUNTIME, PYTHON):
        yield from building.errors()


def main() -> int:
    found = list(errors())
    for error in found:
        print(f"rooms: error: {error}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
