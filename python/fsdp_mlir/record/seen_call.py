"""What a module does in an eager call, as far as a graph break in its place has to know it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from fsdp_mlir.modules.names import used
from fsdp_mlir.modules.outside import Kept, functions_of, kept
from fsdp_mlir.modules.python_state import PythonState
from fsdp_mlir.support.errors import in_torch
from fsdp_mlir.support.generators import states
from fsdp_mlir.support.layouts import bytes_of, is_dense, storage_of

# What a call is told apart by: its arguments, and the modes that it runs in.
Signature = tuple[Any, ...]

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_UNWATCHED = {"data", "untyped_storage", "storage", "data_ptr", "set_"}
_ATTRIBUTES, _GLOBALS = frozenset({"LOAD_ATTR", "LOAD_METHOD"}), frozenset({"LOAD_GLOBAL"})

# Elements, of what is copied before each run.
_KEPT = 1 << 20

_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__()
        self.function, self.name = function, name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def state_of(module: nn.Module, outside: Kept | None = None) -> PythonState:
    """What a module holds, and what its code reads from outside; `outside`: what outside_of gave,
    which takes most of the time."""
    if isinstance(module, Function):
        return PythonState.of(_NONE, module.function, outside=outside)
    return PythonState.of(module, outside=outside)


def outside_of(module: nn.Module) -> Kept:
    """Where the code of a module reads from outside."""
    is_function = isinstance(module, Function)
    return kept(_NONE, module.function) if is_function else kept(module, None)


_NONE = nn.Module()


@dataclass(frozen=True)
class Result:
    """The form of a tensor. `grad`: whether it requires grad."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Result:
        return Result(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)

    def fits(self, tensor: Tensor) -> bool:
        return self == Result.of(tensor)


@dataclass(frozen=True)
class Form:
    """That of a call's results, in the structure `spec` with `plain` leaves in place of what is no
    tensor. `needs`: which operands, the tensors among the arguments and the parameters, require
    grad; `reached`: which of them get gradients. `gradient_strides`: of those that are not
    contiguous, as runs have found them. `draws`: from PyTorch's generator."""

    spec: TreeSpec
    plain: tuple[Any, ...]
    results: tuple[Result, ...]
    needs: list[bool]
    reached: list[bool]
    draws: bool
    gradient_strides: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False)

    def result(self, tensors: Sequence[Tensor]) -> Any:
        each = iter(tensors)
        leaves = [next(each) if leaf is Tensor else leaf for leaf in self.plain]
        return tree_unflatten(leaves, self.spec)

    def fits(self, result: Any) -> bool:
        leaves, spec = tree_flatten(result)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return (
            spec == self.spec
            and repr(_without_tensors(leaves)) == repr(self.plain)
            and all(form.fits(x) for form, x in zip(self.results, tensors, strict=True))
        )


def signature_of(module: nn.Module, leaves: Sequence[Any], spec: TreeSpec) -> Signature:
    """That of a call now."""
    return (
        str(spec),
        tuple(_described(leaf) for leaf in leaves),
        tuple(each.training for each in module.modules()),
        tuple(each.requires_grad for each in module.parameters()),
        torch.is_grad_enabled(),
    )


def _described(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype}{list(leaf.shape)}{leaf.requires_grad}"
    return f"{type(leaf).__name__} {leaf!r}" if isinstance(leaf, _PLAIN) else "another"


def _without_tensors(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves)


# Tensors, by their ids, each with its version.
Tensors = Mapping[int, tuple[Tensor, int]]


def tensors_alive() -> Tensors:
    """Those that Python has."""
    every = gc.get_objects()
    found = (each for each in every if issubclass(type(each), Tensor) and not each.is_inference())
    return {id(each): (each, each._version) for each in found}


