"""Checks of data that ATen makes by itself end a compiled step as they end FSDP2's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsdp_mlir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Program = Callable[[Tensor, Tensor], Tensor]


def square(h: Tensor, scale: Tensor) -> Tensor:
    """A symmetric matrix, which is singular for a scale of zero, and not positive for one below."""
    return (h.t() @ h + torch.eye(3)) * scale


PROGRAMS: dict[str, Program] = {
    "cholesky": lambda h, k: torch.linalg.cholesky(square(h, k)).sum(),
    "inv": lambda h, k: torch.linalg.inv(square(h, k)).sum(),
    "inverse": lambda h, k: square(h, k).inverse().sum(),
    "solve": lambda h, k: torch.linalg.solve(square(h, k), h.t()).sum(),
    "lu_factor": lambda h, k: torch.linalg.lu_factor(square(h, k))[0].sum(),
    "matrix_power": lambda h, k: torch.linalg.matrix_power(square(h, k), -1).sum(),
    "batches": lambda h, k: torch.linalg.inv(torch.stack([square(h, k), square(h, k + 1)])).sum(),
    "one_hot": lambda h, k: (F.one_hot(torch.arange(3) + (k <= 0).long(), 3) * h[:3]).sum(),
    "one_hot below": lambda h, k: (F.one_hot(torch.arange(3) - (k <= 0).long(), 3) * h[:3]).sum(),
}


class Net(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.program = program

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.program(self.linear(x), scale)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_error_of_data(name: str) -> None:
    x = torch.linspace(-1, 1, 18).reshape(6, 3)
    good, bad = torch.tensor(1.5), torch.tensor(-1.0 if name == "cholesky" else 0.0)

    def made() -> tuple[nn.Module, Any]:
        model = fsdp_mlir.fully_shard(Net(PROGRAMS[name]))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, _ = made()
    want = model(x, good)
    with pytest.raises(RuntimeError):
        model(x, bad)
    model, optimizer = made()
    step = fsdp_mlir.compile(model, optimizer=optimizer, fallback="error")
    assert torch.equal(step(x, good), want.detach())
    before = [param.full_tensor().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"test_data_checks\.py:\d+"):
        step(x, bad)
    after = [param.full_tensor() for param in model.parameters()]
    assert all(map(torch.equal, before, after))
