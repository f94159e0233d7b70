"""From a model and a policy to a plan: every rank captures, rank 0 runs fsdp-opt."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from fsdp_mlir.archive.fingerprint import Fingerprint, first_difference
from fsdp_mlir.capture.capture import capture
from fsdp_mlir.frontdoor import process_reads
from fsdp_mlir.frontdoor.plain_model import plain
from fsdp_mlir.modules.left import Left
from fsdp_mlir.modules.others import Others
from fsdp_mlir.modules.sharding import shown
from fsdp_mlir.record.graph import ReliedOn
from fsdp_mlir.step.assumed import Assumption
from fsdp_mlir.step.followed import Followed
from fsdp_mlir.step.numbers import Taken
from fsdp_mlir.step.outputs import Outputs, no_counts
from fsdp_mlir.step.training_step import OutputsOfModes
from fsdp_mlir.support.errors import CompileError
from fsdp_mlir.view.model_view import constant_name


@dataclass(frozen=True)
class Captured:
    """What a capture gave: the digest of its fingerprint; `constants`, the tensors that the graph
    took from elsewhere, by their names as buffers of the plan; `outputs`, what the step returns
    besides the loss; and its warnings. `literals`, `relied_on`, `sources`, `operators`,
    `kernels`, `assigned`, `left`, `unsettled`, `others`, `numbers`, `taken`, `followed`,
    `assumption` and `counts` are those of its CaptureSummary. `reads` and `variables`: what the
    step read of the process (process_reads.Reads)."""

    digest: str
    constants: dict[str, Tensor]
    outputs: OutputsOfModes
    literals: frozenset[int] = frozenset()
    relied_on: ReliedOn = ((), ())
    sources: Mapping[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    operators: tuple[str, ...] = ()
    kernels: tuple[FunctionType, ...] = ()
    assigned: frozenset[str] = frozenset()
    left: tuple[Left, ...] = ()
    unsettled: bool = False
    others: Others = field(default_factory=Others)
    numbers: Taken = field(default_factory=Taken)
    taken: Mapping[str, Sequence[str]] = field(default_factory=dict)
    followed: Followed = field(default_factory=Followed)
    assumption: Assumption = field(default_factory=Assumption)
    reads: tuple[str, ...] = ()
    variables: frozenset[str] = frozenset()
    counts: OutputsOfModes = field(default_factory=no_counts)


@dataclass(frozen=True)
class Recipe:
    """What is captured: a model on example inputs by position and by name, under a policy, the text
    of a config. `options` are further arguments of `capture`. `keeps_outputs`: whether to keep what
    the loss returns besides the scalar."""

    model: nn.Module
    args: Sequence[Tensor]
    kwargs: Mapping[str, Any]
    policy: str
    options: Mapping[str, Any]
    keeps_outputs: bool = False

    def capture(self, folder: Path, values: Mapping[int, Tensor]) -> tuple[Captured, Fingerprint]:
        """Writes policy.yaml, model.pt, and its constants in model.safetensors. `values` are those
        of plain_model.whole_values."""
        folder.mkdir(parents=True, exist_ok=True)
        policy, archive = folder / "policy.yaml", folder / "model.pt"
        policy.write_text(self.policy)
        outputs = Outputs(keeps=self.keeps_outputs), Outputs(keeps=self.keeps_outputs)
        seen = shown(self.model)
        with (
            plain(self.model, values),
            _noting_warnings() as warned,
            process_reads.noted() as reads,
        ):
            done = capture(
                self.model,
                self.args,
                dict(self.kwargs),
                config=policy,
                path=archive,
                save_weights=False,
                outputs=outputs,
                shown=seen,
                **self.options,
            )
        constants = {constant_name(i): tensor for i, tensor in enumerate(done.constants)}
        own = Fingerprint.of(archive)
        captured = Captured(
            own.digest,
            constants,
            outputs,
            done.literals,
            done.relied_on,
            done.sources,
            warned,
            done.operators,
            done.kernels,
            done.assigned,
            done.left,
            done.unsettled,
            done.others,
            done.numbers,
            done.taken,
            done.followed,
            done.assumption,
            tuple(dict.fromkeys(reads.others)),
            frozenset(reads.variables),
            done.counts,
        )
        return captured, own


@contextmanager
def _noting_warnings() -> Iterator[list[str]]:
    """The texts of the body's warnings, which are shown afterwards."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        yield texts
    for each in caught:
        texts.append(str(each.message))
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def refuse_difference(
    own: Fingerprint, exchange: Callable[[str], list[str]], ranks: Sequence[int]
) -> None:
    """CompileError on every rank of `ranks`, which captured steps that differ in what the ranks do
    together. `exchange` returns the texts of all of them."""
    digests = exchange(own.digests)
    at = next(index for index, other in enumerate(digests) if other != digests[0])
    lines = exchange(str(own.line(first_difference(digests[0], digests[at]))))
    raise CompileError(
        f"the step of rank {ranks[at]} is not that of rank {ranks[0]}: {lines[at]} there, "
        f"{lines[0]} on rank {ranks[0]}; expected steps that gather and reduce the same parameters "
        "in the same order on every rank"
    )
