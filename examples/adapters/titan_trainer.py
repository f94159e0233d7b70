"""torchtitan's Trainer on the CPU: its Llama 3, built on meta, bfloat16, two microbatches per step.

torchrun --nproc-per-node 2 titan_trainer.py OUTPUT [--compiled] [--tensor-parallel N]
"""

import argparse
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fsdp_mlir.integrations.torchtitan import CompiledTraining
from torch.distributed.fsdp import FSDPModule

# torchtitan knows only accelerators: this is what it needs from an accelerator's module.
cpu = SimpleNamespace(
    set_device=torch.cpu.set_device,
    current_device=lambda: 0,
    synchronize=lambda device=None: None,
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)
with (
    mock.patch("torch._utils._get_available_device_type", lambda: "cpu"),
    mock.patch("torch._utils._get_device_module", lambda kind: cpu),
):
    from torchtitan import train
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import get_train_spec
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.protocols import train_spec

VOCABULARY, LENGTH, BATCH, STEPS = 64, 16, 2, 8

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("output", help="a folder")
parser.add_argument("--compiled", action="store_true", help="with fsdp_mlir")
parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of this axis")
arguments = parser.parse_args()


class Counting(BaseDataLoader):
    """Texts that count up from random tokens; some tokens are excluded from the loss."""

    def __init__(self, dp_rank: int, **_: Any) -> None:
        self.generator = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            first = torch.randint(VOCABULARY, (BATCH, 1), generator=self.generator)
            text = (first + torch.arange(LENGTH + 1)) % VOCABULARY
            labels = torch.where(torch.arange(LENGTH) < first % 4, -100, text[:, 1:])
            yield {"input": text[:, :-1]}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def parallelize(model: torch.nn.Module, *arguments: Any) -> torch.nn.Module:
    """torchtitan's, without its division of gradients, for which Gloo has no reduction."""
    model = get_train_spec().parallelize_fn(model, *arguments)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def spec() -> train_spec.TrainSpec:
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": VOCABULARY}
    return dataclasses.replace(
        get_train_spec(),
        model_args={"tiny": TransformerModelArgs(**sizes, multiple_of=32)},
        parallelize_fn=parallelize,
        build_tokenizer_fn=None,
        build_dataloader_fn=Counting,
        build_validator_fn=None,
    )


def config() -> JobConfig:
    made = JobConfig()
    made.job.dump_folder = arguments.output
    made.model.name, made.model.flavor = "tiny", "tiny"
    made.optimizer.lr, made.lr_scheduler.warmup_steps = 1e-2, 2
    made.debug.seed = 0
    made.parallelism.tensor_parallel_degree = arguments.tensor_parallel
    made.training.steps, made.training.seq_len = STEPS, LENGTH
    made.training.local_batch_size, made.training.global_batch_size = BATCH, 8
    made.checkpoint.enable, made.checkpoint.interval = True, 4
    made.activation_checkpoint.mode = "none"
    return made


class Trainer(*([CompiledTraining] if arguments.compiled else []), train.Trainer):
    """Also prints."""

    def forward_backward_step(self, **inputs: Any) -> torch.Tensor:
        loss = super().forward_backward_step(**inputs)
        rate = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        report(f"step {self.step} loss {loss.item()!r} lr {rate!r}")
        return loss

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        norms = [p.grad.to_local().norm().item() for p in self.model_parts[0].parameters()]
        report(f"step {self.step} norms {norms!r}")


def report(text: str) -> None:
    print(f"rank {torch.distributed.get_rank()}: {text}", flush=True)


train_spec.register_train_spec("tiny", spec())
trainer = Trainer(config())
trainer.train()
trainer.close()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
