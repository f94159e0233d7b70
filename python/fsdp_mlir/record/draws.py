"""Random numbers that a step draws again, which PyTorch does by setting its generator's state.

torch.utils.checkpoint puts the generator back to where it was before a region and runs the region
again, in backward: its dropout masks are those of forward. A recorded step has no generator state.
So the recording keeps the position in the stream of draws, and a call that PyTorch makes at an
earlier position is recorded as a copy of what was drawn there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from fsdp_mlir.record.known import flat_tensors
from fsdp_mlir.support.errors import Location, SourceMap, located, model_frame

# The generator's seed is this plus the position. The seed is part of the state that code reads and
# sets.
_FIRST_SEED = 0x5EED << 44


def is_draw(func: OpOverload, values: list[Any]) -> bool:
    """Whether a call draws. CaptureError if it does so from a generator that it is given."""
    if any(isinstance(value, torch.Generator) for value in values):
        raise located(
            SourceMap().frame(model_frame()),
            f"'{func}' draws from a torch.Generator that it is given, which a plan does not have; "
            "draw before the step, or from PyTorch's own by not giving one",
        )
    return torch.Tag.nondeterministic_seeded in func.tags and not any(
        formal.name == "dropout_p" and value == 0
        for formal, value in zip(func._schema.arguments, values, strict=True)
    )


def outcome(func: OpOverload, values: list[Any], result: Any) -> list[Tensor]:
    """The tensors that a call wrote, and then those that it made."""
    written = [
        tensor
        for formal, value in zip(func._schema.arguments, values, strict=True)
        if formal.alias_info is not None and formal.alias_info.is_write
        for tensor in flat_tensors(value)
    ]
    made = [t for t in flat_tensors(result) if not any(t is other for other in written)]
    return [*written, *made]


@dataclass
class Draw:
    """A recorded draw: its request, its node, and the tensors that it made or wrote, with their
    names right after it. `copies` of them are made when it is first drawn again."""

    asked: tuple[Any, ...]
    node: Any
    results: list[tuple[Tensor, str]]
    copies: list[Tensor] = field(default_factory=list)


class Draws:
    """The stream of draws of one step, while `following` it."""

    def __init__(self) -> None:
        self._draws: list[Draw] = []

    @contextmanager
    def following(self) -> Iterator[None]:
        """Makes PyTorch's generator follow the position; restores it at the end."""
        generator = torch.default_generator
        before = generator.get_state()
        self._move_to(0)
        try:
            yield
        finally:
            generator.set_state(before)

    def earlier(self, func: OpOverload, values: list[Any], where: Location | None) -> Draw | None:
        """The draw at the generator's position, which goes on by one; None at the end of the
        stream, where `add` is to follow. CaptureError where another call was made there."""
        position = torch.default_generator.initial_seed() - _FIRST_SEED
        if position == len(self._draws):
            return None
        drawn = self._draws[position] if 0 <= position < len(self._draws) else None
        if drawn is None or drawn.asked != _asked(func, values):
            raise located(
                where,
                f"'{func}' draws at a state of the generator at which the step has drawn otherwise "
                "or not at all, which cannot be captured; draw before the step and pass the "
                "numbers as an input",
            )
        self._move_to(position + 1)
        return drawn

    def add(
        self, func: OpOverload, values: list[Any], node: Any, results: list[tuple[Tensor, str]]
    ) -> None:
        self._draws.append(Draw(_asked(func, values), node, results))
        self._move_to(len(self._draws))

    @staticmethod
    def _move_to(position: int) -> None:
        torch.default_generator.manual_seed(_FIRST_SEED + position)


def _asked(func: OpOverload, values: list[Any]) -> tuple[Any, ...]:
    """What decides which numbers are drawn, except the data of tensors."""
    described = tree_map_only(Tensor, lambda tensor: (tensor.shape, tensor.dtype), values)
    return func, str(described)
