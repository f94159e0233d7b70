"""What decides a recorded step, described by values only, so that any process describes it alike.

That is the code (of every module that is loaded by its file, and of the classes and functions of
the model as they are now), the model's Python state with what its code reads from outside
(python_state.py, outside.py), the form of its tensors, the settings of PyTorch, and the
environment. The data of tensors is not part of it.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import os
import platform
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from fsdp_mlir.frontdoor.unchanged import STATE_DICT_HOOKS
from fsdp_mlir.modules import outside
from fsdp_mlir.modules.outside import CONTAINERS, GENERATORS, GLOBAL_HOOKS, SCALARS
from fsdp_mlir.modules.python_state import PythonState
from fsdp_mlir.support.errors import CaptureError, CompileError
from fsdp_mlir.support.numerics import numerics

_MAX_DEPTH = 12
# Describing it must take less time than a capture.
_MAX_ITEMS = 10_000
_MAX_BYTES = 1 << 24
_ADDRESS = " at 0x"

# What launchers and shells set for each process, run or job.
_OF_PROCESS = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "WORLD_SIZE", "HOSTNAME"),
    *("OMP_NUM_THREADS", "PWD", "OLDPWD", "SHLVL", "_", "TERM", "LINES", "COLUMNS", "TMPDIR"),
    *("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "FSDP_MLIR_CACHE"),
}
_OF_JOB = ("TORCHELASTIC_", "SLURM_", "PBS_", "LSB_", "SSH_", "XDG_", "KUBERNETES_", "PMI", "OMPI_")

# In the paths of attributes: hooks that do not affect a step, the attributes that hold FSDP2's own
# state, which the policy describes, and a hash of a transformers configuration that each process
# salts.
_SKIPPED = (
    *STATE_DICT_HOOKS,
    "__composable_api_state_key",
    "__composable_api_registry_key",
    "generation_config._original_object_hash",
)


class Untold(CompileError):
    """Something that decides the step is known only by its identity."""


def identity(model: nn.Module, loss: Any, inputs: Mapping[str, Any]) -> str:
    """A digest of all that; Untold names what cannot be described."""
    _class.cache_clear()  # classes may be patched, code cannot
    lines = [
        *_versions(),
        *_files(),
        *_settings(),
        *_environment(),
        *_model(model, loss),
        *(f"input {name} {_Teller({}).told(value)}" for name, value in inputs.items()),
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def file_of(name: str) -> str | None:
    """The file of a module that is loaded."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return file if isinstance(file, str) else None


def file_line(name: str, file: str | None) -> str | None:
    """A module and the state of its file; None without one."""
    try:
        status = os.stat(file) if file is not None else None
    except OSError:
        return None
    return status and f"{name} {file} {status.st_size} {status.st_mtime_ns}"


def _files() -> Iterator[str]:
    for name in sorted(sys.modules):
        if (line := file_line(name, file_of(name))) is not None:
            yield line


def _versions() -> Iterator[str]:
    yield f"python {sys.version} torch {torch.__version__} {torch.version.git_version}"
    yield f"class {_class(Tensor)}"
    yield f"machine {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _numerics() -> dict[str, str]:
    try:
        return numerics()
    except CaptureError as error:
        raise Untold(str(error)) from error


def _settings() -> Iterator[str]:
    backends = torch.backends
    values = {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "numerics": _numerics(),
        "attention": [
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
        ],
        "fast path": backends.mha.get_fastpath_enabled(),
        "modes": torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack(),
    }
    for name, value in values.items():
        yield f"setting {name} {value}"
    if values["modes"]:
        raise Untold("a mode of torch is entered")


def _environment() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if name not in _OF_PROCESS and not name.startswith(_OF_JOB):
            yield f"variable {name}={value}"


