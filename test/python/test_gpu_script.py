"""bench/gpu.sh on hosts that lack something: one line that says what, and exit status 2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "gpu.sh"

# All that the script calls by itself.
TOOLS = ("bash", "dirname", "env", "sort", "head", "awk", "sed", "grep", "mkdir", "tee", "cp")

# What stands for a Python with torch: answers each of the script's questions.
PYTHON = f"""#!/bin/bash
[ "$1" != bench/gpu.py ] || exec {sys.executable} "$@"
case $2 in
*find_spec*) [ -n "$TORCH" ] && echo /torch ;;
*metadata*) echo "$TORCH" ;;
*version.cuda*) echo 13.0 ;;
*is_available*) [ -n "$USABLE" ] && echo "gpu.sh: NCCL 2.30.7" ;;
esac
"""

# Of which the script may call cmake --version alone.
CMAKE = """
if [ "$1" != --version ]; then echo "built" >&2; exit 1; fi
echo "cmake version 3.25.1"
"""


class Host:
    """A PATH with stand-ins for what a GPU host has."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, tool
            (self.bin / tool).symlink_to(found)
        self.env = {"PATH": str(self.bin), "PYTHON": str(self.bin / "python")}
        self.env |= {"TORCH": "2.11.0+cu130", "USABLE": "1", "CUDA_HOME": str(folder)}
        self.put("nvidia-smi", "echo 'NVIDIA H100 80GB HBM3, 580.65.06'")
        self.put("cmake", CMAKE)
        self.put("g++", "")
        self.put("nvcc", "echo 'Cuda compilation tools, release 13.0'")
        (self.bin / "python").write_text(PYTHON)
        (self.bin / "python").chmod(0o755)

    def put(self, tool: str, body: str) -> None:
        (self.bin / tool).write_text(f"#!/bin/bash\n{body}\n")
        (self.bin / tool).chmod(0o755)

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(SCRIPT), *args], env=self.env, capture_output=True, text=True
        )

    def refusal(self, *args: str) -> str:
        done = self.run(*args)
        assert done.returncode == 2, done.stdout + done.stderr
        lines = done.stderr.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("gpu.sh: error: expected ")
        return lines[0].removeprefix("gpu.sh: error: expected ")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_host_without_a_gpu(host: Host) -> None:
    (host.bin / "nvidia-smi").unlink()
    assert host.refusal() == "a GPU, got no nvidia-smi on the PATH"
    host.put("nvidia-smi", "echo 'No devices were found'; exit 6")
    assert host.refusal("run") == "a GPU, got from nvidia-smi: No devices were found"


def test_a_torch_that_sees_no_gpu(host: Host) -> None:
    host.env["USABLE"] = ""
    assert host.refusal().startswith("a torch that can use the GPU, got ")


@pytest.mark.parametrize("version", ["2.10.1", "2.9.0+cu128", "1.13.1"])
def test_an_old_torch(host: Host, version: str) -> None:
    host.env["TORCH"] = version
    assert host.refusal().endswith(f"got {version}")
    assert "torch >= 2.11 in " in host.refusal("build")


def test_no_torch(host: Host) -> None:
    host.env["TORCH"] = ""
    assert host.refusal("build").startswith("torch >= 2.11 in ")


def test_missing_tools(host: Host) -> None:
    host.put("cmake", "echo 'cmake version 3.22.1'")
    assert host.refusal() == "cmake >= 3.25, got 3.22.1"
    (host.bin / "cmake").unlink()
    assert host.refusal("build") == "cmake >= 3.25 on the PATH, got none"
    host.put("cmake", "echo 'cmake version 4.0.0'")
    host.put("nvcc", "echo 'Cuda compilation tools, release 12.8, V12.8.93'")
    assert host.refusal() == "nvcc 13, as torch's CUDA 13.0, got 12.8"
    (host.bin / "nvcc").unlink()
    assert host.refusal() == "nvcc on the PATH or in CUDA_HOME, got none"
    (host.bin / "g++").unlink()
    assert host.refusal() == "the C++ compiler g++ on the PATH, got none"


