"""A small Llama on a mesh of two axes: FSDP2 over data, tensor and sequence parallelism inside.

torchrun --nproc-per-node 4 parallel.py CHECKPOINT [--compiled]
"""

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel_llama import LENGTH, VOCABULARY, llama, loss_fn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.utils import clip_grad_norm_

BATCH, STEPS, MAX_NORM = 4, 8, 1.0


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences that count up from random tokens."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        first = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        text = (first + torch.arange(LENGTH + 1)) % VOCABULARY
        yield text[:, :-1], text[:, 1:]


def sharded(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)  # ranks of the tensor axis take their parts of the same values
    model = llama(mesh)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def eager(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Tensor, Tensor], tuple[float, float]]:
    def step(tokens: Tensor, labels: Tensor) -> tuple[float, float]:
        loss = loss_fn(model(tokens), labels)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor().item(), norm.full_tensor().item()

    return step


def compiled(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Tensor, Tensor], tuple[float, float]]:
    import fsdp_mlir

    step = fsdp_mlir.compile(model, loss=loss_fn, optimizer=optimizer, max_norm=MAX_NORM)
    return lambda tokens, labels: (step(tokens=tokens, labels=labels).item(), step.grad_norm)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("checkpoint", help="a folder")
parser.add_argument("--compiled", action="store_true", help="with fsdp_mlir")
arguments = parser.parse_args()
dist.init_process_group("gloo")

mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
model = sharded(mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
step = (compiled if arguments.compiled else eager)(model, optimizer)
with loss_parallel():
    for number, (tokens, labels) in enumerate(batches(mesh["data"].get_local_rank())):
        loss, norm = step(tokens, labels)
        print(f"rank {dist.get_rank()}: step {number} loss {loss!r} grad_norm {norm!r}", flush=True)
state = {
    "model": get_model_state_dict(model),
    "optimizer": get_optimizer_state_dict(model, optimizer),
}
dcp.save(state, checkpoint_id=arguments.checkpoint)
# Gloo's threads must let go of dcp's tensors before Python ends.
dist.barrier()
dist.destroy_process_group()
