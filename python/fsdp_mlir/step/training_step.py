"""The step that is captured: a model's forward and its loss, as one function of the inputs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import stateless
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from fsdp_mlir.modules import compute_loss
from fsdp_mlir.modules.compute_loss import ComputeLoss
from fsdp_mlir.modules.growing import Growing
from fsdp_mlir.modules.left import Made, Slots, is_made
from fsdp_mlir.modules.outside import asks_for_numbers
from fsdp_mlir.modules.place import Place, model_class
from fsdp_mlir.modules.python_state import PythonState
from fsdp_mlir.modules.weights import modules_by_path
from fsdp_mlir.step.assumed import Assumed, Outcomes
from fsdp_mlir.step.conversions import conversions_kept
from fsdp_mlir.step.draws import Drawing, DrawsOfModes
from fsdp_mlir.step.followed import Candidates
from fsdp_mlir.step.held import Held
from fsdp_mlir.step.items import Items, Relied, is_item
from fsdp_mlir.step.nested import Content, is_plain, keys_taken, named_leaves, rebuilt, replaced
from fsdp_mlir.step.numbers import Number, Numbers, Unread
from fsdp_mlir.step.outputs import Outputs, no_counts, scalar_of
from fsdp_mlir.support.errors import (
    CaptureError,
    FirstStepError,
    calls_the_model,
    located,
    source_of,
)

calls_the_model(__file__)

Loss = Callable[..., Any]

# Of training and of evaluation.
OutputsOfModes = tuple[Outputs, Outputs]

# Where a TrainingStep holds the model; the first segment of the names of its state.
_MODEL = "model"


@dataclass(frozen=True)
class EachLoss:
    """A loss function that writes the losses of the last microbatches to `values`, one of float64
    each, and begins their backward with 1 where the graph begins it with 1 / len(values)."""

    loss: Loss | None
    values: Tensor

    @staticmethod
    def why_not(count: int, dtype: torch.dtype) -> str:
        """Why there is none for so many losses of this dtype; empty if there is."""
        one = torch.ones((), dtype=dtype)
        if bool(one / count * count == one):
            return ""
        return f"{count} microbatches together: 1 / {count} times {count} is not 1 in {dtype}"

    def noted(self, loss: Tensor) -> Tensor:
        with torch.no_grad():
            values = torch.cat((self.values[1:], loss.to(self.values.dtype).reshape(1)))
            self.values.copy_(values)
        return loss * len(self.values)


class TrainingStep(nn.Module):
    """Forward and loss of `model` on tensors in the order of `names`.

    The inputs arg0, arg1, … go to the model by position, `positional` of them, the others by name,
    except those that `loss` names besides the output, which go only to `loss`. The same holds for
    `constants`, which are not tensors. Without `loss` the output itself, or its `.loss`, is the
    loss. A ComputeLoss gets the model and the inputs instead. With `outputs` the loss may be a part
    of what `loss` gives (outputs.scalar_of), and the rest goes there. Inputs that `scalars` names
    come with a dim 0 of one element, which the model does not see. In place of an input that
    `containers` has come the tensors in it (nested.py). `numbers` are the constants that may be
    others in each step, and `held` the places of further ones that code reads; if there are any,
    their input is the last one. `repeated` has the tensors that are the same object as an earlier
    one, by their names, which code may ask for: the model gets that one. Strings and numbers that
    are `unread`, as named by nested.pattern, have stand-ins in a recording, which it may not read.
    What code reads at the places of `relied` are numbers, if they follow from what the step is
    given. Without `counting` what is left in the places of `held` may not follow from what it
    computes. With `casts` calls of `float` and `int` in the model's code may give numbers of each
    step. `order`: all names, as those that come by name are given; the tensors first otherwise.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        positional: int,
        loss: Loss | EachLoss | None,
        constants: Mapping[str, Any] | None = None,
        outputs: OutputsOfModes | None = None,
        scalars: Iterable[str] = (),
        containers: Mapping[str, Any] | None = None,
        numbers: Iterable[str] = (),
        held: Mapping[str, Place] | None = None,
        growing: Mapping[str, Place] | None = None,
        repeated: Mapping[str, str] | None = None,
        unread: Set[str] = frozenset(),
        assume: Outcomes | None = None,
        relied: Relied = frozenset(),
        draws: DrawsOfModes | None = None,
        drawn: Mapping[str, Any] | None = None,
        counting: bool = False,
        casts: bool = False,
        order: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.names = list(names)
        self._order = order or [*names, *(constants or {})]
        self._by_position = by_position(positional)
        self._each = loss if isinstance(loss, EachLoss) else None
        loss = loss.loss if isinstance(loss, EachLoss) else loss
        self.loss = loss
        self._constants = dict(constants or {})
        self._outputs = outputs
        self._evaluating = False
        self._scalars = frozenset(scalars)
        self._containers = dict(containers or {})
        self._repeated = dict(repeated or {})
        self._unread = unread
        by_name = [x for x in (*self.names, *self._constants) if x not in self._by_position]
        self._of_loss = loss_inputs(loss, by_name)
        self.assigned: set[str] = set()  # the buffers that `settle` has found assigned
        self.taken: dict[str, tuple[str, ...]] = {}  # keys that the step takes out of its inputs
        # For tensors that forward leaves in Python, which a caller in this process may read.
        self.left = None if outputs is None else Slots()
        self._in_places = Held(held or {})
        self._growing = Growing(growing or {})
        self._own: set[int] = set()  # the memory of the state that the model holds
        given = {name: self._constants[name] for name in numbers}
        users = _modules_of(model, loss) if draws is not None or casts else []
        self._drawing = Drawing(draws, users)
        self._drawn = dict(drawn or {})
        given |= self._in_places.values | self._drawn
        self.numbers = Numbers(given, draws or ((), ()), alone=counting)
        # As OutputsOfModes: numbers that are left in places that are held, and what is appended to
        # lists.
        self.counts = no_counts()
        self._counting = counting
        returns = outputs is not None
        self.assumed = tuple(
            Assumed(known, returns=returns, evaluating=evaluating)
            for known, evaluating in zip(assume or (), (False, True), strict=False)
        )
        asks = partial(asks_for_numbers, model, loss)
        self._items = [
            Items(each, relied, asks, users if casts else ())
            for each in self.assumed or (None, None)
        ]
        self.followed = Candidates()

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """The scalar loss; CaptureError if it is neither a scalar nor of one element."""
        loss = self._taken(self.value(inputs))
        self._take_counts(inputs)
        if self.assumed_now is not None:
            self.assumed_now.take(self._error, self.numbers.now)
        return self._each.noted(loss) if self._each else loss

    def _taken(self, value: Any) -> Tensor:
        """The scalar in that; the outputs take the rest."""
        if self._outputs is None:
            return self._scalar(value)
        try:
            loss = self._scalar(scalar_of(value))
        except TypeError as error:
            raise self._error(str(error)) from None
        if loss is not value:
            self.outputs.take(value, loss, self._error, self.numbers.now)
        return loss

    def _take_counts(self, inputs: Sequence[Tensor]) -> None:
        """What forward has left in places that are held and follows from what it computes, and
        what it has appended to lists."""
        found = {x: each for x, each in self._in_places.assigned().items() if is_item(each)}
        if found and not self._counting:
            raise next(iter(found.values())).refused()
        found |= self._appended(inputs)
        if found or self.counts[self._evaluating].slots:
            counts = self.counts[self._evaluating]
            counts.take(found, None, self._error, self.numbers.now)

    def _appended(self, inputs: Sequence[Tensor]) -> dict[str, list[Any]]:
        found = self._growing.appended()
        if not found or not self.numbers.recording:
            return found
        shared = set(map(_memory, inputs))
        for name, items in found.items():
            if self._growing.knows(items):
                raise self._error(
                    f"an object that was there before the step is appended to '{name}', of which a "
                    "compiled step would append a copy; append a copy"
                )
            for each in tree_leaves(items):
                if isinstance(each, Tensor) and not is_made(each, self._own):
                    raise self._error(
                        f"a parameter or a buffer is appended to '{name}', of which a compiled "
                        "step would append a copy; append a .clone()"
                    )
                if isinstance(each, Tensor) and _memory(each) in shared:
                    raise self._error(
                        f"a tensor is appended to '{name}' that has the memory of an input or of "
                        "another one there, of which a compiled step would append a copy; append a "
                        ".clone()"
                    )
                shared |= {_memory(each)} if isinstance(each, Tensor) else set()
        return found

    def _error(self, text: str) -> CaptureError:
        return located(source_of(self.loss or self.model), text)

    @property
    def assumed_now(self) -> Assumed | None:
        """What forward assumes now, if it may."""
        return self.assumed[self._evaluating] if self.assumed else None

    @property
    def outputs(self) -> Outputs:
        """Those that forward takes now."""
        assert self._outputs is not None
        return self._outputs[self._evaluating]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """In the body, forward is recorded."""
        may_keep = self.left is not None and not self._evaluating
        modes = {"evaluating": self._evaluating, "may_keep": may_keep}
        numbers = self.numbers.recorded(self._in_places, **modes)
        with self._items[self._evaluating].recorded(may_keep=may_keep), numbers:
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """In the body, forward runs eagerly, as it was recorded."""
        with self._items[self._evaluating].replayed():
            yield

    @property
    def has_cast(self) -> bool:
        """Items.has_cast of either mode."""
        return any(each.has_cast for each in self._items)

    @property
    def defers(self) -> bool:
        """Items.defers of those of forward now."""
        return self._items[self._evaluating].defers

    @property
    def slots(self) -> list[Tensor]:
        """The tensors that outputs are copied to, in both modes, and what is left in Python."""
        returned = *(self._outputs or ()), *self.counts, *self.assumed
        outputs = [slot for each in returned for slot in each.slots]
        return [*outputs, *(self.left.tensors if self.left else ())]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model in eval mode, and outputs of evaluation."""
        with eval_mode(self.model):
            self._evaluating = True
            try:
                yield
            finally:
                self._evaluating = False

    def value(self, inputs: Sequence[Tensor]) -> Any:
        """What `loss` gives, or the model without it."""
        constants, drawn = self._constants, dict[str, Any]()
        if self.numbers.given:
            *inputs, source = inputs
            values = self._in_places.put(self.numbers.values(source))
            drawn = {name: values.pop(name) for name in self._drawn}
            constants = constants | values
        self._growing.put(recording=self.numbers.recording)
        constants = {name: self._without_unread(name, each) for name, each in constants.items()}
        modes = {"evaluating": self._evaluating, "recording": self.numbers.recording}
        with self._held(inputs) as inputs, self._drawing.given(drawn, **modes):
            return self._called(inputs, constants)

    def _without_unread(self, name: str, value: Any) -> Any:
        if not self._unread or not self.numbers.recording:
            return value
        made = partial(Unread, of=self.numbers)
        return replaced(name, value, self._unread, made)

    @contextmanager
    def _held(self, tensors: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """The inputs in whose place these tensors come. CaptureError if the body changes one that
        is a container."""
        if not self._scalars and not self._containers and not self._repeated:
            yield tensors
            return
        each, given = iter(tensors), dict[str, Tensor]()

        def tensor(name: str) -> Tensor:
            value = next(each)
            if name not in self._repeated:
                given[name] = value.reshape(()) if name in self._scalars else value
            return given[self._repeated.get(name, name)]

        inputs, before = [], []
        for name in self.names:
            held = self._containers.get(name)
            leaves = named_leaves(name, held) if name in self._containers else [(name, Tensor())]
            found = [tensor(path) for path, leaf in leaves if isinstance(leaf, Tensor)]
            given_one = rebuilt(held, iter(found)) if name in self._containers else found[0]
            inputs.append(self._without_unread(name, given_one))
            before.append(Content.by(name, inputs[-1]))
        yield inputs
        for name, value, held in zip(self.names, inputs, before, strict=True):
            taken = keys_taken(name, self._containers.get(name), held, value)
            if taken is None or self.taken.setdefault(name, taken) != taken:
                raise located(
                    source_of(self.model),
                    f"input '{name}' is changed in forward: what it holds would stay as it was for "
                    "the caller; change a copy of it",
                )

    def _called(self, inputs: Sequence[Any], constants: Mapping[str, Any]) -> Any:
        given: dict[str, Any] = dict(zip(self.names, inputs, strict=True)) | constants
        keywords = {name: given[name] for name in self._order}
        args = [keywords.pop(name) for name in self._by_position]
        if isinstance(self.loss, ComputeLoss):
            return self.loss.func(self.model, *args, **keywords)
        beside = {name: keywords.pop(name) for name in self._of_loss}
        output = self.model(*args, **keywords)
        if self.loss is None:
            return output
        return compute_loss.call_loss(self.loss, output, **beside)

    def follow(self, begin: PythonState, own: Set[int]) -> None:
        """Before the first recording, with the Python state then: places whose tensors the step may
        read and replace. `own`: the storages of the model's state."""
        self.followed = Candidates(begin, own)
        self._growing.check(begin)

    def settle(
        self,
        state: Mapping[str, Tensor],
        read: Callable[[], tuple[Mapping[int, bool], Set[int]]] = lambda: ({}, set()),
    ) -> None:
        """At the end of a step, while the model holds `state`: copies a value that was assigned to
        a buffer to the tensor that was there, and puts that back, if it has the same form. What
        follows from parameters by autograd is no such value: the next backward would reach it. The
        slots of `left` take the tensors that the step has left in Python. `read` is that of
        Candidates.settle."""
        self.numbers.ended(self._in_places, evaluating=self._evaluating)
        self._growing.restore()
        self.followed.settle({_memory(tensor) for tensor in state.values()}, read)
        if self.left is not None and not self._evaluating:
            self.left.take(self._in_python, {_memory(tensor) for tensor in state.values()})
            self._items[0].ended(self.left.taken)
            self.numbers.check_left(self.left.taken)
        modules, found = modules_by_path(self.model), {}
        for slot in state:
            path, _, name = slot.rpartition(".")
            found[slot] = modules[path]._buffers, name
        now = {slot: owner.get(name, state[slot]) for slot, (owner, name) in found.items()}
        memory = [_memory(value) for value in now.values()]
        values = {}
        for slot, tensor in state.items():
            value = now[slot]
            if value is None or value is tensor or isinstance(value, DTensor):
                continue
            alone = sum(tensor is other for other in state.values()) == 1
            alone = alone and memory.count(_memory(value)) == 1
            if alone and not value.requires_grad and _form(value) == _form(tensor):
                # Buffers may have changed places.
                moved = any(_memory(value) == _memory(other) for other in state.values())
                with torch.no_grad():
                    values[slot] = value.clone() if moved else value
        for slot, value in values.items():
            owner, name = found[slot]
            with torch.no_grad():
                owner[name] = state[slot].copy_(value)
            self.assigned.add(slot)

    def _in_python(self) -> dict[str, Made]:
        with _disable_current_modes():
            state = PythonState.of(self.model, self.loss, from_end=True)
            return {**self._plain_numbers(state), **state.tensors(), **state.numbers()}

    def _plain_numbers(self, state: PythonState) -> dict[str, Made]:
        """What stands for numbers in a recording, and is the number itself in a replay."""
        assert self.left is not None
        pairs = zip(self.left.paths or (), self.left.recorded, strict=False)
        numbers = {path: each.of_now() for path, each in pairs if type(each) is Number}
        return {
            path: each
            for path, each in numbers.items()
            if state.leaves.get(path) == ("value", repr(each.number))
        }

    @contextmanager
    def holding(self, state: Mapping[str, Tensor]) -> Iterator[None]:
        """The model with `state`, given by the attributes that hold it, in place of its own.

        For forward, and for backward, which runs checkpointed regions of the model again.
        CaptureError if one of these attributes was assigned, and `settle` could not keep the new
        value.
        """
        given = {f"{_MODEL}.{slot}": tensor for slot, tensor in state.items()}
        after = dict(given)
        self._own = {_memory(tensor) for tensor in state.values()}
        with (
            stateless._reparametrize_module(self, after, tie_weights=False),
            conversions_kept(),
            self._in_places.restored(),
            self._growing.restored(),
        ):
            yield
        for slot, tensor in given.items():
            if after[slot] is not tensor:
                text = (
                    f"'{slot.removeprefix(_MODEL + '.')}' was assigned in forward, and the new "
                    "value would be lost; change it in place, as with .copy_()"
                )
                # The first step may make a table, which is there from then on.
                is_other = after[slot] is None or _form(after[slot]) != _form(tensor)
                kind = FirstStepError if is_other else CaptureError
                raise kind(str(located(source_of(self.model), text)))

    def _scalar(self, value: Any) -> Tensor:
        loss = self.loss
        where = source_of(self.model if loss is None else loss)
        what = "the model's output" if loss is None else "the loss function's result"
        if loss is None and not isinstance(value, Tensor) and hasattr(value, "loss"):
            value = value.loss
            what = "the model's .loss"
        fix = "" if loss else "; pass loss=, a function from the output to a scalar"
        if not isinstance(value, Tensor):
            raise located(
                where, f"{what} is no tensor: expected a scalar, got '{type(value).__name__}'{fix}"
            )
        if value.shape == (1,):
            value = value.reshape(())  # which backward() takes, too
        if value.dim() != 0 or not value.is_floating_point():
            dtype = str(value.dtype).removeprefix("torch.")
            raise located(
                where,
                f"{what} is no loss: expected a floating scalar, got "
                f"{dtype}{list(value.shape)}{fix}",
            )
        if torch.is_grad_enabled() and not value.requires_grad:
            raise located(where, f"{what} depends on no parameter that requires grad")
        return value


