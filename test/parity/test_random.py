"""Random small models under random policies, against plain PyTorch in this process.

The reference is one copy of the model: it computes every rank's gradients one after another, adds
them in Gloo's order (ring.py), divides by the number of ranks and steps torch.optim's optimizer on
each rank's rows (a fused kernel's bits depend on where a tensor ends). A plan on N
ranks must give the same losses and the same final weights, bit for bit, under every policy:
resharding and checkpointing are choices of schedule, and so are units on two ranks. Mixed precision
is one for the whole model.

`--random-cases N` and `--random-seed S` choose the cases. A case that fails is shrunk, and printed
as JSON that `--random-case JSON` runs again.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsdp_mlir
import pytest
import random_models
import ring
import torch
import yaml
from fsdp_mlir.policy.policy import MixedPrecision
from harness import BIN, execute, read_run
from safetensors.torch import load_file, save_file
from torch import nn
from train_fsdp2 import OPTIMIZERS

SEQ, SAMPLES = 4, 17
SHRINK_SECONDS = 60
NORMS = ("layernorm", "rmsnorm", "batchnorm")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KINDS = ("mlp", "mlp", "attention", "attention", "conv", "scale", "dropout", *NORMS)
Spec = dict[str, Any]


# --- cases


def random_layer(rng: random.Random) -> Spec:
    kind = rng.choice(KINDS)
    layer: Spec = {"kind": kind}
    if kind == "mlp":
        layer["width"] = rng.choice([1, 5, 8, 19])
        layer["bias"] = rng.random() < 0.5
        layer["activation"] = rng.choice(list(random_models.ACTIVATIONS))
    elif kind == "conv":
        layer["kernel"] = rng.choice([1, 3])
    elif kind == "attention":
        layer["heads"] = rng.choice([1, 2, 3])
        layer["dropout"] = rng.choice([0.0, 0.0, 0.2])
    elif kind == "dropout":
        layer["p"] = rng.choice([0.1, 0.5])
    elif kind == "scale":
        layer["rows"] = rng.choice([1, 2, 3, 7])
    return layer


def random_policy(rng: random.Random, layers: list[Spec], tie: bool) -> Spec:
    """A config for fsdp-opt, without the optimizer. Patterns name layers that exist and have
    parameters."""
    owners = [f"layers.{i}" for i, layer in enumerate(layers) if layer["kind"] != "dropout"]
    patterns: list[list[str]] = [[]] if tie else [[], ["embed"]]
    if owners:
        patterns += [["layers.*"], ["layers.*"], [rng.choice(owners)], ["layers"], ["layers.*.*"]]
    chosen = rng.choice(patterns)
    if chosen == ["layers.*.*"]:  # a norm has no modules of its own
        inner = any(x["kind"] in ("mlp", "conv", "attention", "batchnorm") for x in layers)
        chosen = chosen if inner else ["layers.*"]
    units = [{"match": pattern} for pattern in chosen]
    for unit in units:
        if (reshard := rng.choice([None, True, False])) is not None:
            unit["reshard_after_forward"] = reshard
    policy: Spec = {"units": units}
    if rng.random() < 0.6:
        named = [f"layers.{i}" for i in range(len(layers))]
        match = rng.choice(["layers.*", "layers.*", "layers", "embed", "**", *named])
        policy["activation_checkpoint"] = {"match": match}
        kinds = {layer["kind"] for layer in layers}
        if match == "layers.*" and kinds & {"mlp", "attention"} and rng.random() < 0.5:
            # Matrix products of the linear layers: mm without a bias, addmm with one.
            biased = "attention" in kinds or any(x.get("bias") for x in layers)
            policy["activation_checkpoint"]["save"] = ["aten::addmm" if biased else "aten::mm"]
    return policy


def random_optimizer(rng: random.Random) -> Spec:
    if rng.random() < 0.5:
        return {"name": "sgd", "lr": 0.1, "momentum": rng.choice([0.0, 0.9])}
    return {
        "name": "adamw",
        "lr": 0.01,
        "weight_decay": rng.choice([0.0, 0.1]),
        "fused": rng.random() < 0.5,
    }


def random_precision(rng: random.Random, layers: list[Spec]) -> Spec | None:
    # BatchNorm's kernel on the CPU wants its parameters in fp32.
    if rng.random() < 0.5 or any(layer["kind"] == "batchnorm" for layer in layers):
        return None
    reduce = rng.choice([{}, {"reduce_dtype": "float32"}, {"reduce_dtype": "bfloat16"}])
    return {"param_dtype": rng.choice(["bfloat16", "bfloat16", "float16"]), **reduce}


def random_case(seed: str) -> Spec:
    rng = random.Random(seed)
    layers = [random_layer(rng) for _ in range(rng.randint(1, 5))]
    tie = rng.random() < 0.3
    # The head stays trainable, so that there is a step to take.
    frozen = ["layers.0.*", "*.bias", "*norm.weight"] + ([] if tie else ["embed.*"])
    return {
        "model": {
            "seed": rng.randrange(1000),
            "layers": layers,
            "tie": tie,
            "unused": rng.random() < 0.3,
            "frozen": [p for p in frozen if rng.random() < 0.15],
        },
        "world": rng.choice([1, 2, 3, 4]),
        # Inputs of one sample may have other strides in a unit (policy/unit_entry.py).
        "batch": rng.choice([2, 3, 4]),
        "steps": 3,
        "seed": rng.randrange(1000),
        "optimizer": random_optimizer(rng),
        "policies": [random_policy(rng, layers, tie) for _ in range(3)],
        "precision": random_precision(rng, layers),
    }


# --- the two sides


def make_data(case: Spec, directory: Path) -> dict[str, torch.Tensor]:
    """Writes batches.safetensors."""
    generator = torch.Generator().manual_seed(case["seed"])
    shape = (SAMPLES, SEQ)
    data = {
        name: torch.randint(random_models.VOCAB, shape, generator=generator)
        for name in ("tokens", "targets")
    }
    save_file(data, directory / "batches.safetensors")
    return data


def write_config(case: Spec, policy: Spec, directory: Path) -> Path:
    config: Spec = {**policy, "optimizer": case["optimizer"]}
    if precision := case.get("precision"):
        config["mixed_precision"] = precision
    path = directory / "fsdp.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def capture(case: Spec, data: dict[str, torch.Tensor], config: Path, directory: Path) -> None:
    """Writes model.pt and model.safetensors."""
    batch = {name: x[: case["batch"]] for name, x in data.items()}
    model = random_models.build(case["model"])
    fsdp_mlir.capture(model, kwargs=batch, config=config, path=str(directory / "model.pt"))


def train_plan(
    case: Spec, config: Path, directory: Path
) -> tuple[list[list[float]], Spec, list[list[str]]]:
    """The losses, the weights, and the names of the parameters of each unit."""
    plan, metrics = directory / "plan.json", directory / "metrics.jsonl"
    weights = directory / "trained.safetensors"
    command = [BIN / "fsdp-opt", directory / "model.pt", "--config", config]
    execute([*command, "--world-size", case["world"], "--emit", "plan", "-o", plan])
    command = [BIN / "fsdp-run", plan, "--steps", case["steps"], "--seed", case["seed"]]
    command += ["--nproc", case["world"], "--data", directory / "batches.safetensors"]
    execute([*command, "--metrics", metrics, "--save-weights", weights])
    run, params = read_run(metrics, weights), json.loads(plan.read_text())["params"]
    units = {
        each["unit"]: [x["name"] for x in params if x["unit"] == each["unit"]] for each in params
    }
    return run.rank_losses, run.weights, list(units.values())


def gradients(
    model: nn.Module, batch: dict[str, torch.Tensor], precision: MixedPrecision
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a batch, and the gradients in the dtype of the reduction."""
    leaves = {
        name: p.detach().to(precision.computed(p.dtype)).requires_grad_(p.requires_grad)
        for name, p in model.named_parameters()
    }
    for leaf in leaves.values():
        if leaf.requires_grad:
            keeps = precision.keeps_gradients(torch.float32)
            leaf.grad_dtype = None if keeps else precision.grad_dtype(torch.float32)
    loss = torch.func.functional_call(model, leaves, kwargs=batch)
    loss.backward()
    reduced = precision.reduce_dtype or torch.float32
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return loss, {name: grad.to(reduced) for name, grad in grads.items()}


