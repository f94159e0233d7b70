"""The schema of the policy is what fsdp-opt reads, and capture's check says what fsdp-opt says."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsdp_mlir import CaptureError
from fsdp_mlir.policy.policy import read_policy
from fsdp_mlir.state import optimizers
from fsdp_mlir.support import build
from fsdp_mlir.support.policy_schema import SCHEMA, Key

IMPORT = Path(__file__).resolve().parents[2] / "lib" / "Import"

MODEL = """
fsdp.param @layers.weight : tensor<4xf32>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  %w = fsdp.read @layers.weight : tensor<4xf32>
  fsdp.phase forward
  %loss = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::mul.Tensor"(%x, %loss) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  fsdp.gradients [@layers.weight] %g : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}
"""

# A value that is not the default of each key, and where `@` stands in a policy that has what the
# key needs beside it.
MICROBATCHES = "gradient_accumulation_steps: 2\n@"
SGD, PLUGIN = "optimizer: {name: sgd, momentum: 0.5, @}", "optimizer: {name: plugin, @}"
DECAY = "lr_schedule: {decay: linear, total_steps: 9, @}"
IN_UNIT = "units: [{match: layers, @}]"
IN_GROUP = "optimizer: {groups: [{match: layers, @}]}"
SAMPLES: dict[str, tuple[str, ...]] = {
    "mesh": ("{replicate: 2}",),
    "mesh.replicate": ("2",),
    "mesh.shard": ("2", "mesh: {replicate: -1, @}"),
    "units": ("auto",),
    "units.match": ("layers", "units: [{@}]"),
    "units.class": ("Block", "units: [{@}]"),
    "ignore": ("layers.weight",),
    "reshard_after_forward": ("2",),
    "mixed_precision": ("{param_dtype: bfloat16}",),
    "mixed_precision.param_dtype": ("float16",),
    "mixed_precision.reduce_dtype": ("float64",),
    "mixed_precision.output_dtype": ("bfloat16",),
    "mixed_precision.cast_forward_inputs": (
        "false",
        "mixed_precision: {param_dtype: bfloat16, @}",
    ),
    "cpu_offload": ("true",),
    "gradient_divide_factor": ("2",),
    "force_sum_reduction_for_comms": ("true",),
    "shard_placement": ("[{match: layers.weight, dim: 0}]",),
    "shard_placement.match": ("layers.weight", "shard_placement: [{dim: 0, @}]"),
    "shard_placement.dim": ("0", "shard_placement: [{match: layers.weight, @}]"),
    "activation_checkpoint": ("{match: layers}",),
    "activation_checkpoint.match": ("layers",),
    "activation_checkpoint.save": ('["aten::mm"]', "activation_checkpoint: {match: layers, @}"),
    "activation_offload": ("[{match: layers}]",),
    "activation_offload.match": ("layers",),
    "activation_offload.min_bytes": ("2MiB", "activation_offload: {match: layers, @}"),
    "optimizer": ("{name: sgd}",),
    "optimizer.name": ("adam",),
    "optimizer.lr": ("0.5",),
    "optimizer.betas": ("[0.25, 0.5]",),
    "optimizer.eps": ("0.5",),
    "optimizer.weight_decay": ("0.5",),
    "optimizer.momentum": ("0.5", "optimizer: {name: sgd, @}"),
    "optimizer.dampening": ("0.5", SGD),
    "optimizer.nesterov": ("true", SGD),
    "optimizer.amsgrad": ("true",),
    "optimizer.maximize": ("true",),
    "optimizer.fused": ("true",),
    "optimizer.foreach": ("true",),
    "optimizer.options": ("{beta: 0.5}", "optimizer: {name: plugin, library: a.so, @}"),
    "optimizer.library": ("a.so", PLUGIN),
    "optimizer.groups": ("[{match: layers.weight, lr: 0.5}]",),
    "optimizer.groups.match": ("layers.weight", "optimizer: {groups: [{@}]}"),
    "lr_schedule": ("{warmup_steps: 2}",),
    "lr_schedule.warmup_steps": ("2",),
    "lr_schedule.decay": ("linear", "lr_schedule: {total_steps: 9, @}"),
    "lr_schedule.total_steps": ("9", "lr_schedule: {decay: linear, @}"),
    "lr_schedule.min_lr_ratio": ("0.5", DECAY),
    "clip_grad_norm": ("0.5",),
    "clip_grad_norm.max_norm": ("0.5",),
    "clip_grad_norm.norm_type": (".inf", "clip_grad_norm: {max_norm: 0.5, @}"),
    "gradient_accumulation_steps": ("2",),
    "reduce_each_microbatch": ("false", MICROBATCHES),
    "all_reduce_each_microbatch": ("false", MICROBATCHES),
    "reshard_after_backward": ("false", MICROBATCHES),
    "inexact": ("{loss_chunks: 3}",),
    "inexact.loss_chunks": ("3",),
    "grad_scaler": ("{growth_factor: 3}",),
    "grad_scaler.init_scale": ("2",),
    "grad_scaler.growth_factor": ("3",),
    "grad_scaler.backoff_factor": ("0.25",),
    "grad_scaler.growth_interval": ("3",),
    "schedule": ("fsdp2",),
    "schedule.prefetch": ("none",),
    "schedule.reduce_scatters_in_flight": ("3",),
    "schedule.bucket": ("parameter",),
    "schedule.memory": ("auto", "schedule: {memory_budget: 1GiB, @}"),
    "schedule.memory_budget": ("1GiB",),
    "schedule.stage_checkpoints": ("true",),
    "schedule.fuse": ("none",),
    "schedule.device": ("h100",),
}


def keys(mapping: Key = SCHEMA, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Key]]:
    """All but those that a mapping shares with the one around it."""
    for key in mapping.get("keys", []):
        if key["key"] not in mapping.get("shared", []):
            here = (*path, key["key"])
            yield ".".join(here), key
            yield from keys(key, here)


KEYS = dict(keys())
# Keys without which fsdp-opt refuses the rest of the sample.
NEEDED = {
    "mesh.shard",
    "units.match",
    "units.class",
    "optimizer.library",
    "lr_schedule.decay",
    "lr_schedule.total_steps",
}
# Where `@` stands for a default, if not in the sample.
AT_DEFAULT = {
    "mesh.shard": "mesh: {replicate: 2, @}",
    "lr_schedule.decay": "lr_schedule: {warmup_steps: 2, @}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("schema")
    (path / "model.mlir").write_text(MODEL)
    return path


@functools.cache
def fsdp_opt(folder: Path, policy: str, *options: str) -> str:
    """What it makes of the model under a policy, or its error."""
    config = folder / "fsdp.yaml"
    config.write_text(policy)
    command = [build.built("bin/fsdp-opt"), folder / "model.mlir", "--config", config]
    arguments = ["--world-size", "4", *(options or ("--level", "captured"))]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout
    assert done.returncode == 1, done.stderr
    return done.stderr.split("\n")[0]


def sample(path: str) -> tuple[str, str]:
    """A value of a key, and a policy with `@` at its place."""
    value, *template = SAMPLES[path]
    parent = path.rpartition(".")[0]
    return value, template[0] if template else f"{parent}: {{@}}" if parent else "@"


def filled(template: str, path: str, value: str) -> str:
    return template.replace("@", f"{path.rpartition('.')[2]}: {value}")


def without(template: str) -> str:
    return re.sub(r"(, )?@", "", template)


def test_each_key_has_a_sample() -> None:
    assert SAMPLES.keys() == KEYS.keys()


@pytest.mark.parametrize("path", KEYS)
def test_a_key_is_read(folder: Path, path: str) -> None:
    """It is accepted and says something; what must be there is missed."""
    value, template = sample(path)
    given = fsdp_opt(folder, filled(template, path, value))
    assert "error: " not in given
    absent = fsdp_opt(folder, without(template))
    assert given != absent
    assert ("error: " in absent) == (path in NEEDED or "required" in KEYS[path])


@pytest.mark.parametrize("path", [path for path in KEYS if "default" in KEYS[path]])
def test_a_default_holds_without_the_key(folder: Path, path: str) -> None:
    default = KEYS[path]["default"]
    cases = [(AT_DEFAULT.get(path, sample(path)[1]), default)]
    if isinstance(default, dict) and default:
        cases = [(f"optimizer: {{name: {name}, @}}", each) for name, each in default.items()]
    # The module does not say what an optimizer has by default, or that there is no schedule.
    by_plan = path == "schedule" or path.startswith("optimizer")
    options = ("--emit", "plan") if by_plan else ()
    for template, value in cases:
        text = value if isinstance(value, str) else json.dumps(value)
        absent = fsdp_opt(folder, without(template), *options)
        assert "error: " not in absent
        assert fsdp_opt(folder, filled(template, path, text), *options) == absent


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_hyperparameters_are_those_of_their_optimizers(folder: Path, name: str) -> None:
    for path, key in KEYS.items():
        if "optimizers" not in key or key["key"] in ("options", "library"):
            continue
        value = "0.5" if "number" in key["types"] else SAMPLES[path][0]
        beside = "momentum: 0.5, " if key["key"] == "nesterov" and name == "sgd" else ""
        said = fsdp_opt(folder, f"optimizer: {{name: {name}, {beside}{key['key']}: {value}}}")
        assert ("has no hyperparameter" in said) == (name not in key["optimizers"]), said
    assert set(optimizers.SETTINGS[name]) <= {
        key["key"] for key in KEYS.values() if name in key.get("optimizers", ())
    }


def test_the_readers_know_no_other_keys() -> None:
    known = {path.rpartition(".")[2] for path in KEYS}
    for file in ("ConfigReader.cpp", "TrainingConfig.cpp"):
        text = (IMPORT / file).read_text()
        calls = r"(?:find|getText|getBool|getInteger|getNumber|dtype|key\.is)\(\"(\w+)\"\)"
        read = re.findall(calls, text) + re.findall(r"^\s+[{]+\"(\w+)\", &?\w", text, re.MULTILINE)
        assert read
        assert set(read) <= known


@pytest.mark.parametrize("path", [path for path in KEYS if "example" in KEYS[path]])
def test_examples(folder: Path, path: str) -> None:
    example = KEYS[path]["example"]
    assert "error: " not in fsdp_opt(folder, example)
    (folder / "fsdp.yaml").write_text(example)
    read_policy(folder / "fsdp.yaml")


@pytest.mark.parametrize(
    "policy",
    [
        "mixed_precision: bfloat16",
        "mixed_precision: {param_dtype: bf16}",
        "mixed_precision: {param_dtype: [float32]}",
        "mixed_precision: {cast_forward_inputs: no}",
        "mixed_precision: {param_dtyp: float32}",
        "mixed_precision: {cast_forward_inputs: true, cast_forward_inputs: true}",
        "units: manual",
        "units:\n",
        "units: {}",
        "mixed_precision: []",
        "units: [layers]",
        "units: [{match: }]",
        "units: [{match: []}]",
        "units: [{match: ''}]",
        "units: [{class: [A, B]}]",
        "units: [{match: a, class: B}]",
        "units: [{reshard_after_forward: true}]",
        "units: [{match: a, reshard_after_forward: 0}]",
        "units: [{match: a, gradient_divide_factor: -2}]",
        "units: [{match: a, zzzzzzzzz: 1}]",
        "ignore: {a: b}",
        "ignore: []",
        "[units]",
    ],
)
def test_errors_of_capture_are_those_of_the_compiler(folder: Path, policy: str) -> None:
    said = fsdp_opt(folder, policy)
    (folder / "fsdp.yaml").write_text(policy)
    with pytest.raises(CaptureError) as error:
        read_policy(folder / "fsdp.yaml")
    # LLVM's parser places a flow collection behind its bracket.
    assert said.partition(": error: ")[2] == str(error.value).partition(": ")[2]