def _modules_of(model: nn.Module, loss: Any) -> list[ModuleType]:
    """Those that have the code of a model and its loss function."""
    classes = [model_class(type(module)) for module in model.modules()]
    owners = [*classes, getattr(loss, "func", loss)]
    names = dict.fromkeys(str(getattr(owner, "__module__", "")) for owner in owners)
    found = (sys.modules.get(name) for name in names if name.partition(".")[0] != "torch")
    return [module for module in found if module is not None]


def _memory(tensor: Tensor | None) -> int:
    if tensor is None or isinstance(tensor, DTensor):
        return 0
    key: int = tensor.untyped_storage()._cdata
    return key


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode for the body; afterwards every module is in its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def by_position(count: int) -> list[str]:
    """The names of as many inputs that have none."""
    return [f"arg{index}" for index in range(count)]


def split_constants(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """By name, `args` as arg0, arg1, …: what may be an input of the graph, and what is part of it:
    numbers, strings, None and the like."""
    given: dict[str, Any] = dict(zip(by_position(len(args)), args, strict=True))
    for name, value in kwargs.items():
        if name in given:
            raise CaptureError(f"the keyword '{name}' is taken by a positional input")
        given[name] = value
    constants = {name: value for name, value in given.items() if is_plain(value)}
    return {name: value for name, value in given.items() if name not in constants}, constants


def example_inputs(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The graph's inputs by name, of what the model gets; CaptureError for what is not data."""
    inputs: dict[str, Tensor] = {}
    for top, holder in given.items():
        for name, value in named_leaves(top, holder):
            if is_plain(value):
                continue
            if not isinstance(value, Tensor):
                raise located(
                    source_of(model),
                    f"input '{name}': expected a tensor, got '{type(value).__name__}'; set it in "
                    "the model or wrap the model in one that takes tensors only",
                )
            if value.layout != torch.strided:
                raise located(source_of(model), f"input '{name}': expected a dense tensor")
            if value.requires_grad or isinstance(value, nn.Parameter):
                why = "requires grad" if value.requires_grad else "is a parameter"
                raise located(source_of(model), f"input '{name}' {why}: expected data")
            if name in inputs:
                raise located(source_of(model), f"input '{name}' has a name that another one has")
            inputs[name] = value
    return inputs


def loss_inputs(loss: Loss | None, names: Sequence[str]) -> list[str]:
    """The inputs that `loss` names besides the output."""
    if loss is None or isinstance(loss, ComputeLoss):
        return []
    try:
        named = list(signature_of(loss).parameters)[1:]
    except ValueError:  # a builtin without a signature
        return []
    return [name for name in named if name in names]


def signature_of(function: Any, *, follow_wrapped: bool = True) -> inspect.Signature:
    """That of the forward of a module."""
    function = function.forward if isinstance(function, nn.Module) else function
    return inspect.signature(function, follow_wrapped=follow_wrapped)


def required_inputs(loss: Loss | None) -> list[str]:
    """The inputs besides the output that `loss` requires."""
    if loss is None or isinstance(loss, ComputeLoss):
        return []
    try:
        named = list(signature_of(loss).parameters.values())[1:]
    except ValueError:  # a builtin without a signature
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in named if p.default is p.empty and p.kind in kinds]
