"""Operators that are not PyTorch's own: those of torch.library and TORCH_LIBRARY.

A call of one is recorded like one of ATen, by its schema and its fake kernel. What cannot be
recorded this way is refused here. A Python kernel is run on fake tensors first: if it only calls
operators, these are recorded in its place, so that the step runs without Python.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fsdp_mlir.record import collectives
from fsdp_mlir.record.graph import split_arguments
from fsdp_mlir.record.known import flat_tensors
from fsdp_mlir.record.scalars import kinds_of
from fsdp_mlir.support.errors import Location, located

# Namespaces of PyTorch's own operators besides ATen: collectives, streams, quantized and compiled
# code, whose objects and order a step does not have.
_PYTORCH = {
    *("_c10d_functional_autograd", "_dtensor", "_inductor_test", "_native"),
    *("_native_aot", "_quantized", "_test", "c10d", "c10d_functional", "coor", "cuda"),
    *("debug_mode_ops", "debugprims", "export", "flex_gemm", "flex_lib", "fsdp", "higher_order"),
    *("inductor", "inductor_prims", "mempool", "mkl", "mkldnn", "mkldnn_prepacked", "onednn"),
    *("onnx", "onnx_symbolic", "prepacked", "prim", "prims", "profiler", "quantization"),
    *("quantized", "quantized_decomposed", "rngprims", "sparse", "static_runtime", "streams"),
    *("symm_mem", "xpu"),
}

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device)
_ARGUMENTS = (*_PLAIN, torch.layout, torch.memory_format, type(None), Tensor)
_ELEMENTS = {
    *("TensorType", "IntType", "FloatType", "BoolType", "NumberType", "StringType"),
    *("DeviceObjType", "GeneratorType"),
}
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def is_foreign(func: OpOverload) -> bool:
    """Whether an operator belongs to a library other than PyTorch."""
    return func.namespace != "aten" and func.namespace not in _PYTORCH


def qualified(func: OpOverload) -> str:
    """`namespace::name` or `namespace::name.overload`."""
    schema = func._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def is_composite(func: OpOverload) -> bool:
    """Whether its only kernel calls operators that autograd sees. Above autograd such an operator
    is not dispatched; below it, as in inference mode, it is."""
    return _has_kernel(func, "CompositeImplicitAutograd") and not (
        _has_kernel(func, "CPU") or _has_kernel(func, "CompositeExplicitAutograd")
    )


def composite(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs that kernel."""
    return func._op_dk(_COMPOSITE, *args, **kwargs)


def kernel(func: OpOverload, values: list[Any]) -> Any:
    """Runs the CPU's kernel, whatever the tensors are."""
    args, kwargs = split_arguments(func, values)
    return func.redispatch(_ON_CPU, *args, **kwargs)


def _has_kernel(func: OpOverload, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(qualified(func), key))


def _is_python(func: OpOverload) -> bool:
    """Whether the CPU's kernel was registered from Python."""
    for key in ("CPU", "CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd"):
        if _has_kernel(func, key):
            name = qualified(func).replace("::", "/", 1)
            return f"{name}/{key}" in torch.library._impls
    return False


def check(func: OpOverload, values: list[Any], where: Location | None) -> None:
    """CaptureError for a call that has no form in a graph."""

    def refuse(message: str) -> None:
        raise located(where, f"operator '{func}' cannot be captured: {message}")

    schema = func._schema
    for formal, value in zip(schema.arguments, values, strict=True):
        stray = _stray(value)
        if stray is not None:
            refuse(
                f"argument '{formal.name}' is a '{stray}', expected tensors, numbers, strings, "
                "dtypes, devices and lists of them"
            )
        named = func.namespace == collectives.NAMESPACE and isinstance(value, str)
        if value is not None and not named and not _is_supported(kinds_of(formal.type)):
            refuse(f"argument '{formal.name}' is of type '{formal.type}', which a graph has not")
    for result in schema.returns:
        if not kinds_of(result.type).endswith("TensorType"):
            refuse(f"it returns '{result.type}', expected tensors alone")


