"""Trains with fsdp_mlir: torchrun --nproc-per-node 2 train_fsdp_mlir.py CHECKPOINT"""

import sys

import fsdp_mlir
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_mlir import fully_shard
from model import Transformer, batches, loss_fn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = Transformer()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)

step = fsdp_mlir.compile(model, loss=loss_fn, optimizer=optimizer, max_norm=1.0)
for tokens, targets in batches(rank):
    loss = step(tokens=tokens, targets=targets)
    scheduler.step()
    print(f"rank {rank}: loss {loss.item()!r}")

dcp.save(model.state_dict(), checkpoint_id=sys.argv[1])
# Gloo's threads must let go of dcp's tensors before Python ends.
dist.barrier()
dist.destroy_process_group()
