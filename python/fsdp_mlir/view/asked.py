"""What a capture is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fsdp_mlir.modules.others import Others
from fsdp_mlir.modules.place import Place
from fsdp_mlir.modules.sharding import Shown
from fsdp_mlir.step.assumed import Outcomes
from fsdp_mlir.step.draws import DrawsOfModes
from fsdp_mlir.step.items import Relied
from fsdp_mlir.step.training_step import Loss, OutputsOfModes
from fsdp_mlir.support.errors import CaptureError
from fsdp_mlir.view.device import Device


class Breaks(Protocol):
    """record.graph_breaks.GraphBreaks."""

    made: Mapping[int, Any]

    def recorded(self, relied: Callable[[], int]) -> AbstractContextManager[None]:
        """In the body, which records a step, some modules are calls. `relied`: how many values the
        step relies on so far."""
        raise NotImplementedError

    def refuse(self) -> None:
        """After a capture in which a call did something else."""
        raise NotImplementedError

    def settle(self, loss: Tensor) -> None:
        """At the end of forward."""
        raise NotImplementedError


Factory = Callable[[], nn.Module]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The arguments of `capture` (capture/capture.py), which says what they mean."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    loss: Loss | None
    init: Factory | None
    evaluation: bool
    config: Path | None
    path: Path
    save_weights: bool
    check: bool | None
    outputs: OutputsOfModes | None
    device: Device
    data_ranks: Sequence[int]
    others: Others | None
    shown: Shown | None
    numbers: Sequence[str]
    held: Mapping[str, Place]
    growing: Mapping[str, Place]
    unread: Sequence[str]
    assume: Outcomes | None
    counting: bool
    breaks: Breaks | None = None
    relied: Relied = frozenset()  # places where code needs the numbers that it reads
    # Those that are numbers of each step, and what this one has drawn; None if it draws, and what
    # does not matter to the step.
    draws: DrawsOfModes | None = ((), ())
    drawn: Mapping[str, Any] = field(default_factory=dict)
    assumes_asserted: bool = False  # where the code asserts something
    casts: CaptureError | None = None  # without casts of numbers of each step
    # The state of PyTorch's, before the step.
    generator: Tensor = field(default_factory=torch.default_generator.get_state)
