"""Checks that a folder of the runtime includes only what its page allows.

    python scripts/rooms.py

lib/Runtime/<Room>/README.md ends with "May include: A, B." or "May include: no other room."; it
holds for the room's sources and for its headers in include/fsdp/Runtime/<Room>. Headers that lie in
no room may be included by all. The rooms form no circle.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "lib" / "Runtime"
HEADERS = ROOT / "include" / "fsdp" / "Runtime"


def allowed(room: str) -> set[str]:
    page = SOURCES / room / "README.md"
    found = re.search(r"^May include: (.*)\.$", page.read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"rooms: error: {page.relative_to(ROOT)}: expected a line 'May include:'")
    return set() if found[1] == "no other room" else set(found[1].split(", "))


def circles(rooms: dict[str, set[str]]) -> Iterator[str]:
    left = dict(rooms)
    while free := [room for room, needs in left.items() if not needs & left.keys()]:
        for room in free:
            del left[room]
    if left:
        yield f"rooms that may include each other in a circle: {', '.join(sorted(left))}"


def errors() -> Iterator[str]:
    folders = {path.name for top in (SOURCES, HEADERS) for path in top.iterdir() if path.is_dir()}
    rooms = {room: allowed(room) for room in sorted(folders)}
    yield from circles(rooms)
    for room, needs in rooms.items():
        for unknown in sorted(needs - rooms.keys()):
            yield f"lib/Runtime/{room}/README.md: no room '{unknown}'"
        paths = [path for top in (SOURCES, HEADERS) for path in (top / room).glob("*.*")]
        for path in sorted(path for path in paths if path.suffix in (".h", ".cpp", ".cu")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                other = re.match(r'#include "(?:fsdp/Runtime|\.\.)/(\w+)/', line)
                if other and other[1] not in {room, *needs}:
                    where = f"{path.relative_to(ROOT)}:{number}"
                    yield f"{where}: {room} may not include what is in {other[1]}"


def main() -> int:
    found = list(errors())
    for error in found:
        print(f"rooms: error: {error}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
