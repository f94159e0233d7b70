"""Files that appear whole or not at all, and their hash."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from fsdp_mlir.support.errors import CaptureError

_NO_HASH = "xxh3:" + 32 * "-"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new path beside `path` to write to, renamed to it at the end: readers see old or new.

    Makes the folder. When the body raises, `path` stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name that nobody can guess and turn into a link.
    temporary = path.parent / f".{path.name}.{secrets.token_hex(12)}.tmp"
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def file_hash(path: Path) -> str:
    """`xxh3:` and the 128-bit XXH3 of the file's bytes in hexadecimal."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return f"xxh3:{digest.hexdigest()}"


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Writes the tensors as safetensors, contiguous, and returns the file's hash.

    Raises CaptureError for a dtype that the format lacks.
    """
    for name, tensor in tensors.items():
        if tensor.dtype in (torch.complex32, torch.complex128):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise CaptureError(
                f"'{name}' is of dtype {dtype}, which safetensors lacks; expected complex64"
            )
    separate = {
        # safetensors refuses tensors that share storage; parts of a larger one are copied.
        name: tensor.detach().cpu().contiguous()
        if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        else tensor.detach().cpu().clone().contiguous()
        for name, tensor in tensors.items()
    }
    with replacing(path) as temporary:
        save_file(separate, temporary, metadata={"format": "pt", "data_hash": _NO_HASH})
        temporary.chmod(0o666 & ~_umask())
        _write_data_hash(temporary)
        return file_hash(temporary)


def _write_data_hash(path: Path) -> None:
    """Puts the hash of the file's data in its metadata, so that `fsdp-run` notices if the data
    changes."""
    digest = xxhash.xxh3_128()
    with path.open("r+b") as file:
        text = file.read(int.from_bytes(file.read(8), "little"))
        while block := file.read(1 << 22):
            digest.update(block)
        header = json.loads(text)
        # In one order: safetensors writes its metadata in any.
        header["__metadata__"] = {"data_hash": f"xxh3:{digest.hexdigest()}", "format": "pt"}
        written = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(written) <= len(text), "the header keeps its length"
        file.seek(8)
        file.write(written.ljust(len(text)))


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value
