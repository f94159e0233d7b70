"""Records the ATen calls of a training step, below autograd, under fake tensors.

The recorder is a dispatch mode above a `FakeTensorMode`. What reaches it is what eager autograd
would hand to the kernels: no decomposition, in-place and random calls in order. It keeps every
tensor it has seen alive until it is dropped, because identity names the values. One thread only.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fsdp_mlir.modules.module_stack import ModuleStack
from fsdp_mlir.modules.place import is_librarys
from fsdp_mlir.modules.placed import has_wrapper
from fsdp_mlir.modules.weights import State
from fsdp_mlir.record import collectives, operators, places, versions
from fsdp_mlir.record.asserted import demanded
from fsdp_mlir.record.bound_state import BoundStates
from fsdp_mlir.record.cones import Cones
from fsdp_mlir.record.draws import Draw, Draws, is_draw, outcome
from fsdp_mlir.record.fake_results import FakeResults
from fsdp_mlir.record.graph import (
    Node,
    Origin,
    Ref,
    TensorType,
    Trace,
    all_arguments,
    split_arguments,
    written_arguments,
)
from fsdp_mlir.record.in_place_views import keeps_size, out_of_place
from fsdp_mlir.record.known import KnownValues, flat_tensors
from fsdp_mlir.record.masks import BY_COUNT, shaped_by_values
from fsdp_mlir.record.plain import decided_by_data
from fsdp_mlir.record.scalars import (
    fix_dtype,
    numbers_as_tensors,
    rounds_number,
    takes_numbers_alone,
    with_scalars,
)
from fsdp_mlir.support.errors import (
    STOPS,
    CaptureError,
    DrawnError,
    NumberError,
    SourceMap,
    expects_errors,
    located,
    model_frame,
    prefixed,
    short_path,
)
from fsdp_mlir.support.layouts import bytes_of, placeholder
from fsdp_mlir.view.device import Device

aten = torch.ops.aten

# Checks of data: calls without a result that stay in the step.
ASSERTIONS = {aten._assert_async.default, aten._assert_async.msg}

# Calls that only change autograd's view of a tensor: the result is the argument.
IDENTITIES = {
    aten.detach.default,
    aten.detach_.default,
    aten.lift_fresh.default,
    torch.ops._c10d_functional.wait_tensor.default,  # a plan's call waits for itself
}

_DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

_DEVICE = torch.ops.prim.device.default

_INSTEAD = {"c10d": "a function of torch.distributed._functional_collectives"}

_LIMITS = (DataDependentOutputException, DynamicOutputShapeException)


class Recorder(TorchDispatchMode):
    """Records calls into `trace`; enter this mode inside `fake_mode`.

    `bind` names the graph's inputs, and says what they stand for; constants take the names
    b{first_constant}…. The step is for tensors on `device`. With `asserts` it stops where a number
    that it relies on is another one. Where the step `defers`, a number that it would rely on is
    a NumberError. What the code asserts may be what a caller assumes. It may write what it relies
    on if a caller `rereads` that before each run. Raises CaptureError, with the model's line, for a
    call that has no static form.
    """

    # The end of the error for a call whose result shape or value only its data decides.
    _DATA_DEPENDENCE = (
        "the captured step is static; replace the branch or the size by a tensor operation such as "
        "torch.where"
    )

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        modules: ModuleStack,
        sources: SourceMap,
        first_constant: int,
        device: Device,
        numbers: bool,
        results: FakeResults | None = None,
        *,
        asserts: bool = False,
        defers: Callable[[], bool] = lambda: False,
        rereads: bool = False,
        generator: Tensor | None = None,
        assumes_asserted: bool = False,
    ) -> None:
        super().__init__()
        self._assumes_asserted = assumes_asserted
        self._asserts, self._defers, self._rereads = asserts, defers, rereads
        self._results = results or FakeResults()
        self._target, self._device = device, device.type
        self._first_constant = first_constant
        self._literals: dict[tuple[Any, ...], FakeTensor] = {}
        self.trace = Trace()
        self._fake_mode = fake_mode
        self._modules = modules
        self.sources = sources
        self._known = KnownValues()
        self._names: dict[int, str] = {}
        self._alive: list[Tensor] = []
        self.cones = Cones(self.trace, numbers, rereads, generator)
        self._outside: dict[int, Tensor] = {}  # by the storage of the stand-in
        self._outside_strides: dict[int, tuple[int, ...]] = {}  # of the stand-in
        self._constants: dict[int, FakeTensor] = {}
        self.states = BoundStates()
        self.draws: Draws | None = None  # set where draws are made again
        # Forward origins by the sequence number of the autograd node made last.
        self._sequence: list[int] = []
        self._origins: list[Origin] = []

    def bind(self, tensor: Tensor, name: str, source: Tensor | None = None) -> None:
        """Names a tensor; `source` is the tensor from outside the step that it stands for."""
        self._names[id(tensor)] = name
        self._alive.append(tensor)
        self.cones.bind(name, self._known.data(tensor), source)
        if source is not None:
            key = tensor.untyped_storage()._cdata
            self._outside[key] = source
            self._outside_strides[key] = tensor.stride()

    def bind_state(self, state: State, fake: Tensor, name: str, *, parameter: bool) -> None:
        """Binds the stand-in of a parameter or buffer."""
        self.states.add(state, fake, parameter=parameter)
        self.bind(fake, name, None if parameter else state.tensor)

    def share_constants(self, other: Recorder) -> None:
        """Continues the constants of another recorder of the same model, which keep their names."""
        self.trace.constants = other.trace.constants
        self.trace.constant_index = other.trace.constant_index
        self.trace.literals = other.trace.literals
        self._constants = other._constants
        self.states.share_constants(other.states)
        # A call in place has given some of them the names of its results.
        for name, fake in zip(self.trace.constant_index, self._constants.values(), strict=True):
            self.bind(fake, name, other._outside[fake.untyped_storage()._cdata])

    def name_of(self, tensor: Tensor) -> str | None:
        return self._names.get(id(tensor))

    def check_read(self, tensor: Tensor, reader: str, caller: FrameType) -> None:
        """CaptureError if Python code must not know the data of a tensor."""
        if not self._known.has(tensor):
            why = f"depends on the data of a tensor, and {self._DATA_DEPENDENCE}"
            raise located(self.sources.frame(caller), f"'{reader}' {why}")

    def begin_backward(self) -> None:
        self.trace.backward_begin = len(self.trace.nodes)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # three calls of four
        if has_wrapper(types):
            return NotImplemented
        kwargs = kwargs or {}
        origin = self._origin()
        if (operator := decided_by_data(func)) is not None:
            why = f"depends on the data of a tensor, and {self._DATA_DEPENDENCE}"
            raise located(origin.location, f"{operator} {why}")
        if isinstance(func, HigherOrderOperator) or not isinstance(func, OpOverload):
            raise located(
                origin.location, f"operator '{func}' cannot be captured: expected an ATen call"
            )
        if func is aten.lift_fresh.default:
            return self._literal(func, args[0], origin)
        values = collectives.named(func, all_arguments(func, args, kwargs))
        is_foreign = operators.is_foreign(func) and operators.takes_part(func)
        if is_foreign and operators.is_composite(func):
            with self:
                return operators.composite(func, args, kwargs)
        if func is aten._conj.default and isinstance(values[0], complex):
            # Of a Python number, in the backward of a product with it: no overload takes that.
            func = aten.scalar_tensor.default
            values = [values[0].conjugate(), torch.complex128, None, None, None]
        if takes_numbers_alone(func, values):
            with _disable_current_modes():
                constant = func(*args, **kwargs)
            return self._literal(aten.lift_fresh.default, constant, origin)
        fakes = [self._faked(value, origin) for value in values]
        if func.is_view and (name := self.states.sharded.get(id(fakes[0]))) is not None:
            args, kwargs = split_arguments(func, fakes)
            self._alive.append(seen := func(*args, **kwargs))
            self.states.sharded[id(seen)] = name  # what code looks at, as by to_local()
            return seen
        if keeps_size(func, fakes):
            return args[0]
        if func is aten.as_strided.default:
            self._check_layout(fakes[0], fakes[3], origin)
        if is_foreign:
            operators.check(func, values, origin.location)
            # If its kernel is Python, the kernel's calls stand for it.
            if self._is_inlined(func, values, origin):
                with self:
                    return operators.kernel(func, values)
        draws = self.draws if self.draws and is_draw(func, values) else None
        if draws and (earlier := draws.earlier(func, values, origin.location)):
            return self._written(func, values, fakes, self._again(earlier, func, fakes, origin))
        result, known = self._run(func, values, fakes, origin)
        if is_foreign:
            operators.check_gradients(func, values, result, origin.location)
        if func in IDENTITIES:
            self.bind(result, self._ref(fakes[0], origin).name)
            return result
        if func._schema.name == collectives.WAIT_FOR_ALL:
            for tensor, waited in zip(result, fakes[0], strict=True):
                self.bind(tensor, self._ref(waited, origin).name)
            return result
        schema = func._schema
        stays = func in ASSERTIONS or is_foreign
        if not schema.returns and not schema.is_mutable and not stays:
            return result  # a check of what is static, such as _assert_tensor_metadata
        if schema.returns and not flat_tensors(result) and not is_foreign:
            return result  # a property, such as prim::device
        if func.namespace != "aten" and not is_foreign:
            instead = _INSTEAD.get(func.namespace, "ATen operators")
            raise located(
                origin.location,
                f"operator '{func}' cannot be captured: expected namespace 'aten', got "
                f"'{func.namespace}'; replace it by {instead}",
            )
        recorded = func
        if torch.Tag.inplace_view in func.tags:
            is_made = self._ref(fakes[0], origin).name[0] == "v"
            recorded = out_of_place(func, origin.location, is_made=is_made)
        if rounds_number(func, fakes):
            product = aten.mul.Tensor(*fakes)
            self._record(aten.mul.Tensor, fakes, product, origin)
            self._record(aten.copy_.default, [fakes[0], product, False], result, origin)
        else:
            self._record(recorded, fakes, result, origin)
        if draws:
            drawn = [(tensor, self._names[id(tensor)]) for tensor in outcome(func, fakes, result)]
            draws.add(func, values, self.trace.nodes[-1], drawn)
        return result if known else self._written(func, values, fakes, result)

    def _is_inlined(self, func: OpOverload, values: list[Any], origin: Origin) -> bool:
        """Whether a call is recorded as the calls that its Python kernel makes."""
        try:
            functions = operators.body(
                func, values, self._fake_mode, self.sources.is_model, origin.location
            )
        except _LIMITS as error:
            raise self._undecided(func, values, origin) from error
        self.trace.kernels.update({id(each): each for each in functions or ()})
        return functions is not None

    def _again(self, draw: Draw, func: OpOverload, fakes: list[Any], origin: Origin) -> Any:
        """Records a call that draws the same as `draw` as copies of that draw; returns its
        result."""
        if not draw.copies:
            at = next(i for i, node in enumerate(self.trace.nodes) if node is draw.node) + 1
            for tensor, name in draw.results:
                copy, copied = aten.clone.default(tensor), f"v{self.trace.count}"
                self.trace.count += 1
                self.bind(copy, copied)
                draw.copies.append(copy)
                args, types = [Ref(name), None], [TensorType.of(copy)]
                clone = Node(aten.clone.default, args, [copied], types, draw.node.origin)
                self.trace.nodes.insert(at, clone)
                self.trace.backward_begin += at <= self.trace.backward_begin
        args, kwargs = split_arguments(func, fakes)
        result = func(*args, **kwargs)
        written = flat_tensors(fakes)
        for target, copy in zip(outcome(func, fakes, result), draw.copies, strict=True):
            if any(target is tensor for tensor in written):
                self._record(aten.copy_.default, [target, copy, False], target, origin)
            else:
                self._record(aten.clone.default, [copy, None], target, origin)
        return result

    def _check_layout(self, tensor: Tensor, offset: int | None, origin: Origin) -> None:
        """Refuses strides over a storage from outside the step that a run lays out differently."""
        key = tensor.untyped_storage()._cdata
        source = self._outside.get(key)
        if source is None:
            return
        moved = offset is not None and source.storage_offset() != 0
        if moved or self._outside_strides[key] != source.stride():
            raise located(
                origin.location,
                f"'aten.as_strided' of a tensor of shape {list(source.shape)} that is a part of a "
                "larger one; expected one with a storage of its own, as .clone() gives",
            )

    def _run(
        self, func: OpOverload, values: list[Any], fakes: list[Any], origin: Origin
    ) -> tuple[Any, bool]:
        """The call's result, and whether it is a known value (and then real)."""
        is_foreign = operators.is_foreign(func)
        computable = not is_foreign and self._known.can_compute(func, values)
        computed = False
        try:
            if is_foreign:
                result = operators.fake_result(func, fakes, self._fake_mode, origin.location)
            elif computable and _DATA_DEPENDENT.intersection(func.tags):
                computed = True
            else:
                result = self._results.of(self._fake_mode, func, fakes)
                computed = computable and self._known.worth_keeping(result)
            if computed:
                result = self._known.compute(func, values)
        except _LIMITS as error:
            result = None if is_foreign else self._static_result(func, values, fakes, origin)
            if result is None:
                raise self._undecided(func, fakes, origin) from error
        except UnsupportedOperatorException as error:
            raise located(
                origin.location,
                f"operator '{func}' has no shape rule (fake kernel) and cannot be captured; "
                "replace it by ATen operators",
            ) from error
        return result, computed

    def _static_result(
        self, func: OpOverload, values: list[Any], fakes: list[Any], origin: Origin
    ) -> Any:
        """The result of a call that no fake kernel gives, if it is the same in every step."""

        def value(tensor: Tensor, literal: bool) -> Tensor | None:
            by_count = func in BY_COUNT and tensor.dtype == torch.bool
            name = self._ref(tensor, origin).name
            return self.cones.value(name, literal=literal, by_count=by_count)

        if func is not aten._local_scalar_dense.default:
            known = [self._known.real(tensor) for tensor in flat_tensors(values)]
            with self._fake_mode:
                return shaped_by_values(func, fakes, known, lambda t: value(t, literal=False))
        name = self._ref(fakes[0], origin).name
        if (number := self.cones.number(name, literal=True)) is not None:
            return number
        drawn = self.cones.draws(name)
        # What is drawn is decided before the step, and an error that code expects is a branch.
        asserts = fakes[0].dtype == torch.bool and not drawn and not expects_errors()
        frame = model_frame()
        catches = self._rereads and not is_librarys(frame.f_code.co_filename)  # the user's loop may
        wanted = demanded(frame, asserts=catches) if asserts else None
        if wanted is not None and self._assumes_asserted:
            raise self._undecided(func, fakes, origin, expected=wanted)
        if wanted is not None:
            self._assert(fakes[0], wanted, origin)
            return wanted
        if not drawn and not self.cones.recurs(name, fakes[0]):
            return None
        if self._defers() and self.cones.follows(name):
            undecided = self._undecided(func, fakes, origin)
            error = NumberError(str(undecided), name, self.cones.truth)
            error.most = undecided.most
            raise error
        number = self.cones.number(name, literal=False)
        if number is not None and self._asserts:
            same = aten.eq.Scalar(fakes[0], number)
            self._record(aten.eq.Scalar, [fakes[0], number], same, origin)
            self._assert(same, True, origin, STOPS)
        return number

    def _assert(
        self,
        tensor: Tensor,
        wanted: bool,
        origin: Origin,
        why: str = "an assertion of the model does not hold: ",
    ) -> None:
        """Records that a bool tensor of one element is `wanted`."""
        if not wanted:
            negated = aten.logical_not.default(tensor)
            self._record(aten.logical_not.default, [tensor], negated, origin)
            tensor = negated
        where = f"{short_path(origin.location[0])}:{origin.location[1]}" if origin.location else ""
        self._record(aten._assert_async.msg, [tensor, why + where], None, origin)

    def _undecided(
        self, func: OpOverload, fakes: list[Any], origin: Origin, *, expected: bool | None = None
    ) -> CaptureError:
        """The error of a call that has no static form."""
        draws = [
            draw
            for tensor in flat_tensors(fakes)
            if (draw := self.cones.draw(self._names.get(id(tensor), ""))) is not None
        ]
        why = f"depends on the data of a tensor, and {self._DATA_DEPENDENCE}"
        error = located(origin.location, f"'{func}' {why}")
        if draws:
            location = draws[0].origin.location
            where = f" at {short_path(location[0])}:{location[1]}" if location else ""
            text = f"a branch or a size on a random draw ('{draws[0].func}'{where}) {why}"
            error = DrawnError(prefixed(origin.location, text))
        if func is aten._local_scalar_dense.default:
            name = self._names.get(id(fakes[0]), "")
            error.most = self.cones.most(name)
            made = next((node for node in self.trace.nodes[::-1] if name in node.outs), None)
            is_all = made is not None and made.func.overloadpacket is aten.all
            error.expected = True if expected is None and is_all else expected  # as of isfinite()
        return error

    def _written(self, func: OpOverload, values: list[Any], fakes: list[Any], result: Any) -> Any:
        """Gives real tensors that an unknown value was written to their new names.

        Returns the result with their stand-ins replaced by themselves.
        """
        for formal, value, fake in zip(func._schema.arguments, values, fakes, strict=True):
            if formal.alias_info is None or not formal.alias_info.is_write:
                continue
            for real, stand_in in zip(flat_tensors(value), flat_tensors(fake), strict=True):
                if real is stand_in:
                    continue
                if self._known.made(real):
                    self._known.forget(real)
                    self._names[id(real)] = self._names[id(stand_in)]
                if result is stand_in:
                    result = real
        return result

    def _origin(self) -> Origin:
        node = torch._C._current_autograd_node()
        location = self.sources.frame(sys._getframe(2))
        module = self._modules.current
        if node is None:
            origin = Origin(module or 0, location)
            number = torch.autograd._get_sequence_nr() - 1
            if not self._sequence or number > self._sequence[-1]:
                self._sequence.append(number)
                self._origins.append(origin)
            return origin
        at = bisect_right(self._sequence, node._sequence_nr()) - 1
        forward = self._origins[at] if at >= 0 else Origin()
        return Origin(
            forward.module if module is None else module,
            forward.location if location is None else location,
        )

    def _faked(self, value: Any, origin: Origin) -> Any:
        if isinstance(value, Tensor):
            if isinstance(value, FakeTensor):
                return value
            stand_in = self.states.stand_in(value, origin.location)
            if stand_in is not None:
                return stand_in
            if self._known.made(value):
                with self._fake_mode:
                    fake = placeholder(value, device=str(value.device))
                self.cones.stands_for(fake, self._known.data(value))
                self.bind(fake, self._names[id(value)])
                return fake
            return self._constant(value, origin)
        if isinstance(value, (list, tuple)):
            return [self._faked(item, origin) for item in value]
        return value

    def _constant(self, tensor: Tensor, origin: Origin) -> FakeTensor:
        """The stand-in of a tensor that the model holds outside its parameters and buffers."""
        if id(tensor) not in self._constants:
            if tensor.requires_grad:
                raise located(
                    origin.location,
                    f"a tensor of shape {list(tensor.shape)} requires grad but is no parameter of "
                    "the model; register it with register_parameter",
                )
            # As if the model had been moved there; a tensor without dimensions stays where it is.
            device = self._device if tensor.dim() else tensor.device.type
            with self._fake_mode:
                fake = placeholder(tensor, device=device)
            self._constants[id(tensor)] = fake
            self.states.add_constant(len(self.trace.constants), fake)
            name = f"b{self._first_constant + len(self.trace.constants)}"
            self.bind(fake, name, tensor)
            self.trace.constant_index[name] = len(self.trace.constants)
            self.trace.constants.append(tensor)
        return self._constants[id(tensor)]

    def _literal(self, lift: OpOverload, tensor: Tensor, origin: Origin) -> Any:
        """torch.tensor(…): a constant, shared by equal tensors, and a fresh copy at each call.

        The copy keeps the constant from being changed in place by the step.
        """
        with _disable_current_modes():
            data = bytes(bytes_of(tensor).numpy())  # of any dtype
            key = (tensor.dtype, tensor.shape, data)
        constant = self._literals.get(key)
        if constant is None:
            before = len(self.trace.constants)
            constant = self._literals[key] = self._constant(tensor, origin)
            self.trace.literals.update(range(before, len(self.trace.constants)))
        if self._known.worth_keeping(tensor):
            result = self._known.compute(aten.clone.default, [tensor, None])
        else:
            result = lift(tensor)
        self._record(aten.clone.default, [constant, None], result, origin)
        return result

    def _ref(self, tensor: Tensor, origin: Origin) -> Ref:
        name = self._names.get(id(tensor))
        if name is None:
            raise located(origin.location, self.states.unknown(tensor))
        return Ref(name)

    def _refs(self, value: Any, origin: Origin) -> Any:
        if isinstance(value, Tensor):
            return self._ref(value, origin)
        if isinstance(value, (list, tuple)):
            return [self._refs(item, origin) for item in value]
        return value

    def _record(self, func: OpOverload, values: list[Any], result: Any, origin: Origin) -> None:
        self.states.note_writes(func, values, origin.location)
        if self._device != "cpu":
            places.check(func, values, result, origin.location)
        func = versions.recorded(func, values, self._target, origin.location)
        self._check_relied_on(func, values, origin)
        for at, dtype in numbers_as_tensors(func, values) if func.namespace == "aten" else ():
            number = aten.scalar_tensor.default(values[at], dtype=dtype)
            made = [values[at], dtype, None, None, None]
            self._record(aten.scalar_tensor.default, made, number, origin)
            values = [*values[:at], number, *values[at + 1 :]]
        args = [self._refs(value, origin) for value in values]
        if func.namespace == "aten":
            func, args = with_scalars(func, args, result, origin.location)
            fix_dtype(func, args, result)
        returns = func._schema.returns
        results = [result] if len(returns) == 1 else list(result or ())
        outs: list[str | list[str]] = []
        types: list[TensorType | None] = []
        for value in results:
            if isinstance(value, (list, tuple)):
                outs.append([self._out(item, types) for item in value])
            elif value is None or isinstance(value, (Tensor, int)):
                # A number is the same in every run: the calls that take it have it as an argument.
                outs.append(self._out(value if isinstance(value, Tensor) else None, types))
            else:
                raise located(
                    origin.location,
                    f"operator '{func}' cannot be captured: expected tensor results, got "
                    f"'{type(value).__name__}'",
                )
        self.trace.nodes.append(Node(func, args, outs, types, origin))

    def _check_relied_on(self, func: OpOverload, values: list[Any], origin: Origin) -> None:
        if any(map(self.cones.needs, flat_tensors(written_arguments(func, values)))):
            raise located(
                origin.location,
                f"'{func}' writes a tensor whose values decide a shape in the step, and "
                f"{self._DATA_DEPENDENCE}",
            )

    def _out(self, tensor: Tensor | None, types: list[TensorType | None]) -> str:
        name = f"v{self.trace.count}"
        self.trace.count += 1
        if tensor is None:
            types.append(None)
        else:
            self.bind(tensor, name)
            types.append(TensorType.of(tensor))
        return name
