"""A small GPT learns the characters of this file, in a loop like nanoGPT's.

torchrun --nproc-per-node 2 nanogpt.py CHECKPOINT [--compiled]
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from models import GPT
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

LENGTH, BATCH, MICRO_STEPS = 32, 4, 3
ITERATIONS, WARM_UP, EVAL_EVERY = 12, 3, 4
LEARNING_RATE, LEAST_LEARNING_RATE = 1e-2, 1e-3


def learning_rate(iteration: int) -> float:
    """A linear warm-up, then half a cosine."""
    if iteration < WARM_UP:
        return LEARNING_RATE * (iteration + 1) / WARM_UP
    done = (iteration - WARM_UP) / (ITERATIONS - WARM_UP)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return LEAST_LEARNING_RATE + cosine * (LEARNING_RATE - LEAST_LEARNING_RATE)


def batches(data: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random pieces, and the same one character later."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - LENGTH, (BATCH, 1), generator=generator)
        text = data[starts + torch.arange(LENGTH + 1)]
        yield text[:, :-1], text[:, 1:]


def loss_of(output: tuple[Tensor, Tensor]) -> Tensor:
    """That of a micro-step: its part of the mean."""
    return output[1] / MICRO_STEPS


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("checkpoint", type=Path)
parser.add_argument("--compiled", action="store_true", help="with fsdp_mlir")
arguments = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()

text = Path(__file__).read_text()
characters = sorted(set(text))
data = torch.tensor([characters.index(character) for character in text])
train, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]

torch.manual_seed(0)
model = GPT(len(characters), LENGTH)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
params = list(model.parameters())
groups = [
    {"params": [param for param in params if param.dim() >= 2], "weight_decay": 0.1},
    {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))

if arguments.compiled:
    import fsdp_mlir

    backward = fsdp_mlir.compile(model, loss=loss_of, optimizer=optimizer).backward
else:

    def backward(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model(tokens, targets))
        loss.backward()
        return loss


@torch.no_grad()
def estimate() -> float:
    model.eval()
    held_out_batches = batches(held_out, 100 + rank)
    losses = [model(*next(held_out_batches))[1].item() for _ in range(3)]
    model.train()
    return sum(losses) / len(losses)


torch.manual_seed(1 + rank)  # each rank drops others
training_batches = batches(train, rank)
for iteration in range(ITERATIONS):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(iteration)
    if iteration % EVAL_EVERY == 0:
        print(f"rank {rank}: held-out loss {estimate()!r}", flush=True)
    loss = sum(backward(*next(training_batches)).item() for _ in range(MICRO_STEPS))
    norm = clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    lr = optimizer.param_groups[0]["lr"]
    print(f"rank {rank}: iteration {iteration} loss {loss!r} norm {norm!r} lr {lr!r}", flush=True)
print(f"rank {rank}: held-out loss {estimate()!r}", flush=True)

torch.manual_seed(0)
model.eval()
(sampled,) = model.generate(data[None, :3], 40).tolist()
print(f"rank {rank}: text {''.join(characters[token] for token in sampled)!r}", flush=True)

whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
checkpoint = {
    "model": get_model_state_dict(model, options=whole),
    "optimizer": get_optimizer_state_dict(model, optimizer, options=whole),
    "iteration": ITERATIONS,
}
if rank == 0:
    torch.save(checkpoint, arguments.checkpoint)
dist.barrier()
dist.destroy_process_group()
