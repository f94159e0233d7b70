"""Runs the two sides of a comparison, each in processes of its own.

Ours: `fsdp_mlir.capture` -> `fsdp-opt` -> `fsdp-run`. Theirs: train_fsdp2.py. A `Case` says what
is trained; both sides get the same weights, batches, seed and optimizer from it. The benchmark
and the demo use this module too.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fsdp_mlir
import torch
import yaml
from fsdp_mlir.text import batches
from ranks import free_port, run_ranks
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / "build" / "bin"

ADAMW = {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
ADAMW_FUSED = {**ADAMW, "fused": True}
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}


@dataclass(frozen=True)
class Model:
    """A model to capture, and the shape of its text batches."""

    factory: str  # module:function
    units: Any  # pattern of the modules that are units, or entries of the config's "units"
    names: str  # the model's arguments, "tokens,targets"
    vocab: int
    seq: int
    batch: int
    kwargs: dict[str, Any] = field(default_factory=dict)
    operators: tuple[str, ...] = ()  # libraries with operators that it calls
    pixels: int = 0  # > 0: square images of this size, and `vocab` classes, instead of text

    def build(self) -> torch.nn.Module:
        module, _, function = self.factory.partition(":")
        return getattr(importlib.import_module(module), function)(**self.kwargs)


LLAMA = Model("fsdp_mlir.models.llama:llama_debug", "layers.*", "tokens,targets", 256, 32, 2)
LLAMA_29M = Model("fsdp_mlir.models.llama:llama_29m", "layers.*", "tokens,targets", 4096, 256, 2)
GPT2 = Model("fsdp_mlir.models.gpt2:gpt2_debug", "transformer.h.*", "input_ids,labels", 256, 32, 2)
RESNET18 = Model(
    "parity_models:resnet18", "net.layer*.*", "images,labels", vocab=10, seq=0, batch=4, pixels=32
)
GPT2_DROPOUT = replace(GPT2, factory="fsdp_mlir.models.gpt2:gpt2_debug_dropout")


@dataclass(frozen=True)
class Case:
    """One training run, the same for both sides."""

    model: Model
    optimizer: dict[str, Any]
    world: int = 2
    steps: int = 8
    reshard: str = "default"  # or "true", "false", "2"
    # "mixed_precision" of units by pattern, formed before the model's; "" for all others.
    precision: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    training: dict[str, Any] = field(default_factory=dict)  # further keys of the config
    checkpoint: dict[str, Any] | None = None  # the config's "activation_checkpoint"
    eval_every: int = 0  # steps; the evaluation data are the training data


@dataclass(frozen=True)
class Captured:
    """The files of one captured model."""

    model: Model
    directory: Path

    @property
    def archive(self) -> Path:
        return self.directory / "model.pt"

    @property
    def weights(self) -> Path:
        return self.directory / "model.safetensors"

    @property
    def data(self) -> Path:
        return self.directory / "batches.safetensors"


@dataclass(frozen=True)
class Run:
    """What a training run left behind; no weights where they were not asked for."""

    metrics: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]

    def column(self, name: str) -> list[float]:
        return [line[name] for line in self.metrics]

    @property
    def rank_losses(self) -> list[list[float]]:
        return [line["rank_losses"] for line in self.metrics]


def execute(
    command: list[Any],
    *,
    env: dict[str, str] | None = None,
    timeout: float = 600,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; with `check`, a failure raises with the command's output."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, env=env, timeout=timeout, check=False, capture_output=True, text=True
    )
    if check and done.returncode != 0:
        raise RuntimeError(
            f"exit status {done.returncode} from: {' '.join(words)}\n{done.stdout}{done.stderr}"
        )
    return done


def write_image_batches(model: Model, path: Path, samples: int) -> None:
    """Noise on a pattern of its own for each class, so that there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    size = (3, model.pixels, model.pixels)
    patterns = torch.randn(model.vocab, *size, generator=generator)
    labels = torch.randint(model.vocab, (samples,), generator=generator)
    images = patterns[labels] + 0.1 * torch.randn(samples, *size, generator=generator)
    save_file(dict(zip(model.names.split(","), (images, labels), strict=True)), path)


def write_text_batches(model: Model, path: Path, samples: int) -> None:
    tensors = batches(model.seq, samples, model.vocab)
    save_file(dict(zip(model.names.split(","), tensors, strict=True)), path)


def capture(
    model: Model,
    directory: Path,
    *,
    samples: int = 22,
    precision: dict[str, Any] | None = None,
    reshard: str = "default",
) -> Captured:
    """Captures a model on its first batch of text, under its units. `samples` need not be a
    multiple of anything: the data set wraps. FSDP2 is what checks it."""
    directory.mkdir(parents=True, exist_ok=True)
    captured = Captured(model, directory)
    write = write_image_batches if model.pixels else write_text_batches
    write(model, captured.data, samples)
    batch = {name: x[: model.batch] for name, x in load_file(captured.data).items()}
    config = directory / "capture.yaml"
    write_config(Case(model, ADAMW, precision=precision or {}, reshard=reshard), config)
    fsdp_mlir.capture(
        model.build(),
        kwargs=batch,
        evaluation=True,
        config=config,
        path=str(captured.archive),
        check=False,
    )
    return captured


