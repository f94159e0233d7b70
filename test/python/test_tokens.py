"""`python -m fsdp_mlir.tokens`: files of token ids, of text."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from fsdp_mlir import tokens
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

WORDS = {"[UNK]": 0, "a": 1, "b": 2, "c": 3}
END = "<end>"  # id 4


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "tokenizer.json", WORDS)


def save_tokenizer(path: Path, words: dict[str, int]) -> Path:
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([AddedToken(END, special=True)])
    made.enable_truncation(2)
    made.enable_padding(length=8)
    made.save(str(path))
    return path


def make(tokenizer: Path, *words: object) -> int:
    return tokens.main(["--tokenizer", str(tokenizer), *map(str, words)])


def read_index(path: Path) -> tuple[int, list[int], list[int], list[int]]:
    """Code of the dtype, lengths, pointers, document indices."""
    text = path.read_bytes()
    magic, version, code, sequences, documents = struct.unpack_from("<9sQBQQ", text)
    assert (magic, version) == (b"MMIDIDX\0\0", 1)
    numbers = struct.unpack_from(f"<{sequences}i{sequences}q{documents}q", text, 34)
    assert len(text) == 34 + 12 * sequences + 8 * documents
    return (
        code,
        list(numbers[:sequences]),
        list(numbers[sequences : 2 * sequences]),
        list(numbers[2 * sequences :]),
    )


def test_pair(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "1.txt").write_text("a b\nc")
    (tmp_path / "2.jsonl").write_text('{"text": "c x"}\n\n{"text": ""}\n')
    table = pyarrow.table({"id": [1, 2], "text": ["b b b", "a"]})
    pyarrow.parquet.write_table(table, tmp_path / "3.parquet")
    inputs = [tmp_path / name for name in ("1.txt", "2.jsonl", "3.parquet")]
    prefix = tmp_path / "new" / "corpus.v1"
    prefix.parent.mkdir()
    assert make(tokenizer, *inputs, "--end-token", END, "-o", prefix) == 0
    out = capsys.readouterr().out
    assert out == f"14 tokens of 5 documents, uint16; fsdp-run --data {prefix}\n"
    ids = np.fromfile(f"{prefix}.bin", dtype="<u2").tolist()
    assert ids == [1, 2, 3, 4, 3, 0, 4, 4, 2, 2, 2, 4, 1, 4]
    index = read_index(Path(f"{prefix}.idx"))
    assert index == (8, [4, 3, 1, 4, 2], [0, 8, 14, 16, 24], [0, 1, 2, 3, 4, 5])
    assert sorted(path.name for path in prefix.parent.iterdir()) == [
        "corpus.v1.bin",
        "corpus.v1.idx",
    ]


def test_flat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = {**WORDS, **{f"w{i}": i for i in range(4, 70000)}}
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", words)
    (tmp_path / "1.txt").write_text("a w69999")
    output = tmp_path / "t.bin"
    assert make(tokenizer, tmp_path / "1.txt", "--format", "flat", "-o", output) == 0
    assert f"fsdp-run --data {output}:int32" in capsys.readouterr().out
    assert np.fromfile(output, dtype="<i4").tolist() == [1, 69999]


def test_many_documents(tmp_path: Path, tokenizer: Path) -> None:
    """More than are tokenized together."""
    rows = [{"body": "a " * (i % 7)} for i in range(2500)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert make(tokenizer, tmp_path / "d.jsonl", "--column", "body", "-o", tmp_path / "t") == 0
    _, lengths, _, documents = read_index(tmp_path / "t.idx")
    assert lengths == [i % 7 for i in range(2500)]
    assert documents == list(range(2501))


def test_bad_input(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*words: object) -> str:
        assert make(tokenizer, *words, "-o", tmp_path / "t") == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert not [*tmp_path.glob("t.*"), *tmp_path.glob(".*")]
        return lines[0]

    good = tmp_path / "good.txt"
    good.write_text("a")
    assert "cannot be read" in error(good, tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xff")
    assert "latin.txt: cannot be read" in error(tmp_path / "latin.txt")
    (tmp_path / "empty.txt").write_text("")
    assert "expected at least one token" in error(tmp_path / "empty.txt")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n{"text": 3}\n')
    assert "rows.jsonl:2: 'text': expected text, got int" in error(rows)
    rows.write_text("{")
    assert "rows.jsonl:1: not JSON" in error(rows)
    rows.write_text("[1]")
    assert "rows.jsonl:1: expected an object with 'text'" in error(rows)
    table = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), table)
    assert "column 'text': expected text, got NoneType" in error(table)
    assert "expected a column 'body', got ['text']" in error(table, "--column", "body")
    table.write_bytes(b"PAR1")
    assert "rows.parquet: " in error(table)
    assert "the tokenizer has no token '</s>'" in error(good, "--end-token", "</s>")
    assert make(tokenizer, good, "--format", "flat", "-o", good) == 2
    assert f"it is the input '{good}'" in capsys.readouterr().err and good.read_text() == "a"
    tokenizer.write_text("{}")
    assert "tokenizer.json: no tokenizer" in error(good)
    tokenizer.unlink()
    assert "found no file" in error(good)


def test_package_that_is_missing(
    tmp_path: Path,
    tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "good.txt").write_text("a")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert make(tokenizer, tmp_path / "good.txt", "-o", tmp_path / "t") == 2
    assert "--tokenizer needs the package 'tokenizers'" in capsys.readouterr().err