def train_eagerly(
    case: Spec, data: dict[str, torch.Tensor], directory: Path, units: list[list[str]]
) -> tuple[list[list[float]], Spec]:
    world, size = case["world"], case["batch"]
    model = random_models.build(case["model"])
    model.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
    dtypes = {k: DTYPES[v] for k, v in (case.get("precision") or {}).items()}
    precision = MixedPrecision(**dtypes)
    settings = dict(case["optimizer"])
    shards = {  # the rows of each rank, in place
        name: p.detach().chunk(world) for name, p in model.named_parameters() if p.requires_grad
    }
    optimizer = OPTIMIZERS[settings.pop("name")](sum(shards.values(), ()), **settings)
    torch.manual_seed(case["seed"])
    generators = [torch.get_rng_state()] * world
    buffers = [copy.deepcopy(dict(model.named_buffers())) for _ in range(world)]
    losses: list[list[float]] = []
    for step in range(case["steps"]):
        found: list[dict[str, torch.Tensor]] = []
        losses.append([])
        for rank in range(world):
            torch.set_rng_state(generators[rank])
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[rank][name])
            indices = torch.arange(size).add((step * world + rank) * size) % SAMPLES
            batch = {name: x[indices] for name, x in data.items()}
            loss, grads = gradients(model, batch, precision)
            found.append(grads)
            losses[-1].append(float(f"{loss.item():.9g}"))
            buffers[rank] = copy.deepcopy(dict(model.named_buffers()))
            generators[rank] = torch.get_rng_state()
        for name, total in ring.add_units(found, units).items():
            mean = (total / world).float()
            for piece, grad in zip(shards[name], mean.chunk(world), strict=True):
                piece.grad = grad
        optimizer.step()
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[0][name])
    return losses, model.state_dict()


