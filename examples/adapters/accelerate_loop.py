"""An accelerate loop: a transformers Llama in bfloat16, with gradients of two batches per update.

torchrun --nproc-per-node 2 accelerate_loop.py OUTPUT [--compiled]
"""

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    set_seed,
)
from fsdp_mlir.integrations import accelerate as fsdp_mlir_accelerate
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, BATCH, EPOCHS = 64, 16, 4, 2

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("output", help="a folder")
parser.add_argument("--compiled", action="store_true", help="with fsdp_mlir")
arguments = parser.parse_args()

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
)
accelerator = Accelerator(
    cpu=True,
    mixed_precision="bf16",
    fsdp_plugin=plugin,
    gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3, sync_each_batch=True),
)
fsdp_mlir_accelerate.fsdp2_on_cpu(accelerator, plugin)

set_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
)
first = torch.randint(VOCABULARY, (44, 1), generator=torch.Generator().manual_seed(0))
tokens = (first + torch.arange(LENGTH)) % VOCABULARY
loader = DataLoader([{"input_ids": x, "labels": x} for x in tokens], BATCH, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)


def compute_loss(model: nn.Module, **batch: Any) -> Tensor:
    output = model(**batch)
    return output.loss + 1e-4 * output.logits.float().square().mean()


if arguments.compiled:
    step = fsdp_mlir_accelerate.compile(accelerator, model, optimizer, compute_loss)
    backward = step.backward
else:

    def backward(batch: Any) -> Tensor:
        loss = compute_loss(model, **batch)
        accelerator.backward(loss)
        return loss.detach()


rank = accelerator.process_index
for epoch in range(EPOCHS):
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = backward(batch)
            norm = None
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0).item()
            lr = scheduler.get_last_lr()[0]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        print(f"rank {rank}: loss {loss.item()!r} norm {norm!r} lr {lr!r}", flush=True)
    model.eval()
    with torch.no_grad():
        held_out = accelerator.gather(compute_loss(model, **batch)).mean().item()
    print(f"rank {rank}: epoch {epoch} held-out loss {held_out!r}", flush=True)
    accelerator.save_state(f"{arguments.output}/{epoch}")

state = accelerator.get_state_dict(model)
accelerator.unwrap_model(model).save_pretrained(
    arguments.output, state_dict=state, is_main_process=accelerator.is_main_process
)
accelerator.wait_for_everyone()
accelerator.end_training()
