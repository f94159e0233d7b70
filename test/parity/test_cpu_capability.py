"""FSDP2's bits under the kernels of other CPUs: both sides with the same vector instructions.

A subset of the tests runs again in a process of its own, under each capability that this CPU has
beside the best one, which all other tests run under.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from harness import execute

# Of ATen, oneDNN and MKL; from few instructions to many.
CAPABILITIES = {
    "default": ("DEFAULT", "SSE41", "SSE4_2"),
    "avx2": ("AVX2", "AVX2", "AVX2"),
    "avx512": ("AVX512", "AVX512_CORE", "AVX512"),
}
EXHAUSTIVE = pytest.mark.exhaustive  # of CPUs without AVX2, which are rare
SUBSET = [
    "test_parity.py::test_uneven_shards[llama-3]",
    "test_matrix.py::test_equals_fsdp2[resnet18-default-4]",
    "test_mixed_precision.py::test_four_ranks[bf16]",
]


def environment(capability: str) -> dict[str, str]:
    _, onednn, mkl = CAPABILITIES[capability]
    variables = {"ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": mkl}
    return os.environ | variables | {"ATEN_CPU_CAPABILITY": capability}


def left_out(capability: str) -> str | None:
    """Why a capability is not run here. ATen takes what it is told, even what the CPU has not."""
    best = torch.backends.cpu.get_cpu_capability()
    known = [aten for aten, _, _ in CAPABILITIES.values()]
    asked = CAPABILITIES[capability][0]
    if asked == best:
        return f"all other tests run under {capability}"
    if best not in known or known.index(asked) > known.index(best):
        return f"this CPU has no {capability}, its best capability is {best}"
    return None


@pytest.mark.parametrize(
    "capability",
    [pytest.param(each, marks=[EXHAUSTIVE] * (each == "default")) for each in CAPABILITIES],
)
def test_equals_fsdp2(capability: str) -> None:
    if reason := left_out(capability):
        pytest.skip(reason)
    tests = [Path(__file__).parent / test for test in SUBSET]
    script = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    variables = environment(capability)
    done = execute([sys.executable, "-c", script], env=variables)
    assert done.stdout.strip() == CAPABILITIES[capability][0]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    done = execute(command, env=variables, timeout=900)
    assert f"{len(SUBSET)} passed" in done.stdout
