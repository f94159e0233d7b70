"""One rank of the reference on a GPU: trains a case of gpu_cases.py with FSDP2.

Public PyTorch only. Reads the weights and batches that `fsdp-run` reads, and writes a JSON object
a step with fsdp-run's names. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say who the ranks are;
each takes the GPU LOCAL_RANK. `--device cpu` trains over Gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_cases import CASES, OPTIMIZER, PRECISION, Case
from gpu_files import build_model, load, save
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--compile", action="store_true", help="torch.compile of every layer")
    parser.add_argument("--metrics", type=Path, help="JSON lines, by rank 0")
    parser.add_argument("--save-weights", type=Path, help="full parameters at the end, by rank 0")
    return parser.parse_args()


def shard(model: Any, case: Case, args: argparse.Namespace) -> None:
    """One unit a layer, then the root."""
    mesh = init_device_mesh(args.device, (case.world,))
    given = {key: getattr(torch, name) for key, name in PRECISION[case.precision].items()}
    policy = MixedPrecisionPolicy(**given)
    for layer in model.layers:
        if args.compile:
            layer.compile(fullgraph=True)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def load_weights(model: nn.Module, path: Path) -> None:
    weights = load(path)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(weights[name])


def take_batch(data: dict[str, Tensor], first: int, batch: int) -> dict[str, Tensor]:
    indices = torch.arange(first, first + batch)
    return {name: samples[indices % samples.shape[0]] for name, samples in data.items()}


def peaks(device: str) -> dict[str, int]:
    if device == "cpu":
        return {}
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def train(args: argparse.Namespace, case: Case, rank: int) -> list[dict[str, Any]]:
    model = build_model(case)
    load_weights(model, args.weights)
    model.to(args.device)
    shard(model, case, args)
    settings = {key: value for key, value in OPTIMIZER.items() if key != "name"}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    if args.device == "cuda":
        # What loading took is not the step's.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    data = load(args.data)
    torch.manual_seed(0)  # fsdp-run's
    records = []
    for step in range(args.steps):
        batch = take_batch(data, (step * case.world + rank) * case.batch, case.batch)
        start = time.perf_counter()
        batch = {name: x.to(args.device) for name, x in batch.items()}
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        host = time.perf_counter() - start
        value = loss.item()
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        records.append(
            {
                "step": step + 1,
                "loss": value,
                "step_ms": seconds * 1e3,
                "host_ms": host * 1e3,
                **peaks(args.device),
            }
        )
    if args.save_weights:
        full = {name: x.full_tensor().cpu() for name, x in model.named_parameters()}
        if rank == 0:
            save(args.save_weights, full)
    return records


def main() -> None:
    args = parse_args()
    case = CASES[args.case]
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    records = train(args, case, dist.get_rank())
    gathered: list[Any] = [None] * case.world
    dist.all_gather_object(gathered, records)
    if args.metrics and int(os.environ["RANK"]) == 0:
        with args.metrics.open("w") as file:
            for step in zip(*gathered, strict=True):
                losses = [float(f"{record['loss']:.9g}") for record in step]
                file.write(json.dumps({**step[0], "rank_losses": losses}) + "\n")
    if args.device == "cpu":
        # Gloo's threads now and then abort at the end.
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