def differences(case: Spec, directory: Path) -> Iterator[str]:
    """What differs from the reference, policy by policy."""
    directory.mkdir(parents=True, exist_ok=True)
    data = make_data(case, directory)
    reference: tuple[list[list[float]], Spec] | None = None
    for policy in case["policies"]:
        config = write_config(case, policy, directory)
        if reference is None or case.get("precision"):  # the capture has the units' casts
            capture(case, data, config, directory)
        try:
            our_losses, our_weights, units = train_plan(case, config, directory)
        except RuntimeError as error:
            yield f"{json.dumps(policy)}: {error}"
            continue
        if reference is None or case["world"] > 2:  # where a sum has an order
            reference = train_eagerly(case, data, directory, units)
        losses, weights = reference
        if our_losses != losses:
            yield f"{json.dumps(policy)}: losses {our_losses}, expected {losses}"
        for name, weight in weights.items():
            if not torch.equal(our_weights[name], weight):
                worst = (our_weights[name] - weight).abs().max()
                yield f"{json.dumps(policy)}: '{name}' differs by up to {worst:.3g}"


# --- shrinking


def smaller_cases(case: Spec) -> Iterator[Spec]:
    """Each with one thing less; patterns of a policy may then match nothing, which is an error
    of another kind, so such policies are dropped."""
    if len(case["policies"]) > 1:
        for policy in case["policies"]:
            yield {**case, "policies": [policy]}
        return
    policy = case["policies"][0]
    for key in policy:
        if policy[key]:
            yield {**case, "policies": [{k: v for k, v in policy.items() if k != key}]}
    for key, least in (("world", 1), ("batch", 2), ("steps", 1)):
        if case[key] > least:
            yield {**case, key: least}
            yield {**case, key: case[key] - 1}
    model = case["model"]
    for i in range(len(model["layers"])):
        yield {**case, "model": {**model, "layers": model["layers"][:i] + model["layers"][i + 1 :]}}
    for key, simple in (("tie", False), ("unused", False), ("frozen", [])):
        if model[key]:
            yield {**case, "model": {**model, key: simple}}
    if case.get("precision"):
        yield {**case, "precision": None}
    plain = {"name": "sgd", "lr": 0.1}
    if case["optimizer"] != plain:
        yield {**case, "optimizer": plain}


def is_numeric_failure(problems: list[str]) -> bool:
    return any("losses" in problem or "differs" in problem for problem in problems)


def shrink(case: Spec, problems: list[str], directory: Path) -> tuple[Spec, list[str]]:
    """The smallest case found in bounded time that fails in the same way."""
    deadline = time.monotonic() + SHRINK_SECONDS
    numeric = is_numeric_failure(problems)
    smaller = smaller_cases(case)
    while time.monotonic() < deadline and (candidate := next(smaller, None)):
        shutil.rmtree(directory, ignore_errors=True)
        try:
            found = list(differences(candidate, directory))
        except Exception:  # no model any more
            continue
        if found and is_numeric_failure(found) == numeric:
            case, problems, smaller = candidate, found, smaller_cases(candidate)
    return case, problems


# --- the test


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = metafunc.config.getoption("--random-case")
    seed = metafunc.config.getoption("--random-seed")
    count = metafunc.config.getoption("--random-cases")
    cases = [given] if given else [f"{seed}.{index}" for index in range(count)]
    metafunc.parametrize("seed", cases, ids=["given"] if given else cases)


def test_equals_plain_pytorch(seed: str, tmp_path: Path) -> None:
    case = json.loads(seed) if seed.startswith("{") else random_case(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        problems = list(differences(case, tmp_path / "case"))
        if problems:
            case, problems = shrink(case, problems, tmp_path / "smaller")
    finally:
        torch.set_num_threads(threads)
    again = f"pytest test/parity/test_random.py --random-case '{json.dumps(case)}'"
    assert not problems, "\n".join([*problems, "again: " + again])
