"""Runs a recorded step beside eager PyTorch: loss, gradients and buffers must have equal bits.

Two steps, without an update between them: the first on the example, the second on another batch
with the same elements. The recorded calls run one by one, eager PyTorch runs the model with the
same hooks at unit boundaries, both on the CPU and from the same seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_mlir.check.kernel_check import checked_call
from fsdp_mlir.modules.placed import local
from fsdp_mlir.modules.python_state import PythonState
from fsdp_mlir.record.generators import untouched_generators
from fsdp_mlir.record.graph import Node, Ref, Trace, split_arguments
from fsdp_mlir.record.known import flat_tensors
from fsdp_mlir.record.recording import Recording
from fsdp_mlir.record.trace import IDENTITIES
from fsdp_mlir.support.autocast import without_autocast
from fsdp_mlir.support.errors import (
    CaptureError,
    Location,
    OtherwiseError,
    located,
    source_of,
    warn,
)
from fsdp_mlir.support.layouts import bytes_of, laid_out_copy
from fsdp_mlir.view.gathered import Gathered
from fsdp_mlir.view.model_view import ModelView

aten = torch.ops.aten

_SEED = 20

# (name of the operator without its in-place mark, hash of its results)
Called = tuple[str, str]

# Hashes of what a step computes, by a description of it.
_Bits = dict[str, str]


def run(recording: Recording) -> bool:
    """False, after a warning, if eager PyTorch cannot run the step, unless the check was asked for;
    CaptureError if the recorded step differs from it."""
    view = recording.view
    with untouched_generators():
        try:
            runs = _eager_runs(recording)
        except _EagerFailed as failed:
            cause = failed.__cause__
            text = f"failed: {_line(cause)}"
            if view.asked.check:
                raise located(source_of(view.model), f"eager PyTorch {text}") from failed
            warn(f"the captured step was not run beside eager PyTorch, which {text}")
            return False
        return all(_is_equal(recording, batches, eager) for batches, eager in runs)


def _is_equal(recording: Recording, batches: list[list[Tensor]], eager: list[_Bits]) -> bool:
    """As `run`, for steps in a row, of which eager PyTorch gave these results."""
    try:
        graph = _Graph(recording).steps(batches)
    except CaptureError:
        raise
    except Exception as error:
        text = f"the recorded step does not run: {_line(error)}"
        raise located(source_of(recording.view.model), text) from error
    for step, (want, got) in enumerate(zip(eager, graph, strict=True)):
        differing = [name for name in want if want[name] != got.get(name)]
        differing += [name for name in got if name not in want]
        if not differing:
            continue
        if _Eager(recording).steps(batches) == eager:
            raise _difference(recording, batches, step, differing)
        warn(
            "the captured step was not compared with eager PyTorch, which gave other bits when it "
            "ran again"
        )
        return False
    return True


def _eager_runs(recording: Recording) -> list[tuple[list[list[Tensor]], list[_Bits]]]:
    """What eager PyTorch computes from the example and then from a batch of the same elements in
    another order; if it refuses that batch, from the same samples in another order, or from the
    example again. Each of the two runs alone if `each_alone`."""
    view = recording.view
    example = [
        laid_out_copy(_on_cpu(tensor), expanded=False)
        if view.is_data(name)
        else view.step.numbers.input()
        for name, tensor in view.inputs.items()
    ]

    def with_others(change: Callable[[Tensor], Tensor], others: bool) -> list[Tensor]:
        return [
            change(each) if view.is_data(name) else view.step.numbers.input(others=others)
            for name, each in zip(view.inputs, example, strict=True)
        ]

    def runs(other: list[Tensor]) -> list[tuple[list[list[Tensor]], list[_Bits]]]:
        rows = [[example], [other]] if each_alone(recording) else [[example, other]]
        return [(batches, _Eager(recording).steps(batches)) for batches in rows]

    # With other numbers, too, if there are any: a step may look at their class.
    kinds = [(_shuffled, True)] if view.step.numbers.given else []
    for change, others in (*kinds, (_shuffled, False), (_rotated, False)):
        other = with_others(change, others)
        if not _relied_on(recording, other):
            continue
        try:
            return runs(other)
        except (_EagerFailed, OtherwiseError):
            continue
    return runs(example)


def each_alone(recording: Recording) -> bool:
    """Whether steps are not run in a row, because one changes what it relies on: the next one may
    go another way."""
    buffers = {f"b{index}": each.name for index, each in enumerate(recording.view.buffers)}
    outside = {name for each in recording.trace.relied_on for name in each.outside}
    written = any(buffers.get(name, name) in recording.written for name in outside)
    return written or any(each.draws for each in recording.trace.relied_on)


def _relied_on(recording: Recording, batch: list[Tensor]) -> bool:
    """Whether what the step relies on is the same for these inputs."""
    view, trace = recording.view, recording.trace
    sources = {f"i{index}": tensor for index, tensor in enumerate(batch)}
    held = [*(buffer.tensor for buffer in view.buffers), *trace.constants]
    sources |= {f"b{index}": tensor for index, tensor in enumerate(held)}
    traces = [trace, *([recording.evaluation] if recording.evaluation else [])]
    generator = view.asked.generator
    return all(each.holds(sources, generator) for one in traces for each in one.relied_on)


def _line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def equal_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bits; all NaNs count as equal."""
    return _bits(left) == _bits(right)