def _model(model: nn.Module, loss: Any) -> Iterator[str]:
    modules = dict(model.named_modules())
    if isinstance(loss, nn.Module):
        modules |= {f"(loss).{name}": module for name, module in loss.named_modules()}
    reached = outside.reached(model, loss)
    others = {f"(outside) {label}": module for label, module in reached.modules}
    teller = _Teller({**others, **modules})
    if loss is not None and not isinstance(loss, nn.Module):
        yield f"loss {teller.told(loss, 'loss')}"
    hooks = [*map(vars(nn.modules.module).get, GLOBAL_HOOKS)]
    yield f"hooks of all modules {teller.told(hooks, 'a hook of all modules')}"
    tensors: dict[int, str] = {}
    namespaces: dict[str, ModuleType] = {"torch": torch, "torch.nn.functional": nn.functional}
    for path, module in modules.items():
        kind = type(module)
        yield f"module {path} {_class(kind)}"
        for base in kind.__mro__:
            if base.__module__ in sys.modules and base.__module__ != "__main__":
                namespaces[base.__module__] = sys.modules[base.__module__]
        for members in (module._parameters, module._buffers):
            for name, tensor in members.items():
                # One that is in two places is described by the first.
                first = tensors.setdefault(id(tensor), f"{path}.{name}")
                yield f"tensor {path}.{name} {first} {teller.told(tensor)}"
        yield f"not persistent {sorted(module._non_persistent_buffers_set)}"

    state = PythonState.of(model, loss)
    first_at: dict[int, str] = {}
    for path, (kind_of_leaf, value) in sorted(state.leaves.items()):  # sets have no order
        if any(key in path for key in _SKIPPED):
            continue
        if _ADDRESS in path:
            raise Untold(f"'{path}' is an item of a set or the key of a dict")
        if kind_of_leaf in ("tensor", "object"):
            found = state.held(value)
            earlier = first_at.setdefault(value, path)
            told = teller.told(found, path) if earlier == path else ""
            yield f"{kind_of_leaf} {path} {earlier} {told}"
        elif kind_of_leaf == "type":
            yield f"object {path} {_class(value)}"
        else:
            yield f"{kind_of_leaf} {path} {value}"
    for found in outside.code(model, loss):
        # What it closes over is described where code reads it (outside.py).
        defaults = [found.__defaults__, found.__kwdefaults__]
        yield f"code {_function(found)} {teller.told(defaults, found.__qualname__)}"
    for name, module in others.items():
        yield f"module {name} {_class(type(module))} {teller.told(vars(module), name)}"
    for place in sorted(reached.held, key=lambda place: place.label):
        yield f"held {place.label} {teller.told(place.value(), place.label)}"
    for module in namespaces.values():
        yield from _namespace(module)


def _namespace(module: ModuleType) -> Iterator[str]:
    """The functions of a library's module, which others may have replaced, and its settings. What a
    user's module contains is described where code reads it."""
    if not outside.is_library(module):
        return
    for name, value in list(vars(module).items()):
        if isinstance(value, FunctionType):
            yield f"global {module.__name__}.{name} {_function(value)}"
        elif isinstance(value, (type, bool, int, float, enum.Enum)):
            yield f"global {module.__name__}.{name} {_name(value) or value!r}"


