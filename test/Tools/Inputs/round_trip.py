"""Captures models into the folder that is given, and takes each through all levels with
fsdp-opt, reading every level again as it was written: the plans must equal the capture's."""

import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from fsdp_mlir import capture
from fsdp_mlir.models.gpt2 import gpt2_debug_dropout
from fsdp_mlir.models.llama import llama_debug
from torch import Tensor, nn

#: The passes that make each level of the one before it.
LEVELS = {
    "grouped": "detect-units assign-units choose-memory bucket-units recompute-activations "
    "simplify-calls offload-activations",
    "placed": "place-params",
    "gathered": "insert-all-gathers insert-reshards",
    "reduced": "insert-reduce-scatters insert-all-reduces insert-offload-copies "
    "insert-accumulation defer-reshards insert-loss-scaling insert-clipping",
    "sharded": "insert-optimizer",
    "scheduled": "schedule",
    "planned": "lower",
}

#: Model and policy.
CASES = {
    "auto": ("llama", "{units: auto, clip_grad_norm: 1.0, grad_scaler: {init_scale: 1024}}"),
    "evaluation": ("gpt2", "{cpu_offload: true}"),
    "hsdp": (
        "llama",
        "{mesh: {replicate: 2}, units: [{match: 'layers.*'}], gradient_accumulation_steps: 2, "
        "all_reduce_each_microbatch: false, ignore: 'layers.0.attention_norm.weight'}",
    ),
    "activations": (
        "llama",
        "{units: [{match: 'layers.*'}], activation_checkpoint: {match: 'layers.0'}, "
        "activation_offload: {match: 'layers.1', min_bytes: 1}}",
    ),
    "convolution": (
        "convolution",
        "{units: [{match: 'blocks.*'}], reshard_after_forward: false, "
        "schedule: {bucket: parameter}}",
    ),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.convolution(x)))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, image: Tensor) -> Tensor:
        return self.blocks(self.stem(image)).square().mean()


def capture_models(folder: Path) -> None:
    tokens = torch.zeros((2, 32), dtype=torch.int64)
    capture(llama_debug(), kwargs={"tokens": tokens, "targets": tokens}, path=folder / "llama.pt")
    ids = {"input_ids": tokens, "labels": tokens}
    capture(gpt2_debug_dropout(), kwargs=ids, evaluation=True, path=folder / "gpt2.pt")
    capture(Convolution(), args=(torch.zeros(2, 3, 8, 8),), path=folder / "convolution.pt")


def opt(source: Path, out: Path, *options: str) -> bytes:
    subprocess.run(["fsdp-opt", source, *options, "-o", out], check=True)
    return out.read_bytes()


def check(folder: Path, model: Path, policy: str) -> str:
    folder.mkdir()
    (folder / "fsdp.yaml").write_text(policy)
    options = (f"--config={folder}/fsdp.yaml", "--world-size=4")
    direct = opt(model, folder / "plan.json", *options, "--emit=plan")
    for suffix, form in (("mlir", ()), ("mlirbc", ("--emit-bytecode",))):
        level = folder / f"captured.{suffix}"
        opt(model, level, *options, "--level=captured", *form)
        for name, passes in LEVELS.items():
            previous, level = level, folder / f"{name}.{suffix}"
            content = opt(previous, level, *(f"--fsdp-{p}" for p in passes.split()), *form)
            if suffix == "mlir":
                assert b"loc(" not in content
                assert f"fsdp.level = #fsdp.level<{name}>".encode() in content
        if opt(level, folder / f"{suffix}.json", "--emit=plan") != direct:
            subprocess.run(["fsdp-opt", "--diff", folder / "plan.json", folder / f"{suffix}.json"])
            sys.exit(f"{folder.name}: another plan by way of {suffix}")
    plan = json.loads(direct)
    return f"{len(plan['units'])} units, {len(plan['lines'])} lines"


def main() -> None:
    folder = Path(sys.argv[1])
    capture_models(folder)
    for name, (model, policy) in CASES.items():
        result = check(folder / name, folder / f"{model}.pt", policy)
        print(f"{name}: {result}: text, bytecode", flush=True)


main()
