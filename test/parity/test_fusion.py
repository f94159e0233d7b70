"""Kernels have the bits of the calls that they run as one, on every processor that they are for."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_bits
import pytest
import torch
from harness import (
    ADAMW_FUSED,
    BIN,
    GPT2,
    LLAMA,
    Captured,
    Case,
    Model,
    capture,
    compile_plan,
    execute,
    run_command,
    run_reference,
    train_plan,
)

HERE = Path(__file__).parent
SEED = 11
#: ATen's capability that goes with a target.
TARGETS = {"x86-64-v3": "avx2", "x86-64-v4": "avx512"}
PLAIN = {"schedule": {"fuse": "none"}}
BF16 = {"": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}


def environment(target: str) -> dict[str, str]:
    have = torch.backends.cpu.get_cpu_capability()
    if (target, have) in {
        ("x86-64-v4", "AVX2"),
        ("x86-64-v4", "DEFAULT"),
        ("x86-64-v3", "DEFAULT"),
    }:
        pytest.skip(f"this processor has {have}, and cannot run code for {target}")
    return {**os.environ, "ATEN_CPU_CAPABILITY": TARGETS[target]}


@pytest.mark.parametrize("one_in", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_have_the_bits_of_their_calls(target: str, one_in: int, tmp_path: Path) -> None:
    command = [sys.executable, HERE / "kernel_bits.py", "--target", target, "--folder", tmp_path]
    command += ["--seed", SEED, "--one-in", one_in]
    done = execute(command, env=environment(target), check=False)
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = re.search(r"^(\d+) kernels for .* 0 differ$", done.stdout, re.MULTILINE)
    assert found and int(found[1]) * one_in >= 3000


def find_ptxas() -> Path:
    """That of the toolkit, or Triton's, which torch depends on."""
    places = [Path("/usr/local/cuda/bin/ptxas")]
    site = Path(torch.__file__).parents[1]
    places.append(site / "triton" / "backends" / "nvidia" / "bin" / "ptxas")
    found = next((place for place in places if place.exists()), None)
    if not found:
        pytest.skip("no ptxas, neither in a toolkit nor in Triton's wheel")
    return found


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_kernels_for_a_gpu_are_assembled(target: str, tmp_path: Path) -> None:
    """And none contracts a product and a sum: multiply-adds are those that the kernel spells
    out."""
    kernels = kernel_bits.make_kernels(target, SEED, chains=8)
    picked = [*random.Random(SEED).sample(kernels, 24), *kernels[-16:]]
    codes = kernel_bits.compile_kernels(kernel_bits.named(picked), target, tmp_path)
    ptx = tmp_path / "kernel.ptx"
    for kernel, code in zip(picked, codes, strict=True):
        ptx.write_bytes(code.image)
        execute([find_ptxas(), f"-arch={target}", ptx, "-o", tmp_path / "kernel.cubin"])
        text = code.image.decode()
        assert f".target {target}" in text and ".visible .entry fsdp_kernel(" in text
        assert not re.search(r"\b(mul|add|sub)(\.ftz)?\.b?f(16|32|64)", text), "expected .rn"
        callees = {call.callee.removeprefix("aten::") for call in kernel.calls}
        if not callees & {"silu", "silu_backward", "sigmoid", "gelu", "tanh_backward"}:
            assert not re.search(r"fma\S*\.f(32|64)", text)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    return capture(LLAMA, tmp_path_factory.mktemp("llama"), samples=32)


def kernels_of(plan: Path) -> list[dict[str, Any]]:
    return json.loads(plan.read_text()).get("kernels", [])


def weights_of(captured: Captured, plan: Path, case: Case, *options: Any, **env: str) -> bytes:
    weights = plan.with_suffix(".safetensors")
    command = [*run_command(captured, plan, case), "--save-weights", weights, *options]
    execute(command, env={**os.environ, **env})
    return weights.read_bytes()


@pytest.mark.exhaustive  # the other tests of parity have kernels, too
@pytest.mark.parametrize(
    ("model", "precision"),
    [(LLAMA, {}), (LLAMA, BF16), (GPT2, {})],
    ids=["llama", "llama-bf16", "gpt2"],
)
def test_a_fused_step_has_fsdp2s_bits(
    model: Model, precision: dict[str, Any], tmp_path: Path
) -> None:
    captured = capture(model, tmp_path, samples=64, precision=precision)
    case = Case(model, ADAMW_FUSED, steps=10, precision=precision)
    plan = compile_plan(captured, case, "fused")
    assert len(kernels_of(plan)) >= 3
    ours = train_plan(captured, plan, case)
    theirs = run_reference(captured, case, "fsdp2")
    assert ours.rank_losses == theirs.rank_losses
    assert ours.weights.keys() == theirs.weights.keys()
    assert all(torch.equal(ours.weights[name], theirs.weights[name]) for name in ours.weights)


