"""Graph breaks: modules that run in Python, in the middle of a plan, because no plan can have them.

What such a module does follows from data: which tokens an expert gets, which box belongs to which
object. If its results have one form, the step has a call in its place, whose kernel calls the
module on the operands, and keeps autograd's graph for the call in backward. A run that does
anything else than it was seen to do says so (`failed`): its results mean nothing, and whoever has
run the step makes it anew without a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import torch
import xxhash
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node
from torch.utils._pytree import TreeSpec, tree_flatten

from fsdp_mlir.modules import compute_loss
from fsdp_mlir.modules.python_state import PythonState
from fsdp_mlir.record.python_run import Called, Run
from fsdp_mlir.record.seen_call import (
    Form,
    Function,
    Signature,
    seen,
    signature_of,
    state_of,
    tensors_alive,
)
from fsdp_mlir.support.autograd import nodes_from
from fsdp_mlir.support.errors import (
    BreakError,
    CaptureError,
    calls_the_model,
    located,
    prefixed,
    source_of,
)

calls_the_model(__file__)

_NAMESPACE = "fsdp_mlir"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
_SCHEMA = "(Tensor[] operands, int number) -> Tensor[]"
_LIBRARY.define(f"graph_break{_SCHEMA}")
_LIBRARY.define(f"drawing_graph_break{_SCHEMA}", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.define(
    "graph_break_backward(Tensor[] operands, Tensor[] gradients, int number) -> Tensor[]"
)

# Those of the plan that runs, or of the last recording, by the numbers in their calls, which are
# the same in each process of a job.
_breaks: WeakValueDictionary[int, Break] = WeakValueDictionary()

# Elements of results that are kept, for a run that fails: zeros may not stand for them.
_FILLER = 1 << 16

# Of torch.nn.functional: their results have a form, what is in between has none.
_FUNCTIONS = ("ctc_loss",)

# Observations of a module in a row after which a capture still fails in it.
_MOST_TRIES = 3


@contextmanager
def _called_by(call: Callable[..., Any]) -> Iterator[None]:
    """In the body, modules, and functions that may be graph breaks, are called by that."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.Module, "__call__", call))
        for name in _FUNCTIONS:
            made = Function(getattr(nn.functional, name), name)
            stack.enter_context(mock.patch.object(nn.functional, name, made))

        def call_loss(loss: Callable[..., Any], output: Any, **beside: Any) -> Any:
            is_module = isinstance(loss, nn.Module)
            return (loss if is_module else Function(loss, "loss"))(output, **beside)

        stack.enter_context(mock.patch.object(compute_loss, "call_loss", call_loss))
        yield


@dataclass(eq=False)
class _Step:
    """A run of a plan. `failed`: one of its graph breaks has."""

    failed: bool = False


