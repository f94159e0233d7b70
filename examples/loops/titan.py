"""A small Llama in a loop like torchtitan's: built on meta, in bfloat16, resumed midway.

torchrun --nproc-per-node 2 titan.py CHECKPOINT [--compiled]
"""

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Llama
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

VOCABULARY, LENGTH, BATCH, STEPS, WARM_UP, MAX_NORM = 128, 32, 4, 10, 2, 1.0


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences that count up from random tokens."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        first = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        text = (first + torch.arange(LENGTH + 1)) % VOCABULARY
        yield text[:, :-1], text[:, 1:]


class Trainer:
    """The model, the optimizer and the scheduler of one job."""

    def __init__(self, seed: int, compiled: bool) -> None:
        with torch.device("meta"):
            self.model = Llama(VOCABULARY, LENGTH)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in self.model.layers.values():
            fully_shard(layer, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.model.to_empty(device="cpu")
        torch.manual_seed(seed)  # on CPU each rank draws its own rows
        self.model.init_weights()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.scheduler = LambdaLR(
            self.optimizer, lambda step: min((step + 1) / WARM_UP, (STEPS - step) / STEPS)
        )
        self.step = self._compiled() if compiled else self._eager

    def _compiled(self) -> Callable[[Tensor, Tensor], tuple[float, float]]:
        import fsdp_mlir

        step = fsdp_mlir.compile(
            self.model, loss=loss_fn, optimizer=self.optimizer, max_norm=MAX_NORM
        )
        return lambda tokens, labels: (step(tokens=tokens, labels=labels).item(), step.grad_norm)

    def _eager(self, tokens: Tensor, labels: Tensor) -> tuple[float, float]:
        loss = loss_fn(self.model(tokens), labels)
        loss.backward()
        norm = clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm.full_tensor().item()

    def train(self, first: int, last: int) -> None:
        rank = dist.get_rank()
        for number, (tokens, labels) in enumerate(batches(rank)):
            if first <= number < last:
                lr = self.scheduler.get_last_lr()[0]
                loss, norm = self.step(tokens, labels)
                self.scheduler.step()
                metrics = f"loss {loss!r} grad_norm {norm!r} lr {lr!r}"
                print(f"rank {rank}: step {number} {metrics}", flush=True)
            elif number == last:
                break

    def save(self, path: str) -> None:
        dcp.save(self._state(), checkpoint_id=path)

    def load(self, path: str) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    def _state(self) -> dict:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "scheduler": self.scheduler.state_dict(),
        }


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("checkpoint", help="a folder")
parser.add_argument("--compiled", action="store_true", help="with fsdp_mlir")
arguments = parser.parse_args()
dist.init_process_group("gloo")

trainer = Trainer(seed=dist.get_rank(), compiled=arguments.compiled)
trainer.train(0, STEPS // 2)
trainer.save(f"{arguments.checkpoint}/middle")
resumed = Trainer(seed=10 + dist.get_rank(), compiled=arguments.compiled)
resumed.load(f"{arguments.checkpoint}/middle")
resumed.train(STEPS // 2, STEPS)
resumed.save(f"{arguments.checkpoint}/last")
# Gloo's threads must let go of dcp's tensors before Python ends.
dist.barrier()
dist.destroy_process_group()
