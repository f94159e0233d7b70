"""A Lightning Fabric loop in bfloat16, with TensorBoard.

torchrun --nproc-per-node 2 fabric_loop.py OUTPUT [--compiled]
"""

import argparse
import time

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from models import Transformer, compute_loss, shard, texts
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("output", help="a folder")
parser.add_argument("--compiled", action="store_true", help="with fsdp_mlir")
arguments = parser.parse_args()

strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision="bf16-mixed")
fabric.launch()
fabric.seed_everything(0)
model = fabric.setup(Transformer())
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
loader = fabric.setup_dataloaders(DataLoader(texts(44, seed=0), 4, shuffle=True))

if arguments.compiled:
    from fsdp_mlir.integrations import lightning

    backward = lightning.compile(fabric, model, optimizer, compute_loss).backward
else:

    def backward(tokens: Tensor) -> Tensor:
        loss = compute_loss(model, tokens)
        fabric.backward(loss)
        return loss.detach()


rank, number = fabric.global_rank, 0
writer = SummaryWriter(f"{arguments.output}/logs") if rank == 0 else None
for _ in range(2):
    for (tokens,) in loader:
        start = time.perf_counter()
        loss = backward(tokens)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0).full_tensor()
        lr = scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        values = {"loss": loss.item(), "grad_norm": norm.item(), "lr": lr}
        print(f"rank {rank}: step {number} {values}", flush=True)
        if writer is not None:
            for name, value in values.items():
                writer.add_scalar(f"train/{name}", value, number)
            writer.add_scalar("time/step", seconds, number)
        number += 1
if writer is not None:
    writer.close()
fabric.save(f"{arguments.output}/saved", {"model": model, "optimizer": optimizer})
fabric.barrier()
torch.distributed.destroy_process_group()