def _bits(tensor: Tensor) -> str:
    """A hash of dtype, shape and elements."""
    data = tensor.detach().resolve_conj().resolve_neg()
    if data.is_floating_point():
        data = torch.where(data.isnan(), torch.full_like(data, float("nan")), data)
    digest = xxhash.xxh3_128_hexdigest(bytes_of(data).numpy())
    return f"{tensor.dtype}{list(tensor.shape)}{digest}"


def _result(
    loss: Tensor, gradients: dict[str, Tensor], buffers: dict[str, Tensor], outputs: list[Tensor]
) -> _Bits:
    """One step's loss, gradients by parameter name, and buffers and outputs after it."""
    bits = {"the loss": _bits(local(loss))}
    bits |= {f"the gradient of '{name}'": _bits(x) for name, x in gradients.items()}
    bits |= {f"output {index}": _bits(x) for index, x in enumerate(outputs)}
    return bits | {f"buffer '{name}'": _bits(x) for name, x in buffers.items()}


def _seed(recording: Recording) -> None:
    torch.manual_seed(_SEED)
    # Which another seed may decide otherwise.
    if any(each.draws for each in recording.trace.relied_on):
        torch.default_generator.set_state(recording.view.asked.generator)
    random.seed(_SEED)
    np.random.seed(_SEED)


class _EagerFailed(Exception):
    """The model or its backward raised an error, which is the cause."""


@contextmanager
def _eager_failures() -> Iterator[None]:
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        raise _EagerFailed from error


class _Eager:
    """Eager PyTorch on the model itself, whose state is put back at the end."""

    def __init__(self, recording: Recording) -> None:
        self._recording, self._view = recording, recording.view
        self._constants = recording.trace.constants
        self._evaluates = recording.evaluation is not None

    def steps(self, batches: list[list[Tensor]], tape: _Tape | None = None) -> list[_Bits]:
        view = self._view
        params = {
            param.name: view.parameter(param, _on_cpu(param.tensor, view.computed(param)))
            for param in view.params
        }
        buffers = {buffer.name: _on_cpu(buffer.tensor) for buffer in view.buffers}
        slots = view.slots({**params, **buffers})
        results = []
        _seed(self._recording)
        with (
            _unchanged(view, [*buffers.values(), *self._constants]),
            view.units.hooked(view.params, view.asked.device.version, view.asked.shown) as entries,
        ):
            gathered = Gathered(view, list(params.values()), entries)
            for batch in batches:
                for param in params.values():
                    param.grad = None
                inputs = [laid_out_copy(tensor) for tensor in batch]
                with (
                    torch.enable_grad(),
                    view.step.holding(slots),
                    tape or nullcontext(),
                    _eager_failures(),
                ):
                    with gathered.in_forward(), view.step.replayed():
                        loss = view.step.forward(inputs)
                    with gathered.in_backward(), without_autocast():
                        loss.backward()
                    view.step.settle(slots)
                if tape is not None:
                    tape.end_step()
                gradients = {n: p.grad for n, p in params.items() if p.grad is not None}
                results.append(_result(loss, gradients, buffers, view.step.slots))
            if self._evaluates:
                inputs = [laid_out_copy(tensor) for tensor in batches[-1]]
                with (
                    torch.no_grad(),
                    view.step.evaluating(),
                    view.step.holding(slots),
                    _eager_failures(),
                ):
                    with gathered.in_forward(), view.step.replayed():
                        loss = view.step.forward(inputs)
                    view.step.settle(slots)
                results[-1]["the loss in eval mode after it"] = _bits(local(loss))
        return results


