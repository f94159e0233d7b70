"""Trains with FSDP2: torchrun --nproc-per-node 2 train_fsdp2.py CHECKPOINT"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model import Transformer, batches, loss_fn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = Transformer()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)

for tokens, targets in batches(rank):
    loss = loss_fn(model(tokens), targets)
    loss.backward()
    clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    print(f"rank {rank}: loss {loss.item()!r}")

dcp.save(model.state_dict(), checkpoint_id=sys.argv[1])
# Gloo's threads must let go of dcp's tensors before Python ends.
dist.barrier()
dist.destroy_process_group()