class _Teller:
    """Describes values as text. Modules of the model, which are described one by one, are given by
    name."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = {id(module): name for name, module in modules.items()}

    def told(self, value: Any, path: str = "a value", depth: int = 0) -> str:
        """`path` is for the error."""
        tell: Callable[[Any], str] = partial(self.told, path=path, depth=depth + 1)
        if depth > _MAX_DEPTH:
            raise Untold(f"'{path}' is nested too deep")
        if isinstance(value, type):
            return _class(value)
        if type(value) in SCALARS:
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, SCALARS):
            base = next(kind for kind in type(value).__mro__ if kind in SCALARS)
            text = base.__repr__(value)
            return f"{_class(type(value))} {text} {tell(getattr(value, '__dict__', None))}"
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, np.ndarray):
            if value.nbytes > _MAX_BYTES:
                raise Untold(f"'{path}' holds an array of {value.nbytes} bytes")
            return f"array {value.dtype}{value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            defaults = [value.__defaults__, value.__kwdefaults__]
            return f"{_function(value)} {tell(defaults)} {tell(cells)}"
        if isinstance(value, MethodType):
            return f"{tell(value.__func__)} of {tell(value.__self__)}"
        if isinstance(value, partial):
            return f"partial {tell(value.func)} {tell(value.args)} {tell(value.keywords)}"
        if isinstance(value, BuiltinFunctionType):
            owner = value.__self__
            of = "" if owner is None or isinstance(owner, ModuleType) else tell(owner)
            return f"{value.__module__}.{value.__qualname__} {of}"
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if isinstance(
            value, CustomOpDef
        ):  # what it does is described for steps that call it: plan_cache
            return f"operator {value._qualname}"
        if isinstance(value, (OpOverload, OpOverloadPacket)):
            return f"operator {value}"
        if isinstance(value, GENERATORS):
            return _name(type(value))
        if isinstance(value, logging.Logger):
            return f"logger {value.name}"
        if isinstance(value, weakref.ref):
            return f"reference {tell(value())}"
        if isinstance(value, nn.Module):
            if id(value) not in self._modules:
                raise Untold(f"'{path}' is a module that the model does not hold as one")
            return f"module {self._modules[id(value)]}"
        return f"{_class(type(value))} {self._object(value, path, tell)}"

    def _object(self, value: Any, path: str, tell: Callable[[Any], str]) -> str:
        """What an object holds. Its __repr__ may leave out some of that."""
        held = []
        if isinstance(value, (dict, *CONTAINERS)) and len(value) > _MAX_ITEMS:
            raise Untold(f"'{path}' holds {len(value)} items")
        if isinstance(value, deque):
            held.append(f"at most {value.maxlen}")
        if isinstance(value, dict):
            held += [f"{tell(key)}: {tell(item)}" for key, item in value.items()]
        elif isinstance(value, CONTAINERS):
            items = [tell(item) for item in value]
            held += sorted(items) if isinstance(value, (set, frozenset)) else items
        slots = [name for base in type(value).__mro__ for name in _slots(base)]
        attributes = getattr(value, "__dict__", None)
        named = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        held += [f"{name} {tell(item)}" for name, item in {**named, **(attributes or {})}.items()]
        if attributes is None and not slots and not isinstance(value, CONTAINERS):
            text = repr(value)  # of a type that is not written in Python
            if _ADDRESS in text:
                raise Untold(f"'{path}' holds a {_name(type(value))}")
            held.append(text)
        return f"({', '.join(held)})"


def _tensor(value: Tensor) -> str:
    layout = value.stride() if value.layout == torch.strided else value.layout
    return (
        f"{_name(type(value))} {value.dtype}{list(value.shape)} {layout} {value.device.type} "
        f"{value.requires_grad} {value.is_leaf}"
    )


def _slots(base: type) -> list[str]:
    """As getattr takes them."""
    slots = vars(base).get("__slots__", ())
    names = {*([slots] if isinstance(slots, str) else slots)} - {"__dict__", "__weakref__"}
    private = f"_{base.__name__.lstrip('_')}"
    return [
        f"{private}{name}" if name[:2] == "__" and name[-2:] != "__" else name
        for name in sorted(names)
    ]


def _name(value: Any) -> str:
    """A function's or a class's; empty for what has none."""
    name = getattr(value, "__qualname__", "")
    return f"{value.__module__}.{name}" if isinstance(name, str) and name else ""


@lru_cache(maxsize=4096)
def _class(kind: type) -> str:
    """A class by its name, and by its and its bases' code and numbers."""
    digest = hashlib.sha256()
    for base in kind.__mro__:
        digest.update(_name(base).encode())
        if base in (object, *_BUILT_IN):
            continue
        for name, value in sorted(vars(base).items()):
            value = value.fget if isinstance(value, property) else value
            value = getattr(value, "__func__", value)
            text = name
            if isinstance(value, FunctionType):
                text = f"{name} {_function(value)}"
            elif isinstance(value, SCALARS) and not name.startswith("__"):
                text = f"{name} {value!r}"
            digest.update(text.encode())
    return f"{_name(kind)} {digest.hexdigest()[:16]}"


_BUILT_IN = (bool, int, float, str, bytes, dict, list, tuple, set, frozenset)


def _function(function: FunctionType) -> str:
    defaults = repr(function.__kwdefaults__) if function.__kwdefaults__ else ""
    shown = "" if _ADDRESS in defaults else defaults
    return f"{_name(function)} {_code(function.__code__)} {shown}"


@lru_cache(maxsize=1 << 16)
def _code(code: CodeType) -> str:
    constants = [
        _code(value)
        if isinstance(value, CodeType)
        else repr(sorted(map(repr, value)))
        if isinstance(value, frozenset)
        else repr(value)
        for value in code.co_consts
    ]
    parts = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
