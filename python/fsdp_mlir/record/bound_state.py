"""The stand-ins for a model's state in a recording: what reads them and what writes them."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from fsdp_mlir.modules.weights import State
from fsdp_mlir.record.graph import written_arguments
from fsdp_mlir.record.known import flat_tensors
from fsdp_mlir.support.errors import CaptureError, Location, located
from fsdp_mlir.view.model_view import constant_name


@dataclass(frozen=True)
class _Bound:
    """A parameter or buffer, its stand-in, and where the stand-in lay when it was bound."""

    state: State
    fake: Tensor
    placed: tuple[Any, ...]
    parameter: bool


def _placed(tensor: Tensor) -> tuple[Any, ...]:
    return _storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


class BoundStates:
    """Parameters, buffers and constants of one recording; `written` are the buffers and constants
    that calls write in place."""

    def __init__(self) -> None:
        self.written: set[str] = set()
        self.sharded: dict[int, str] = {}  # of view/gathered.py
        self._by_tensor: dict[int, _Bound] = {}
        self._by_storage: dict[int, _Bound] = {}
        self._constants: dict[int, str] = {}  # names by the storages of stand-ins

    def add(self, state: State, fake: Tensor, *, parameter: bool) -> None:
        bound = _Bound(state, fake, _placed(fake), parameter)
        self._by_tensor[id(state.tensor)] = bound
        self._by_storage[bound.placed[0]] = bound

    def add_constant(self, index: int, fake: Tensor) -> None:
        self._constants[_storage(fake)] = constant_name(index)

    @property
    def storages_of_constants(self) -> Set[int]:
        """Those of their stand-ins."""
        return self._constants.keys()

    def share_constants(self, other: BoundStates) -> None:
        self._constants = other._constants

    def stand_in(self, tensor: Tensor, location: Location | None) -> Tensor | None:
        """The stand-in of a state that was reached by a separate reference, such as a loss
        function's: autograd does not see that it is the parameter. None for any other tensor."""
        bound = self._by_tensor.get(id(tensor))
        if bound is None:
            return None
        if bound.state.tensor.requires_grad:
            raise located(
                location,
                f"parameter '{bound.state.name}' is read by a reference that is kept outside of "
                "its module, which has no gradient; read it as the module's attribute",
            )
        return bound.fake

    def unknown(self, tensor: Tensor) -> str:
        """Why a call takes a tensor that has no name."""
        if (name := self.sharded.get(id(tensor))) is not None:
            return (
                f"parameter '{name}' is used outside of the forward of its unit, where FSDP2 has "
                "it sharded; use it in the forward of the module that fully_shard was called on"
            )
        return (
            f"a tensor of shape {list(tensor.shape)} was made before the captured step and is "
            "neither parameter, buffer nor input"
        )

    def note_writes(self, func: OpOverload, values: list[Any], location: Location | None) -> None:
        """Remembers the buffers and constants that a call writes; CaptureError for a parameter."""
        for tensor in flat_tensors(written_arguments(func, values)):
            bound = self._by_storage.get(_storage(tensor))
            if bound is None:
                self.written.update(filter(None, [self._constants.get(_storage(tensor))]))
            elif not bound.parameter:
                self.written.add(bound.state.name)
            else:
                raise located(
                    location,
                    f"parameter '{bound.state.name}' is written by '{func}' in the step: it is "
                    "gathered anew before each use, and the write would be lost, as with "
                    "FSDP2; write it between steps, or keep the value in a buffer",
                )

    def check_places(self) -> None:
        """CaptureError if a parameter or buffer lies elsewhere than before the step."""
        for bound in self._by_tensor.values():
            if _placed(bound.fake) != bound.placed:
                raise CaptureError(
                    f"'{bound.state.name}' was given other memory or another shape in forward (as "
                    "by '.data =' or 'set_'), which would be lost; change it in place, as with "
                    ".copy_()"
                )
