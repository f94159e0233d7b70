"""From the start of a script to its first step, and a step: GPT-2 124 M with FSDP2 and compiled.

Every run is a job of new processes, in rounds of A B C A B C …: `fsdp2`, `compiled` (nothing kept)
and `cached` (with the plan that an earlier job kept). Writes out/latency.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out"
CACHE = OUT / "latency-cache"
SIDES = ("fsdp2", "compiled", "cached")
COLUMNS = {
    "imports": "imports, s",
    "model": "model and fully_shard, s",
    "compile": "compile, s",
    "first": "start to first step, s",
    "step": "step, ms",
}


def train(side: str, steps: int, sequence: int, start: float) -> None:
    """One rank of a job that began at `start`; rank 0 prints seconds, those of a step in
    milliseconds."""
    import torch
    import torch.distributed as dist
    from fsdp_mlir import compile, fully_shard
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    times = {"imports": time.time() - start}
    begin = time.time()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 50257, (1, sequence))
    batch = {"input_ids": tokens, "labels": tokens}
    times["model"] = time.time() - begin
    begin = time.time()
    step = None
    if side != "fsdp2":
        cache = CACHE if side == "cached" else None
        step = compile(model, optimizer=optimizer, example=batch, cache=cache, fallback="error")
    times["compile"] = time.time() - begin
    taken = []
    for _ in range(steps):
        begin = time.time()
        if step is not None:
            loss = step(batch)
        else:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        value = loss.item()
        taken.append(1e3 * (time.time() - begin))
        times.setdefault("first", time.time() - start)
    times |= {"step": statistics.median(taken[1:]), "loss": value}
    if dist.get_rank() == 0:
        print("times", json.dumps(times), flush=True)
    dist.barrier()
    os._exit(0)


def job(side: str, arguments: argparse.Namespace) -> dict[str, float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(arguments.ranks),
        "LOCAL_WORLD_SIZE": str(arguments.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--side", side, "--start", str(time.time())]
    command += ["--steps", str(arguments.steps), "--sequence", str(arguments.sequence)]
    ranks = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(arguments.ranks)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{side}: a rank ended with {[rank.returncode for rank in ranks]}")
    (line,) = [line for line in outputs[0].splitlines() if line.startswith("times ")]
    return dict(json.loads(line.removeprefix("times ")))


def table(samples: dict[str, list[dict[str, float]]]) -> str:
    rows = [f"| | {' | '.join(COLUMNS.values())} |", "| --- " * (len(COLUMNS) + 1) + "|"]
    for side in SIDES:
        cells = []
        for name in COLUMNS:
            values = [each[name] for each in samples[side]]
            digits = 0 if name == "step" else 2
            low, high = min(values), max(values)
            cells.append(
                f"{statistics.median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
            )
        rows.append(f"| {side} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        train(arguments.side, arguments.steps, arguments.sequence, arguments.start)
    shutil.rmtree(CACHE, ignore_errors=True)
    job("cached", arguments)  # which keeps the plan, and warms the files of all
    if not CACHE.is_dir():
        raise SystemExit("cached: expected a plan that is kept, got none")
    samples: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(arguments.rounds):
        for side in SIDES:
            samples[side].append(job(side, arguments))
            print(f"round {number + 1} {side}: {samples[side][-1]}", file=sys.stderr)
    if len({each["loss"] for rows in samples.values() for each in rows}) != 1:
        raise SystemExit("the losses differ")
    OUT.mkdir(exist_ok=True)
    record = {"machine": platform.platform(), "arguments": vars(arguments), "samples": samples}
    (OUT / "latency.json").write_text(json.dumps(record, indent=1))
    (OUT / "latency.md").write_text(table(samples) + "\n")
    print(table(samples))


if __name__ == "__main__":
    main()
