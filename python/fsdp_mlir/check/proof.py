"""Proves that a recorded step is what the model does, or names the call where it is not.

When it is recorded again, with different seeds and, if it is for all ranks, as another rank, the
step must be the same graph: otherwise a number that only this run has was baked in. What forward
does to the Python state of the modules must not matter to the next step. Then the graph runs beside
eager PyTorch (eager_check.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_mlir.check import eager_check
from fsdp_mlir.check.perturbed import other_surroundings
from fsdp_mlir.modules.growing import grown
from fsdp_mlir.modules.left import Calculated, Left, tensors_of
from fsdp_mlir.modules.python_state import PythonState
from fsdp_mlir.record import collectives
from fsdp_mlir.record.generators import Drawn, untouched_generators
from fsdp_mlir.record.graph import Node, Ref, Trace
from fsdp_mlir.record.graph_breaks import is_break
from fsdp_mlir.record.operators import is_foreign
from fsdp_mlir.record.recording import Recorded, Recording, record_once
from fsdp_mlir.record.trace import ASSERTIONS
from fsdp_mlir.support.errors import (
    STOPS,
    AssertsError,
    BreakError,
    CaptureError,
    CountedError,
    EvaluationError,
    FirstStepError,
    OtherwiseError,
    located,
    short_path,
    source_of,
    warn,
)
from fsdp_mlir.support.layouts import storage_of
from fsdp_mlir.view.fake_model import FakeModel
from fsdp_mlir.view.model_view import ModelView, check_shared_memory

# The model's line, and both calls.
_Difference = tuple[tuple[str, int] | None, str]

# What is compared by identity, in a message.
_LEAVES = {
    "tensor": "a tensor",
    "number": "a number",
    **dict.fromkeys(("object", "held", "type"), "an object"),
}

# What tells that a step changes it each time.
_BY_VALUE = {"value", "items"}
# What is compared by identity, and may be made in each step.
_ANEW = {"tensor", "number", "object", "held"}

# Above this many bytes of parameters, buffers and inputs the step is not run unless asked for.
CHECKED_BYTES = 256 << 20


@dataclass(frozen=True)
class Checked:
    """A recording that is known to be what the model does, and whether it was run beside eager
    PyTorch. `left` puts in place what a step leaves in Python. `unsettled`: the recorded step is
    another one once it has run, though with the same bits, or leaves once what `left` cannot put in
    place, such as a hook."""

    recording: Recording
    beside_eager: bool
    left: list[Left] = field(default_factory=list)
    unsettled: bool = False


def check(recorded: Recorded) -> Checked:
    """Proves it, or raises CaptureError. The model's Python state and the generators are unchanged
    in any case."""
    recording, before, first = recorded.recording, recorded.before, recorded.after
    view, wanted = recording.view, recording.view.asked.check
    changed = before.changes(first)
    try:
        with untouched_generators():
            drawn = _check_again(recorded)
            first.restore()
            cached = bool(changed) and _depends_on_state(recording)
            second = PythonState.of(view.model, view.step.loss) if changed else first
    finally:
        before.restore()
    _check_draws(recording, drawn)
    _check_growing(view, before, first, second)
    _check_counters(view, before, first, second)
    if cached:
        _check_computed(view, before, first)
    _check_evaluation(recording, before, first)
    begun = view.asked.outputs is not None and (
        view.step.followed.begins
        or any(path not in before.tensors() for path in first.made_since(before))
        or not first.numbers().keys() <= before.leaves.keys()
    )
    kept = view.step.left if not cached else None
    if kept is not None:
        _check_steady(view, first, second)
    check_shared_memory(view, recording.trace.constants, recording.written)
    _check_assumed(recording)
    _check_held(view, before)

    checked = _has_data(view) and (_bytes(view) <= CHECKED_BYTES if wanted is None else wanted)
    device = view.asked.device
    if wanted and device.type != "cpu":
        raise CaptureError(
            f"check: a step that is captured for '{device.type}' is not run beside eager PyTorch; "
            "expected check=False, or device='cpu'"
        )
    if wanted and not checked:
        raise CaptureError("check: expected a model and inputs with data, got tensors on 'meta'")
    # Other ranks would have to run it too.
    others = view.asked.others is not None and view.asked.others.called
    checked = checked and device.type == "cpu" and not (others or _communicates(recording))
    if checked:
        try:
            checked = eager_check.run(recording)
        except (OtherwiseError, BreakError):
            raise
        except CaptureError as error:
            if cached and begun:
                raise FirstStepError(str(error)) from error
            raise
        finally:
            before.restore()  # the recorded calls draw from the model's generators
    if not checked and view.asked.breaks is not None and view.asked.breaks.made:
        raise located(
            source_of(view.model),
            "a module is to run in Python, and the step could not be compared with eager PyTorch",
        )
    if cached and (not checked or eager_check.each_alone(recording)):
        error = located(
            source_of(view.model),
            f"{_attributes(changed)} changed in forward, and the next step depends on it; capture "
            "with check=True, which runs two steps, or call the model once before capture",
        )
        raise FirstStepError(str(error)) if begun else error
    after = recording.trained or first
    left = before.left(after, kept) if changed else []
    once: list[str] = []
    if view.asked.outputs is not None:
        once, anew = _not_put(view, before, after, second, left) if changed else ([], [])
        # The state before an evaluation has the hooks of the recording itself.
        once, anew = ([path for path in each if path in changed] for each in (once, anew))
        if anew and not cached:
            raise located(
                source_of(view.model),
                f"{_attributes(anew)} set in each step to what a compiled step cannot put there; "
                "keep tensors, plain values, and objects of your own classes that hold these",
            )
        left += recording.drawn.left()
    elif lost := first.made_since(before) if not cached else []:
        warn(
            f"{_attributes(lost)} set in forward, and no later step reads it; the compiled step "
            "does not set it"
        )
    return Checked(recording, checked, left, cached or bool(once))


def _check_assumed(recording: Recording) -> None:
    """Warns of what a step assumes that stops where that is not so. The error of a truth value that
    another step cannot assume, as what it does otherwise could not be put back: in what it calls,
    or because a call may fail on what a branch would have kept from it."""
    view = recording.view
    errors = [error for each in view.step.assumed for error in each.errors]
    nodes = recording.nodes()
    if view.asked.outputs is None:
        texts = [str(node.args[-1]) for node in nodes if node.func in ASSERTIONS]
        places = dict.fromkeys(x.removeprefix(STOPS) for x in texts if x.startswith(STOPS))
        if places:
            shown = ", ".join([*places][:3]) + (f" and {len(places) - 3} more" * (len(places) > 3))
            warn(f"data decide what the step is: {shown}; a step that would be another one stops")
        return
    others = view.asked.others is not None and view.asked.others.called
    fails = any(each.may_fail for each in view.step.assumed)
    foreign = any(is_foreign(node.func) and not is_break(node.func) for node in nodes)
    breaks = view.asked.breaks is not None and view.asked.breaks.made
    asserts = any(node.func in ASSERTIONS for node in nodes)
    if (errors or breaks) and asserts and not others and not view.asked.assumes_asserted:
        raise AssertsError("")
    if errors and (others or fails or foreign):
        raise errors[0]
    if breaks and fails:
        raise located(
            source_of(view.model),
            "a module is to run in Python, and calls may fail on what it gives if it does not do "
            "what it was seen to do",
        )


def _communicates(recording: Recording) -> bool:
    """Whether a step has collectives of its own."""
    return any(node.func.namespace == collectives.NAMESPACE for node in recording.nodes())


def _check_again(recorded: Recorded) -> Drawn:
    """CaptureError if a second recording, in different surroundings, gives a different graph.
    Returns what it does to Python's and NumPy's generators."""
    recording = recorded.recording
    followed = recording.view.step.followed
    # In this process each rank captures its own step.
    for_all = recording.view.asked.outputs is None
    again = difference = None
    if followed:
        with suppress(CaptureError), followed.elsewhere():
            again, difference = _again(recorded, of_rank=for_all)
        if again is None or difference or not followed.keep(again.trace.constants):
            if name := followed.assigned():
                raise located(
                    source_of(recording.view.model),
                    f"'{name}' is assigned in forward, which looks at more of the tensor there "
                    "than what is in it, such as by another name; change it in place, as with "
                    ".copy_()",
                )
            followed.forget()
            again = None
    if again is None:
        again, difference = _again(recorded, of_rank=for_all)
    if difference is not None:
        location, text = difference
        raise located(
            location,
            f"the step is not the same each time: {text}, with other seeds of Python, NumPy "
            f"and torch{' and another rank' if for_all else ''}; draw by calls of torch on "
            "tensors, and keep what differs by rank or by step in an input or a buffer",
        )
    return again.drawn


def _again(recorded: Recorded, *, of_rank: bool) -> tuple[Recording, _Difference | None]:
    """Another recording of the step, and where it differs."""
    with untouched_generators(), other_surroundings(of_rank=of_rank):
        try:
            again = record_once(FakeModel(recorded.recording.view), recorded.recording)
        finally:
            recorded.before.restore()
    return again, _difference(recorded.recording, again)


def _check_held(view: ModelView, before: PythonState) -> None:
    """CaptureError for a buffer that forward assigns and something else holds too, which keeps the
    tensor from before."""
    for buffer in view.buffers:
        if buffer.name not in view.step.assigned:
            continue
        memory = storage_of(buffer.tensor)
        for path, tensor in before.tensors().items():
            if storage_of(tensor) == memory:
                raise located(
                    source_of(view.model),
                    f"'{buffer.name}' was assigned in forward, and '{path}' keeps what was there; "
                    "change it in place, as with .copy_()",
                )


def _depends_on_state(recording: Recording) -> bool:
    """Whether the step is different in the Python state that forward left."""
    with untouched_generators():
        try:
            again = record_once(FakeModel(recording.view), recording)
        except Exception:  # such as a stand-in from the first recording that the next one reads
            return True
        return _difference(recording, again) is not None


def _check_counters(
    view: ModelView, before: PythonState, first: PythonState, second: PythonState
) -> None:
    """CaptureError for Python values that every step changes, such as a count of calls."""
    numbers = first.numbers(), second.numbers()
    for path in first.changes(second):
        leaves = [state.leaves.get(path, ("none", "nothing")) for state in (before, first, second)]
        forms = [each[path].form for each in numbers if path in each]
        if _BY_VALUE.isdisjoint(kind for kind, _ in leaves[1:]) and len({*forms}) < 2:
            continue
        shown = [_LEAVES.get(kind, str(value)) for kind, value in leaves]
        error = located(
            source_of(view.model),
            f"attribute '{path}' changes in each step (from {' to '.join(shown)}), which a "
            "captured step does not do; keep it in a buffer that is changed in place",
        )
        if view.asked.outputs is not None:
            was, now, then = (_numbers(state) for state in (before, first, second))
            changed = {key for key, value in now.items() if value != then.get(key, value)}
            if counted := {key for key in was if was[key] != now.get(key)} | (changed & was.keys()):
                raise CountedError(str(error), counted, path) from error
            if changed:
                raise FirstStepError(str(error)) from error
        raise error


def _check_growing(
    view: ModelView, before: PythonState, first: PythonState, second: PythonState
) -> None:
    """CountedError for lists that each step appends to, for a caller that can do so."""
    if view.asked.counting and (keys := grown(before, first, second).keys()):
        changes = first.changes(second)
        path = next((each for each in changes if each not in first.leaves), [*changes, ""][0])
        text = f"forward appends to a list, as it does at '{path}'"
        raise CountedError(str(located(source_of(view.model), text)), keys, path)


def _check_draws(recording: Recording, other: Drawn) -> None:
    """CaptureError for what Python draws and is no number of each step, unless it is seeded first
    or known not to matter."""
    view = recording.view
    host = "" if view.asked.draws is None else recording.drawn.varies(other)
    if host:
        raise located(
            source_of(view.model),
            f"forward draws from {host}'s generator of random numbers otherwise than by calls that "
            "give one number, which a captured step does not do; draw before the step",
        )


def _check_computed(view: ModelView, before: PythonState, first: PythonState) -> None:
    """CountedError for numbers in whose places a step leaves what it computes, if the next step
    depends on that."""
    counted = _numbers(before).keys() & {
        (id(spot.owner), spot.name)
        for spot, value in first.spots(int, float)
        if issubclass(type(value), Calculated)
    }
    if counted and view.asked.outputs is not None:
        changed = before.changes(first)
        path = next((path for path in first.numbers() if path in changed), changed[0])
        text = f"attribute '{path}' changes in each step, which a captured step does not do"
        raise CountedError(str(located(source_of(view.model), text)), counted, path)


def _check_evaluation(recording: Recording, before: PythonState, after: PythonState) -> None:
    """EvaluationError if forward in eval mode leaves something in Python, for a caller that has it
    between its own code."""
    view, trained = recording.view, recording.trained
    if trained is None or view.asked.outputs is None:
        return
    # The recording itself has hooks on modules until its end.
    own = trained.leaves.keys() - before.leaves.keys() - after.leaves.keys()
    if paths := [
        path for path in trained.changes(after) if path not in own or "_hooks" not in path
    ]:
        raise EvaluationError(f"{_attributes(paths)} set by forward in eval mode")


def _numbers(state: PythonState) -> dict[tuple[int, Any], str]:
    """Those in attributes, items and variables, by the keys of their places."""
    return {
        (id(spot.owner), spot.name): repr(value)
        for spot, value in state.spots(int, float)
        if type(value) in (int, float)
    }


def _not_put(
    view: ModelView, before: PythonState, after: PythonState, second: PythonState, left: list[Left]
) -> tuple[list[str], list[str]]:
    """What a step leaves and `left` does not put in place: what the next step keeps, and what it
    makes anew."""
    try:
        with suppress(ArithmeticError, ValueError):  # of numbers of no step
            for put in left:
                put()
        missed = PythonState.of(view.model, view.step.loss).changes(after)
    finally:
        before.restore()
    put_tensors, old, new = tensors_of(left), before.tensors(), after.tensors() | after.numbers()
    missed = [
        path
        for path in missed
        if id(new.get(path)) not in put_tensors
        # The list that an RNN has of its parameters follows them by itself.
        and not all(isinstance(each.get(path), nn.Parameter) for each in (old, new))
    ]
    once = [path for path in missed if after.leaves.get(path) == second.leaves.get(path)]
    return once, [path for path in missed if path not in once]


def _check_steady(view: ModelView, first: PythonState, second: PythonState) -> None:
    """CaptureError if a step leaves something else than the one before it, as in a list that grows
    or rotates: all that may differ is that it has made each thing anew."""
    there = first.known()
    changes = first.changes(second)
    # Of modules that take turns, their hooks for state dicts do, too.
    for path in sorted(changes, key=lambda path: "_state_dict_" in path):
        was, now = first.leaves.get(path), second.leaves.get(path)
        is_anew = was is not None and now is not None and {was[0], now[0]} <= _ANEW
        if is_anew and now is not None and now != was and now[1] not in there:
            continue
        kind = "a tensor" if now is not None and now[0] == "tensor" else "something"
        raise located(
            source_of(view.model),
            f"forward leaves {kind} at '{path}' in one step and elsewhere in the next, which a "
            "captured step does not do; clear what holds it in forward",
        )


def _attributes(paths: list[str]) -> str:
    # Hooks for state dicts, which FSDP2 registers at a model's first call, are the last to be told.
    paths = [path for path in paths if "_state_dict_" not in path] or paths
    named = ", ".join(f"'{path}'" for path in paths[:3])
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return f"attribute{'s' if len(paths) > 1 else ''} {named}{more} " + (
        "were" if len(paths) > 1 else "was"
    )


def _difference(left: Recording, right: Recording) -> _Difference | None:
    """Where two recordings first differ, with both calls; None if they are equal."""
    pairs: Iterable[tuple[Trace | None, Trace | None]] = (
        (left.trace, right.trace),
        (left.evaluation, right.evaluation),
    )
    for one, other in pairs:
        if one is None or other is None:
            continue
        for index, (a, b) in enumerate(zip_longest(one.nodes, other.nodes)):
            if a is None or b is None or not _same_call(a, b, one, other):
                node = a or b
                return node.origin.location, (
                    f"call {index + 1} is {_call(a, one)} once and {_call(b, other)} then"
                )
    if (left.loss, left.gradients) != (right.loss, right.gradients):
        return None, "other parameters have gradients"
    return None


def _same_call(a: Node, b: Node, one: Trace, other: Trace) -> bool:
    return (
        a.func is b.func
        and a.outs == b.outs
        and a.types == b.types
        and repr(a.args) == repr(b.args)
        and all(
            _same_bits(one.constants[i], other.constants[j])
            for i, j in zip(_constants(a, one), _constants(b, other), strict=True)
        )
    )


def _constants(node: Node, trace: Trace) -> list[int]:
    """The constants that a call takes, as indices."""
    refs = torch.utils._pytree.tree_leaves(node.args)
    return [
        trace.constant_index[ref.name]
        for ref in refs
        if isinstance(ref, Ref) and ref.name in trace.constant_index
    ]


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left is right:
        return True
    if left.shape != right.shape or left.dtype != right.dtype or left.is_meta:
        return False
    at = [(each.data_ptr(), each.stride()) for each in (left, right)]
    return at[0] == at[1] or eager_check.equal_bits(left, right)


def _call(node: Node | None, trace: Trace) -> str:
    if node is None:
        return "nothing"
    location = node.origin.location
    where = f" at {short_path(location[0])}:{location[1]}" if location else ""
    values = [trace.constants[i] for i in _constants(node, trace)]
    shown = "".join(
        f" with {value.flatten()[:3].tolist()}" for value in values if value.numel() < 4
    )
    arguments = ", ".join(_argument(value) for value in node.args)
    return f"'{node.func}({arguments[:120]})'{shown}{where}"


def _argument(value: object) -> str:
    return f"%{value.name}" if isinstance(value, Ref) else repr(value)


def _has_data(view: ModelView) -> bool:
    return not any(tensor.is_meta for tensor in _tensors(view))


def _bytes(view: ModelView) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(view))


def _tensors(view: ModelView) -> list[Tensor]:
    return [*(state.tensor for state in view.states), *view.inputs.values()]
