"""Trains transformers' GPT-2 by epochs, with dropout and a smaller last batch.

torchrun --nproc-per-node 2 huggingface.py CHECKPOINT [--compiled]
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY, LENGTH, SAMPLES, BATCH, EPOCHS = 64, 16, 22, 4, 3


def texts(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Sequences that count up from random tokens, in steps of one or two."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(VOCABULARY, (count, 1), generator=generator)
    stride = torch.randint(1, 3, (count, 1), generator=generator)
    tokens = (first + stride * torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": text, "labels": text} for text in tokens]


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("checkpoint", help="a folder, as for from_pretrained")
parser.add_argument("--compiled", action="store_true", help="with fsdp_mlir")
arguments = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=VOCABULARY,
    n_positions=32,
    n_embd=64,
    n_layer=2,
    n_head=4,
    resid_pdrop=0.1,
    embd_pdrop=0.1,
    attn_pdrop=0.1,
    bos_token_id=0,
    eos_token_id=0,
)
model = GPT2LMHeadModel(config)
for block in model.transformer.h:
    fully_shard(block)
fully_shard(model)

training, held_out = texts(SAMPLES, seed=0), texts(2 * BATCH, seed=1)
sampler = DistributedSampler(training, seed=2)
loader = DataLoader(training, BATCH, sampler=sampler)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
scheduler = OneCycleLR(optimizer, max_lr=1e-2, epochs=EPOCHS, steps_per_epoch=len(loader))

if arguments.compiled:
    import fsdp_mlir

    step = fsdp_mlir.compile(model, optimizer=optimizer)
else:

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


def report(kind: str, *values: object) -> None:
    print(f"rank {rank}: {kind} {' '.join(map(repr, values))}", flush=True)


@torch.no_grad()
def evaluate() -> float:
    model.eval()
    batches = DataLoader(held_out[rank::2], BATCH)
    return sum(model(**batch).loss.item() for batch in batches) / len(batches)


def generate() -> list[list[int]]:
    model.eval()
    prompt = torch.tensor([[5, 6, 7], [20, 22, 24]])
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False).tolist()


report("generated", generate())
torch.manual_seed(1 + rank)  # each rank drops different elements
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    model.train()
    for batch in loader:
        loss = step(batch)
        report("loss", len(batch["labels"]), loss.item(), scheduler.get_last_lr()[0])
        scheduler.step()
    report("held-out loss", evaluate())
report("generated", generate())

state = get_model_state_dict(
    model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
)
if rank == 0:
    model.save_pretrained(arguments.checkpoint, state_dict=state)
dist.barrier()
dist.destroy_process_group()
