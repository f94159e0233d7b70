"""torchtitan's mixture of experts (Qwen 3) on its own: with FSDP2, or compiled by fsdp_mlir.

torchrun --nproc-per-node N titan_experts.py FILE VARIANT [--compiled]: three steps; rank 0 saves
the whole state dict to FILE. The model is torchtitan's, as it is installed. VARIANT says how it
computes its experts:

  loop     one matrix product for each expert, of sizes that are read from a tensor
  grouped  grouped matrix products; the order of the tokens comes from torchtitan's loop over
           numbers read from a tensor, its reference for the Triton kernel
  tensors  grouped matrix products; the order comes from tensor operators

FSDP2 itself cannot run torchtitan's experts on a CPU: torch.histc takes no integers there, and the
default order of tokens is a Triton kernel. Both are given here, to both sides.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import fsdp_mlir
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchtitan.models.moe.kernels
import torchtitan.models.moe.utils
from fsdp_mlir import fully_shard
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import Qwen3Model

VOCABULARY, LENGTH, BATCH = 128, 32, 2


def count(x: Tensor, **bins: Any) -> Tensor:
    """torch.histc of integers, as a GPU has it."""
    return histc(x.float(), **bins).to(x.dtype)


def order_tokens(
    counts: Tensor, experts: int, ranks: int, length: int, alignment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """torchtitan's `generate_permute_indices` for the experts of one rank: the tokens of each
    expert, filled up with -1 to a multiple of `alignment`, at least one."""
    assert ranks == 1 and counts.shape == (experts,)
    sizes = ((counts.clamp_min(1) + alignment - 1) // alignment * alignment).to(torch.int32)
    ends = sizes.cumsum(0)
    place = torch.arange(length)
    expert = torch.searchsorted(ends, place, right=True).clamp_max(experts - 1)
    offset = place - (ends - sizes)[expert]
    token = (counts.cumsum(0) - counts)[expert] + offset
    return torch.where((offset >= 0) & (offset < counts[expert]), token, -1), sizes, ends


def order_tokens_by_numbers(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return permute(*args, use_cpu=True)


histc = torch.histc
torch.histc = count
permute = torchtitan.models.moe.kernels.generate_permute_indices


def build(variant: str) -> Qwen3Model:
    torch.manual_seed(0)
    experts = MoEArgs(
        num_experts=4,
        top_k=2,
        num_shared_experts=1,
        use_grouped_mm=variant != "loop",
        load_balance_coeff=1e-3,
    )
    model = Qwen3Model(
        Qwen3ModelArgs(
            dim=64,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            vocab_size=VOCABULARY,
            head_dim=16,
            hidden_dim=128,
            max_seq_len=LENGTH,
            moe_enabled=True,
            moe_inter_dim=32,
            moe_args=experts,
        )
    )
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    return model


def compute_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("variant", choices=("loop", "grouped", "tensors"))
    parser.add_argument("--compiled", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torchtitan.models.moe.utils.generate_permute_indices = (
        order_tokens if args.variant == "tensors" else order_tokens_by_numbers
    )
    model = build(args.variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if args.compiled:
        step = fsdp_mlir.compile(model, loss=compute_loss, optimizer=optimizer)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        tokens, targets = text[:, :-1], text[:, 1:]
        if args.compiled:
            loss = step(tokens=tokens, targets=targets)
        else:
            loss = compute_loss(model(tokens), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"rank {rank}: loss {loss.item()!r}", flush=True)
    for name, layer in model.layers.items():
        tokens = layer.moe.tokens_per_expert.tolist()
        print(f"rank {rank}: layer {name}: tokens of its experts {tokens}", flush=True)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(whole, args.file)
    dist.destroy_process_group()


main()