def test_pack_needs_the_compiler_and_a_new_folder(host: Host, tmp_path: Path) -> None:
    host.env["FSDP_OPT"] = str(tmp_path / "fsdp-opt")
    assert host.refusal("pack", str(tmp_path / "new")).startswith("fsdp-opt at ")
    host.env["FSDP_OPT"] = os.fspath(host.bin / "python")
    assert host.refusal("pack", str(host.bin)) == f"a new folder, got {host.bin}"
    assert host.refusal("pack") == "pack DIR, got 1 arguments"


def test_an_unknown_command(host: Host) -> None:
    assert host.refusal("bench") == "run, build or pack, got bench"


def test_items_are_listed_without_a_gpu_and_a_build(host: Host) -> None:
    (host.bin / "nvidia-smi").unlink()
    host.env["TORCH"] = ""
    done = host.run("--list", "--built", "--cases", "llama-1b-2048", "--sides", "graphs")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "deadline  item                        options",
        "    80 s  bench llama-1b-2048 graphs  --only bench --cases llama-1b-2048 --sides graphs",
    ]
    assert len(host.run("run", "--list").stdout.splitlines()) > 20


def test_an_unknown_name_costs_no_build(host: Host) -> None:
    for options, message in [
        ("--only x", "--only: expected one of tests, sanitizer, parity, trace, bench, got x"),
        (
            "--tests CudaTest",
            "--tests: expected one of CudaTests, NcclTests, RuntimeTests, PlanTests, got CudaTest",
        ),
        (
            "--only trace --cases llama-2-fp32",
            "--cases: expected one of llama-1-fp32, llama-1-fp32-sm_90, llama-1-bf16, "
            "llama-1-bf16-sm_90, llama-1-bf16-products-sm_90, gpt-1-fp32-sm_90, gpt-1-bf16-sm_90, "
            "convnet-1-fp32-sm_90, convnet-1-bf16-sm_90, got llama-2-fp32",
        ),
        (
            "--cases llama-1-fp32 --sides eager",
            "--sides: expected one of fsdp2, fsdp-run, graphs, unfused, compile, got eager",
        ),
        ("--only parity --tests CudaTests", "--tests: expected none with these sections, got Cu"),
        ("--tests PlanTests:3/2", "--tests: expected a shard as PlanTests:1/4, got PlanTests:3/2"),
        (
            "--cases llama-1-fp32 --sides compile",
            "expected --only, --cases and --sides that have an item in common",
        ),
        ("--deadline 0", "--deadline: expected seconds above 0, got 0"),
    ]:
        done = host.run("run", *options.split())
        assert done.returncode == 2, (options, done.stderr)
        [line] = done.stderr.splitlines()
        assert line.startswith(f"gpu.py: error: {message}")


def test_a_build_that_fails_leaves_its_errors(host: Host, tmp_path: Path) -> None:
    # A tree of its own, where it builds.
    script = tmp_path / "tree" / "bench" / "gpu.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(SCRIPT, script)
    host.put("ninja", "")
    host.env["OUT"] = str(tmp_path / "back")
    done = subprocess.run(
        ["bash", str(script), "build"], env=host.env, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == ("gpu.sh: error: expected a build, got the errors in out/gpu/build.log\n")
    assert "built\n" in done.stdout
    for folder in (tmp_path / "back", tmp_path / "tree" / "out" / "gpu"):
        assert (folder / "build.log").read_text() == "built\n"


def test_a_slice_of_what_is_built(host: Host, tmp_path: Path) -> None:
    build, out, back = (tmp_path / name for name in ("build", "out", "back"))
    (build / "bin").mkdir(parents=True)
    (build / "bin" / "PlanTests").write_text("#!/bin/bash\necho '[  PASSED  ] 3 tests.'\n")
    (build / "bin" / "PlanTests").chmod(0o755)
    host.env["OUT"] = str(back)
    options = ["--device", "cpu", "--build", str(build), "--out", str(out)]
    done = host.run("run", "--built", "--tests", "PlanTests", *options)
    assert done.returncode == 0, done.stderr
    assert "passed   PlanTests  [  PASSED  ] 3 tests." in (back / "report.txt").read_text()
    assert (back / "report.json").read_text() == (out / "report.json").read_text()