def _on_cpu(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor in its own memory, if it is on the CPU in that dtype."""
    return tensor.detach().to("cpu", dtype or tensor.dtype)


@contextmanager
def _unchanged(view: ModelView, tensors: list[Tensor]) -> Iterator[None]:
    """Puts the Python state of the model, and the data of `tensors`, back at the end; also that of
    tensors which only another step than the recorded one writes."""
    state = PythonState.of(view.model, view.step.loss)
    every = {id(tensor): tensor for tensor in (*tensors, *state.watched())}.values()
    kept = [_Kept(tensor) for tensor in every if tensor.device.type == "cpu"]
    try:
        yield
    finally:
        state.restore()
        for each in kept:
            each.restore()


class _Kept:
    """A tensor's data as they are now."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._data = tensor, tensor.detach().clone()

    def restore(self) -> None:
        tensor = self._tensor
        if not equal_bits(tensor, self._data):
            if tensor.shape != self._data.shape:
                requires = tensor.requires_grad  # which cannot be given another shape
                tensor.requires_grad_(False).resize_(self._data.shape).requires_grad_(requires)
            tensor.detach().copy_(self._data)


class _Graph:
    """The recorded calls, run one by one."""

    def __init__(self, recording: Recording) -> None:
        view = recording.view
        self._recording = recording
        self._values: dict[str, Tensor] = {}
        for index, param in enumerate(view.params):
            self._values[f"p{index}"] = _on_cpu(param.tensor, view.computed(param))
        buffers = [*(buffer.tensor for buffer in view.buffers), *recording.trace.constants]
        for index, tensor in enumerate(buffers):
            self._values[f"b{index}"] = laid_out_copy(_on_cpu(tensor))

    def steps(self, batches: list[list[Tensor]], tape: _Tape | None = None) -> list[_Bits]:
        # Modules that run in Python may leave something there.
        view = self._recording.view
        with _unchanged(view, [buffer.tensor for buffer in view.buffers]):
            return self._steps(batches, tape)

    def _steps(self, batches: list[list[Tensor]], tape: _Tape | None) -> list[_Bits]:
        recording, view = self._recording, self._recording.view
        _seed(recording)
        names = [recording.loss, *recording.gradients.values()]
        results = []
        for batch in batches:
            inputs = {f"i{i}": laid_out_copy(tensor) for i, tensor in enumerate(batch)}
            loss, *gradients = replay(recording.trace, self._values | inputs, names, tape)
            for each in view.asked.breaks.made.values() if view.asked.breaks else ():
                each.check()
            if tape is not None:
                tape.end_step()
            named = {
                view.params[index].name: gradient
                for index, gradient in zip(recording.gradients, gradients, strict=True)
            }
            buffers = {
                buffer.name: self._values[f"b{index}"] for index, buffer in enumerate(view.buffers)
            }
            results.append(_result(loss, named, buffers, self._outputs()))
        if recording.evaluation is not None:
            inputs = {f"i{i}": laid_out_copy(tensor) for i, tensor in enumerate(batches[-1])}
            (loss,) = replay(
                recording.evaluation, self._values | inputs, [recording.evaluation_loss]
            )
            results[-1]["the loss in eval mode after it"] = _bits(local(loss))
        return results

    def _outputs(self) -> list[Tensor]:
        view, constants = self._recording.view, self._recording.trace.constants
        places = {id(tensor): f"b{len(view.buffers) + i}" for i, tensor in enumerate(constants)}
        # The value of an evaluation that has not run yet is unchanged.
        return [self._values[places[id(slot)]] for slot in view.step.slots]


def replay(
    trace: Trace, values: dict[str, Tensor], results: list[str], tape: _Tape | None = None
) -> list[Tensor]:
    """Runs the calls of a trace on `values` by name, in place where the calls are, and returns the
    values of `results`. A value is dropped after its last use. Grad mode is on in forward, as in
    eager execution: some kernels keep nothing for backward without it. It is off for operators that
    are not ATen's, as in their autograd kernels."""
    values = dict(values)
    uses: dict[str, int] = dict.fromkeys(results, len(trace.nodes))
    for index, node in reversed(list(enumerate(trace.nodes))):
        for leaf in torch.utils._pytree.tree_leaves([node.args, node.outs]):
            name = leaf.name if isinstance(leaf, Ref) else leaf
            if isinstance(name, str):
                uses.setdefault(name, index)
    ends: dict[int, list[str]] = {}
    for name, index in uses.items():
        ends.setdefault(index, []).append(name)
    # The calls have the casts of the autocast that may be on around the step.
    with torch.no_grad(), without_autocast():
        for index, node in enumerate(trace.nodes):
            args = [_resolved(value, values) for value in node.args]
            forward = index < trace.backward_begin and node.func.namespace == "aten"
            with torch.set_grad_enabled(forward):
                made = _called(node, args)
            if tape is not None:
                tape.add(node.func, made, node.origin.location)
            _assign(node.outs, made, values)
            for name in ends.get(index, ()):
                values.pop(name, None)
    return [values[name] for name in results]


def _called(node: Node, args: list[Any]) -> Any:
    if node.func.namespace != "aten":
        return checked_call(node, args)
    positional, keywords = split_arguments(node.func, args)
    made = node.func(*positional, **keywords)
    if torch.Tag.dynamic_output_shape in node.func.tags:
        shapes = [tuple(tensor.shape) for tensor in flat_tensors(made)]
        want = [type_.shape for type_ in node.types if type_ is not None]
        if shapes != want:
            raise located(
                node.origin.location,
                f"'{node.func}' gives a result of another shape, {shapes[0]}, on other data; the "
                f"captured step is static, with {want[0]}",
            )
    return made


def _resolved(value: Any, values: dict[str, Tensor]) -> Any:
    if isinstance(value, Ref):
        return values[value.name]
    if isinstance(value, (list, tuple)):
        return [_resolved(item, values) for item in value]
    return value


def _assign(outs: list[str | list[str]], made: Any, values: dict[str, Tensor]) -> None:
    for out, value in zip(outs, [made] if len(outs) == 1 else made or (), strict=True):
        names, tensors = ([out], [value]) if isinstance(out, str) else (out, value)
        values.update(zip(names, tensors, strict=True))


class _Tape(TorchDispatchMode):
    """The calls of each step with hashes of their results, up to a number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[tuple[Called, Location | None]]] = [[]]

    def end_step(self) -> None:
        self.steps.append([])

    def add(self, func: OpOverload, result: Any, location: Location | None = None) -> None:
        tensors = flat_tensors(result)
        if func in IDENTITIES or not tensors:
            return
        name = func._schema.name.removesuffix("_")
        if func is aten.lift_fresh.default:
            name = "aten::clone"  # as the recorder has it
        hashes = "".join(_bits(tensor) for tensor in tensors)
        self.steps[-1].append(((name, hashes), location))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, OpOverload):
            self.add(func, result)
        return result


def _difference(
    recording: Recording,
    batches: list[list[Tensor]],
    step: int,
    differing: list[str],
) -> CaptureError:
    """The error for a step that differs, with the first call whose results do."""
    eager, graph = _Tape(), _Tape()
    _Eager(recording).steps(batches, eager)
    _Graph(recording).steps(batches, graph)
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    what = f"{differing[0]}{more} of {'the first' if step == 0 else 'a second'} step"
    location = source_of(recording.view.model)
    call = ""
    for index, ((name, bits), where) in enumerate(graph.steps[step]):
        found = eager.steps[step][index][0] if index < len(eager.steps[step]) else ("nothing", "")
        if found != (name, bits):
            location = where or location
            other = f" where eager PyTorch calls '{found[0]}'" if found[0] != name else ""
            call = f"; the first call that differs is '{name}'{other}"
            break
    cause = (
        ""
        if step == 0
        else ", so the model keeps something from step to step that is neither parameter nor "
        "buffer, or took data for a constant"
    )
    return located(
        location, f"the captured step is not what eager PyTorch does: {what} differs{call}{cause}"
    )


def _shuffled(tensor: Tensor) -> Tensor:
    """The same elements in another order."""
    order = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(_SEED))
    made = torch.empty_like(tensor)
    made.copy_(tensor.reshape(-1)[order].reshape(tensor.shape))
    return made


def _rotated(tensor: Tensor) -> Tensor:
    """The same samples in another order."""
    made = torch.empty_like(tensor)
    made.copy_(tensor.roll(1, 0))
    return made
