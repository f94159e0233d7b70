"""What bench/gpu.py runs on a GPU: the models, and how their plans are compiled.

The standard library alone: a GPU host needs no compiler, and a host with the compiler no GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SMALL_PLANS = ROOT / "test" / "Inputs" / "gpu"
LARGE_PLANS = ROOT / "out" / "gpu-plans"
BENCH = ROOT / "bench"
MODELS = {
    "llama": ROOT / "python" / "fsdp_mlir" / "models" / "llama.py",
    "gpt": BENCH / "gpu_models.py",
    "convnet": BENCH / "gpu_models.py",
}

UNITS = "layers.*"
OPTIMIZER: dict[str, Any] = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "fused": True}
PRECISION: dict[str, dict[str, str]] = {
    "fp32": {},
    "bf16": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
}

# What a step keeps: nothing but products in a layer, also the logits in parts.
_CHECKPOINT = {"activation_checkpoint": {"match": UNITS, "save": ["products"]}}
MEMORY: dict[str, dict[str, Any]] = {
    "products": _CHECKPOINT,
    "lean": {**_CHECKPOINT, "inexact": {"loss_chunks": 8}},
}

SMALL = {"dim": 256, "layers": 2, "heads": 4, "vocab": 512, "seq": 64, "hidden": 704}
LARGE = {"dim": 2048, "layers": 18, "heads": 16, "vocab": 32000, "hidden": 5632}


@dataclass(frozen=True)
class Case:
    """A model of MODELS, its policy, and `batch` samples a rank. Its step is captured for a GPU of
    the architecture `arch`, or for the CPU; for the FSDP2 of PyTorch `torch`, or of the installed
    one. `memory` is a key of MEMORY; FSDP2 keeps all activations all the same."""

    name: str
    sizes: dict[str, int]
    batch: int
    world: int
    precision: str
    large: bool = False
    arch: str | None = None
    torch: str | None = None
    model: str = "llama"
    memory: str = ""

    @property
    def seq(self) -> int:
        return self.sizes["seq"]

    @property
    def tokens(self) -> int:
        """Of one rank in a step."""
        return self.batch * self.seq

    @property
    def plan(self) -> Path:
        return (LARGE_PLANS if self.large else SMALL_PLANS) / f"{self.name}.json"

    @property
    def config(self) -> str:
        """The policy, as JSON, which is YAML too."""
        config: dict[str, Any] = {
            "units": [{"match": UNITS}],
            "optimizer": OPTIMIZER,
            "schedule": {"device": "h100", "fuse": "exact" if self.arch else "none"},
        }
        if PRECISION[self.precision]:
            config["mixed_precision"] = PRECISION[self.precision]
        if self.memory:
            config |= MEMORY[self.memory]
        return json.dumps(config)

    @property
    def inputs(self) -> list[str]:
        shape = f"int64[{self.batch},{self.seq}]<{self.sizes['vocab']}"
        return [f"tokens={shape}", f"targets={shape}"]

    @property
    def parameters(self) -> int:
        """Of a Llama."""
        assert self.model == "llama"
        dim, hidden = self.sizes["dim"], self.sizes["hidden"]
        block = 4 * dim * dim + 3 * dim * hidden + 2 * dim
        return self.sizes["layers"] * block + dim + 2 * self.sizes["vocab"] * dim

    @property
    def flops(self) -> float:
        """Of one rank's step, as PaLM's appendix B counts them (arXiv:2204.02311): 6 a parameter
        and token, without the table that is only looked up, and 12 x layers x dim x seq a token
        for attention, whose causal half is not taken off."""
        matrices = self.parameters - self.sizes["vocab"] * self.sizes["dim"]
        attention = 12 * self.sizes["layers"] * self.sizes["dim"] * self.seq
        return float(self.tokens * (6 * matrices + attention))


# What the lent hosts have. FSDP2 rounds gradients in mixed precision otherwise since 2.15.
GPU_TORCH = "2.11"


def is_other_fsdp2(case: Case, installed: str) -> bool:
    """Whether FSDP2 of the PyTorch `installed` has other bits than the case's plan, which is for
    another version."""
    if case.precision == "fp32":
        return False
    plan = json.loads(case.plan.read_text())
    wanted = plan["captured_for"]["torch"]
    return _keeps_gradients(wanted) != _keeps_gradients(installed)


def _keeps_gradients(version: str) -> bool:
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= (2, 15)


PARITY = [
    Case(
        f"llama-{world}-{precision}" + (f"-{arch}" if arch else ""),
        SMALL,
        batch=2,
        world=world,
        precision=precision,
        arch=arch,
        torch=GPU_TORCH if arch else None,
    )
    for world in (1, 2)
    for precision in PRECISION
    for arch in (None, "sm_90")
]
PARITY.append(replace(PARITY[3], name="llama-1-bf16-products-sm_90", memory="products"))
PARITY += [
    replace(PARITY[at], name=f"{model}-1-{precision}-sm_90", model=model)
    for model in ("gpt", "convnet")
    for at, precision in ((1, "fp32"), (3, "bf16"))
]
BENCHMARKS = [
    Case(
        f"llama-1b-{seq}" + (f"-{memory}" if memory else ""),
        {**LARGE, "seq": seq},
        8192 // seq,
        1,
        "bf16",
        large=True,
        arch="sm_90",
        torch=GPU_TORCH,
        memory=memory,
    )
    for seq, memory in ((2048, ""), (4096, ""), (2048, "products"), (2048, "lean"))
]
CASES = {case.name: case for case in [*PARITY, *BENCHMARKS]}
