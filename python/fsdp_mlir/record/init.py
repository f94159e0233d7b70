"""Captures how a model's factory initialises it, as a graph of ATen calls without inputs.

Run at a seed, the graph draws and computes what the factory does at that seed on one device, in
the same order. Nothing is materialised: the factory runs on fake CPU tensors.

The model's own initialisation often overwrites a constructor's values later. Their draws must stay,
but their memory need not: an in-place call that overwrites a whole tensor without reading it is
recorded on new storage, so that the old value ends at its last use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_mlir.modules import weights
from fsdp_mlir.modules.module_stack import ModuleStack
from fsdp_mlir.record.graph import Node, Origin, Ref, TensorType
from fsdp_mlir.record.known import flat_tensors
from fsdp_mlir.record.recording import Recording
from fsdp_mlir.record.trace import Recorder
from fsdp_mlir.support.errors import CaptureError, SourceMap, calls_the_model, located, source_of
from fsdp_mlir.view.device import Device

calls_the_model(__file__)

aten = torch.ops.aten

# In-place calls that write every element of argument 0 and read none of it.
_OVERWRITES = {
    aten.bernoulli_.float,
    aten.cauchy_.default,
    aten.copy_.default,
    aten.exponential_.default,
    aten.fill_.Scalar,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.normal_.default,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
    aten.uniform_.default,
    aten.zero_.default,
}

_ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}

# A constant is written out as calls, one for each run of equal elements.
_MAX_RUNS = 1024


@dataclass
class InitTrace:
    """The graph: `results` names the final value of every parameter, then of every buffer."""

    nodes: list[Node]
    results: list[str]


Layout = tuple[torch.Size, tuple[int, ...], int, torch.dtype]


def _layout(tensor: Tensor) -> Layout:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


@dataclass
class _Storage:
    """A storage of the factory, and the value that holds its data now.

    `layout` is that of the value. `version` counts the values that the storage has had.
    `allocation` is the call that made the value, as long as nothing has used it.
    """

    handle: torch.UntypedStorage  # kept alive, so that its address stays its own
    name: str
    layout: Layout
    version: int = 0
    allocation: Node | None = None


class _InitRecorder(Recorder):
    """A recorder in which a storage may move to a new value.

    A name belongs to a tensor at a version of its storage. A tensor of an older version, and one
    that became an alias unseen (as by `.data = `), is named anew from the storage's value.
    """

    _DATA_DEPENDENCE = (
        "a captured initialisation is static; capture the model without it (init=None, --no-init) "
        "and give weights to fsdp-run"
    )

    def __init__(self, fake_mode: FakeTensorMode, sources: SourceMap) -> None:
        super().__init__(fake_mode, ModuleStack(nn.Module()), sources, 0, Device(), False)
        self._storages: dict[int, _Storage] = {}
        self._versions: dict[int, tuple[int, int]] = {}

    def final(self, tensor: Tensor, name: str) -> str:
        """The value of a state of the built model."""
        where = f"'{name}' of the initialised model"
        if tensor.device.type != "cpu":
            raise CaptureError(f"{where} is on '{tensor.device}', expected 'cpu'")
        if isinstance(tensor, FakeTensor) or tensor.untyped_storage()._cdata in self._storages:
            return self._ref(tensor, Origin()).name
        return self.constant(tensor, where)

    def constant(self, tensor: Tensor, where: str) -> str:
        """The value of a tensor that no captured call made."""
        if tensor.device.type != "cpu":
            raise CaptureError(f"{where} is on '{tensor.device}', expected a tensor with data")
        return self._ref(self._constant(tensor, Origin()), Origin()).name

    def bind(self, tensor: Tensor, name: str) -> None:
        super().bind(tensor, name)
        handle = tensor.untyped_storage()
        key = handle._cdata
        storage = self._storages.setdefault(key, _Storage(handle, name, _layout(tensor)))
        self._versions[id(tensor)] = key, storage.version

    def _ref(self, tensor: Tensor, origin: Origin) -> Ref:
        key = tensor.untyped_storage()._cdata
        storage = self._storages.get(key)
        if storage is None:
            return super()._ref(tensor, origin)
        if self._versions.get(id(tensor)) != (key, storage.version):
            self.bind(tensor, self._alias(storage, tensor, origin))
        return super()._ref(tensor, origin)

    def _alias(self, storage: _Storage, tensor: Tensor, origin: Origin) -> str:
        """The name of `tensor` as a view of its storage's value."""
        size, stride, offset, dtype = _layout(tensor)
        if _layout(tensor) == storage.layout:
            return storage.name
        if dtype != storage.layout[-1]:
            raise located(
                origin.location,
                f"expected a view of dtype '{storage.layout[-1]}' of an initialised tensor, got "
                f"'{dtype}'",
            )
        arguments = [Ref(storage.name), list(size), list(stride), offset]
        return self._emit(aten.as_strided.default, arguments, TensorType.of(tensor), origin)

    def _emit(self, func: OpOverload, args: list[Any], type_: TensorType, origin: Origin) -> str:
        """Records a call that the factory did not make."""
        name = f"v{self.trace.count}"
        self.trace.count += 1
        self.trace.nodes.append(Node(func, args, [name], [type_], origin))
        return name

    def _empty(self, type_: TensorType, origin: Origin) -> str:
        arguments = [list(type_.shape), type_.dtype, None, None, None, None]
        return self._emit(aten.empty.memory_format, arguments, type_, origin)

    def _record(self, func: OpOverload, values: list[Any], result: Any, origin: Origin) -> None:
        if func in _OVERWRITES and self._covers_storage(values[0]):
            self._move(func, values, origin)
        for tensor in flat_tensors(values):
            storage = self._storages.get(tensor.untyped_storage()._cdata)
            if storage is not None:
                storage.allocation = None
        super()._record(func, values, result, origin)
        if func.overloadpacket in _ALLOCATIONS and isinstance(result, FakeTensor):
            storage = self._storages[result.untyped_storage()._cdata]
            storage.allocation = self.trace.nodes[-1]

    @staticmethod
    def _covers_storage(tensor: Tensor) -> bool:
        # Only floats: a known integer is a real tensor, whose stand-in is new at each use.
        return (
            tensor.is_floating_point()
            and tensor.is_contiguous()
            and tensor.storage_offset() == 0
            and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        )

    def _move(self, func: OpOverload, values: list[Any], origin: Origin) -> None:
        """Gives the storage of the overwritten tensor a new value, allocated here."""
        target = values[0]
        key = target.untyped_storage()._cdata
        storage = self._storages.get(key)
        if storage is None:
            return
        if func is aten.copy_.default and values[1].untyped_storage()._cdata == key:
            return
        if storage.allocation is not None:
            self._postpone(storage.allocation)
            return
        storage.name = self._empty(TensorType.of(target), origin)
        storage.layout = _layout(target)
        storage.version += 1

    def _postpone(self, allocation: Node) -> None:
        """Moves the allocation to where the value is first written, which may be long after it was
        made."""
        nodes = self.trace.nodes
        at = next(i for i in reversed(range(len(nodes))) if nodes[i] is allocation)
        nodes.append(nodes.pop(at))

    def _constant(self, tensor: Tensor, origin: Origin) -> FakeTensor:
        """Writes the tensor out as calls: full for each run of equal elements, cat, view."""
        if id(tensor) not in self._constants:
            with _disable_current_modes():
                shape, dtype = tuple(tensor.shape), tensor.dtype
                flat = tensor.detach().contiguous().flatten()
                runs = _runs(flat, origin)
                values = [flat[begin].item() for begin, _ in runs]
            pieces = []
            for value, (_, length) in zip(values, runs, strict=True):
                arguments = [[length], value, dtype, None, None, None]
                if isinstance(value, bool):
                    arguments[1] = int(value)
                type_ = TensorType((length,), dtype)
                pieces.append(self._emit(aten.full.default, arguments, type_, origin))
            if len(pieces) == 1:
                name = pieces[0]
            elif pieces:
                type_ = TensorType((flat.numel(),), dtype)
                refs = [Ref(piece) for piece in pieces]
                name = self._emit(aten.cat.default, [refs, 0], type_, origin)
            else:
                name = self._empty(TensorType((0,), dtype), origin)
            name = self._emit(
                aten.view.default, [Ref(name), list(shape)], TensorType(shape, dtype), origin
            )
            with self._fake_mode:
                fake = torch.empty(shape, dtype=dtype, device="cpu")
            self._constants[id(tensor)] = fake
            self._alive.append(tensor)
            self.bind(fake, name)
        return self._constants[id(tensor)]


