"""Captures one training step of a model: forward, loss and backward, as a graph of ATen calls.

The stages, each with one input and one output that contains the input: a view of the model under
its policy (view/model_view.py), the same without data (view/fake_model.py), the recording of its
step (record/recording.py), the proof that the recording is what the model does (check/proof.py),
the contents of an archive, and the archive (archive/writer.py).
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from fsdp_mlir.archive.writer import Contents, Written, write
from fsdp_mlir.check import proof
from fsdp_mlir.modules.left import Left
from fsdp_mlir.modules.others import Others, Revised
from fsdp_mlir.modules.place import Place
from fsdp_mlir.modules.sharding import Shown
from fsdp_mlir.record.graph import ReliedOn
from fsdp_mlir.record.graph_breaks import GraphBreaks
from fsdp_mlir.record.operators import qualified
from fsdp_mlir.record.recording import record
from fsdp_mlir.step.assumed import Assumption, Outcomes
from fsdp_mlir.step.draws import DrawsError
from fsdp_mlir.step.followed import Followed
from fsdp_mlir.step.numbers import Refused, Taken
from fsdp_mlir.step.outputs import no_counts
from fsdp_mlir.step.training_step import Loss, OutputsOfModes, TrainingStep
from fsdp_mlir.support.errors import (
    AssertsError,
    BreakError,
    CaptureError,
    EvaluationError,
    NumberError,
    OtherwiseError,
    located,
    warn,
)
from fsdp_mlir.support.files import check_output
from fsdp_mlir.view.asked import Asked, Factory
from fsdp_mlir.view.device import Device
from fsdp_mlir.view.fake_model import FakeModel
from fsdp_mlir.view.model_view import ModelView, constant_name

# Each may find out how other models are used.
_MOST_RECORDINGS = 4
_MOST_GUESSES = 8  # that an example shows to be wrong
_MOST_RELIED = 16  # places; more are all


@dataclass(frozen=True)
class CaptureSummary:
    """What was written. Sizes are in elements and bytes, time in seconds.

    `checked`: the captured step was run beside eager PyTorch. `constants` are tensors from
    elsewhere that the graph took as they were; `literals` are the indices of those that the step
    itself made. `relied_on`: values of inputs, buffers and constants that decided shapes; `sources`
    maps the names that these use for buffers and constants to their own names. `operators` are the
    names of operators that are not ATen's. `kernels` are the Python functions whose calls stand in
    the graph in place of an operator. `assigned` are the buffers that forward assigns, which the
    step changes in place. `left` and `unsettled` are those of proof.Checked. `others`: further
    sharded models that the step calls. `numbers`: what it takes of those that it is given. `taken`:
    keys that it takes out of mappings among its inputs, by the names of these. `followed`: where
    code may replace constants.
    """

    path: Path
    weights: Path | None
    params: int
    elements: int
    buffers: int
    nodes: int
    backward_begin: int
    grads: int
    seconds: float
    bytes: int
    checked: bool
    constants: tuple[Tensor, ...] = field(repr=False)
    literals: frozenset[int] = field(repr=False)
    relied_on: ReliedOn = field(repr=False)
    sources: dict[str, str] = field(repr=False)
    operators: tuple[str, ...] = ()
    kernels: tuple[FunctionType, ...] = field(default=(), repr=False)
    assigned: frozenset[str] = frozenset()
    left: tuple[Left, ...] = field(default=(), repr=False)
    unsettled: bool = False
    others: Others = field(default_factory=Others, repr=False)
    numbers: Taken = field(default_factory=Taken, repr=False)
    counts: OutputsOfModes = field(default_factory=no_counts, repr=False)
    taken: dict[str, tuple[str, ...]] = field(default_factory=dict)
    followed: Followed = field(default_factory=Followed, repr=False)
    assumption: Assumption = field(default_factory=Assumption, repr=False)

    @staticmethod
    def of(written: Written, seconds: float) -> CaptureSummary:
        contents = written.contents
        recording = contents.recording
        view, trace, evaluation = recording.view, recording.trace, recording.evaluation
        slotted = set(map(id, view.step.slots))
        slots = {constant_name(i) for i, x in enumerate(trace.constants) if id(x) in slotted}
        buffers = [buffer.name for buffer in view.buffers]
        buffers += [constant_name(index) for index in range(len(trace.constants))]
        return CaptureSummary(
            path=written.path,
            weights=written.weights,
            params=len(view.params),
            elements=sum(param.tensor.numel() for param in view.params),
            buffers=len(buffers),
            nodes=len(trace.nodes),
            backward_begin=trace.backward_begin,
            grads=len(recording.gradients),
            seconds=seconds,
            bytes=written.size,
            checked=contents.checked.beside_eager,
            constants=tuple(trace.constants),
            literals=frozenset(trace.literals),
            relied_on=(tuple(trace.relied_on), tuple(evaluation.relied_on if evaluation else ())),
            sources={f"b{index}": name for index, name in enumerate(buffers)},
            operators=tuple(dict.fromkeys(map(qualified, contents.foreign()))),
            kernels=tuple(recording.kernels()),
            assigned=frozenset(view.step.assigned),
            left=tuple(contents.checked.left),
            unsettled=contents.checked.unsettled,
            others=view.asked.others or Others(),
            numbers=view.step.numbers.taken,
            counts=view.step.counts,
            taken={name: keys for name, keys in view.step.taken.items() if keys},
            followed=view.step.followed.found(
                {constant_name(i): tensor for i, tensor in enumerate(trace.constants)},
                recording.written,
                overwrites=recording.overwrites,
            ),
            assumption=Assumption(
                view.step.assumed,
                frozenset(recording.written - slots),
                tuple(view.asked.breaks.made.values()) if view.asked.breaks else (),
            ),
        )

    def __str__(self) -> str:
        forward, backward = self.backward_begin, self.nodes - self.backward_begin
        data = f"weights in {self.weights}" if self.weights else "no weights"
        check = "equal to eager PyTorch" if self.checked else "not run beside eager PyTorch"
        return (
            f"{self.path}: {self.params} params ({self.elements} elements), "
            f"{self.buffers} buffers, {self.nodes} ops ({forward} forward, {backward} backward), "
            f"{self.grads} gradients, {self.seconds:.2f} s, {self.bytes} bytes, {data}, {check}"
        )


def _proven(asked: Asked) -> proof.Checked:
    revised = guessed = 0
    fixed = [0, 0]  # what this example has shown, in each mode
    while revised < _MOST_RECORDINGS:
        try:
            checked = _once(asked)
            if not asked.drawn or asked.outputs is not None:
                return checked
            _check_draws(checked.recording.view.step)
            asked = replace(asked, draws=None, drawn={})
        except _Cast as error:
            asked = replace(asked, casts=error.error)
        except OtherwiseError as error:
            guessed += 1
            assume = [*(asked.assume or ((), ()))]
            if len(error.known) <= fixed[error.evaluating] or guessed == _MOST_GUESSES:
                raise
            fixed[error.evaluating] = len(error.known)
            assume[error.evaluating] = error.known
            asked = replace(asked, assume=tuple(assume))
        except BreakError as error:
            guessed += 1
            if not error.learned or guessed == _MOST_GUESSES:
                assert asked.breaks is not None
                asked.breaks.refuse()
                raise
        except AssertsError:
            asked = replace(asked, assumes_asserted=True)
        except EvaluationError as error:
            warn(f"evaluations run as FSDP2 does: {error}")
            asked = replace(asked, evaluation=False)
        except NumberError as error:
            if asked.relied is None or error.where in (None, *asked.relied):
                raise
            relied = {*asked.relied, error.where}
            asked = replace(asked, relied=relied if len(relied) < _MOST_RELIED else None)
        except DrawsError as error:
            asked = _with_draws(asked, error)
        except Revised:
            if asked.others is None or not asked.others.initialise():
                revised += 1
        except Refused as error:
            other = _with_fixed(asked, error.names) or _without_evaluation(asked, error)
            if other is None:
                drawn = {draw.name for draws in asked.draws or () for draw in draws}
                names = [name for name in error.names if name not in drawn]
                raise (Refused(str(error), names) if names else CaptureError(str(error))) from error
            asked = other
    raise CaptureError("the loss is differentiated through another model in one recording only")


class _Cast(Exception):
    """A call of `float` or `int` could not read a number."""

    def __init__(self, error: CaptureError) -> None:
        super().__init__(str(error))
        self.error = error


def _once(asked: Asked) -> proof.Checked:
    view = None
    try:
        view = ModelView.of(asked)
        return proof.check(record(FakeModel(view)))
    except CaptureError as error:
        # What the number has been read for, such as a size, may be the reason.
        has_cast = view is not None and view.step.has_cast and type(error) is CaptureError
        if (error.casts or has_cast) and asked.casts is None:
            raise _Cast(error) from error
        if asked.casts is not None and type(error) is CaptureError and not _is_met(asked):
            raise asked.casts from error
        raise


def _is_met(asked: Asked) -> bool:
    """Whether the recordings rely on the number that could not be read."""
    error = asked.casts
    return isinstance(error, NumberError) and error.where in (asked.relied or ())


def _with_draws(asked: Asked, error: DrawsError) -> Asked:
    """With those that a recording has found."""
    assert asked.draws is not None
    draws = [*asked.draws]
    mode = "evaluation: " if error.evaluating else ""
    found = {replace(draw, name=f"{mode}{draw.name}"): x for draw, x in error.found.items()}
    draws[error.evaluating] = tuple(found)
    drawn = {draw.name: number for draw, number in found.items()}
    return replace(asked, draws=(draws[0], draws[1]), drawn=asked.drawn | drawn)


def _with_fixed(asked: Asked, names: Collection[str]) -> Asked | None:
    """With integers that are drawn, and used as more than a tensor may be, each of whose values is
    another step. None if it is not because of such."""
    refused = [draw for draws in asked.draws or () for draw in draws if draw.name in names]
    if not refused or not all(type(asked.drawn[draw.name]) is int for draw in refused):
        return None
    if asked.outputs is None or all(draw.is_fixed for draw in refused):
        return None
    fixed = [
        tuple(replace(draw, is_fixed=draw.is_fixed or draw in refused) for draw in draws)
        for draws in asked.draws or ()
    ]
    return replace(asked, draws=(fixed[0], fixed[1]))


def _without_evaluation(asked: Asked, error: Refused) -> Asked | None:
    """If it is because of numbers that evaluations alone draw."""
    training, evaluation = asked.draws or ((), ())
    if asked.outputs is None or not {*error.names} <= {draw.name for draw in evaluation}:
        return None
    warn(f"evaluations run as FSDP2 does: {error}")
    drawn = {draw.name: asked.drawn[draw.name] for draw in training}
    return replace(asked, evaluation=False, draws=(training, ()), drawn=drawn)


def _check_draws(step: TrainingStep) -> None:
    """CaptureError if what forward draws in Python matters to the step, which draws nothing then,
    as for `fsdp-run`."""
    taken = step.numbers.taken
    if taken.draws_decide():
        found = [draw for draws in taken.draws for draw in draws]
        names = ", ".join(dict.fromkeys(f"'{draw.function}'" for draw in found))
        raise located(
            found[0].location,
            f"the step depends on numbers that forward draws by {names}, which a captured step "
            "does not do; draw before the step and pass the numbers as an input",
        )


@contextmanager
def uncollected() -> Iterator[None]:
    """Turns off the search for garbage cycles: recording makes a great many live objects, and
    scanning everything that a large library has created would take a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def unlogged() -> Iterator[None]:
    """Within the body, PyTorch does not log what fails on fake tensors: the error says so."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    init: Factory | None = None,
    evaluation: bool = False,
    config: str | Path | None = None,
    path: str | Path = "model.pt",
    save_weights: bool = True,
    check: bool | None = None,
    outputs: OutputsOfModes | None = None,
    device: str = "cpu",
    device_arch: str | None = None,
    torch_version: str | None = None,
    data_ranks: Sequence[int] = (0,),
    shown: Shown | None = None,
    numbers: Sequence[str] = (),
    held: Mapping[str, Place] | None = None,
    growing: Mapping[str, Place] | None = None,
    unread: Sequence[str] = (),
    assume: bool | Outcomes = True,
    counting: bool = False,
    breaks: GraphBreaks | None = None,
) -> CaptureSummary:
    """Captures the training step `model(*args, **kwargs)` → loss → gradients, and writes `path`.

    The tensors in `args` and `kwargs` are examples: their shapes and dtypes are captured, and their
    dim 0 is the batch of one rank; a scalar becomes a batch of one element in the graph. The
    graph's inputs have the names in `kwargs`; those of `args` are arg0, arg1, …. Numbers, strings
    and None in `kwargs` are part of the step, and so is the form of a container of tensors
    (step/nested.py), whose tensors are inputs such as `batch['x'][0]`. `loss` maps the model's
    output to a scalar; inputs with the names of further parameters of `loss` go to it and not to
    the model. Without `loss` the output itself, or its `.loss`, is the scalar. A ComputeLoss maps
    the model and the inputs to the scalar. The model is captured in the mode, train or eval, that
    it is in. The step is recorded without data, so a model on `meta` works at any size.

    The graph is for tensors on `device`, wherever the model's own tensors are: "cpu", or "cuda"
    with the GPU's architecture in `device_arch`, such as "sm_90". PyTorch then chooses the
    operators that it would run on that GPU. No GPU is needed, but PyTorch and this package must be
    built with CUDA. Such a step is not run beside eager PyTorch.

    Where versions of FSDP2 differ, the plan has the bits of FSDP2 in PyTorch `torch_version`, such
    as "2.11"; the default is the installed version. The operators are those of the installed
    PyTorch.

    Weights are written beside `path` with suffix .safetensors, unless a parameter is on `meta`. For
    such a model, `init()` must build the same model as one would on one device: its initialisation
    is captured too, on fake tensors, and fsdp-run executes it with its own seed. A seed that `init`
    sets is not part of that. Without `save_weights` the file has only the graph's own tensors, if
    there are any.

    `evaluation` also captures the loss in eval mode, on the same inputs and without gradients, for
    evaluations between steps; the model's own mode stays as it is.

    `config` is a policy file of fsdp-opt, read for the units and their mixed precision: parameters
    then have the dtype in which they are gathered, and the graph has the casts at unit boundaries
    and sums the gradients of a unit's inputs as FSDP2 does. fsdp-opt reports it if it needs that.

    The step is recorded again with other seeds and, without `outputs`, as another rank, and must be
    the same. With `check` it is then run on two batches beside eager PyTorch: loss, gradients and
    buffers must have equal bits (eager_check.py). By default this is done if the model and the
    inputs have data, of at most proof.CHECKED_BYTES.

    `outputs`, for callers that execute the step in this process: what `loss` returns besides the
    scalar (outputs.py). Without it, a loss function that returns more is an error.

    `data_ranks`: for a model that communicates itself, such as one of tensor parallelism, the ranks
    that FSDP shards over, this one among them, in the order of the mesh. The plan is told what the
    other axes are, which its simulation needs (planned_mesh.py).

    `shown`: of a model that was sharded, what its code sees of a parameter outside of the forward
    of its unit.

    `numbers`: the names of those numbers in `args` and `kwargs` that are inputs of the step and not
    a part of it (step/numbers.py). They come in an input of their own, behind the others. `held`:
    the places of further ones, which code reads there, by names that no input has. `unread`: names
    of strings and numbers in `args` and `kwargs` that the step may not read, as nested.pattern has
    them.

    `assume`: a branch on what the step computes, as in `if x.isnan().any():`, is captured one way:
    that of the example if the step is run beside eager PyTorch, else that for False, or for True of
    an `all` and of what is asserted. So are sizes
    that follow from integers in inputs and buffers. A warning names the lines, and a step that
    would be another one stops with an error. With `outputs` the caller sees to it (`assumption` of
    the result), and in place of True may come the truth values that are known. Without `assume`
    such a step is an error.

    `growing`: the places of lists that it appends to.
    `counting`: what is left in the places of `held` may follow from what the step computes, for
    callers that run one microbatch at a time (`counts` of the result).
    `breaks`: the modules that may run in Python, in the middle of the step, for callers that run it
    in this process and see to it that they do what is expected (`assumption` of the result).

    Raises CaptureError, and then writes nothing; OSError if a file cannot be written, or would
    replace `config`. The model is unchanged in any case.
    """
    start = time.perf_counter()
    asked = Asked(
        model=model,
        args=args,
        kwargs=kwargs or {},
        loss=loss,
        init=init,
        evaluation=evaluation,
        config=None if config is None else Path(config),
        path=Path(path),
        save_weights=save_weights,
        check=check,
        outputs=outputs,
        device=Device.of(device, device_arch, torch_version),
        data_ranks=data_ranks,
        others=None if outputs is None else Others(),
        shown=shown,
        numbers=numbers,
        held=held or {},
        growing=growing or {},
        unread=unread,
        assume=((), ()) if assume is True else assume or None,
        counting=counting,
        breaks=breaks,
    )
    if asked.path.suffix == ".safetensors":
        raise CaptureError(f"'{path}': expected another suffix, as the weights beside it have this")
    inputs = [asked.config] if asked.config else []
    check_output(asked.path, inputs)
    check_output(asked.path.with_suffix(".safetensors"), inputs)
    with uncollected(), unlogged():
        contents = Contents.of(_proven(asked))
        written = write(contents)
    return CaptureSummary.of(written, time.perf_counter() - start)
