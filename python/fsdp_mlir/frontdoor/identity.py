"""What decides a recorded step, described by values only, so that any process describes it alike.

That is the code (of every module that is loaded by its file, and of the classes and functions of
the model as they are now), the model's Python state with what its code reads from outside
(python_state.py, outside.py), the form of its tensors, the settings of PyTorch, and the
environment, except what each process has of its own: plan_cache keeps no step that reads that
(process_reads.py). The data of tensors is not part of it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_mlir.frontdoor.library_code import LibraryCode
from fsdp_mlir.frontdoor.process_reads import is_of_process
from fsdp_mlir.frontdoor.telling import ADDRESS, HASHED, Teller, Untold, check_order
from fsdp_mlir.modules import outside
from fsdp_mlir.modules.hooks import GLOBAL_HOOKS, STATE_DICT_HOOKS
from fsdp_mlir.modules.names import hashed_in, names_in, namespace_in
from fsdp_mlir.modules.place import OF_MODULES, is_library
from fsdp_mlir.modules.python_state import OF_SET, Leaf, PythonState
from fsdp_mlir.support.errors import CaptureError
from fsdp_mlir.support.numerics import numerics

# What code may ask of the process, by the names of the functions that tell.
_ASKED: dict[str, Callable[[], Any]] = {
    "get_num_threads": torch.get_num_threads,
    "get_num_interop_threads": torch.get_num_interop_threads,
    "cpu_count": os.cpu_count,
    "getcwd": os.getcwd,
    "getpid": os.getpid,
    "gethostname": socket.gethostname,
    "is_available": torch.cuda.is_available,
    "device_count": torch.cuda.device_count,
}

# Attributes and globals with hooks by their ids.
_BY_ID = {*GLOBAL_HOOKS, *(name for name in OF_MODULES if "_hooks" in name)}

# In the paths of attributes: hooks that do not affect a step, the attributes that hold FSDP2's own
# state, which the policy describes, and a hash of a transformers configuration that each process
# salts.
_SKIPPED = (
    *STATE_DICT_HOOKS,
    "__composable_api_state_key",
    "__composable_api_registry_key",
    "generation_config._original_object_hash",
)


def identity(
    model: nn.Module, loss: Any, inputs: Mapping[str, Any], without: Collection[str] = ()
) -> str:
    """A digest of all that; Untold names what cannot be described. `without`: modules that
    captures have loaded since."""
    lines = [
        *_versions(),
        *_files(without),
        *_settings(),
        *_environment(),
        *_model(model, loss),
        *(f"input {name} {Teller({}).told(value)}" for name, value in inputs.items()),
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


def _files(without: Collection[str]) -> Iterator[str]:
    for name in sorted(sys.modules.keys() - set(without)):
        if (line := file_line(name, file_of(name))) is not None:
            yield line


def _versions() -> Iterator[str]:
    yield f"python {sys.version} torch {torch.__version__} {torch.version.git_version}"
    yield f"class {Teller({}).class_(Tensor)}"
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


def _numbered(held: Mapping[str, Any]) -> dict[tuple[str, int], str]:
    """For each id of a hook, by the name of what holds it: its place there, and when it was
    registered among the hooks of all. The ids count the hooks of the process."""
    hooks = {key: [*value] for key, value in held.items() if key in _BY_ID}
    order = {id: at for at, id in enumerate(sorted({id for ids in hooks.values() for id in ids}))}
    return {
        (key, id): f"{at}, {order[id]}" for key, ids in hooks.items() for at, id in enumerate(ids)
    }


def _with_numbered_hooks(
    leaves: Mapping[str, Leaf], model: nn.Module, loss: Any
) -> dict[str, Leaf]:
    """The leaves, with paths that do not depend on the ids of hooks."""
    modules = list(model.named_modules())
    if isinstance(loss, nn.Module):
        modules += loss.named_modules(prefix="loss")
    renamed = {
        f"{name}{'.' if name else ''}{key}[{id}]": f"{name}.{key}[{number}]"
        for name, module in modules
        for (key, id), number in _numbered(vars(module)).items()
    }
    return {renamed.get(path, path): leaf for path, leaf in leaves.items()}


def _environment() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if not is_of_process(name):
            yield f"variable {name}={value}"


def _is_unordered(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether the order of a set cannot matter: one of a library's module, of any module, or of the
    names of what a pretrained model does not load."""
    holder, _, name = path.partition("[")[0].rpartition(".")
    librarys = holder in modules and is_library(type(modules[holder]))
    return librarys or name in OF_MODULES or name.startswith("_keys_to_ignore")