def _runs(flat: Tensor, origin: Origin) -> list[tuple[int, int]]:
    """(begin, length) of each run of elements of the same bits; `flat` is contiguous, 1-d."""
    if flat.is_complex() or flat.is_quantized:
        raise located(origin.location, f"a constant of dtype '{flat.dtype}' is not supported")
    if flat.numel() == 0:
        return []
    bits = flat.view(torch.uint8).view(flat.numel(), flat.element_size())
    starts = torch.ones(flat.numel(), dtype=torch.bool)
    starts[1:] = (bits[1:] != bits[:-1]).any(1)
    begins = starts.nonzero().flatten().tolist()
    if len(begins) > _MAX_RUNS:
        raise located(
            origin.location,
            f"the initialisation uses a constant tensor of {flat.numel()} elements; compute it "
            "with torch operations",
        )
    return list(
        zip(
            begins,
            (b - a for a, b in zip(begins, [*begins[1:], flat.numel()], strict=True)),
            strict=True,
        )
    )


@contextmanager
def _plain_conversion() -> Iterator[None]:
    """Module.to and the like assign `.data`, as they do where tensors are not fake.

    For fake tensors they swap, which fails for any tensor that a fake mode remembers.
    """

    def assign(tensor: Tensor, converted: Tensor) -> None:
        tensor.data = converted

    swap, torch.utils.swap_tensors = torch.utils.swap_tensors, assign
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


