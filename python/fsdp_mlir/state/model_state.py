"""The state dict of a sharded model: as DTensors or as whole tensors, and loading either back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_mlir.modules import sharding

_SHOWN = 400  # characters of an error of PyTorch's


class ModelState:
    """Reads and writes the state dict of `model`, whose own hooks decide about its keys and
    values."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._model = model
        self._rank = rank

    def state_dict(self) -> dict[str, Any]:
        sharding.reshard(sharding.groups(self._model))
        return self._model.state_dict()

    def full_state_dict(self) -> dict[str, Any]:
        full = {}
        for key, value in self.state_dict().items():
            if isinstance(value, DTensor):
                value = value.full_tensor()
            if self._rank == 0:
                full[key] = value.detach().clone() if isinstance(value, Tensor) else value
        return full

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keys and shapes are checked before anything is written."""
        own = self.state_dict()
        for name, keys in (
            ("missing", set(own) - set(state)),
            ("unexpected", set(state) - set(own)),
        ):
            if keys:
                listed = ", ".join(f"'{key}'" for key in sorted(keys)[:4])
                raise ValueError(f"{len(keys)} {name} keys in the state dict: {listed}")
        for key, value in state.items():
            want = getattr(own[key], "shape", None)
            if isinstance(value, Tensor) and want is not None and value.shape != want:
                raise ValueError(f"'{key}': expected shape {list(want)}, got {list(value.shape)}")
        given = {key: like(own[key], value) for key, value in state.items()}
        if hasattr(state, "_metadata"):
            given = type(own)(given)
            given._metadata = state._metadata  # type: ignore[attr-defined]
        try:
            self._model.load_state_dict(given)
        except RuntimeError as error:
            text = " ".join(str(error).split())
            raise ValueError(text if len(text) <= _SHOWN else text[:_SHOWN] + "…") from error


def like(own: Any, given: Any) -> Any:
    """A value of a state dict in the form that `own` has: a part of a whole tensor, or plain."""
    if not isinstance(given, Tensor) or not isinstance(own, Tensor):
        return given
    given = given.detach()
    if not isinstance(own, DTensor):
        return given.full_tensor() if isinstance(given, DTensor) else given
    if isinstance(given, DTensor):
        if given.device_mesh == own.device_mesh and given.placements == own.placements:
            return given
        given = given.full_tensor()
    mesh, placements = own.device_mesh, own.placements
    if any(type(x) not in (Shard, Replicate) for x in placements):
        # For a hook to see, or for DTensor to refuse.
        return DTensor.from_local(given, mesh, [Replicate()] * mesh.ndim, run_check=False)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts = given.chunk(mesh.size(axis), placement.dim)
            rank = mesh.get_local_rank(axis)
            given = parts[rank] if rank < len(parts) else given.narrow(placement.dim, 0, 0)
    return DTensor.from_local(
        given, mesh, placements, run_check=False, shape=own.shape, stride=own.stride()
    )


def clone_like(own: Tensor, given: Tensor) -> Tensor:
    """A copy of `given`, a part or a whole, in the form of `own` and the dtype of `given`."""
    return torch.Tensor.clone(like(own, given))
