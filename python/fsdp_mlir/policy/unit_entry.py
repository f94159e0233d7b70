"""Where a unit's inputs enter it: FSDP2's autograd function there, and which units need it.

FSDP2 sends the inputs of a unit that require gradients through one autograd function
(RegisterPostBackwardFunction in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py). So the
gradient of such an input is first summed over its uses inside the unit, then with those of other
uses, and an input that nothing in the unit uses gets zeros. Autograd by itself adds in the reverse
order of the uses. The sums have different bits if an input is used at least twice inside a unit and
once later outside it.

What the function gives are views of the inputs. A view has other strides along dimensions of one
element, as of a batch of one image whose channels are last: then operators such as convolutions
take another way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.fsdp._common_utils import collect_grad_tensors, replace_grad_tensors
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_mlir.modules.sharding import class_name
from fsdp_mlir.modules.weights import State, modules_by_path
from fsdp_mlir.support.errors import CaptureError
from fsdp_mlir.support.layouts import view_strides

# A differentiable value: the node that made it, and which of its results it is.
Edge = tuple[Node, int]

# By the first module of a unit ("" for the root): its parameters whose gradients are cast to a
# dtype until backward reaches the outputs of the unit, and not from there on.
Keeping = dict[str, list[tuple[str, torch.dtype]]]


class UnitEntry(torch.autograd.Function):
    """The identity on a unit's inputs, as FSDP2 has it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> tuple[Tensor, ...]:
        return tangents


class _Renamed(TorchDispatchMode):
    """Hides from a recorder below the calls by which autograd makes aliases of a function's
    unchanged inputs, unless these have other strides and it `restrides`."""

    def __init__(self, *, restrides: bool = False) -> None:
        super().__init__()
        self._restrides = restrides

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.is_view and not (self._restrides and _is_restrided(args[0])):
            return torch.ops.aten.detach.default(args[0])
        return func(*args, **(kwargs or {}))


def _is_restrided(tensor: Tensor) -> bool:
    """Whether a view of the same shape has other strides."""
    return 1 in tensor.shape and view_strides(tensor, tensor.shape) != tensor.stride()