def seen(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    call: Callable[..., Any],
    older: Tensors,
) -> tuple[Form | str, Any]:
    """The form of a call of the module, or why there cannot be a break in its place; and what it
    gives. `older`: the tensors that there were before the step."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    params = list(module.parameters())
    operands = [*given, *params]
    if why := _unfit(module, tree_leaves((args, kwargs)), operands):
        return why, call(module, *args, **kwargs)
    outside = [*state_of(module).tensors().values()]
    known = [*operands, *module.buffers(), *outside]
    if sum(each.numel() for each in known[len(operands) :]) > _KEPT:
        return "it reads large tensors that it is not given", call(module, *args, **kwargs)
    if name := _unwatched(module):
        return f"its code names '{name}'", call(module, *args, **kwargs)
    before = [each._version for each in known], states()
    bytes_before = [_digest(each) for each in known[len(given) :]]
    generator = torch.random.default_generator.get_state()
    if len({id(each) for each in operands}) < len(operands):
        return "it is given a tensor twice", call(module, *args, **kwargs)
    watch = _Watch(operands, older)
    begin = torch._C._autograd._get_sequence_nr()
    with watch:
        result = call(module, *args, **kwargs)
    if before != ([each._version for each in known], states()):
        return "it writes its inputs or buffers, or draws Python's random numbers", result
    if bytes_before != [_digest(each) for each in known[len(given) :]]:
        return "it writes parameters or tensors that it is not given", result
    draws = not torch.equal(generator, torch.random.default_generator.get_state())
    if watch.stray:
        return watch.stray, result
    leaves, spec = tree_flatten(result)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
        return "it returns other things than tensors", result
    memory = [storage_of(each) for each in (*known, *tensors)]
    if len(set(memory[len(known) :])) < len(tensors) or set(memory[: len(known)]) & set(
        memory[len(known) :]
    ):
        return "its results share memory", result
    if not all(type(each) is Tensor and is_dense(each.shape, each.stride()) for each in tensors):
        return "its results are not dense tensors", result
    needs = [torch.is_grad_enabled() and operand.requires_grad for operand in operands]
    uses = uses_of(operands, tensors, begin)
    if uses is None:
        return "its gradients are those of other tensors too", result
    forms = tuple(map(Result.of, tensors))
    reached = [bool(count) for count in uses]
    return Form(spec, _without_tensors(leaves), forms, needs, reached, draws), result


def _digest(tensor: Tensor) -> str:
    # FSDP2 could not free the memory of what NumPy has had.
    data = tensor.detach().resolve_conj().resolve_neg().clone()
    return xxhash.xxh3_64_hexdigest(bytes_of(data).numpy())


def _unwatched(module: nn.Module) -> str:
    """What its code, or code that this calls, names by which it may write a tensor that autograd
    does not see written, or take from an iterator, which nobody can put back."""
    is_function = isinstance(module, Function)
    functions = functions_of(_NONE, module.function) if is_function else functions_of(module, None)
    for function in functions:
        if not in_torch(function.__code__.co_filename):
            found = used(function.__code__, _ATTRIBUTES) & _UNWATCHED
            found |= used(function.__code__, _GLOBALS) & {"next"}
            if found:
                return sorted(found)[0]
    return ""


def _unfit(module: nn.Module, leaves: Sequence[Any], operands: Sequence[Tensor]) -> str:
    if any(isinstance(each, FSDPModule) for each in module.modules()):
        return "fully_shard was called on it, or on a module in it"
    if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
        return "it is given an object"
    if not all(type(each) in (Tensor, nn.Parameter) for each in operands):
        return "it is given tensors of a subclass"
    if any(each.layout != torch.strided or each.device.type != "cpu" for each in operands):
        return "it is given tensors that are not dense or not on the CPU"
    return ""


def uses_of(
    operands: Sequence[Tensor], results: Sequence[Tensor], begin: int = 0
) -> list[int] | None:
    """How often the graph of the results, made since the sequence number `begin`, uses each
    operand. None if it uses other tensors that require grad."""
    edges = [get_gradient_edge(x) if x.requires_grad else None for x in operands]
    places = {(id(edge.node), edge.output_nr): i for i, edge in enumerate(edges) if edge}
    uses = [0] * len(operands)
    roots = [x.grad_fn for x in results if x.grad_fn is not None]
    waiting: list[Node] = list(roots)
    found = {id(node): node for node in roots}
    while waiting:
        node = waiting.pop()
        if node._sequence_nr() < begin:
            return None
        for other, number in node.next_functions:
            if other is None:
                continue
            if (place := places.get((id(other), number))) is not None:
                uses[place] += 1
            elif hasattr(other, "variable"):
                return None
            elif id(other) not in found:
                found[id(other)] = other
                waiting.append(other)
    return uses


class _Watch(TorchDispatchMode):
    """Finds what a call computes with that it is not given, such as a buffer, and that the step has
    made or written before: in a plan it would be that of another step."""

    def __init__(self, given: Sequence[Tensor], older: Tensors) -> None:
        super().__init__()
        self._older = older
        self._known = {storage_of(each) for each in given}
        self._before = tensors_alive()
        self.stray = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in _COMMUNICATION:
            self.stray = "it communicates with other ranks"
        for tensor in _tensors((args, kwargs)):
            storage = storage_of(tensor)
            if storage not in self._known and self._is_of_step(tensor):
                self.stray = (
                    "it reads a tensor that it is not given, and that the step makes or writes"
                )
        result = func(*args, **(kwargs or {}))
        self._known.update(map(storage_of, _tensors(result)))
        return result

    def _is_of_step(self, tensor: Tensor) -> bool:
        if id(tensor) in self._older:
            return self._older[id(tensor)][1] != self._before[id(tensor)][1]
        return id(tensor) in self._before


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