def test_all_ways_to_run_a_kernel_have_the_same_bits(captured: Captured) -> None:
    case = Case(LLAMA, ADAMW_FUSED, world=1, steps=5)
    plain = compile_plan(captured, replace(case, training=PLAIN), "plain")
    assert kernels_of(plain) == []
    want = weights_of(captured, plain, case)
    plan = compile_plan(captured, case, "fused")
    assert all(len(kernel["code"]) == len(TARGETS) for kernel in kernels_of(plan))
    assert weights_of(captured, plan, case) == want
    assert weights_of(captured, plan, case, "--no-kernels") == want
    assert weights_of(captured, plan, case, OMP_NUM_THREADS="2") == want
    # No code is for the capability.
    for capability in ("avx2", "default"):
        want = weights_of(captured, plain, case, ATEN_CPU_CAPABILITY=capability)
        assert weights_of(captured, plan, case, ATEN_CPU_CAPABILITY=capability) == want


def test_threads_divide_kernels_as_aten_divides_calls(tmp_path: Path) -> None:
    """Long enough for several threads, with what is left of a vector in each part."""
    model = replace(LLAMA, batch=23)
    captured = capture(model, tmp_path, samples=46)
    case = Case(model, ADAMW_FUSED, world=1, steps=2)
    plain = compile_plan(captured, replace(case, training=PLAIN), "plain")
    plan = compile_plan(captured, case, "fused")
    for threads in ("1", "2", "3"):
        want = weights_of(captured, plain, case, OMP_NUM_THREADS=threads)
        assert weights_of(captured, plan, case, OMP_NUM_THREADS=threads) == want, threads


def flip(code: dict[str, Any]) -> None:
    first, rest = code["image"][:2], code["image"][2:]
    code["image"] = ("00" if first != "00" else "01") + rest


@pytest.mark.parametrize(
    "change",
    [
        lambda kernel: flip(kernel["code"][0]),
        lambda kernel: kernel["code"][0].update(target="riscv"),
        lambda kernel: kernel["code"][0].update(imports=["system"]),
        lambda kernel: kernel.update(trips=kernel["trips"] + 1),
        lambda kernel: kernel["calls"][0].update(call="aten::sub.Tensor"),
    ],
    ids=["image", "target", "imports", "trips", "calls"],
)
def test_code_and_calls_that_differ_do_not_run(captured: Captured, change: Any) -> None:
    case = Case(LLAMA, ADAMW_FUSED, world=1, steps=2)
    plan = compile_plan(captured, case, "changed")
    tree = json.loads(plan.read_text())
    tree.pop("digest")
    change(next(k for k in tree["kernels"] if k["calls"][0]["call"] == "aten::add.Tensor"))
    plan.write_text(json.dumps(tree))
    done = execute(run_command(captured, plan, case), check=False)
    assert done.returncode == 2
    assert "(P42)" in done.stderr and "not those that were written" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_fsdp_run_says_why_code_does_not_run(captured: Captured) -> None:
    case = Case(LLAMA, ADAMW_FUSED, world=1, steps=2)
    plan = compile_plan(captured, case, "other")
    want = weights_of(captured, plan, case)
    tree = json.loads(plan.read_text())
    tree.pop("digest")
    tree["captured_for"]["torch"] = "1.0.0"
    other = plan.with_name("changed.plan.json")
    other.write_text(json.dumps(tree))
    assert weights_of(captured, other, case) == want
    said = "the code of its kernels is not run, but their calls: "
    command = run_command(captured, other, case)
    assert f"{said}it is for torch 1.0.0, this is torch " in execute(command).stderr
    assert said not in execute([*command, "--no-kernels"]).stderr
    command = run_command(captured, plan, case)
    assert said not in execute(command).stderr
    default = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    assert f"{said}none is for this processor" in execute(command, env=default).stderr


def test_stats_and_remarks_say_what_is_fused(captured: Captured) -> None:
    case = Case(LLAMA, ADAMW_FUSED, world=1)
    compile_plan(captured, case, "stats")
    command = [BIN / "fsdp-opt", captured.archive, "--config", captured.directory / "stats.yaml"]
    stats = execute([*command, "--emit", "stats"]).stdout
    assert re.search(
        r"^kernels +\d+ in \d+ places, for \d+ ATen calls, machine code for x86-64-v3, x86-64-v4$",
        stats,
        re.MULTILINE,
    ), stats
    remarks = execute([*command, "--emit", "stats", "--remarks-filter=fsdp-fuse"]).stderr
    assert "are not written" in remarks and "silu_mul: 2 calls as one" in remarks


@pytest.mark.exhaustive
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("target", TARGETS)
def test_every_input_has_the_bits_of_its_call(target: str, tmp_path: Path) -> None:
    command = [sys.executable, HERE / "kernel_bits.py", "--target", target, "--folder", tmp_path]
    done = execute([*command, "--every-input"], env=environment(target), timeout=5000, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