@dataclass(eq=False)
class Break:
    """One call of a module.

    `given`: which of those results that require grad have gradients; set when backward is recorded.
    `elsewhere`: operands whose gradient has terms of other calls that may come before its own are
    added up. `step`: that of all breaks of a plan.
    """

    number: int
    key: str
    called: Called
    step: _Step
    given: list[bool] = field(default_factory=list)
    elsewhere: set[int] = field(default_factory=set)
    node: Node | None = None  # while the step is recorded
    run: Run | None = None
    _earlier: Sequence[Tensor] = ()

    @property
    def module(self) -> nn.Module:
        return self.called.module

    @property
    def form(self) -> Form:
        return self.called.form

    @property
    def failed(self) -> str:
        """Why the last run's results mean nothing; empty if they are right."""
        return self.run.failed if self.run else ""

    @property
    def learned(self) -> bool:
        """Whether another recording would do what it has done."""
        return self.run is not None and self.run.learned

    def begin(self) -> None:
        """A step begins that has this call: other plans have calls of the same number."""
        self.run, self.step.failed = None, False
        _breaks[self.number] = self

    def undo(self) -> None:
        """Puts back what the run has changed of what its module reads from Python."""
        if self.run is not None and self.run.around is not None:
            self.run.around.restore()

    def raise_interrupt(self) -> None:
        """After that: what its module has raised beside errors, such as KeyboardInterrupt."""
        if self.run is not None and self.run.interrupt is not None:
            raise self.run.interrupt

    def check(self) -> None:
        """BreakError if the last run has failed."""
        if self.run is not None and self.run.failed:
            text = f"'{self.key}', which is to run in Python: {self.run.failed}"
            error = BreakError(prefixed(source_of(self.module), text))
            error.learned = self.learned
            raise error

    def forward(self, operands: Sequence[Tensor]) -> list[Tensor]:
        self.run = run = Run(self.called)
        if self.step.failed:  # which may be what would keep it busy for ever
            run.failed = "a module before it has failed"
            return [x.empty().zero_() for x in self.form.results]
        # Of what is recomputed only values are needed, if it has no backward.
        results = run.forward(operands, self.elsewhere if self.given else None, self._earlier)
        self.step.failed |= bool(run.failed)
        if not self._earlier and not run.failed and self._is_small:
            self._earlier = [x.clone() if x.is_floating_point() else x * 0 for x in results]
        return results

    @property
    def _is_small(self) -> bool:
        return sum(math.prod(result.shape) for result in self.form.results) <= _FILLER

    def backward(self, operands: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        assert self.run is not None
        found = self.run.backward(operands, gradients, self.given, self.wanted)
        self.step.failed |= bool(self.run.failed)
        return found

    @property
    def wanted(self) -> list[int]:
        """The operands that get gradients."""
        pairs = zip(self.form.reached, self.form.needs, strict=True)
        return [index for index, (reached, need) in enumerate(pairs) if reached and need]


def _of(operands: Sequence[Tensor], number: int) -> Break:
    if any(isinstance(operand, FakeTensor) for operand in operands):
        raise RuntimeError("a module that runs in Python needs data")
    return _breaks[number]


@torch.library.impl(_LIBRARY, "drawing_graph_break", "CPU")
@torch.library.impl(_LIBRARY, "graph_break", "CPU")
def _forward(operands: list[Tensor], number: int) -> list[Tensor]:
    return _of(operands, number).forward(operands)


@torch.library.impl(_LIBRARY, "graph_break_backward", "CPU")
def _backward(operands: list[Tensor], gradients: list[Tensor], number: int) -> list[Tensor]:
    return _of(operands, number).backward(operands, gradients)


@torch.library.register_fake(f"{_NAMESPACE}::drawing_graph_break", lib=_LIBRARY)
@torch.library.register_fake(f"{_NAMESPACE}::graph_break", lib=_LIBRARY)
def _fake_forward(operands: list[Tensor], number: int) -> list[Tensor]:
    return [result.empty() for result in _breaks[number].form.results]


@torch.library.register_fake(f"{_NAMESPACE}::graph_break_backward", lib=_LIBRARY)
def _fake_backward(operands: list[Tensor], _: list[Tensor], number: int) -> list[Tensor]:
    made = _breaks[number]
    return [made.called.gradient(index, operands[index]) for index in made.wanted]


_OPERATORS = torch.ops.fsdp_mlir


def is_break(func: OpOverload) -> bool:
    return func.namespace == _NAMESPACE


def _recorded(made: Break, operands: Sequence[Tensor]) -> list[Tensor]:
    function = _OPERATORS.drawing_graph_break if made.form.draws else _OPERATORS.graph_break
    results: list[Tensor] = function(list(operands), made.number)
    return results


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Break, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.made = made
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands)
        results = _recorded(made, operands)
        without = [x for x, form in zip(results, made.form.results, strict=True) if not form.grad]
        ctx.mark_non_differentiable(*without)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        made = ctx.made
        if made.given:
            raise located(
                source_of(made.module),
                f"'{made.key}', which is to run in Python, has two backwards",
            )
        forms = made.form.results
        every = [each for each, form in zip(gradients, forms, strict=True) if form.grad]
        made.given = [each is not None for each in every]
        operands = list(ctx.saved_tensors)
        present = [each for each in every if each is not None]
        found = _OPERATORS.graph_break_backward(operands, present, made.number)
        of = dict(zip(made.wanted, found, strict=True))
        return None, *(of.get(index) for index in range(len(operands)))