def check_gradients(
    func: OpOverload, values: list[Any], result: Any, where: Location | None
) -> None:
    """CaptureError if autograd would not know of a call: eager PyTorch then warns, and has no
    gradients, or those of whatever the kernel happens to call."""
    made = [*flat_tensors(result), *_written(func, values)]
    if (
        torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in flat_tensors(values))
        and any(tensor.is_floating_point() or tensor.is_complex() for tensor in made)
        and not any(_has_kernel(func, key) for key in ("Autograd", "AutogradCPU"))
    ):
        raise located(
            where,
            f"operator '{func}' cannot be captured: it has no autograd kernel and is given a "
            "tensor that requires grad; register one with torch.library.register_autograd, or "
            "call it under torch.no_grad()",
        )


def _written(func: OpOverload, values: list[Any]) -> list[Tensor]:
    return [
        tensor
        for formal, value in zip(func._schema.arguments, values, strict=True)
        if formal.alias_info is not None and formal.alias_info.is_write
        for tensor in flat_tensors(value)
    ]


def _stray(value: Any) -> str | None:
    """The type of what is no argument of a graph's call."""
    if isinstance(value, (list, tuple)):
        return next((found for item in value if (found := _stray(item))), None)
    return None if isinstance(value, _ARGUMENTS) else type(value).__name__


def _is_supported(kinds: str) -> bool:
    """Whether a plan can have the argument: an element, a list, or None in place of either; a list
    of tensors may contain None."""
    parts = kinds.split()
    if parts[0] == "OptionalType":
        parts = parts[1:]
    if parts[0] == "ListType":
        parts = parts[1:]
        if parts == ["OptionalType", "TensorType"]:
            return True
        return len(parts) == 1 and parts[0] in _ELEMENTS - {"DeviceObjType", "GeneratorType"}
    return len(parts) == 1 and parts[0] in _ELEMENTS


def takes_part(func: OpOverload) -> bool:
    """Whether it computes with tensors; an operator that does not is like a Python function."""
    schema = func._schema
    formals = [*schema.arguments, *schema.returns]
    return any(kinds_of(formal.type).endswith("TensorType") for formal in formals)


def fake_result(
    func: OpOverload, fakes: list[Any], mode: FakeTensorMode, where: Location | None
) -> Any:
    """What the fake kernel returns, in the memory that the schema says; inside the fake mode."""
    args, kwargs = split_arguments(func, fakes)
    try:
        result = func(*args, **kwargs)
    except (RuntimeError, UnsupportedOperatorException) as error:
        lacks = isinstance(error, UnsupportedOperatorException) or "fake impl" in str(error)
        if not lacks or isinstance(error, NotImplementedError):
            raise
        raise located(
            where,
            f"operator '{func}' has no fake kernel and cannot be captured; register one with "
            "torch.library.register_fake, which says the shapes of its results",
        ) from error
    return _apart(func, fakes, result, mode, where)


