"""Training from files of tokens gives the bits of the same samples as safetensors."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_mlir.text import corpus, encode
from harness import ADAMW_FUSED, BIN, LLAMA, Captured, Case, Model, compile_plan, execute
from safetensors.torch import save_file

SEQ = LLAMA.seq
WORLDS = (1, 2, 3)
MASK = (1 << 64) - 1


@pytest.fixture(scope="module")
def plans(captured: Callable[[Model], Captured]) -> dict[int, Path]:
    cases = {world: Case(LLAMA, ADAMW_FUSED, world=world) for world in WORLDS}
    return {
        world: compile_plan(captured(LLAMA), case, f"tokens{world}")
        for world, case in cases.items()
    }


def text(tokens: int, begin: int = 0) -> np.ndarray:
    return encode(corpus(), LLAMA.vocab)[begin : begin + tokens].astype(np.uint16)


def write_pair(prefix: Path, tokens: np.ndarray, lengths: list[int]) -> None:
    """Megatron-LM's pair of documents of these lengths."""
    assert sum(lengths) == len(tokens)
    tokens.astype("<u2").tofile(f"{prefix}.bin")
    count = len(lengths)
    sizes = np.array(lengths, dtype=np.int64) * 2
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + np.array([1], "<u8").tobytes() + b"\x08")
        file.write(np.array([count, count + 1], "<u8").tobytes())
        file.write(np.array(lengths, "<i4").tobytes())
        file.write((np.cumsum(sizes) - sizes).astype("<i8").tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())


