"""Mixed precision in the capture: parameters, casts at unit boundaries, gradients."""

from __future__ import annotations

import json
import random
import re
import subprocess
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_mlir import CaptureError, capture
from fsdp_mlir.modules import weights
from fsdp_mlir.policy.policy import MixedPrecision, Units, pattern_to_regex, read_policy
from fsdp_mlir.support import build
from torch import Tensor, nn


@pytest.mark.parametrize(
    ("pattern", "names", "others"),
    [
        ("layers.*", ["layers.0", "layers.10"], ["layers", "layers.0.mlp", "xlayers.0"]),
        ("**.mlp", ["a.mlp", "a.b.mlp"], ["mlp", "a.mlps"]),
        ("h.?", ["h.1"], ["h.10", "h.."]),
        ("a.b", ["a.b"], ["axb"]),
    ],
)
def test_patterns(pattern: str, names: list[str], others: list[str]) -> None:
    regex = pattern_to_regex(pattern)
    assert [n for n in names + others if regex.fullmatch(n)] == names


def test_patterns_match_as_in_the_compiler() -> None:
    """Each has its own: capture runs where nothing is built."""
    draw = random.Random(0)
    parts = ["*", "**", "?", ".", "a", "b"]
    patterns = ["m" + "".join(draw.choices(parts, k=draw.randint(1, 6))) for _ in range(300)]
    patterns.append("m" + "**a" * 40)
    names = ["m" + "".join(letters) for k in range(5) for letters in product("a.?", repeat=k)]
    own = [
        re.sub(r"\*+", "", pattern).replace("?", "z") for pattern in patterns
    ]  # none is an error
    modules = [
        "\n".join(
            [f'fsdp.ignore "{p}"', *(f'fsdp.param @"{n}" : tensor<1xf32>' for n in {*names, o})]
        )
        for p, o in zip(patterns, own, strict=True)
    ]
    command = [build.built("bin/fsdp-opt"), "--fsdp-assign-units", "--split-input-file", "-"]
    source = "\n// -----\n".join(modules)
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    for pattern, text in zip(patterns, done.stdout.split("// -----"), strict=True):
        found = set(re.findall(r'fsdp.param @"?([^" ]+)"? : .*ignored', text))
        regex = pattern_to_regex(pattern)
        assert {name for name in names if regex.fullmatch(name)} == found & set(names), pattern


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 2), nn.Linear(2, 2)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.norm, self.head = nn.LayerNorm(2), nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.head.weight


def units_of(model: nn.Module, config: Path, text: str) -> dict[str, tuple[str, ...]]:
    """Per parameter: the units of its names and their param_dtype."""
    config.write_text(text)
    units = Units(read_policy(config), model)
    return {
        param.name: tuple(
            f"{name}:{precision and str(precision.param_dtype).removeprefix('torch.')}"
            for name, precision in units._units_of(param).items()
        )
        for param in weights.parameters(model)
    }


def test_units(tmp_path: Path) -> None:
    found = units_of(
        Stack(),
        tmp_path / "fsdp.yaml",
        "mixed_precision: {param_dtype: bfloat16}\n"
        "units:\n"
        "- {match: first.up, mixed_precision: {param_dtype: float32}}\n"
        "- {match: [norm, head]}\n"
        "- {class: Bl*, mixed_precision: {param_dtype: float16}}\n"
        "- {match: first, mixed_precision: false}\n"
        "ignore: second.up.bias\n",
    )
    assert found["first.up.weight"] == ("first.up:float32",)
    assert found["first.down.weight"] == ("first:float16",)  # of two patterns the first wins
    assert found["second.up.weight"] == ("second:float16",)
    assert found["second.up.bias"] == ()
    assert found["norm.weight"] == ("norm:bfloat16",)
    assert found["head.weight"] == ("head:bfloat16", ":bfloat16")
    assert found["tied.bias"] == (":bfloat16",)
    assert Units(read_policy(None), Stack()).with_precision(weights.parameters(Stack())) == {}


def test_a_tied_parameter_of_different_precision(tmp_path: Path) -> None:
    config = tmp_path / "fsdp.yaml"
    config.write_text("units: [{match: tied, mixed_precision: {param_dtype: bfloat16}}]")
    units = Units(read_policy(config), Stack())
    message = "parameter 'head.weight' is in units of different mixed precision: '.root.', 'tied'"
    with pytest.raises(CaptureError, match=message):
        for param in weights.parameters(Stack()):
            units.precision_of(param)


def test_gradients_are_cast_where_the_reduction_is_not_wider() -> None:
    half, single = torch.bfloat16, torch.float32
    for precision in (MixedPrecision(half), MixedPrecision(half, single)):
        assert precision.grad_dtype(single) is single
        assert precision.keeps_gradients(single)
        assert precision.grad_dtype(single, (2, 11)) is half
        assert not precision.keeps_gradients(single, (2, 11))
    assert MixedPrecision(half, half).grad_dtype(single) is half
    assert MixedPrecision(None, half).grad_dtype(single) is half
    assert MixedPrecision(single).grad_dtype(single) is single
    for precision in (
        MixedPrecision(half, half),
        MixedPrecision(None, half),
        MixedPrecision(single),
    ):
        assert not precision.keeps_gradients(single)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        assert count.dtype == torch.int64
        return x * self.scale + self.shift.to(x.dtype)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x * self.weight, torch.ones(1, dtype=torch.int64))
        assert y.dtype == torch.float64
        return y.sum()


def test_a_captured_policy(tmp_path: Path) -> None:
    config = tmp_path / "fsdp.yaml"
    config.write_text(
        "units: [{match: inner, mixed_precision: {param_dtype: bfloat16, output_dtype: float64}}]"
    )
    path = tmp_path / "model.pt"
    model = Outer()
    capture(model, kwargs={"x": torch.ones(2, 4)}, config=config, path=path)
    assert not model.inner._forward_pre_hooks
    assert not model.inner._forward_hooks
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith("extra/capture.json"))
        record: dict[str, Any] = json.loads(archive.read(name))
    dtypes = {p["name"]: (p["dtype"], p["compute_dtype"]) for p in record["params"]}
    assert dtypes == {"inner.scale": ("float32", "bfloat16"), "weight": ("float32", "float32")}
    assert [b["dtype"] for b in record["buffers"] if b["name"] == "inner.shift"] == ["float32"]
    assert record["mixed_precision"] == [
        {
            "module": "inner",
            "param_dtype": "bfloat16",
            "reduce_dtype": None,
            "output_dtype": "float64",
            "cast_forward_inputs": True,
        }
    ]
    copies = [n["outs"][0]["dtype"] for n in record["nodes"] if n["op"] == "aten::_to_copy"]
    # The unit's input, the buffer that the model casts itself, the output; and back in backward.
    assert copies[:3] == ["bfloat16", "bfloat16", "float64"]
