"""What a call of a step wants a plan for, and the name by which it finds one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_mlir.frontdoor import around
from fsdp_mlir.modules import sharding, weights
from fsdp_mlir.modules.place import Place
from fsdp_mlir.record.graph_breaks import GraphBreaks
from fsdp_mlir.state import optimizers
from fsdp_mlir.step.assumed import Outcomes
from fsdp_mlir.step.batches import Batch, Inputs
from fsdp_mlir.step.eager import Clipping
from fsdp_mlir.step.training_step import EachLoss, by_position
from fsdp_mlir.support import policy_schema

# Options that say how a loop over microbatches reduces gradients; the first is their number.
OF_LOOP = policy_schema.keys_where("compile", "loop")

# Of torch.amp.GradScaler.
_INIT_SCALE = 2.0**16


@dataclass(frozen=True)
class Request:
    """What a plan is for: inputs of one microbatch by position and by name, and the keys of the
    config besides those of fully_shard. The losses of its microbatches go to `each`. `numbers`: the
    names of those inputs that are numbers of each call; `held`: the places of further ones, by
    their names, and `growing` those of lists that it appends to; `unread`: names of what the step
    may not read; `assume`, `counting`, `breaks`: of `capture`; `place`: how many plans there are
    for other numbers."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    config: Mapping[str, Any]
    evaluation: bool = False
    is_example: bool = False  # of a batch that eager PyTorch need not accept
    keeps_outputs: bool = False  # what the loss returns besides the scalar
    each: Tensor | None = None
    numbers: tuple[str, ...] = ()
    held: Mapping[str, Place] = field(default_factory=dict)
    growing: Mapping[str, Place] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    assume: Outcomes | None = None
    counting: bool = False
    breaks: GraphBreaks | None = None
    place: int = 0

    @property
    def updates(self) -> bool:
        """Whether the plan makes the optimizer's step."""
        return bool(self.config.get("optimizer", {}).get("name") != "external")

    @property
    def batch(self) -> dict[str, Any]:
        """The inputs by their names."""
        return {**dict(zip(by_position(len(self.args)), self.args, strict=True)), **self.kwargs}

    @property
    def given(self) -> dict[str, Any]:
        """These, and the numbers that are held, as they are now."""
        return self.batch | {name: place.value() for name, place in self.held.items()}