def write_config(case: Case, path: Path) -> None:
    config: dict[str, Any] = {
        "units": unit_entries(case),
        "optimizer": case.optimizer,
        **case.training,
    }
    if case.checkpoint:
        config["activation_checkpoint"] = case.checkpoint
    if "" in case.precision:
        config["mixed_precision"] = case.precision[""]
    path.write_text(yaml.safe_dump(config))


def unit_entries(case: Case) -> Any:
    """The config's "units"."""
    units: list[dict[str, Any]] = [
        {"match": pattern, "mixed_precision": policy}
        for pattern, policy in case.precision.items()
        if pattern
    ]
    if not isinstance(case.model.units, str):
        return [*units, *case.model.units]
    units.append({"match": case.model.units})
    if case.reshard != "default":
        for unit in units:
            unit["reshard_after_forward"] = json.loads(case.reshard)
    return units


def compile_plan(captured: Captured, case: Case, stem: str) -> Path:
    """Returns the plan's path: `<stem>.plan.json` beside the captured model."""
    config = captured.directory / f"{stem}.yaml"
    plan = captured.directory / f"{stem}.plan.json"
    write_config(case, config)
    command = [BIN / "fsdp-opt", captured.archive, "--config", config]
    execute([*command, "--world-size", case.world, "--emit", "plan", "-o", plan])
    return plan


def run_command(captured: Captured, plan: Path, case: Case) -> list[Any]:
    """`fsdp-run` with the case's steps, seed and data (world size to be added)."""
    command = [BIN / "fsdp-run", plan, "--steps", case.steps, "--seed", case.seed]
    if case.eval_every:
        command += ["--eval-every", case.eval_every, "--eval-data", captured.data]
    if "library" in case.optimizer:
        command += ["--allow-plugin", case.optimizer["library"]]
    for library in captured.model.operators:
        command += ["--load", library]
    return [*command, "--data", captured.data]


def run_plan(
    captured: Captured,
    case: Case,
    stem: str,
    *,
    nodes: int = 0,
    comm: str = "shm",
    streams: str = "serial",
) -> Run:
    """Compiles and trains; with `nodes`, as many torchruns start the ranks."""
    plan = compile_plan(captured, case, stem)
    return train_plan(captured, plan, case, nodes=nodes, comm=comm, streams=streams)


def train_plan(
    captured: Captured,
    plan: Path,
    case: Case,
    *,
    nodes: int = 0,
    comm: str = "shm",
    streams: str = "serial",
    save: bool = True,
) -> Run:
    """Trains a compiled plan. Without `save` the final weights are not written."""
    metrics, weights = plan.with_suffix(".jsonl"), plan.with_suffix(".safetensors")
    command = [*run_command(captured, plan, case), "--metrics", metrics, "--comm", comm]
    command += ["--streams", streams]
    if save:
        command += ["--save-weights", weights]
    if nodes:
        run_nodes(command, nodes, case.world)
    else:
        execute([*command, "--nproc", case.world])
    return read_run(metrics, weights if save else None)


def run_nodes(command: list[Any], nodes: int, world: int) -> None:
    """Starts the ranks by a torchrun for each of `nodes`, all on this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nnodes", nodes]
    launcher += ["--nproc-per-node", world // nodes, "--master-addr", "127.0.0.1"]
    launcher += ["--master-port", free_port()]
    with ThreadPoolExecutor(nodes) as pool:
        for run in [
            pool.submit(execute, [*launcher, "--node-rank", node, *command])
            for node in range(nodes)
        ]:
            run.result()


def run_reference(
    captured: Captured,
    case: Case,
    stem: str,
    *,
    mode: str = "fsdp2",
    compiled: bool = False,
    save: bool = True,
) -> Run:
    """Trains the same case with FSDP2 (or on one rank without it: mode "single"; `compiled`: by
    torch.compile)."""
    metrics = captured.directory / f"{stem}.{mode}.jsonl"
    weights = captured.directory / f"{stem}.{mode}.safetensors"
    args = [*reference_args(captured, case, mode), "--metrics", metrics]
    if compiled:
        args.append("--compile")
    if save:
        args += ["--save-weights", weights]
    # Gloo aborts now and then while it starts or ends its threads.
    run_ranks("train_fsdp2", args, case.world, attempts=2)
    return read_run(metrics, weights if save else None)


def reference_args(captured: Captured, case: Case, mode: str) -> list[Any]:
    model = case.model
    args = ["--mode", mode, "--model", model.factory, "--kwargs", json.dumps(model.kwargs)]
    args += ["--units", json.dumps(unit_entries(case)), "--seed", case.seed]
    args += ["--precision", json.dumps(case.precision.get(""))]
    args += ["--optimizer", json.dumps(case.optimizer), "--steps", case.steps]
    args += ["--training", json.dumps(case.training)]
    args += ["--weights", captured.weights, "--data", captured.data]
    if case.checkpoint:
        args += ["--checkpoint", json.dumps(case.checkpoint)]
    if case.eval_every:
        args += ["--eval-every", case.eval_every, "--eval-data", captured.data]
    return [*args, "--batch", model.batch]


def read_run(metrics: Path, weights: Path | None) -> Run:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Run(lines, load_file(weights) if weights else {})
