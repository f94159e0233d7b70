"""The same model under FSDP2 and compiled, trained side by side in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsdp_mlir
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Twins:
    """`optimizer`: a class and its arguments, or what makes one of a model."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        batch: dict[str, Tensor],
        optimizer: Any,
        **options: Any,
    ) -> None:
        self.batch = batch
        self.loss = options.get("loss")
        self.ours = fsdp_mlir.fully_shard(make())
        self.theirs = torch.distributed.fsdp.fully_shard(make())
        self.optimizers = [
            optimizer[0](model.parameters(), **optimizer[1])
            if isinstance(optimizer, tuple)
            else optimizer(model)
            for model in (self.ours, self.theirs)
        ]
        options = {"example": batch, **options}
        self.step = fsdp_mlir.compile(self.ours, optimizer=self.optimizers[0], **options)

    def change(self, change: Callable[[Any], Any]) -> None:
        for model in (self.ours, self.theirs):
            model.reshard()  # FSDP2 drops what is done to unsharded parameters
            change(model)

    def change_optimizer(self, change: Callable[[Any], Any]) -> list[Any]:
        return [change(optimizer) for optimizer in self.optimizers]

    def assert_equal_steps(self, count: int = 2) -> None:
        for number in range(count):
            torch.manual_seed(number)
            got = self.step(self.batch)
            torch.manual_seed(number)
            output = self.theirs(**self.batch)
            want = self.loss(output) if self.loss else output
            want.backward()
            self.optimizers[1].step()
            self.optimizers[1].zero_grad()
            assert torch.equal(got, want.detach())
        self.assert_equal_state()

    def assert_equal_state(self) -> None:
        got, want = whole(self.ours), whole(self.theirs)
        assert list(got) == list(want)
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), name
        ours, theirs = (optimizer.state_dict()["state"] for optimizer in self.optimizers)
        assert list(ours) == list(theirs)
        for index, state in theirs.items():
            assert list(ours[index]) == list(state)
            for key, value in state.items():
                assert type(ours[index][key]) is type(value)
                assert torch.equal(full(ours[index][key]), full(value)), (index, key)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(tensor) for name, tensor in model.state_dict().items()}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
