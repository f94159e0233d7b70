"""Safetensors files with torch and the standard library, for hosts that have nothing else."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import torch
from gpu_cases import MODELS, Case
from torch import Tensor, nn

DTYPES = {"F32": torch.float32, "I64": torch.int64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    """float32 and int64 tensors, in the order given."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(memoryview(tensor.detach().contiguous().flatten().numpy()).cast("B"))


def load(path: Path) -> dict[str, Tensor]:
    """Views of the file, which is mapped; copies of what is not aligned there."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    raw = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    result = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        dtype = DTYPES[entry["dtype"]]
        part = raw[begin:end]
        if begin % dtype.itemsize:
            part = part.clone()
        result[name] = part.view(dtype).view(entry["shape"])
    return result


def build_model(case: Case, device: str = "cpu") -> nn.Module:
    """The case's model, initialised at seed 0; without the package, which needs more than torch."""
    spec = importlib.util.spec_from_file_location(f"gpu_{case.model}", MODELS[case.model])
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks
    spec.loader.exec_module(module)
    with torch.device(device):
        return getattr(module, case.model)(**case.sizes)


def write_inputs(case: Case, directory: Path, samples: int = 64) -> tuple[Path, Path]:
    """The weights that both sides begin with, and their batches. Buffers are among the weights:
    a plan without an initialisation has no other source for them."""
    directory.mkdir(parents=True, exist_ok=True)
    weights, data = directory / "weights.safetensors", directory / "batches.safetensors"
    model = build_model(case)
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    save(weights, tensors)
    generator = torch.Generator().manual_seed(1)
    size = (samples, case.seq + 1)
    text = torch.randint(case.sizes["vocab"], size, generator=generator)
    save(data, {"tokens": text[:, :-1], "targets": text[:, 1:]})
    return weights, data
