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
    found = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
    return {id(each): (each, _version(each)) for each in found}


def _version(tensor: Tensor) -> int:
    """-1 of one that has none, as in inference mode."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def seen(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    call: Callable[..., Any],
    older: Tensors,
) -> tuple[Form | str, Any]:
    """The form of a call of the module, or why there cannot be a break in its place; and what it
    gives. `older`: the tensors that there were before the step."""
    try:
        seeing = _Seeing(module, tree_leaves((args, kwargs)), older)
    except Exception as error:  # of what looks at the call, not of the call
        return _reason(error), call(module, *args, **kwargs)
    with seeing.watch:
        result = call(module, *args, **kwargs)
    try:
        return seeing.form(result), result
    except Exception as error:
        return _reason(error), result


class _UnfitError(Exception):
    """There cannot be a break."""


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, _UnfitError) else f"{type(error).__name__}: {text}"


class _Seeing:
    """What there is before a call. _UnfitError if there cannot be a break in its place."""

    def __init__(self, module: nn.Module, leaves: Sequence[Any], older: Tensors) -> None:
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._operands = [*given, *module.parameters()]
        if why := _unfit(module, leaves, self._operands):
            raise _UnfitError(why)
        outside = [*module.buffers(), *state_of(module).tensors().values()]
        if sum(each.numel() for each in outside) > _KEPT:
            raise _UnfitError("it reads large tensors that it is not given")
        if name := _unwatched(module):
            raise _UnfitError(f"its code names '{name}'")
        if len(set(map(id, self._operands))) < len(self._operands):
            raise _UnfitError("it is given a tensor twice")
        self._known = [*self._operands, *outside]
        self._kept = self._known[len(given) :]
        self._state = self._now()
        self._digests = [_digest(each) for each in self._kept]
        self._generator = torch.random.default_generator.get_state()
        self.watch = _Watch(self._operands, older)
        self._begin = torch._C._autograd._get_sequence_nr()

    def _now(self) -> tuple[Any, ...]:
        return [each._version for each in self._known], states()

    def form(self, result: Any) -> Form:
        """After the call; _UnfitError as before it."""
        if self._state != self._now():
            raise _UnfitError("it writes its inputs or buffers, or draws Python's random numbers")
        if self._digests != [_digest(each) for each in self._kept]:
            raise _UnfitError("it writes parameters or tensors that it is not given")
        if self.watch.stray:
            raise _UnfitError(self.watch.stray)
        leaves, spec = tree_flatten(result)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors or not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
            raise _UnfitError("it returns other things than tensors")
        own = set(map(storage_of, tensors))
        if len(own) < len(tensors) or own & set(map(storage_of, self._known)):
            raise _UnfitError("its results share memory")
        if not all(type(x) is Tensor and is_dense(x.shape, x.stride()) for x in tensors):
            raise _UnfitError("its results are not dense tensors")
        uses = uses_of(self._operands, tensors, self._begin)
        if uses is None:
            raise _UnfitError("its gradients are those of other tensors too")
        return Form(
            spec,
            _without_tensors(leaves),
            tuple(map(Result.of, tensors)),
            [torch.is_grad_enabled() and operand.requires_grad for operand in self._operands],
            [bool(count) for count in uses],
            not torch.equal(self._generator, torch.random.default_generator.get_state()),
        )


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

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "namespace", "") in _COMMUNICATION:
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