def record_init(recording: Recording) -> InitTrace | None:
    """Records what the given `init` does, with the final values of the parameters and buffers of a
    recorded step; None without an `init`.

    Constants are further buffers of the step; their values come last. Raises CaptureError if the
    factory makes a different model, or depends on the data of a tensor. The state of the random
    generators is unchanged.
    """
    view = recording.view
    factory = view.asked.init
    if factory is None:
        return None
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = _InitRecorder(fake_mode, SourceMap())
    try:
        with (
            torch.random.fork_rng(devices=[]),
            _plain_conversion(),
            fake_mode,
            recorder,
            torch.enable_grad(),
        ):
            made = factory()
    except CaptureError:
        raise
    except Exception as error:
        location = recorder.sources.traceback(error.__traceback__)
        raise located(location, f"init: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise CaptureError(f"init: expected a torch.nn.Module, got '{type(made).__name__}'")
    results = []
    for kind, want, got in (
        ("parameter", view.params, weights.parameters(made)),
        ("buffer", view.buffers, weights.buffers(made)),
    ):
        _check_same(view.model, kind, want, got)
        results += [recorder.final(state.tensor, state.name) for state in got]
    constants = recording.trace.constants
    results += [recorder.constant(tensor, "a constant of the model") for tensor in constants]
    return InitTrace(recorder.trace.nodes, results)


def _check_same(
    model: nn.Module, kind: str, want: Sequence[weights.State], got: Sequence[weights.State]
) -> None:
    def described(state: weights.State) -> str:
        dtype = str(state.tensor.dtype).removeprefix("torch.")
        names = ", ".join(f"'{name}'" for name in (state.name, *state.aliases))
        return f"{kind} {names} of {dtype}{list(state.tensor.shape)}"

    for expected, made in zip(want, got, strict=False):
        if described(expected) != described(made):
            raise located(
                source_of(model), f"init: expected {described(expected)}, got {described(made)}"
            )
    if len(want) != len(got):
        raise located(
            source_of(model), f"init: expected {len(want)} {kind}s as in the model, got {len(got)}"
        )
