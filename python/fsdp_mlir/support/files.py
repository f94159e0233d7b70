"""Files that are read in bounds, that appear whole or not at all, and their hash.

What cannot be read or written is an OSError of one line, with the words of lib/Support/Files.cpp.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fsdp_mlir.support.errors import CaptureError

_NO_HASH = "xxh3:" + 32 * "-"


_PIPE_WAIT_SECONDS = 5


def read_text(path: Path, most: int) -> str:
    """The text of a file, UTF-8, of at most `most` bytes.

    OSError for more, and for a pipe that nobody has opened for writing after a while.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # opening a pipe would wait for a writer

    with open(path, "rb", opener=opener) as file:
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            waiting = select.poll()
            waiting.register(file, select.POLLIN)
            if not waiting.poll(1000 * _PIPE_WAIT_SECONDS):
                raise OSError(errno.ENXIO, "a pipe that nobody writes to", str(path))
        os.set_blocking(file.fileno(), True)
        text = file.read(most + 1)
    if len(text) > most:
        raise OSError(errno.EFBIG, f"expected at most {most} bytes, got more", str(path))
    return text.decode()


def check_output(path: Path, inputs: Iterable[Path] = ()) -> None:
    """OSError unless `path` can be written to: a new name in a folder that is there, or a regular
    file, which is none of `inputs`."""
    if not path.parent.is_dir():
        raise OSError(f"{path}: cannot be written: no folder '{path.parent}'")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        got = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise OSError(f"{path}: cannot be written: expected a regular file, got {got}")
    for read in inputs:
        if read.exists() and path.samefile(read):
            raise OSError(f"{path}: cannot be written: it is the input '{read}'")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new path beside `path` to write to, renamed to it at the end: readers see old or new.

    When the body raises, `path` stays as it was; OSError as check_output() and for what cannot be
    written. A link stays one, its file is replaced.
    """
    check_output(path)
    target = path.resolve() if path.exists() else path
    # A name that nobody can guess and turn into a link.
    temporary = target.parent / f".{target.name}.{secrets.token_hex(12)}.tmp"
    try:
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        if error.errno is None:
            raise  # it says what it is about
        raise OSError(f"{path}: cannot be written: {os.strerror(error.errno)}") from error
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
        try:
            save_file(separate, temporary, metadata={"format": "pt", "data_hash": _NO_HASH})
        except SafetensorError as error:
            raise OSError(f"{path}: cannot be written: {error}") from error
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