class Requests:
    """Those of one step. A call is of one kind:

    - "update": a whole step;
    - "gradients": a whole step whose optimizer is not in the plan;
    - "backward": forward and backward of one microbatch;
    - "accumulate": of several, whose gradients are reduced together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        clipping: Clipping | None,
        config: Mapping[str, Any],
        inputs: Inputs,
        *,
        evaluation: bool,
        gives_outputs: bool,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._clipping = clipping
        self._config = config
        self._inputs = inputs
        self._evaluation = evaluation
        self._gives_outputs = gives_outputs
        self._each: dict[int, Tensor] = {}
        self._states = tuple(dict.fromkeys(sharding.states(model).values()))

    @property
    def count(self) -> int:
        """Microbatches of a whole step."""
        return int(self._config.get(OF_LOOP[0], 1) or 1)

    @property
    def first_scaler(self) -> tuple[float, int] | None:
        """The loss scaler of the first step; None without one."""
        given = self._config.get("grad_scaler")
        settings = given if isinstance(given, dict) else {}
        return (float(settings.get("init_scale", _INIT_SCALE)), 0) if given else None

    def losses(self, count: int) -> Tensor:
        """Where plans for "accumulate" leave the losses of that many microbatches."""
        return self._each.setdefault(count, torch.zeros(count, dtype=torch.float64))

    def key(
        self, kind: str, microbatches: Sequence[Batch], params: Sequence[nn.Parameter]
    ) -> tuple[Any, ...]:
        """The key by which plans are told apart. Equal on all ranks that make the same call."""
        structure: tuple[Any, ...] = ()
        if kind == "update" and self._optimizer is not None:
            positions = {id(param): index for index, param in enumerate(params)}
            structure = optimizers.structure(self._optimizer, positions)
        return (
            kind,
            len(microbatches),
            self._inputs.form(microbatches[0]),
            tuple(module.training for module in self._model.modules()),
            tuple(param.requires_grad for param in params),
            around.settings(),
            sharding.settable(self._states, between_backwards=len(microbatches) > 1),
            structure,
        )

    def evaluation_key(self, batch: Batch) -> tuple[Any, ...]:
        settable = sharding.settable(self._states, between_backwards=False)
        return "evaluate", self._inputs.form(batch), around.settings(), settable

    def why_eager(
        self, kind: str, microbatches: Sequence[Batch], params: list[nn.Parameter]
    ) -> str:
        """Why this call is one for FSDP2, whatever plans there are; empty if it is not."""
        count = len(microbatches)
        why = around.entered() or around.without_gradients()
        if not why and kind == "gradients" and count > 1 and self._reduces_each:
            why = around.each_microbatch(params)
        if not why and kind == "accumulate":
            why = self._inputs.unlike(microbatches) or EachLoss.why_not(count, torch.float32)
        return why or self._inputs.unfit(microbatches[0])

    def dtype_changed(self) -> str:
        """Why FSDP2 alone decides what a step is: it goes on with the dtypes that parameters had
        at its first forward. Empty if they still have these."""
        for group in (group for state in self._states for group in state._fsdp_param_groups):
            for record in group.fsdp_params:
                dtype = record.sharded_param.dtype
                before = getattr(record, "orig_dtype", dtype)
                if dtype == before:
                    continue
                if record.all_gather_outputs:
                    return (
                        f"'{record._param_fqn}' is {dtype} and was {before} at the first forward, "
                        "the dtype with which FSDP2 goes on"
                    )
                # `compile` has initialised FSDP2, which would have waited for the first forward.
                group._init_mp_dtypes()
                break
        return ""

    @property
    def _reduces_each(self) -> bool:
        """Whether the gradients of each microbatch come to the parameters by themselves."""
        each, all_each = (self._config.get(key, True) for key in OF_LOOP[1:])
        return bool(each and (all_each or not sharding.has_replicas(self._model)))

    def request(
        self,
        kind: str,
        microbatches: Sequence[Batch],
        *,
        place: int,
        is_example: bool,
        assume: Outcomes | None,
        breaks: GraphBreaks,
    ) -> Request:
        batch, count = microbatches[0], len(microbatches)
        values = list(batch.values())
        positional = self._inputs.positional
        alone = kind == "backward" or (self.count == 1 and kind != "accumulate")
        return Request(
            values[:positional],
            dict(list(batch.items())[positional:]),
            self._config_of(kind, count),
            evaluation=self._evaluation and kind in ("update", "gradients"),
            is_example=is_example,
            keeps_outputs=self._gives_outputs and alone,
            each=self.losses(count) if kind == "accumulate" else None,
            numbers=self._inputs.numbers(batch),
            held=self._inputs.held,
            growing=self._inputs.growing if alone else {},
            unread=self._inputs.unread,
            assume=assume if alone else None,
            breaks=breaks if alone and assume is not None else None,
            counting=alone,
            place=place,
        )

    def _config_of(self, kind: str, count: int) -> dict[str, Any]:
        config = dict(self._config)
        if kind == "update":
            if self._optimizer is not None:
                params = weights.parameters(self._model)
                config["optimizer"] = optimizers.config_of(self._optimizer, params)
            if self._clipping is not None:
                config["clip_grad_norm"] = {
                    "max_norm": self._clipping.max_norm,
                    "norm_type": self._clipping.norm_type,
                }
        else:
            config["optimizer"] = {"name": "external"}
        if kind in ("backward", "accumulate"):
            for option in (*OF_LOOP, "grad_scaler", "lr_schedule"):
                config.pop(option, None)
        if kind == "accumulate":
            config["gradient_accumulation_steps"] = count
            config["reduce_each_microbatch"] = False
        return config
