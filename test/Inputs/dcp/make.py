"""Writes the checkpoint beside it: torchrun --nproc-per-node 2 test/Inputs/dcp/make.py"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main() -> None:
    here = Path(sys.argv[1] if sys.argv[1:] else Path(__file__).parent / "two-ranks")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)])
    row = distribute_tensor(torch.arange(3, dtype=torch.bfloat16).view(1, 3), mesh, [Shard(0)])
    state = {
        "model": {"weight": weight, "row": row},
        "optimizer": {"state.weight.step": torch.tensor(2.0)},
        "lr_scheduler": {"last_epoch": 2},
        "options": {"betas": (0.9, 0.999), "names": ["a", {"b": None}], "raw": b"\x00\xff"},
        "turned": torch.arange(6).to(torch.uint16).view(2, 3).t(),
    }
    dcp.save(state, checkpoint_id=str(here.relative_to(Path.cwd())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
