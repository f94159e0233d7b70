"""Records one training step of a model, and its evaluation, under fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_mlir.modules.module_stack import ModuleStack
from fsdp_mlir.modules.placed import local, local_gradient, unrecorded
from fsdp_mlir.modules.python_state import PythonState
from fsdp_mlir.modules.sharding import no_gathers, no_methods
from fsdp_mlir.modules.weights import State
from fsdp_mlir.record.backward_graph import Backward, BackwardGraph, Hooks
from fsdp_mlir.record.collectives_in_place import as_functional
from fsdp_mlir.record.draws import Draws
from fsdp_mlir.record.failing import may_fail
from fsdp_mlir.record.fake_results import FakeResults
from fsdp_mlir.record.generators import (
    Drawn,
    noted_draws,
    refused_seeding,
    untouched_generators,
)
from fsdp_mlir.record.graph import Node, Trace
from fsdp_mlir.record.graph_breaks import is_break
from fsdp_mlir.record.no_fakes import no_fakes
from fsdp_mlir.record.plain import composites
from fsdp_mlir.record.run import evaluated, traced
from fsdp_mlir.record.trace import Recorder
from fsdp_mlir.support.autocast import without_autocast
from fsdp_mlir.support.autograd import nodes_from
from fsdp_mlir.support.errors import (
    CaptureError,
    DrawnError,
    EvaluationError,
    SourceMap,
    calls_the_model,
    located,
    source_of,
)
from fsdp_mlir.support.layouts import is_itself, storage_of
from fsdp_mlir.view.fake_model import FakeModel
from fsdp_mlir.view.gathered import Gathered
from fsdp_mlir.view.model_view import ModelView, constant_name

calls_the_model(__file__)


@dataclass(frozen=True)
class Recording:
    """The graphs of a step. `gradients` has the value of each gradient by its parameter's index; a
    parameter that the loss does not depend on has none. Evaluation shares the constants of
    `trace`."""

    view: ModelView
    modules: ModuleStack
    trace: Trace
    loss: str
    gradients: dict[int, str]
    post_backwards: dict[int, int]  # as unit_entry.Entries has them
    written: set[str]  # buffers and constants that are changed in place
    overwrites: bool  # an input, in the step or its evaluation
    units: list[list[str]]  # the modules of each unit but the root
    entries: dict[str, str]  # as unit_entry.Entries.needed has it
    drawn: Drawn  # by forward and backward
    backward: Backward | None  # if a graph alone decides it
    results: FakeResults = field(repr=False)
    evaluation: Trace | None = None
    evaluation_loss: str = ""
    trained: PythonState | None = None  # the Python state before that evaluation

    def nodes(self) -> list[Node]:
        """The calls of the step and of its evaluation."""
        return [*self.trace.nodes, *(self.evaluation.nodes if self.evaluation else ())]

    def kernels(self) -> list[FunctionType]:
        """Functions that only the dispatcher knows, and that the step was recorded from."""
        traces = [self.trace, *([self.evaluation] if self.evaluation else [])]
        return list({id(k): k for trace in traces for k in trace.kernels.values()}.values())


@dataclass(frozen=True)
class Recorded:
    """The first recording, and its side effects: the Python state of the model, which has been
    restored, and the one that forward left; what it did to Python's and NumPy's generators."""

    recording: Recording
    before: PythonState
    after: PythonState
    drawn: Drawn


def record(fake: FakeModel) -> Recorded:
    """Records the step for the first time. CaptureError names the model's line. The model's Python
    state and the generators are as before in any case."""
    view = fake.view
    before = PythonState.of(view.model, view.step.loss)
    view.step.follow(before, {storage_of(state.tensor) for state in view.states})
    try:
        with untouched_generators() as drawn:
            state = torch.random.default_generator.get_state()
            with before.untaken():
                recording = record_once(fake)
            if not torch.equal(state, torch.random.default_generator.get_state()):
                raise located(
                    source_of(view.model),
                    "torch's generator of random numbers was set or drawn from outside of captured "
                    "calls; draw tensors that the step uses by calls of torch",
                )
            if path := before.given_data():
                raise located(
                    source_of(view.model),
                    f"'{path}' gets other memory in forward (.data = …), which a captured step "
                    "does not give it; change it in place, as with .copy_()",
                )
            after = PythonState.of(view.model, view.step.loss)
            return Recorded(recording, before, after, drawn)
    finally:
        before.restore()


def record_once(fake: FakeModel, first: Recording | None = None) -> Recording:
    """Runs forward, backward and, if asked, evaluation; CaptureError names the model's line. With
    the `first` recording, backward is not run if that would make the calls that it made there.

    The model's own tensors are not touched. What forward does to other attributes is not undone.
    """
    view = fake.view
    sources = SourceMap()
    hooked = view.units.hooked(view.params, view.asked.device.version, view.asked.shown)
    present, others = view.asked.device.present(), view.asked.others
    breaks = view.asked.breaks
    with (
        present,
        ModuleStack(view.model) as modules,
        hooked as entries,
        refused_seeding(),
        no_gathers() if others is None else others.recorded(),
        no_methods(),
        no_fakes(),
        as_functional(),
    ):
        results = FakeResults() if first is None else first.results
        recorder = _recorder(fake, modules, sources, results)
        recorders = [recorder]
        trainable = [i for i, param in enumerate(fake.params) if param.requires_grad]

        with fake.mode:
            gathered = Gathered(view, fake.params, entries)
        recorder.states.sharded = gathered.names

        hooks = Hooks()
        backward: Backward | None = None

        def forward() -> Tensor:
            torch.clear_autocast_cache()  # of what a recording before this one has cast
            with gathered.in_forward(), view.step.recorded(), hooks.noted():
                loss: Tensor = view.step.forward(fake.inputs)
            return loss

        def evaluate() -> Tensor:
            loss = forward()
            view.step.settle(fake.slots, read)
            return loss

        def read() -> tuple[dict[int, bool], set[int]]:
            named = enumerate(recorder.trace.constants)
            written = set().union(*(each.states.written for each in recorders))
            storages = {*map(storage_of, fake.inputs), *recorder.states.storages_of_constants}
            return {id(each): constant_name(index) in written for index, each in named}, storages

        def graph_of(loss: Tensor) -> BackwardGraph | None:
            exchanges = (others is not None and others.called) or any(x.spec for x in view.params)
            has_breaks = breaks is not None and breaks.made
            unknown = hooks.any or recorder.trace.kernels or exchanges or has_breaks
            return None if unknown else BackwardGraph.of(loss, fake.params)

        def differentiate(loss: Tensor) -> tuple[Tensor | None, ...] | None:
            nonlocal backward
            leaves = [fake.params[index] for index in trainable]
            _check_no_gradients(fake, "forward")
            if others is not None:
                others.check(loss)
            if breaks is not None:
                breaks.settle(loss)
            graph = graph_of(loss)
            if first and first.backward and graph == first.backward.graph:
                backward = first.backward
                backward.again(recorder.trace)
                view.step.settle(fake.slots, read)
                return None
            constants = len(recorder.trace.constants)
            if _has_reentrant_checkpoint(loss):
                entries.check_called_once()
                with gathered.in_backward(), without_autocast():
                    loss.backward()
                found = tuple(leaf.grad for leaf in leaves)
            else:
                with gathered.in_backward(), without_autocast():
                    found = torch.autograd.grad(loss, leaves, allow_unused=True)
                _check_no_gradients(fake, "backward")
            # Constants are counted from there on.
            if graph is not None and constants == len(recorder.trace.constants):
                backward = Backward.of(graph, recorder.trace)
            view.step.settle(fake.slots, read)
            pairs = zip(found, trainable, strict=True)
            return tuple(_reduced(view, gradient, view.params[i]) for gradient, i in pairs)

        recorder.draws = Draws()
        following = recorder.draws.following()
        with (
            fake.mode,
            unrecorded(),
            composites(),
            gathered.guarded(fake.others),
            following,
            view.step.holding(fake.slots),
            noted_draws() as drawn,
            breaks.recorded(lambda: len(recorder.trace.relied_on)) if breaks else nullcontext(),
        ):
            value, found = traced(forward, differentiate, recorder)
        recorder.states.check_places()
        overwrites = _check_inputs(fake, recorder)
        _note_hazards(view, recorder, evaluating=False)
        loss = recorder.name_of(_own_loss(view, value))
        gradients: dict[int, str | None] = {
            index: recorder.name_of(gradient)
            for index, gradient in zip(trainable, found or (), strict=found is not None)
            if gradient is not None
        }
        if loss is None or None in gradients.values():
            raise located(
                source_of(view.model), "the loss or a gradient was not made by the captured step"
            )
        named = {index: name for index, name in gradients.items() if name}
        if found is None and first is not None:
            named = first.gradients
        uses = entries.uses(value)
        behind = entries.post_backwards(uses, view.params, fake.params)
        made = partial(Recording, view, modules, recorder.trace, loss, named, behind)
        needed = entries.needed(uses, view.params, fake.params)
        if not view.asked.evaluation:
            written = recorder.states.written
            return made(written, overwrites, entries.units, needed, drawn, backward, results)

        trained = PythonState.of(view.model, view.step.loss)
        if others is not None:
            others.before_evaluation()
        evaluator = _recorder(fake, modules, sources, results, evaluates=True)
        evaluator.share_constants(recorder)
        recorders.append(evaluator)
        evaluator.states.sharded = gathered.names
        with (
            _alone(view),
            fake.mode,
            unrecorded(),
            composites(),
            gathered.guarded(fake.others),
            view.step.evaluating(),
            view.step.holding(fake.slots),
            noted_draws() as drawn_to_evaluate,
        ):
            value = _own_loss(view, evaluated(evaluate, evaluator))
            evaluation_loss = evaluator.name_of(value)
        evaluator.states.check_places()
        overwrites |= _check_inputs(fake, evaluator)
        _note_hazards(view, evaluator, evaluating=True)
        if evaluation_loss is None:
            raise located(source_of(view.model), "the loss was not made by the captured evaluation")
        if drawn_to_evaluate and view.asked.draws is not None:
            kind = CaptureError if view.asked.outputs is None else EvaluationError
            raise kind(
                "forward in eval mode draws from Python's or NumPy's generator of random numbers"
            )
        written = recorder.states.written | evaluator.states.written
        evaluated_as = evaluator.trace, evaluation_loss, trained
        decided = overwrites, entries.units, needed, drawn, backward, results
        return made(written, *decided, *evaluated_as)


@contextmanager
def _alone(view: ModelView) -> Iterator[None]:
    """In the body, which records an evaluation, what has no plan is no reason why training has
    none, for a caller that can evaluate without."""
    try:
        yield
    except CaptureError as error:
        casts = error.casts and view.asked.casts is None
        if view.asked.outputs is None or casts or type(error) not in (CaptureError, DrawnError):
            raise
        raise EvaluationError(str(error)) from error


def _check_inputs(fake: FakeModel, recorder: Recorder) -> bool:
    """Whether the step writes an input. CaptureError for one of which a plan gets a copy, or that
    may be a part of another tensor that the step reads, and for a step that asks for the gradient
    of one."""
    view = fake.view
    if view.asked.outputs is None:
        return False  # in another process nobody has them afterwards
    inputs = {f"i{index}": each for index, each in enumerate(view.inputs.items())}
    for (name, example), tensor in zip(view.inputs.items(), fake.inputs, strict=True):
        if tensor.shape != example.shape:
            raise located(
                source_of(view.model), f"input '{name}' gets another shape in forward, as by .t_()"
            )
        if tensor.requires_grad:
            raise located(
                source_of(view.model),
                f"input '{name}' is made to require grad in forward, and its .grad would not be "
                "there; use its .detach().requires_grad_()",
            )
    written = recorder.cones.written(inputs)
    once = {id(tensor): tensor for tensor in view.inputs.values()}
    storages = Counter(storage_of(tensor) for tensor in once.values()) if written else Counter()
    held = set(map(storage_of, recorder.trace.constants)) if written else set()
    for each in sorted(written):
        name, tensor = inputs[each]
        why = "" if is_itself(tensor) else "is a view with gaps, or that is conjugated"
        if storages[storage_of(tensor)] > 1:
            why = "has the memory of another one"
        elif storage_of(tensor) in held:
            why = "has the memory of a tensor that is held elsewhere and read"
        if why:
            raise located(
                source_of(view.model),
                f"input '{name}' is written in forward and {why}: a compiled step would write a "
                "copy; give its .clone()",
            )
    return bool(written)


def _note_hazards(view: ModelView, recorder: Recorder, *, evaluating: bool) -> None:
    """What matters where a step is to be put back."""
    assumed = view.step.assumed[evaluating] if view.step.assumed else None
    if assumed is None:
        return
    names = [f"i{index}" for index in range(len(view.inputs))]
    if assumed.outcomes:
        assumed.inputs |= recorder.cones.written(names)
        assumed.may_fail |= may_fail(recorder.trace, recorder.cones)
    elif not evaluating and view.asked.breaks is not None and view.asked.breaks.made:
        assumed.inputs |= recorder.cones.written(names)
        assumed.may_fail |= may_fail(recorder.trace, recorder.cones, behind=is_break)


def _reduced(view: ModelView, gradient: Tensor | None, param: State) -> Tensor | None:
    """What FSDP2 reduces of a gradient."""
    if gradient is None or param.spec is None:
        return gradient
    reduced = local_gradient(gradient, param.spec)
    if view.units.sums_first and reduced is not local(gradient):
        raise located(
            source_of(view.model),
            f"the gradient of '{param.name}' is exchanged with other ranks after those of all "
            "microbatches are added, which a captured step does not do",
        )
    return reduced


def _own_loss(view: ModelView, loss: Tensor) -> Tensor:
    """The tensor of a DTensor that is the same on all ranks, as that of a loss over parallel
    logits; CaptureError for any other DTensor."""
    if isinstance(loss, DTensor) and not all(place.is_replicate() for place in loss.placements):
        raise located(
            source_of(view.model),
            f"the loss is a DTensor placed as {loss.placements}, expected the same on all ranks; "
            "use .full_tensor()",
        )
    return local(loss)


def _check_no_gradients(fake: FakeModel, during: str) -> None:
    view = fake.view
    for param, leaf in zip(view.params, fake.params, strict=True):
        if leaf.grad is not None:
            raise located(
                source_of(view.model),
                f"backward() ran inside {during} and left a gradient in '{param.name}', which "
                "would be lost; return the sum of the losses, or use torch.autograd.grad",
            )


def _has_reentrant_checkpoint(loss: Tensor) -> bool:
    """Whether backward itself runs a backward, which `torch.autograd.grad` refuses. Otherwise that
    function is used: it returns gradients as they are made, without the copies of accumulation."""
    return any(node.name() == "CheckpointFunctionBackward" for node in nodes_from(loss.grad_fn))


def _recorder(
    fake: FakeModel,
    modules: ModuleStack,
    sources: SourceMap,
    results: FakeResults,
    *,
    evaluates: bool = False,
) -> Recorder:
    view = fake.view
    compares, assumes = view.asked.outputs is not None, view.asked.assume is not None
    recorder = Recorder(
        fake.mode,
        modules,
        sources,
        len(view.buffers),
        view.asked.device,
        compares or assumes,
        results,
        asserts=assumes and not compares,
        defers=lambda: view.step.defers,
        rereads=assumes and compares,  # a step of one microbatch
        generator=None if evaluates or view.asked.device.type != "cpu" else view.asked.generator,
        assumes_asserted=assumes and compares and view.asked.assumes_asserted,
    )
    for index, (param, leaf) in enumerate(zip(view.params, fake.params, strict=True)):
        recorder.bind_state(param, local(leaf), f"p{index}", parameter=True)
    for index, (buffer, tensor) in enumerate(zip(view.buffers, fake.buffers, strict=True)):
        recorder.bind_state(buffer, tensor, f"b{index}", parameter=False)
    inputs = zip(view.inputs.items(), fake.inputs, strict=True)
    for index, ((name, example), tensor) in enumerate(inputs):
        recorder.bind(tensor, f"i{index}", example if view.is_data(name) else None)
    return recorder
