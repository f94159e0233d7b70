"""Small stand-ins for large results: digests of files and of their tensors, and what of two sides'
results differs. The standard library alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

CHUNK = 1 << 22


def of_files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def of_tensors(path: Path) -> dict[str, str]:
    """Of each tensor of a safetensors file: dtype, shape and bytes."""
    result = {}
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            digest = hashlib.sha256(f"{entry['dtype']} {entry['shape']} ".encode())
            begin, end = entry["data_offsets"]
            file.seek(8 + size + begin)
            left = end - begin
            while left:
                chunk = file.read(min(left, CHUNK))
                if not chunk:
                    raise ValueError(f'{path.name}: expected all of "{name}", got a part')
                digest.update(chunk)
                left -= len(chunk)
            result[name] = digest.hexdigest()
    return result


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """Of final parameters; ours may have more, buffers."""
    for name, want in theirs.items():
        if name not in ours:
            return f'expected the final parameter "{name}", got none'
        if ours[name] != want:
            return f'the final parameter "{name}" differs'
    return None
