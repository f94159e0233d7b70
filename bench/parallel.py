"""A compiled step beside FSDP2's where tensor parallelism sharded the model before.

torchtitan's Llama 3 on a mesh of 2 x 2 CPU ranks of one thread each: FSDP2 over data; tensor,
sequence and loss parallel inside, by torchtitan's own `apply_tp`. Both sides are in the same
processes and take turns, step by step, on models of equal values; their losses must have equal
bits. Writes out/parallel.json, and prints a table.

    .venv/bin/python bench/parallel.py [--steps N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIZES = {
    "small": {"dim": 256, "n_layers": 4, "n_heads": 4, "vocab_size": 2048, "length": 64},
    "medium": {"dim": 512, "n_layers": 8, "n_heads": 8, "vocab_size": 8192, "length": 128},
}
WARM_UP = 3


def sides(size: dict[str, int]) -> dict[str, Callable[[], float]]:
    """A step of each side; returns its loss."""
    import fsdp_mlir
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional as F
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.infra.parallelize import apply_tp

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tp"))
    size = dict(size)
    length = size.pop("length")
    arguments = TransformerModelArgs(max_seq_len=length, **size)

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Transformer(arguments)
        with torch.no_grad():
            model.init_weights(torch.device("cpu"))
        apply_tp(model, mesh["tp"], loss_parallel=True, enable_float8_tensorwise_tp=False)
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))

    generator = torch.Generator().manual_seed(mesh["data"].get_local_rank())
    tokens = torch.randint(arguments.vocab_size, (2, length + 1), generator=generator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    model, optimizer = made()

    def fsdp2() -> float:
        loss = loss_fn(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor().item()

    ours, own = made()
    step = fsdp_mlir.compile(ours, loss=loss_fn, optimizer=own, fallback="error")
    return {"fsdp2": fsdp2, "compiled": lambda: step(inputs, labels=labels).item()}


def main_of_rank(name: str, steps: int, path: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.parallel import loss_parallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seconds: dict[str, list[float]] = {}
    with loss_parallel():
        made = sides(SIZES[name])
        for number in range(WARM_UP + steps):
            losses = set()
            for side, step in made.items():
                dist.barrier()
                begin = time.perf_counter()
                losses.add(step())
                if number >= WARM_UP:
                    seconds.setdefault(side, []).append(time.perf_counter() - begin)
            assert len(losses) == 1, losses
    if dist.get_rank() == 0:
        path.write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", choices=SIZES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out = ROOT / "out"
    if arguments.rank:
        main_of_rank(arguments.rank, arguments.steps, out / f"parallel-{arguments.rank}.json")
        return
    out.mkdir(exist_ok=True)
    report = {}
    print("| model | FSDP2, ms | compiled, ms | ratio of steps, median (quartiles) |")
    print("| --- | --- | --- | --- |")
    for name in SIZES:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", __file__]
        command += ["--rank", name, "--steps", str(arguments.steps)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        report[name] = seconds = json.loads((out / f"parallel-{name}.json").read_text())
        pairs = zip(seconds["compiled"], seconds["fsdp2"], strict=True)
        low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        theirs, ours = (1e3 * statistics.median(seconds[side]) for side in ("fsdp2", "compiled"))
        ratio = f"{middle:.2f} ({low:.2f}-{high:.2f})"
        print(f"| {name} | {theirs:.0f} | {ours:.0f} | {ratio} |", flush=True)
    (out / "parallel.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