class _Relying:
    """In which modules a recording comes to rely on values: the innermost ones."""

    def __init__(self, relied: Callable[[], int]) -> None:
        self._relied = relied
        self._count = 0
        self._stack: list[str] = []
        self.keys: set[str] = set()

    @contextmanager
    def within(self, key: str) -> Iterator[None]:
        self._note()
        self._stack.append(key)
        try:
            yield
        finally:
            self._note()
            self._stack.pop()

    def end(self) -> None:
        """The recording has ended, which nothing is to hold."""
        self._relied = lambda: 0

    def _note(self) -> None:
        if (count := self._relied()) > self._count:
            self._count = count
            self.keys |= {*self._stack[-1:]}


@dataclass
class _State:
    """What code reads of Python, and the versions of the tensors there."""

    python: PythonState
    versions: dict[str, int]

    @staticmethod
    def of(model: nn.Module, loss: Callable[..., Any] | None) -> _State:
        python = PythonState.of(model, loss)
        return _State(python, {path: x._version for path, x in python.tensors().items()})

    def change(self, after: _State) -> str:
        """The first thing that differs; empty if nothing does."""
        if changes := self.python.changes(after.python):
            return changes[0]
        return next((x for x in self.versions if self.versions[x] != after.versions.get(x)), "")


class GraphBreaks:
    """Those of a model's steps. A module is one if it is `wanted`, by its path or, outside of the
    model, its class, and was `observed` once for such operands while it trained eagerly."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        self._model, self._loss = model, loss
        self._paths = {id(module): path for path, module in model.named_modules() if path}
        self.wanted: dict[str, str] = {}  # with the reason
        self.refused: dict[str, str] = {}
        self._forms: dict[tuple[str, Signature], Form] = {}
        self._first: tuple[nn.Module, ...] = ()  # in which the capture has failed first
        self._counts: dict[str, int] = {}
        self._tries: dict[str, int] = {}  # in a row, without a call in its place
        self._relying = _Relying(lambda: 0)
        self._within = False
        self._step = _Step()
        self.made: dict[int, Break] = {}

    def key(self, module: nn.Module) -> str:
        """Empty for the model itself."""
        if module is self._model:
            return ""
        kind = type(module)
        if isinstance(module, Function):
            return module.name
        return self._paths.get(id(module), f"class {kind.__module__}.{kind.__qualname__}")

    def want_relying(self) -> bool:
        """Whether there are modules that may be breaks in which the last recording relies on
        values, for each of which there is another plan otherwise."""
        found = self._relying.keys - {"", *self.refused, *self.wanted}
        self.wanted |= dict.fromkeys(found, "what it does follows from values that vary")
        return bool(found)

    def taken(self) -> None:
        """The last recording has become a plan."""
        self._tries.clear()

    def refuse(self) -> None:
        """After a capture in which a call did something else: its module is none any more."""
        failed = next((made for made in self.made.values() if made.failed), None)
        if failed is not None:
            self._refuse(failed.module, failed.failed)

    def broken(self) -> dict[str, str]:
        """The modules of the last recording that are calls, with the reasons."""
        return {made.key: self.wanted[made.key] for made in self.made.values()}

    def begin(self) -> None:
        """A capture begins."""
        self._first = ()

    def want(self, error: CaptureError) -> bool:
        """Whether one of the modules in which the capture has failed first may be one, after it has
        been observed; the innermost is taken."""
        if isinstance(error, BreakError):
            return True  # without that module, the next capture finds others
        chain = self._first or error.within
        for module in chain:
            key = self.key(module)
            if not key or key in self.refused:
                continue
            tries = self._tries[key] = self._tries.get(key, 0) + 1
            if tries > _MOST_TRIES:
                self._refuse(module, "it is called in another way each time")
                continue
            # The layers of a model fail alike; a module around one may be of any kind.
            for each in self._alike(module) if module is chain[0] else {key}:
                self.wanted.setdefault(each, str(error))
            return True
        return False

    @contextmanager
    def observed(self) -> Iterator[None]:
        """In the body, which trains eagerly, calls of those that are wanted are observed."""
        plainly = nn.Module.__call__
        older = tensors_alive()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            key = self.key(module)
            if self._within or key not in self.wanted or key in self.refused:
                return plainly(module, *args, **kwargs)
            before = self._looked()
            with self._inside():
                form, result = seen(module, args, kwargs, plainly, older)
            after = self._looked()
            if before is None or after is None:
                form = "what its code reads cannot be compared"
            elif change := before.change(after):
                form = f"it changes '{change}'"
            if isinstance(form, str):
                self._refuse(module, form)
            else:
                signature = signature_of(module, *tree_flatten((args, kwargs)))
                if self._forms.setdefault((key, signature), form) != form:
                    self._refuse(module, "its results have another form each time")
            return result

        with _called_by(call):
            yield

    @contextmanager
    def recorded(self, relied: Callable[[], int]) -> Iterator[None]:
        """In the body, which records a step, modules with a form are calls. `relied`: how many
        values the step relies on so far."""
        self._counts, self.made, plainly = {}, {}, nn.Module.__call__
        self._step = _Step()
        before = {
            x: state_of(y) for y in self._model.modules() if (x := self.key(y)) in self.wanted
        }
        everything = self._state() if self.wanted else None
        relying = self._relying = _Relying(relied)

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            key = self.key(module)
            if key in self.wanted and key not in self.refused:
                leaves, spec = tree_flatten((args, kwargs))
                signature = signature_of(module, leaves, spec)
                form = self._forms.get((key, signature))
                if form is not None and everything is not None:
                    now = state_of(module) if key in before else self._state()
                    changes = before.get(key, everything).changes(now)
                    if not changes:
                        return self._called(key, module, leaves, spec, form, signature)
                    self._refuse(module, f"'{changes[0]}', which it may read, is set before it")
            try:
                with relying.within(key):
                    return plainly(module, *args, **kwargs)
            except CaptureError as error:
                if self._first == error.within:  # it is the first that any has left
                    self._first = (*error.within, module)
                error.within = (*error.within, module)
                raise

        backward = torch.autograd.backward

        def from_there(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self.settle(*([tensors] if isinstance(tensors, Tensor) else tensors))
            backward(tensors, *args, **kwargs)

        try:
            with _called_by(call), mock.patch.object(torch.autograd, "backward", from_there):
                yield
        finally:
            relying.end()

    def _looked(self) -> _State | None:
        """None if that fails, which is no reason why the step does."""
        with suppress(Exception):
            return _State.of(self._model, self._loss)
        return None

    def _state(self) -> PythonState:
        return PythonState.of(self._model, self._loss)

    def _alike(self, module: nn.Module) -> set[str]:
        """The keys of this module and those of the model of its class."""
        found = (each for each in self._model.modules() if type(each) is type(module))
        return {self.key(each) for each in (module, *found)} - {""}

    def _refuse(self, module: nn.Module, why: str) -> None:
        self.refused |= dict.fromkeys(self._alike(module), why)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._within = True
        try:
            yield
        finally:
            self._within = False

    def _called(
        self,
        key: str,
        module: nn.Module,
        leaves: list[Any],
        spec: TreeSpec,
        form: Form,
        signature: Signature,
    ) -> Any:
        params = dict(module.named_parameters())
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        operands = [*tensors, *params.values()]
        count = self._counts[key] = self._counts.get(key, 0) + 1
        about = repr((key, count, signature, form, form.gradient_strides))
        number = xxhash.xxh3_64_intdigest(about.encode()) >> 1
        called = Called(
            module,
            [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            spec,
            list(params),
            form,
            [each.training for each in module.modules()],
            torch.is_grad_enabled(),
            (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
            dict(form.gradient_strides),
        )
        made = Break(number, key, called, self._step, elsewhere={*range(len(operands))})
        self.made[number] = _breaks[number] = made
        if any(form.needs):
            results = _Function.apply(made, *operands)
            made.node = next((x.grad_fn for x in results if x.grad_fn is not None), None)
        else:
            results = _recorded(made, operands)
        return form.result(results)

    def settle(self, *roots: Tensor) -> None:
        """Before a backward from there: finds which operands have gradients of other calls."""
        nodes = {id(node): node for root in roots for node in nodes_from(root.grad_fn)}
        users: dict[tuple[Node, int], list[Node]] = {}
        for node in nodes.values():
            for edge in node.next_functions:
                users.setdefault(edge, []).append(node)
        for made in self.made.values():
            if made.node is None or id(made.node) not in nodes:
                continue
            behind = set(nodes_from(made.node)) - {made.node}
            made.elsewhere.clear()
            for index, edge in enumerate(made.node.next_functions):
                others = [user for user in users.get(edge, ()) if user is not made.node]
                if users.get(edge, ()).count(made.node) > 1 or not behind.issuperset(others):
                    made.elsewhere.add(index)
            made.node = None
