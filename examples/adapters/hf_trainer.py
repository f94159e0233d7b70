"""transformers' Trainer: GPT-2 with dropout, two microbatches per update, resumed midway.

torchrun --nproc-per-node 2 hf_trainer.py OUTPUT [--compiled]
"""

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
import transformers
from fsdp_mlir.integrations.transformers import CompiledTraining, FSDP2OnCPU
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

VOCABULARY, LENGTH = 64, 16


def texts(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Sequences that count up from random tokens; the first tokens of some have no label."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(VOCABULARY, (count, 1), generator=generator)
    tokens = (first + torch.arange(LENGTH)) % VOCABULARY
    labels = torch.where(torch.arange(LENGTH) < first % 4, -100, tokens)
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]


def make_model() -> nn.Module:
    set_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("output", help="a folder")
parser.add_argument("--compiled", action="store_true", help="with fsdp_mlir")
arguments = parser.parse_args()


class Trainer(CompiledTraining if arguments.compiled else FSDP2OnCPU, transformers.Trainer):
    pass


class OwnLoss(Trainer):
    """Adds a penalty, weighted by an attribute of its own."""

    penalty = 0.0

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **options: Any
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        loss = loss + self.penalty * outputs["logits"].float().square().mean()
        return (loss, outputs) if return_outputs else loss


def train(kind: type[transformers.Trainer], folder: str, resume: str | None, **options: Any) -> Any:
    settings = TrainingArguments(
        f"{arguments.output}/{folder}",
        use_cpu=True,
        fsdp=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["GPT2Block"]},
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        logging_steps=1,
        eval_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = kind(
        model=make_model(),
        args=settings,
        train_dataset=texts(44, seed=0),
        eval_dataset=texts(8, seed=1),
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    timed = ("runtime", "per_second")
    for entry in trainer.state.log_history:
        values = {key: x for key, x in entry.items() if not any(word in key for word in timed)}
        print(f"\nrank {dist.get_rank()}: {folder} {json.dumps(values)}", flush=True)
    return trainer


# An epoch has six batches per rank: updates of four and two.
accumulated = {"gradient_accumulation_steps": 4, "num_train_epochs": 2}
train(Trainer, "whole", None, save_strategy="epoch", **accumulated)
middle = f"{arguments.output}/whole/checkpoint-2"
train(Trainer, "resumed", middle, save_strategy="no", **accumulated)

OwnLoss.penalty = 0.01
others = {"bf16": True, "label_smoothing_factor": 0.1, "max_grad_norm": 0.5, "optim": "sgd"}
train(OwnLoss, "own_loss", None, save_strategy="no", num_train_epochs=1, **others)
dist.barrier()
dist.destroy_process_group()