class _Unit:
    """The modules of one `fully_shard` call, and how far the unit's forward has got."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        entered: Callable[[], None],
        left: Callable[[Any], None],
        through_function: Callable[[Any, Any], tuple[Any, Any]],
    ) -> None:
        """`left` is called with the output of the module that runs last."""
        self.modules = set(modules)
        self._entered = entered
        self._left = left
        self._through_function = through_function
        self._to_run: set[nn.Module] = set()
        self._running = False
        self.calls = 0

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A forward pre-hook. The function takes the inputs of the module that runs first."""
        if _in_backward():
            self._entered()  # to be recomputed
            return args, kwargs
        _check_own_parameters(module)
        self._entered()
        first, self._running = not self._running, True
        if not self._to_run:
            self._to_run |= self.modules
        self.calls += first
        return self._through_function(args, kwargs) if first else (args, kwargs)

    def leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        """A forward hook."""
        if not _in_backward() and module in self._to_run:
            self._to_run.remove(module)
            self._running = bool(self._to_run)
            if not self._running:
                self._left(output)

    def complete(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """A forward hook of the root: no longer waits for modules that have not run."""
        if not _in_backward():
            if self._to_run:
                self._left(None)
            self._to_run.clear()
            self._running = False


def _check_own_parameters(unit: nn.Module) -> None:
    """CaptureError for tensors in place of parameters, as torch.func.functional_call puts them:
    FSDP2 puts the gathered parameters back when the unit's forward begins, if they are sharded."""
    for name, module in unit.named_modules():
        for key, param in module._parameters.items():
            if param is not None and not isinstance(param, nn.Parameter):
                path = f"{name}.{key}" if name else key
                raise CaptureError(
                    f"a unit ('{class_name(unit)}') runs with another tensor in place of its "
                    f"parameter '{path}', which FSDP2 may replace"
                )


def _in_backward() -> bool:
    return torch._C._current_autograd_node() is not None


@dataclass
class _Call:
    """One call of a module: its inputs that require gradients, each with the argument's name, and
    the sequence numbers of the autograd nodes that it made. `restrided`: the argument of one that
    has other strides as a view."""

    module: str
    inputs: list[tuple[str, GradientEdge]]
    begin: int
    end: int = 0
    restrided: str = ""


class Places(Protocol):
    """Where parameters are put when FSDP2 gathers and frees a unit, which its first module names"""

    def gather(self, unit: str) -> None: ...

    def free(self, unit: str) -> None: ...

    def reshard(self, unit: str) -> None: ...


class Entries:
    """The hooks of a model's units, and a record of what enters its modules.

    `units` are the names of the modules of each unit but the root. Units are named by their first
    modules: `unit_of` has that of each parameter, `resharded` those that are freed after forward.
    `kept`: whether all stay whole after backward.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Sequence[str]],
        unit_of: Mapping[str, str],
        keeping: Keeping,
        resharded: Collection[str],
        *,
        kept: bool,
    ) -> None:
        self._model = model
        self.units = [list(names) for names in units]
        self._unit_of = unit_of
        self._keeping = keeping
        self._resharded = resharded
        self._kept = kept
        self.gathered: Places | None = None
        self.differentiates = False  # in the backward of the step
        by_path = modules_by_path(model)
        self._without_forward = {
            names[0]
            for names in self.units
            if any(type(by_path[name]).forward is nn.Module.forward for name in names)
        }
        self._calls: list[_Call] = []
        self._open: list[_Call] = []
        self._hooked: dict[str, _Unit] = {}
        self._functions: dict[str, list[Node]] = {}  # by unit

    def attach(self) -> Iterator[Any]:
        """Registers the hooks, before all others that run before a forward; yields handles."""
        by_path = modules_by_path(self._model)
        for names in self.units:
            modules = [by_path[name] for name in names]
            unit = _Unit(
                modules,
                partial(self._gather, names[0]),
                partial(self._left, names[0]),
                partial(self._through_function, names[0]),
            )
            self._hooked[names[0]] = unit
            for module in unit.modules:
                yield module.register_forward_pre_hook(unit.enter, prepend=True, with_kwargs=True)
                yield module.register_forward_hook(unit.leave, always_call=True)
            yield self._model.register_forward_hook(unit.complete)
        yield self._model.register_forward_pre_hook(
            self._enter_root, prepend=True, with_kwargs=True
        )
        yield self._model.register_forward_hook(self._leave_root)
        for name, module in self._model.named_modules():
            if module is not self._model and any(True for _ in module.parameters()):

                def before(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    self._before(name, module, args, kwargs)

                yield module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                yield module.register_forward_hook(self._after, always_call=True)

    def unit_of(self, param: State) -> str | None:
        """None for a parameter that is ignored, or of a unit that has no forward, as that of a
        ModuleList, which FSDP2 does not take."""
        unit = self._unit_of.get(param.name)
        return None if unit in self._without_forward else unit

    def _gather(self, unit: str) -> None:
        if self.gathered is not None:
            self.gathered.gather(unit)

    def _left(self, unit: str, output: Any) -> None:
        self._keep_gradients(unit, output)

        def gather(_grad: Tensor) -> None:
            if self.differentiates:
                self._gather(unit)

        for tensor in collect_grad_tensors(output) if torch.is_grad_enabled() else ():
            tensor.register_hook(gather)
        if self.gathered is not None and unit in self._resharded:
            self.gathered.free(unit)

    @staticmethod
    def uses(loss: Tensor) -> Uses:
        return Uses(loss)

    def post_backwards(
        self, uses: Uses, params: Sequence[State], leaves: Sequence[Tensor]
    ) -> dict[int, int]:
        """By the index of a parameter, how many calls of its unit backward has gone through when
        the gradient is whole, if any. FSDP2 reduces behind each what is whole there (its
        post-backward). Autograd runs nodes in the order opposite to that in which they were made.
        """
        calls = {
            unit: [node._sequence_nr() for node in nodes if node in uses.nodes]
            for unit, nodes in self._functions.items()
        }
        found = {}
        for index, (param, leaf) in enumerate(zip(params, leaves, strict=True)):
            unit, first = self.unit_of(param), uses.first(leaf)
            if unit in calls and first is not None:
                found[index] = sum(begin > first for begin in calls[unit])
        return {index: count for index, count in found.items() if count}

    def check_called_once(self) -> None:
        """CaptureError for a unit that is called several times: with reentrant checkpoints, FSDP2
        does not reduce all of its gradients."""
        for unit, hooked in self._hooked.items():
            if hooked.calls > 1:
                raise CaptureError(
                    f"unit '{unit}' is called {hooked.calls} times in a step with reentrant "
                    "checkpoints (use_reentrant=True), which a captured step does not do"
                )

    def _through_function(self, unit: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The inputs of a unit as FSDP2's function gives them."""
        inputs = collect_grad_tensors((args, kwargs)) if torch.is_grad_enabled() else ()
        if not inputs:
            return args, kwargs
        with _Renamed(restrides=True):
            entered = UnitEntry.apply(*inputs)
        if (node := entered[0].grad_fn) is not None:
            self._functions.setdefault(unit, []).append(node)
            node.register_hook(lambda *_: self._differentiated(unit))
        return replace_grad_tensors((args, kwargs), iter(entered))

    def _differentiated(self, unit: str) -> None:
        if self.gathered is not None and self.differentiates and not self._kept:
            self.gathered.reshard(unit)

    def _enter_root(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if _in_backward():
            return args, kwargs
        self._gather("")
        return self._through_function("", args, kwargs)

    def _leave_root(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not _in_backward():
            self._left("", output)

    def _keep_gradients(self, unit: str, output: Any) -> None:
        """Does with the unit's parameters what FSDP2 does before the unit's backward."""
        outputs = collect_grad_tensors(output)
        leaves = []
        for name, dtype in self._keeping.get(unit, []) if outputs else ():
            leaf = attrgetter(name)(self._model)
            if leaf.requires_grad:
                leaf.grad_dtype = dtype
                leaves.append(leaf)
        if not leaves:
            return

        def keep(_grad: Tensor) -> None:
            for leaf in leaves:
                leaf.grad_dtype = None

        torch.autograd.graph.register_multi_grad_hook(outputs, keep, mode="any")

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = _Call(name, [], torch.autograd._get_sequence_nr())
        if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
            names = list(inspect.signature(module.forward).parameters)
            named = [(names[min(i, len(names) - 1)], value) for i, value in enumerate(args)]
            for argument, value in (*named, *kwargs.items()):
                for tensor in collect_grad_tensors(value):
                    if _is_restrided(tensor):
                        call.restrided = argument
                    with _Renamed():
                        call.inputs.append((argument, get_gradient_edge(tensor)))
        self._open.append(call)

    def _after(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._open:
            call = self._open.pop()
            call.end = torch.autograd._get_sequence_nr()
            if call.inputs and not _in_backward():
                self._calls.append(call)

    def needed(
        self, uses: Uses, params: Sequence[State], leaves: Sequence[Tensor]
    ) -> dict[str, str]:
        """The modules that need the function if they are units, and the argument that needs it: by
        what it does, or as FSDP2 reduces the gradients of their parameters behind several calls.

        For any other module it makes no difference, whatever else is a unit.
        """
        found = self._reduced_apart(uses, params, leaves)
        for call in self._calls:
            if call.restrided:
                found.setdefault(call.module, call.restrided)
            edges = [uses.origin(edge) for _, edge in call.inputs]
            inside = [[call.begin <= at < call.end for at in uses.of(edge)] for edge in edges]
            if not any(map(any, inside)):
                continue
            for (argument, _), edge, within in zip(call.inputs, edges, inside, strict=True):
                summed = sum(within) >= 2 and any(at >= call.end for at in uses.of(edge))
                if summed or not within or edges.count(edge) > 1:
                    found.setdefault(call.module, argument)
        return found

    def _reduced_apart(
        self, uses: Uses, params: Sequence[State], leaves: Sequence[Tensor]
    ) -> dict[str, str]:
        """Modules of whose parameters the first uses are in different calls, or before the only
        one: FSDP2 reduces their gradients behind different ones (post_backwards)."""
        calls: dict[str, list[_Call]] = {}
        for call in self._calls:
            calls.setdefault(call.module, []).append(call)
        behind: dict[str, set[int]] = {}
        for param, leaf in zip(params, leaves, strict=True):
            if (first := uses.first(leaf)) is None:
                continue
            module = param.name
            while module := module.rpartition(".")[0]:
                if several := calls.get(module):
                    count = sum(call.begin > first for call in several)
                    behind.setdefault(module, set()).add(count)
        return {
            module: calls[module][0].inputs[0][0]
            for module, counts in behind.items()
            if len(counts) > 1
        }


class Uses:
    """The uses of values in what a loss depends on, as sequence numbers. Entry functions do not
    count as uses; whatever uses their results does."""

    def __init__(self, loss: Tensor) -> None:
        self._users: dict[Edge, list[tuple[Node, int]]] = {}
        start = loss.grad_fn
        self.nodes = seen = {start}
        self._leaves: dict[int, Node] = {}  # by the id of the tensor
        waiting = [start]
        while waiting:
            user = waiting.pop()
            assert user is not None
            for position, (node, result) in enumerate(user.next_functions):
                if node is None:
                    continue
                self._users.setdefault((node, result), []).append((user, position))
                if node not in seen:
                    seen.add(node)
                    waiting.append(node)
                    if isinstance(leaf := getattr(node, "variable", None), Tensor):
                        self._leaves[id(leaf)] = node

    def origin(self, edge: GradientEdge) -> Edge:
        """The value that entry functions made `edge` of."""
        node, result = edge.node, edge.output_nr
        while isinstance(node, UnitEntry._backward_cls):
            node, result = node.next_functions[result]
        return node, result

    def first(self, leaf: Tensor) -> int | None:
        """None if the loss does not depend on it."""
        node = self._leaves.get(id(leaf))
        return None if node is None else min(self.of((node, 0)), default=None)

    def of(self, edge: Edge) -> list[int]:
        uses: list[int] = []
        for user, position in self._users.get(edge, ()):
            if isinstance(user, UnitEntry._backward_cls):
                uses += self.of((user, position))
            else:
                uses.append(user._sequence_nr())
        return uses