def mix(x: int) -> int:
    """docs/data.md, as the permutation."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def permuted(seed: int, stream: int, number: int, size: int) -> int:
    epoch, i = divmod(number, size)
    key = mix((mix((mix(seed) + stream) & MASK) + epoch) & MASK)
    a = isqrt(size - 1) + 1
    b = -(-size // a)
    while True:
        left, right = divmod(i, b)
        for k in range(0, 8, 2):
            left = (left + mix(mix((key + k) & MASK) ^ right) % a) % a
            right = (right + mix(mix((key + k + 1) & MASK) ^ left) % b) % b
        i = left * b + right
        if i < size:
            return i


def save_samples(path: Path, samples: list[np.ndarray]) -> None:
    """Of SEQ + 1 tokens each, as safetensors."""
    rows = torch.from_numpy(np.stack(samples).astype(np.int64))
    save_file({"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}, path)


def train(plan: Path, steps: int, *words: Any) -> list[dict[str, Any]]:
    metrics = plan.with_suffix(".tokens.jsonl")
    execute([BIN / "fsdp-run", plan, "--steps", steps, "--metrics", metrics, *words])
    return [json.loads(line) for line in metrics.read_text().splitlines()]


# The plan's inputs are in the order of the captured batch, of a safetensors file: by name.
INPUTS = ["--token-inputs", "tokens,targets"]


def rank_losses(lines: list[dict[str, Any]]) -> list[Any]:
    return [(line["rank_losses"], line.get("rank_eval_losses")) for line in lines]


@pytest.mark.parametrize("world", WORLDS)
def test_flat_file_in_order(plans: dict[int, Path], tmp_path: Path, world: int) -> None:
    tokens = text(20 * SEQ + 1)
    tokens.tofile(tmp_path / "t.bin")
    save_samples(
        tmp_path / "t.safetensors", [tokens[k * SEQ : k * SEQ + SEQ + 1] for k in range(20)]
    )
    steps = 12 // world + 2  # over the end
    ours = train(plans[world], steps, "--data", f"{tmp_path}/t.bin:uint16", *INPUTS)
    theirs = train(plans[world], steps, "--data", tmp_path / "t.safetensors")
    assert rank_losses(ours) == rank_losses(theirs)
    assert len({line["loss"] for line in ours}) == steps
    # The batches that are read ahead take nothing from the allocator that is counted.
    assert [line["allocator_calls"] for line in ours][3:] == [
        line["allocator_calls"] for line in theirs
    ][3:]
    assert ours[-1]["allocator_calls"] == 0


@pytest.mark.parametrize("world", [1, 2])
def test_shuffled_mixture_with_evaluations(
    plans: dict[int, Path], tmp_path: Path, world: int
) -> None:
    """Of a pair of Megatron-LM's and a flat file, 3 to 1, the last half of both held out."""
    first, second = text(31 * SEQ + 5), text(9 * SEQ, begin=50_000)
    write_pair(tmp_path / "pair", first, [10 * SEQ, 0, 5 * SEQ, 16 * SEQ + 5])
    second.tofile(tmp_path / "flat.bin")
    # Two of four documents; 4.5 samples of the flat file.
    trained = [first[: 10 * SEQ], second[: 9 * SEQ // 2]]
    held = [first[10 * SEQ :], second[9 * SEQ // 2 :]]

    def sample(tokens: np.ndarray, k: int) -> np.ndarray:
        return tokens[k * SEQ : k * SEQ + SEQ + 1]

    steps = 24 // world
    counts = [(len(tokens) - 1) // SEQ for tokens in trained]
    assert counts == [9, 4]
    samples, taken = [], [0, 0]
    for position in range(steps * world * LLAMA.batch):
        source = int(position % 4 == 2)  # behind by 1/2 there for the first time
        k = permuted(7, source, taken[source], counts[source])
        taken[source] += 1
        samples.append(sample(trained[source], k))
    save_samples(tmp_path / "train.safetensors", samples)
    evaluated = [sample(part, k) for part in held for k in range((len(part) - 1) // SEQ)]
    save_samples(tmp_path / "eval.safetensors", evaluated)

    every = ["--eval-every", steps // 2]
    mixture = [*INPUTS, "--data", f"3:{tmp_path}/pair", "--data", f"1:{tmp_path}/flat.bin:uint16"]
    ours = train(plans[world], steps, *mixture, "--shuffle-seed", 7, "--eval-split", 0.5, *every)
    theirs = train(
        plans[world],
        steps,
        *("--data", tmp_path / "train.safetensors", "--eval-data", tmp_path / "eval.safetensors"),
        *every,
    )
    assert rank_losses(ours) == rank_losses(theirs)


def test_token_out_of_range(plans: dict[int, Path], tmp_path: Path) -> None:
    """The bound is the embedding's: the captured batch does not hold every id."""
    tokens = text(40 * SEQ)
    tokens[3] = LLAMA.vocab - 1
    tokens.tofile(tmp_path / "t.bin")
    command = [BIN / "fsdp-run", plans[2], "--steps", 5, "--data", f"{tmp_path}/t.bin:uint16"]
    assert "as --token-inputs tokens,targets" in execute(command, check=False).stderr
    command += INPUTS
    execute(command)
    tokens[10 * SEQ + 3] = LLAMA.vocab
    tokens.tofile(tmp_path / "t.bin")
    done = execute(command, check=False)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(errors) == 1, done.stderr
    assert re.search(
        rf"t.bin: token {10 * SEQ + 3} is 256: expected an id in \[0, 256\), the rows of the "
        'embedding of input "tokens"',
        errors[0],
    )
    # Sample 10 is read ahead, and not taken, in a run that ends before.
    execute([*command[:3], 2, *command[4:]])


def test_file_cut_under_the_run(plans: dict[int, Path], tmp_path: Path) -> None:
    path, metrics = tmp_path / "t.bin", tmp_path / "m.jsonl"
    text(40 * SEQ).tofile(path)
    command = [BIN / "fsdp-run", plans[2], "--steps", "1000000", "--metrics", metrics]
    run = subprocess.Popen(
        [*command, *INPUTS, "--data", f"{path}:uint16"], stderr=subprocess.PIPE, text=True
    )
    try:
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert run.poll() is None
            time.sleep(0.05)
        with path.open("r+b") as file:
            file.truncate(100)
        _, err = run.communicate(timeout=120)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 1
    errors = [line for line in err.splitlines() if "error" in line]
    assert len(errors) == 1, err
    assert re.search(r"rank \d: .*t.bin: changed while the run reads it", errors[0]), err
