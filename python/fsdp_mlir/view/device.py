"""The device that a step is captured for.

The CPU's steps are recorded on fake CPU tensors. A GPU's are recorded on fake CUDA tensors, on any
machine: PyTorch's own C++ then decides which operators run, as it would with that GPU. Its queries
to the GPU on the way are answered here, by a library of ours (lib/Capture/FakeCuda.cpp) and in
Python.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._prims_common import suggest_memory_format

from fsdp_mlir.support.build import built
from fsdp_mlir.support.errors import CaptureError, CompileError

_TYPES = ("cpu", "cuda")
_INSTALLED = torch.__version__.split("+")[0]
_OLDEST = (2, 11)
#: The versions whose operators were compared (record/versions.py): the older one is followed.
COMPARED = ((2, 11), (2, 15))
_RNNS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _parts(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class Device:
    """`arch` is a GPU's architecture, such as "sm_90"; None for the CPU. `torch` is the version of
    the FSDP2 whose bits are wanted: the rules that differ between versions follow it, and the
    operators as far as record/versions.py knows them."""

    type: str = "cpu"
    arch: str | None = None
    torch: str = _INSTALLED

    @staticmethod
    def of(type_: str, arch: str | None, torch_version: str | None) -> Device:
        """CaptureError for devices, architectures and versions that do not exist, or one without
        the other."""
        version = torch_version or _INSTALLED
        if not re.fullmatch(r"\d+\.\d+(\.\d+)?", version) or not (
            _OLDEST <= _parts(version) <= _parts(_INSTALLED)
        ):
            raise CaptureError(
                f"torch_version: expected one from {'.'.join(map(str, _OLDEST))} to the installed "
                f"{_INSTALLED}, got '{version}'"
            )
        if type_ not in _TYPES:
            raise CaptureError(f"device: expected {' or '.join(_TYPES)}, got '{type_}'")
        if type_ == "cpu":
            if arch is not None:
                raise CaptureError(f"device_arch: expected none for the CPU, got '{arch}'")
            return Device(torch=version)
        if arch is None:
            raise CaptureError(
                "device_arch: expected the GPU's architecture, such as 'sm_90', which decides the "
                "operators; got none"
            )
        if not re.fullmatch(r"sm_[1-9]\d{1,2}", arch):
            raise CaptureError(f"device_arch: expected one such as 'sm_90', got '{arch}'")
        return Device(type_, arch, version)

    @property
    def version(self) -> tuple[int, int]:
        """That of `torch`, major and minor."""
        return _parts(self.torch)

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of a GPU."""
        assert self.arch is not None
        digits = self.arch.removeprefix("sm_")
        return int(digits[:-1]), int(digits[-1])

    @contextmanager
    def present(self) -> Iterator[None]:
        """Makes PyTorch believe that this device is present. CaptureError if that is not
        possible."""
        with ExitStack() as stack:
            if self.version == COMPARED[0]:
                stack.enter_context(patch.object(torch, "group_norm", _copying_group_norm))
            if self.type != "cpu":
                stack.enter_context(self._present())
            yield

    @contextmanager
    def _present(self) -> Iterator[None]:
        library = _library()
        _fix_attention_order(self)
        missing = library.fsdp_fake_cuda_begin(*self.capability)
        if missing is not None:
            raise CaptureError(f"device 'cuda': {missing.decode()}")
        try:
            with ExitStack() as stack:
                for name, answer in self._answers().items():
                    stack.enter_context(patch.object(torch.cuda, name, answer))
                for name in _RNNS:
                    rnn = _refused_rnn(name)
                    stack.enter_context(patch.object(torch._VF, name, rnn, create=True))
                # The engine's own threads would look for the GPU's streams.
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                yield
        finally:
            library.fsdp_fake_cuda_end()

    def _answers(self) -> dict[str, Any]:
        """Functions of torch.cuda that models ask."""
        major, minor = self.capability
        name = f"a GPU of {self.arch}"
        return {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_capability": lambda device=None: (major, minor),
            "get_device_name": lambda device=None: name,
            "get_device_properties": lambda device=None: SimpleNamespace(
                name=name, major=major, minor=minor
            ),
            "is_bf16_supported": lambda including_emulation=True: including_emulation or major >= 8,
        }


# PyTorch orders the attention kernels once in a process, by the GPU that it sees then.
_ordered_for: list[str | None] = []


def _fix_attention_order(device: Device) -> None:
    if not _ordered_for:
        _ordered_for.append(device.arch)
    if _ordered_for[0] != device.arch:
        raise CaptureError(
            f"device_arch: this process has captured for '{_ordered_for[0]}', and PyTorch "
            f"keeps that GPU's order of attention kernels; capture for '{device.arch}' in another"
        )


@cache
def _library() -> ctypes.CDLL:
    """CaptureError if it is not built, or was built for another PyTorch."""
    try:
        library = ctypes.CDLL(str(built("python/_fake_cuda.so")))
    except (CompileError, OSError) as error:
        raise CaptureError(f"device 'cuda': {error}") from error
    library.fsdp_fake_cuda_begin.restype = ctypes.c_char_p
    library.fsdp_fake_cuda_torch.restype = ctypes.c_char_p
    wanted, got = library.fsdp_fake_cuda_torch().decode(), _INSTALLED
    if wanted != got:
        raise CaptureError(
            f"device 'cuda': this build is for torch {wanted}, got torch {got}; run make build"
        )
    return library


_group_norm = torch.group_norm


def _copying_group_norm(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As of torch 2.11, which copies what its kernels do not take: on a GPU an image laid out by
    channels, and gradients that are laid out otherwise than the input."""
    if input.device.type == "cuda":
        input = input.contiguous()
    layout = suggest_memory_format(input)
    result = _group_norm(input, *args, **kwargs)
    if result.requires_grad:
        result.register_hook(lambda grad: grad.contiguous(memory_format=layout))
    return result


def _refused_rnn(name: str) -> Callable[..., Any]:
    original = getattr(torch._VF, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.backends.cudnn.enabled:
            return original(*args, **kwargs)
        raise NotImplementedError(  # the recorder says where
            f"'{name}' of cuDNN hands to its backward a tensor whose size cuDNN alone knows, which "
            "no plan has; capture and train with torch.backends.cudnn.flags(enabled=False)",
        )

    return call
