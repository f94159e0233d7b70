"""What CMake built: the compiler `fsdp-opt`, and the runtime as a module of this process.

Looked for in the folder that FSDP_MLIR_BUILD names, else in `build` of the source tree that holds
this package.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import torch  # noqa: F401  # the runtime's libtorch is this one

from fsdp_mlir.support.errors import CompileError

_MODULE = "fsdp_mlir._runtime"

# fsdp-opt is linked anew with every change but those of what it loads.
COMPILER = ("bin/fsdp-opt", "lib/libFSDPCaptureReader.so")


def built(name: str) -> Path:
    """The path of a file in the build folder; CompileError if it is not there."""
    given = os.environ.get("FSDP_MLIR_BUILD")
    folder = Path(given) if given else Path(__file__).resolve().parents[3] / "build"
    path = folder / name
    if not path.exists():
        source = "FSDP_MLIR_BUILD" if given else "the source tree of fsdp_mlir"
        raise CompileError(
            f"expected '{path}' (by {source}), found none; run make build, or set FSDP_MLIR_BUILD"
        )
    return path


def runtime() -> ModuleType:
    """The runtime's module, loaded at the first call."""
    if _MODULE not in sys.modules:
        spec = importlib.util.spec_from_file_location(_MODULE, built("python/_runtime.so"))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[_MODULE] = module
    return sys.modules[_MODULE]