def _apart(
    func: OpOverload, fakes: list[Any], result: Any, mode: FakeTensorMode, where: Location | None
) -> Any:
    """The result, with its own memory wherever the schema has new memory; CaptureError for anything
    but a tensor on the CPU, and for a new tensor in place of an argument that is written."""
    returns = func._schema.returns
    written = _written(func, fakes)
    seen = {tensor.untyped_storage()._cdata for tensor in flat_tensors(fakes)}

    def own(fake: Tensor, alias: Any) -> Tensor:
        if fake.device.type != "cpu" or fake.layout != torch.strided:
            raise located(
                where,
                f"operator '{func}' cannot be captured: its fake kernel gives a tensor of layout "
                f"'{fake.layout}' on '{fake.device}', expected a dense one on 'cpu'",
            )
        key = fake.untyped_storage()._cdata
        if alias is not None:
            if alias.is_write and not any(fake is tensor for tensor in written):
                raise located(
                    where,
                    f"operator '{func}' cannot be captured: its fake kernel gives a new tensor, "
                    "expected the argument that its schema says it writes and returns",
                )
            return fake
        if key in seen or not isinstance(fake, FakeTensor):
            with mode:
                fake = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
        seen.add(fake.untyped_storage()._cdata)
        return fake

    def each(value: Any, alias: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [each(item, alias) for item in value]
        return own(value, alias) if isinstance(value, Tensor) else value

    if len(returns) == 1:
        return each(result, returns[0].alias_info)
    if not isinstance(result, (list, tuple)) or len(result) != len(returns):
        if returns or result is not None:
            raise located(
                where,
                f"operator '{func}': expected {len(returns)} results of its fake kernel, got "
                f"{type(result).__name__}",
            )
        return None
    return tuple(
        each(value, formal.alias_info) for value, formal in zip(result, returns, strict=True)
    )


def body(
    func: OpOverload,
    values: list[Any],
    mode: FakeTensorMode,
    is_model: Callable[[CodeType], bool],
    where: Location | None,
) -> list[FunctionType] | None:
    """The functions of the model's code that the kernel of a call runs, if the kernel is Python and
    calls only operators: it ran on tensors without data and addresses, and everything that it
    returns was made by operators or is an argument. None for any other kernel, such as one that
    reads data or asks for an address.

    CaptureError if the fake kernel, which PyTorch's compiler relies on, gives different shapes.
    """
    schema = func._schema
    if not _is_python(func) or not (schema.returns or schema.is_mutable):
        return None  # without results it is there for what it does to Python
    with mode:
        said = fake_result(func, tree_map_only(Tensor, _stand_in, values), mode, where)
        check_gradients(func, values, said, where)
        fakes = tree_map_only(Tensor, _stand_in, values)
        codes: dict[int, CodeType] = {}
        probe = _Probe(flat_tensors(fakes))
        try:
            with probe, warnings.catch_warnings(), _watching(codes, is_model):
                warnings.simplefilter("ignore")
                result = kernel(func, fakes)
        except Exception:
            return None
    results = _leaves(result)
    if not all(each is None or probe.made(each) for each in results):
        return None
    described = [[_described(each) for each in leaves] for leaves in (_leaves(said), results)]
    if described[0] != described[1]:
        raise located(
            where,
            f"operator '{func}' cannot be captured: its fake kernel gives "
            f"{', '.join(described[0])}, its kernel {', '.join(described[1])}",
        )
    return [function for code in codes.values() for function in _functions(code)]


def _stand_in(tensor: Tensor) -> Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    torch._C._set_throw_on_mutable_data_ptr(fake)
    return fake


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


class _Probe(TorchDispatchMode):
    """Records what operators make; asking for the address of such a tensor is an error."""

    def __init__(self, operands: list[Tensor]) -> None:
        super().__init__()
        self._made = list(operands)

    def made(self, value: Any) -> bool:
        return any(value is tensor for tensor in self._made)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not isinstance(func, OpOverload):
            raise TypeError(func)
        result = func(*args, **(kwargs or {}))
        for tensor in flat_tensors(result):
            if isinstance(tensor, FakeTensor):
                torch._C._set_throw_on_mutable_data_ptr(tensor)
                self._made.append(tensor)
        return result


@contextmanager
def _watching(codes: dict[int, CodeType], is_model: Callable[[CodeType], bool]) -> Iterator[None]:
    """Notes the model's code that runs."""
    before = sys.getprofile()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_model(frame.f_code):
            codes[id(frame.f_code)] = frame.f_code

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


_by_code: dict[CodeType, list[FunctionType]] = {}


def _functions(code: CodeType) -> list[FunctionType]:
    """The functions of that code; only the dispatcher knows a kernel's."""
    if code not in _by_code:
        _by_code[code] = [
            each
            for each in gc.get_referrers(code)
            if isinstance(each, FunctionType) and each.__code__ is code
        ]
    return _by_code[code]


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "nothing"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
