"""From a model and a policy to a plan: every rank captures, rank 0 runs fsdp-opt."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fsdp_mlir import build
from fsdp_mlir.bound_state import constant_name
from fsdp_mlir.errors import CompileError
from fsdp_mlir.fingerprint import Fingerprint, first_difference
from fsdp_mlir.plain_model import plain
from fsdp_mlir.step import capture


@dataclass(frozen=True)
class Captured:
    """What a capture gave. `constants` are the tensors that the graph took from elsewhere, by
    their names as buffers of the plan."""

    fingerprint: Fingerprint
    constants: dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """What is captured: a model on example inputs by position and by name, under a policy, the
    text of a config. `options` are further arguments of `capture`."""

    model: nn.Module
    args: Sequence[Tensor]
    kwargs: Mapping[str, Any]
    policy: str
    options: Mapping[str, Any]

    def capture(self, folder: Path, values: Mapping[int, Tensor]) -> Captured:
        """Writes policy.yaml, model.pt, and its constants in model.safetensors. `values` are those
        of plain_model.whole_values."""
        folder.mkdir(parents=True, exist_ok=True)
        policy, archive = folder / "policy.yaml", folder / "model.pt"
        policy.write_text(self.policy)
        with plain(self.model, values):
            done = capture(
                self.model,
                self.args,
                dict(self.kwargs),
                config=policy,
                path=archive,
                save_weights=False,
                **self.options,
            )
        constants = {constant_name(i): tensor for i, tensor in enumerate(done.constants)}
        return Captured(Fingerprint.of(archive), constants)


def make_plan(folder: Path, world_size: int) -> None:
    """plan.json of the model.pt and policy.yaml that lie in `folder`."""
    archive, policy, plan = (folder / name for name in ("model.pt", "policy.yaml", "plan.json"))
    command = [build.built("bin/fsdp-opt"), archive, "--config", policy]
    command += ["--world-size", str(world_size), "--emit", "plan", "-o", plan]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stderr.splitlines():
        if done.returncode == 0 and ": warning: " in line:
            warnings.warn(line.partition(": warning: ")[2], stacklevel=4)
    if done.returncode != 0:
        found = [line for line in done.stderr.splitlines() if "error: " in line]
        raise CompileError((found or [f"fsdp-opt ended with status {done.returncode}"])[0])


def check_same(own: Fingerprint, exchange: Callable[[str], list[str]]) -> None:
    """CompileError on every rank where the ranks captured different steps. `exchange` gives the
    texts of all ranks."""
    if len(set(exchange(own.digest))) == 1:
        return
    digests = exchange(own.digests)
    rank = next(rank for rank, other in enumerate(digests) if other != digests[0])
    lines = exchange(str(own.line(first_difference(digests[0], digests[rank]))))
    raise CompileError(
        f"the step of rank {rank} is not that of rank 0: {lines[rank]} there, {lines[0]} on rank "
        "0; expected the same model and code on every rank, and what differs as an input or a "
        "buffer"
    )
