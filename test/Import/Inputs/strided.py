"""Captures to the path that is given a model whose input, buffer and results are not row-major,
and one of whose parameters the loss does not use."""

import sys
from pathlib import Path

import fsdp_mlir
import torch
from torch import Tensor, nn


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.beside = nn.Linear(2, 2, bias=False)
        self.register_buffer("table", torch.arange(12.0).reshape(3, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + torch.as_strided(self.table, (4, 3), (1, 4))).sum()


torch.manual_seed(0)
fsdp_mlir.capture(Strided(), kwargs={"x": torch.ones(4, 4).t()}, path=Path(sys.argv[1]))
