"""Real text that every machine has: the topics of Python's own `pydoc_data`, as token batches.

    python -m fsdp_mlir.text --seq 256 --samples 64 --vocab 256 -o batches.safetensors

Up to vocabulary 256 a token is a byte (modulo the vocabulary). Above, a token is a word, a run of
spaces or one other character, and its id the 8-byte BLAKE2b of its bytes modulo the vocabulary: the
ids spread over the whole vocabulary and are the same on every machine; two words may share one.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

from fsdp_mlir.support.errors import CaptureError
from fsdp_mlir.support.files import check_output, save_tensors

_MOST_TOKENS = 1 << 27  # of a file: 1 GiB of inputs, and as much of targets
_MOST_IDS = 1 << 24  # more than any vocabulary has
_WORDS = re.compile(rb"\w+|\s+|[^\w\s]")


def corpus() -> bytes:
    """The text of all topics, in the order of their names."""
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def encode(text: bytes, vocab: int) -> np.ndarray:
    """The token ids of `text`, int64 [tokens], each in [0, vocab)."""
    if vocab <= 256:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64) % vocab
    ids: dict[bytes, int] = {}
    tokens = _WORDS.findall(text)
    for word in set(tokens):
        digest = hashlib.blake2b(word, digest_size=8).digest()
        ids[word] = int.from_bytes(digest, "little") % vocab
    return np.array([ids[word] for word in tokens], dtype=np.int64)


def batches(seq: int, samples: int, vocab: int, shift: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 [samples, seq]: consecutive windows of the text, from its start.

    Targets are the inputs `shift` tokens later. The text starts again where it ends.
    """
    tokens = encode(corpus(), vocab)
    at = np.arange(samples)[:, None] * seq + np.arange(seq)[None, :]
    inputs, targets = tokens[at % len(tokens)], tokens[(at + shift) % len(tokens)]
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the batches as safetensors; exit status 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_mlir.text",
        description="Write token batches of the text of Python's pydoc topics.",
    )
    parser.add_argument("--seq", type=int, default=256, help="tokens of a sample [%(default)s]")
    parser.add_argument("--samples", type=int, default=64, help="[%(default)s]")
    parser.add_argument("--vocab", type=int, default=256, help="[%(default)s]")
    parser.add_argument(
        "--names",
        default="tokens,targets",
        metavar="INPUTS,TARGETS",
        help="names of the tensors, those of the graph's inputs [%(default)s]",
    )
    parser.add_argument(
        "--shift",
        type=int,
        default=1,
        help="how many tokens later the targets are; 0 if the model shifts them [%(default)s]",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(argv)
    names = options.names.split(",")
    if len(names) != 2 or not all(names) or names[0] == names[1]:
        parser.error(f"--names: expected two names, got '{options.names}'")
    bounds = {
        "seq": (1, _MOST_TOKENS),
        "samples": (1, _MOST_TOKENS // max(options.seq, 1)),
        "vocab": (1, _MOST_IDS),
        "shift": (0, options.seq),
    }
    for name, (least, most) in bounds.items():
        if not least <= (got := getattr(options, name)) <= most:
            parser.error(f"--{name}: expected at least {least} and at most {most}, got {got}")
    try:
        check_output(options.output)
        tensors = batches(options.seq, options.samples, options.vocab, options.shift)
        save_tensors(options.output, dict(zip(names, tensors, strict=True)))
    except (CaptureError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: {options.samples} samples of {options.seq} tokens, {names}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
