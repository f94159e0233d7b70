"""Optimizers whose state is not in the form of the parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor


class _Custom(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, self.state[param], group["lr"])

    def update(self, param: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError


class Rows(_Custom):
    """Keeps a number for each row, as a DTensor."""

    def update(self, param: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        squares = param.grad.pow(2)
        squares = squares.mean(1, keepdim=True) if param.dim() > 1 else squares
        state["row"] = state["row"] + squares if state else squares
        param.sub_(lr * param.grad / (state["row"].sqrt() + 1e-3))


class Parts(_Custom):
    """Keeps a plain tensor of this rank's part, and a list."""

    def update(self, param: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        part, grad = param.to_local(), param.grad.to_local()
        state["momentum"] = state["momentum"] * 0.9 + grad if state else grad.clone()
        state["history"] = [*state.get("history", []), len(state)][-3:]
        part.sub_(lr * state["momentum"])


class Wholes(_Custom):
    """Keeps whole tensors, the same on each rank."""

    def update(self, param: nn.Parameter, state: dict[str, Any], lr: float) -> None:
        grad = param.grad.full_tensor()
        assert type(state.get("momentum", grad)) is Tensor
        state["momentum"] = state["momentum"] * 0.9 + grad if state else grad.clone()
        mesh, placements = param.device_mesh, param.placements
        param.sub_(
            distribute_tensor(state["momentum"], mesh, placements, src_data_rank=None), alpha=lr
        )
