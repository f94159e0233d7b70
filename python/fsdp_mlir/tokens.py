"""Makes files of token ids from text, for `fsdp-run --data`.

    python -m fsdp_mlir.tokens --tokenizer tokenizer.json --end-token '<|endoftext|>' \\
        -o corpus shard-*.parquet

Reads Parquet and JSON lines (a document a row), and other files as UTF-8 text (a document a file),
in the order in which they are named. Writes Megatron-LM's pair, `corpus.bin` and `corpus.idx`,
which keeps where documents end (`--data corpus`), or with `--format flat` only the ids, to the
named file (`--data corpus.bin:uint16`). Files appear whole or not at all.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fsdp_mlir.support.files import check_output, replacing

# Megatron-LM's codes of dtypes, core/datasets/indexed_dataset.py.
_CODES = {"uint16": 8, "int32": 4}
_BATCH = 1000  # documents that are tokenized together


class TokensError(ValueError):
    """The input cannot be made into a file of tokens. The message is one line."""


@dataclass
class Written:
    """What was written."""

    documents: int
    tokens: int
    dtype: str


def _package(name: str, why: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise TokensError(f"{why} needs the package '{package}': {error}") from error


def documents(path: Path, column: str) -> Iterator[str]:
    """The documents of a file, whose type follows from its suffix; `column` holds the text of a
    row."""
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path, column)
        elif path.suffix in (".jsonl", ".ndjson"):
            yield from _json_lines(path, column)
        else:
            yield path.read_bytes().decode("utf-8")  # line ends as they are
    except (OSError, UnicodeDecodeError) as error:
        raise TokensError(f"{path}: cannot be read: {error}") from error


def _parquet(path: Path, column: str) -> Iterator[str]:
    parquet = _package("pyarrow.parquet", "reading Parquet")
    arrow = _package("pyarrow", "reading Parquet")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise TokensError(f"{path}: expected a column '{column}', got {names}")
            for batch in file.iter_batches(columns=[column], batch_size=_BATCH):
                for text in batch.column(0).to_pylist():
                    yield _text(text, f"{path}: column '{column}'")
    except arrow.ArrowException as error:
        raise TokensError(f"{path}: {' '.join(str(error).split())}") from error


def _json_lines(path: Path, column: str) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise TokensError(f"{where}: not JSON: {error}") from error
            if not isinstance(row, dict) or column not in row:
                raise TokensError(f"{where}: expected an object with '{column}'")
            yield _text(row[column], f"{where}: '{column}'")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise TokensError(f"{where}: expected text, got {type(value).__name__}")
    return value


def load_tokenizer(path: Path) -> Any:
    """A `tokenizers.Tokenizer` of a tokenizer.json, which neither truncates nor pads."""
    tokenizers = _package("tokenizers", "--tokenizer")
    if not path.is_file():
        raise TokensError(f"{path}: expected a tokenizer.json, found no file")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises this class itself
        raise TokensError(f"{path}: no tokenizer: {' '.join(str(error).split())}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def write(
    texts: Iterable[str],
    tokenizer: Any,
    output: Path,
    *,
    flat: bool = False,
    end_token: str | None = None,
) -> Written:
    """Tokenizes the documents to `output`: a prefix, or with `flat` a file.

    Ids are uint16 if all of the tokenizer's fit, else int32. No special tokens are added except
    `end_token` after each document, which the tokenizer must have.
    """
    end: list[int] = []
    if end_token is not None:
        found = tokenizer.token_to_id(end_token)
        if found is None:
            raise TokensError(f"--end-token: the tokenizer has no token '{end_token}'")
        end = [found]
    vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    dtype = "uint16" if vocabulary <= 1 << 16 else "int32"
    with ExitStack() as stack:
        if flat:
            data = stack.enter_context(stack.enter_context(replacing(output)).open("wb"))
            lengths = _write_ids(texts, tokenizer, end, dtype, data)
            _require_tokens(lengths)
        else:
            # The index appears last, so that there is never a pair of different versions.
            index_path, data_path = _beside(output, ".idx"), _beside(output, ".bin")
            index = stack.enter_context(replacing(index_path))
            data = stack.enter_context(stack.enter_context(replacing(data_path)).open("wb"))
            lengths = _write_ids(texts, tokenizer, end, dtype, data)
            _require_tokens(lengths)
            index.write_bytes(_index(np.asarray(lengths, dtype=np.int32), dtype))
            index_path.unlink(missing_ok=True)
    return Written(len(lengths), sum(lengths), dtype)


def _beside(prefix: Path, suffix: str) -> Path:
    return prefix.parent / (prefix.name + suffix)


def _require_tokens(lengths: Sequence[int]) -> None:
    if not any(lengths):
        raise TokensError("expected at least one token, got none")


def _write_ids(
    texts: Iterable[str], tokenizer: Any, end: list[int], dtype: str, file: BinaryIO
) -> array[int]:
    """Writes the ids, little-endian, and returns how many each document has."""
    lengths = array("q")
    remaining = iter(texts)
    while batch := list(islice(remaining, _BATCH)):
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            ids = np.array(encoding.ids + end, dtype=np.int64)
            if len(ids) > np.iinfo(np.int32).max:
                raise TokensError(
                    f"document {len(lengths)}: expected at most {np.iinfo(np.int32).max} tokens"
                )
            file.write(ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
            lengths.append(len(ids))
    return lengths


def _index(lengths: np.ndarray, dtype: str) -> bytes:
    """Megatron-LM's index of documents of one sequence each."""
    count = len(lengths)
    sizes = lengths.astype(np.int64) * np.dtype(dtype).itemsize
    head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([_CODES[dtype]])
    head += count.to_bytes(8, "little") + (count + 1).to_bytes(8, "little")
    pointers = np.cumsum(sizes) - sizes
    arrays = lengths.astype("<i4"), pointers.astype("<i8"), np.arange(count + 1, dtype="<i8")
    return head + b"".join(values.tobytes() for values in arrays)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes a file of tokens; exit status 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_mlir.tokens",
        description="Make files of token ids from text, for fsdp-run --data.",
    )
    parser.add_argument("inputs", nargs="+", type=Path, metavar="FILE")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, metavar="FILE", help="a tokenizer.json"
    )
    parser.add_argument(
        "--column",
        default="text",
        help="where rows of Parquet and JSON have the text [%(default)s]",
    )
    parser.add_argument(
        "--end-token", metavar="TOKEN", help="a token of the tokenizer to end each document with"
    )
    parser.add_argument(
        "--format",
        choices=("megatron", "flat"),
        default="megatron",
        help="PREFIX.bin and PREFIX.idx, which keeps documents, or only the ids [%(default)s]",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="PREFIX")
    options = parser.parse_args(argv)
    flat = options.format == "flat"
    suffixes = ("",) if flat else (".idx", ".bin")
    try:
        for suffix in suffixes:
            check_output(_beside(options.output, suffix), (*options.inputs, options.tokenizer))
        texts = (text for path in options.inputs for text in documents(path, options.column))
        tokenizer = load_tokenizer(options.tokenizer)
        written = write(texts, tokenizer, options.output, flat=flat, end_token=options.end_token)
    except (TokensError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    source = f"{options.output}:{written.dtype}" if flat else str(options.output)
    print(
        f"{written.tokens} tokens of {written.documents} documents, {written.dtype}; "
        f"fsdp-run --data {source}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
