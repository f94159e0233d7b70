"""The state dict of a step: what the model's own state_dict makes of the tensors that are trained.

The session's tensors take the places of the model's while its state_dict or load_state_dict runs.
So its hooks and overridden methods see DTensors, as with FSDP2, and names are those they give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

# Of a parameter's index and a tensor of its shard's shape: the tensor as this rank's part.
Sharded = Callable[[int, Tensor], Tensor]

_SHOWN = 400  # characters of an error of PyTorch's

# "param" or "buffer", and the index into the plan's.
Index = tuple[str, int]


class ModelState:
    """Reads and writes the state of `session` as that of `model`. `indices` are those of all its
    parameters and buffers, by each name."""

    def __init__(
        self,
        session: Any,
        model: nn.Module,
        rank: int,
        indices: Mapping[str, Index],
        sharded: Sharded,
    ) -> None:
        self._session = session
        self._model = model
        self._rank = rank
        self._indices = indices
        self._sharded = sharded

    def state_dict(self) -> dict[str, Any]:
        with self._in_place(self._trained()):
            return self._model.state_dict()

    def full_state_dict(self) -> dict[str, Any]:
        trained = self._trained()
        params = {id(tensor): i for (kind, i), tensor in trained.items() if kind == "param"}
        with self._in_place(trained):
            state = self._model.state_dict(keep_vars=True)
        full = {}
        for key, value in state.items():
            if id(value) in params:
                value = self._session.full_param(params[id(value)])
            elif isinstance(value, DTensor):
                value = value.detach().full_tensor()
            if self._rank == 0:
                full[key] = value.detach().clone() if isinstance(value, Tensor) else value
        return full

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Into copies first, so that an error changes nothing."""
        own = self.state_dict()
        given = {key: _like(own.get(key), value) for key, value in state.items()}
        if hasattr(state, "_metadata"):
            given = type(own)(given)
            given._metadata = state._metadata  # type: ignore[attr-defined]
        copies = self._trained(copied=True)
        try:
            with self._in_place(copies), torch.no_grad():
                unmet = self._model.load_state_dict(given, strict=False)
        except RuntimeError as error:
            for key, value in state.items():
                want = getattr(own.get(key), "shape", None)
                if isinstance(value, Tensor) and want is not None and value.shape != want:
                    raise ValueError(
                        f"'{key}': expected shape {list(want)}, got {list(value.shape)}"
                    ) from error
            text = " ".join(str(error).split())
            raise ValueError(text if len(text) <= _SHOWN else text[:_SHOWN] + "…") from error
        for name, keys in (("missing", unmet.missing_keys), ("unexpected", unmet.unexpected_keys)):
            if keys:
                listed = ", ".join(f"'{key}'" for key in sorted(keys)[:4])
                raise ValueError(f"{len(keys)} {name} keys in the state dict: {listed}")
        self._session.quiesce()
        with torch.no_grad():
            for index, target in self._trained().items():
                _local(target).copy_(_local(copies[index]))
        self._session.publish()

    def _trained(self, *, copied: bool = False) -> dict[Index, Tensor]:
        """The session's tensors, or copies; parameters as nn.Parameter."""
        found: dict[Index, Tensor] = {}
        for name, index in self._indices.items():
            if index in found:
                continue
            kind, number = index
            if kind == "buffer":
                buffer = self._session.buffer(number)
                found[index] = buffer.clone() if copied else buffer
                continue
            shard = self._session.shard(number)
            sharded = self._sharded(number, shard.clone() if copied else shard)
            path, _, attribute = name.rpartition(".")
            own = self._model.get_submodule(path)._parameters.get(attribute)
            found[index] = nn.Parameter(sharded, requires_grad=own is None or own.requires_grad)
        return found

    @contextmanager
    def _in_place(self, tensors: Mapping[Index, Tensor]) -> Iterator[None]:
        """The model with `tensors` as its parameters and buffers, for the body."""
        slots: dict[tuple[int, str], tuple[dict[str, Tensor | None], str, Index]] = {}
        for name, index in self._indices.items():
            path, _, attribute = name.rpartition(".")
            module = self._model.get_submodule(path)
            held = module._parameters if index[0] == "param" else module._buffers
            slots[id(module), attribute] = held, attribute, index
        before = [held[attribute] for held, attribute, _ in slots.values()]
        for held, attribute, index in slots.values():
            held[attribute] = tensors[index]
        try:
            yield
        finally:
            for (held, attribute, _), tensor in zip(slots.values(), before, strict=True):
                held[attribute] = tensor


def _like(own: Any, given: Any) -> Any:
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
    if given.shape != own.shape or any(type(x) not in (Shard, Replicate) for x in placements):
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


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
