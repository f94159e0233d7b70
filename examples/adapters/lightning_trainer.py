"""Lightning's Trainer with its ModelParallelStrategy, which shards with FSDP2.

torchrun --nproc-per-node 2 lightning_trainer.py OUTPUT [--compiled]
"""

import argparse
from typing import Any

import pytorch_lightning
import torch
from fsdp_mlir.integrations.lightning import CompiledTraining
from models import Transformer, compute_loss, shard, texts
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("output", help="a folder")
parser.add_argument("--compiled", action="store_true", help="with fsdp_mlir")
arguments = parser.parse_args()


class Module(CompiledTraining, pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer()

    def configure_model(self) -> None:
        shard(self.model, self.device_mesh)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def training_step(self, batch: Any, number: int) -> Tensor:
        if arguments.compiled:
            loss = self.compiled(self.model, compute_loss, *batch)
        else:
            loss = compute_loss(self.model, *batch)
        self.log("loss", loss)
        self.report("loss", loss.item(), self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])
        self.report("norm", norms.full_tensor().item())

    def validation_step(self, batch: Any, number: int) -> None:
        self.report("held-out loss", compute_loss(self.model, *batch).item())

    def report(self, kind: str, *values: float) -> None:
        print(f"rank {self.global_rank}: {kind} {' '.join(map(repr, values))}", flush=True)


pytorch_lightning.seed_everything(0)
trainer = pytorch_lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    max_epochs=2,
    gradient_clip_val=1.0,
    num_sanity_val_steps=0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    default_root_dir=arguments.output,
)
module = Module()
loaders = [DataLoader(texts(44, 0), 4, shuffle=True), DataLoader(texts(16, 1), 4)]
trainer.fit(module, *loaders)
trainer.save_checkpoint(f"{arguments.output}/saved")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