def _model(model: nn.Module, loss: Any) -> Iterator[str]:
    modules = dict(model.named_modules())
    if isinstance(loss, nn.Module):
        modules |= {f"(loss).{name}": module for name, module in loss.named_modules()}
    reached = outside.reached(model, loss)
    others = {f"(outside) {label}": module for label, module in reached.modules}
    teller = Teller({**others, **modules})
    if loss is not None and not isinstance(loss, nn.Module):
        yield f"loss {teller.told(loss, 'loss')}"
    every = {key: getattr(nn.modules.module, key) for key in GLOBAL_HOOKS}
    numbers = _numbered(every)
    hooks = [{numbers[key, id]: hook for id, hook in every[key].items()} for key in every]
    yield f"hooks of all modules {teller.told(hooks, 'a hook of all modules')}"
    tensors: dict[int, str] = {}
    called: list[Any] = []
    for path, module in modules.items():
        kind = type(module)
        yield f"module {path} {teller.class_(kind)}"
        called += [value for base in kind.__mro__ for value in vars(base).values()]
        for members in (module._parameters, module._buffers):
            for name, tensor in members.items():
                # One that is in two places is described by the first.
                first = tensors.setdefault(id(tensor), f"{path}.{name}")
                yield f"tensor {path}.{name} {first} {teller.told(tensor)}"
        yield f"not persistent {sorted(module._non_persistent_buffers_set)}"

    state = PythonState.of(model, loss, outside=reached.kept)
    first_at: dict[int, str] = {}
    leaves = _with_numbered_hooks(state.leaves, model, loss)
    # Its variables are told one by one (_environment).
    environment = tuple(p.label for p in reached.places if p.owner is vars(os.environ))
    variables = tuple(f"{label}[" for label in environment)
    for path, (kind_of_leaf, value) in sorted(leaves.items()):  # sets have no order
        if path.startswith(variables) or any(key in path for key in _SKIPPED):
            continue
        if kind_of_leaf in ("held", "items"):  # of this process
            continue
        if ADDRESS in path:
            raise Untold(f"'{path}' is an item of a set or the key of a dict")
        if kind_of_leaf in ("tensor", "object"):
            found = state.held(value)
            earlier = first_at.setdefault(value, path)
            told = teller.told(found, path) if earlier == path else ""
            yield f"{kind_of_leaf} {path} {earlier} {told}"
        elif kind_of_leaf == "type":
            yield f"object {path} {teller.class_(value)}"
        else:
            yield f"{kind_of_leaf} {path} {value}"
    for path, keys in sorted(state.orders.items()):
        if path in environment:
            continue
        if path.endswith(OF_SET):
            held = path.removesuffix(OF_SET)
            if not _is_unordered(held, modules):
                check_order(held, keys)
                yield f"order {path} {keys}"
            continue
        if path.rpartition(".")[2] not in _BY_ID and not any(key in path for key in _SKIPPED):
            yield f"order {path} {keys}"
    for found in outside.in_order(reached.functions):
        yield f"code {teller.told(found, found.__qualname__)}"
    for name, module in others.items():
        yield f"module {name} {teller.class_(type(module))} {teller.told(vars(module), name)}"
    for place in sorted(reached.held, key=lambda place: place.label):
        value = place.value()
        if value is os.environ:
            continue
        called.append(value)
        tell = teller.of_library if place.library else teller.told
        yield f"held {place.label} {tell(value, place.label)}"
    functions = [value for value in called if callable(value) and not isinstance(value, type)]
    yield from LibraryCode(teller).lines([*reached.functions, *functions])
    for function in reached.functions:
        if not is_library(function) and (name := namespace_in(function.__code__)):
            raise Untold(f"'{function.__qualname__}' may read any name by '{name}'")
        hashes = sys.flags.hash_randomization and not is_library(function)
        if hashes and (how := hashed_in(function.__code__)):
            raise Untold(f"'{function.__qualname__}' {how}{HASHED}")
    names = {name for function in reached.functions for name in names_in(function.__code__)}
    for name in sorted(names & _ASKED.keys()):
        yield f"call {name} {_ASKED[name]()}"
