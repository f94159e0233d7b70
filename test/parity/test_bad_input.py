"""Bad input and broken ranks: one clear message, non-zero exit, bounded time, nothing left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    ADAMW_FUSED,
    BIN,
    LLAMA,
    Captured,
    Case,
    Model,
    compile_plan,
    execute,
    run_command,
)
from ranks import free_port
from safetensors.torch import load_file, save_file

LIMIT_S = 120  # seconds, for a hang on a loaded machine; the ranks' own limit is longer
CASE = Case(LLAMA, ADAMW_FUSED, steps=3)


def processes_with(variable: str) -> list[int]:
    """The processes that have `variable` (NAME=value) in the environment they started with."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and variable.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # ended meanwhile
            continue
    return found


def shared_segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "fsdp" in name}


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process that the test started outlives it, and no segment of fsdp-run. Tests that run
    beside this one have others in /dev/shm."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("FSDP_TEST_MARK", mark)
    segments = shared_segments()
    yield
    assert processes_with(f"FSDP_TEST_MARK={mark}") == []
    assert shared_segments() - segments == set()


@pytest.fixture(scope="module")
def llama(captured: Callable[[Model], Captured]) -> Captured:
    return captured(LLAMA)


@pytest.fixture(scope="module")
def plan(llama: Captured) -> Path:
    return compile_plan(llama, CASE, "bad_input")


def fails(command: list[Any], *expected: str) -> str:
    """Runs a command that must fail with one line of at most a few that has every expected
    pattern; returns what it printed."""
    done = execute(command, timeout=LIMIT_S, check=False)
    assert done.returncode > 0, f"exit status {done.returncode}: {done.stderr}"
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(errors) == 1, done.stderr
    for pattern in expected:
        assert re.search(pattern, errors[0]), errors[0]
    return done.stderr


def fsdp_opt(archive: Path, config: str, directory: Path) -> list[Any]:
    path = directory / "fsdp.yaml"
    path.write_text(config)
    command = [BIN / "fsdp-opt", archive, "--config", path, "--world-size", 2]
    return [*command, "--emit", "plan", "-o", directory / "out.json"]


CONFIG = "units: [{match: 'layers.*'}]\noptimizer: {name: sgd, lr: 0.1}\n"


# --- fsdp-opt: the archive


def test_corrupt_archive(llama: Captured, tmp_path: Path) -> None:
    data = bytearray(llama.archive.read_bytes())
    data[len(data) // 4 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 4)
    bad = tmp_path / "corrupt.pt"
    bad.write_bytes(data)
    fails(fsdp_opt(bad, CONFIG, tmp_path), "corrupt.pt")


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_truncated_archive(llama: Captured, tmp_path: Path, size: int) -> None:
    bad = tmp_path / "short.pt"
    bad.write_bytes(llama.archive.read_bytes()[:size])
    fails(fsdp_opt(bad, CONFIG, tmp_path), "short.pt")


def test_two_gradients_of_a_parameter(llama: Captured, tmp_path: Path) -> None:
    bad = tmp_path / "twice.pt"
    with zipfile.ZipFile(llama.archive) as archive, zipfile.ZipFile(bad, "w") as changed:
        for entry in archive.infolist():
            data = archive.read(entry)
            if entry.filename.endswith("extra/capture.json"):
                record = json.loads(data)
                record["grads"][1] = record["grads"][0]
                data = json.dumps(record).encode()
            changed.writestr(entry, data)
    fails(fsdp_opt(bad, CONFIG, tmp_path), "twice.pt", "expected one gradient of parameter")


def test_traced_module(tmp_path: Path) -> None:
    foreign = tmp_path / "traced.pt"
    torch.jit.trace(torch.nn.Linear(4, 4), torch.zeros(1, 4)).save(str(foreign))
    fails(fsdp_opt(foreign, CONFIG, tmp_path), "traced.pt", "capture")


def test_unrelated_zip(tmp_path: Path) -> None:
    foreign = tmp_path / "letters.pt"
    with zipfile.ZipFile(foreign, "w") as archive:
        archive.writestr("a.txt", "hello")
    fails(fsdp_opt(foreign, CONFIG, tmp_path), "letters.pt")


def test_missing_archive(tmp_path: Path) -> None:
    fails(fsdp_opt(tmp_path / "none.pt", CONFIG, tmp_path), "none.pt")


# --- fsdp-opt: the configuration


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("unitz: []\n", ["unitz", "units"]),
        (CONFIG.replace("lr:", "learning_rat:"), ["learning_rat"]),
        (CONFIG.replace("match:", "mach:"), ["mach", "match"]),
        (CONFIG.replace("layers.*", "blocks.*"), [r"blocks\.\*"]),
        (CONFIG.replace("sgd", "sdg"), ["sdg", "sgd"]),
        ("units: [\n", ["fsdp.yaml"]),
        (CONFIG.replace("0.1", "fast"), ["fast"]),
    ],
    ids=["key", "optimizer_key", "unit_key", "no_match", "optimizer", "syntax", "number"],
)
def test_bad_config(llama: Captured, tmp_path: Path, config: str, expected: list[str]) -> None:
    fails(fsdp_opt(llama.archive, config, tmp_path), *expected)


# --- fsdp-run: the plan


def test_plan_of_another_version(llama: Captured, plan: Path, tmp_path: Path) -> None:
    content = json.loads(plan.read_text())
    assert content["version"] == 3
    bad = plan.with_name("version.json")
    bad.write_text(json.dumps({**content, "version": 99}))
    fails([*run_command(llama, bad, CASE), "--nproc", 2], "version", "99", "3")


def test_world_size_mismatch(llama: Captured, plan: Path) -> None:
    fails([*run_command(llama, plan, CASE), "--nproc", 3], "world", "2", "3")


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.9999])
def test_truncated_plan(llama: Captured, plan: Path, fraction: float) -> None:
    text = plan.read_text()
    bad = plan.with_name("truncated.json")
    bad.write_text(text[: int(len(text) * fraction)])
    fails([*run_command(llama, bad, CASE), "--nproc", 2], "truncated.json")


def test_changed_weights(llama: Captured, plan: Path, tmp_path: Path) -> None:
    bad = tmp_path / plan.name
    bad.write_text(plan.read_text())
    weights = load_file(llama.weights)
    save_file({name: x + 1 for name, x in weights.items()}, tmp_path / "model.safetensors")
    fails([*run_command(llama, bad, CASE), "--nproc", 2], "model.safetensors", "hash")


def test_missing_weights(llama: Captured, plan: Path, tmp_path: Path) -> None:
    bad = tmp_path / plan.name
    bad.write_text(plan.read_text())
    fails([*run_command(llama, bad, CASE), "--nproc", 2], "model.safetensors")


# --- fsdp-run: the data


def with_data(plan: Path, data: Path, steps: int = 2) -> list[Any]:
    return [BIN / "fsdp-run", plan, "--steps", steps, "--nproc", 2, "--data", data]


def test_wrong_data_names(llama: Captured, plan: Path, tmp_path: Path) -> None:
    data = load_file(llama.data)
    save_file({"tokens": data["tokens"], "labels": data["targets"]}, tmp_path / "names.safetensors")
    fails(with_data(plan, tmp_path / "names.safetensors"), "names.safetensors", "targets")


def test_wrong_data_shape(llama: Captured, plan: Path, tmp_path: Path) -> None:
    data = load_file(llama.data)
    data["tokens"] = data["tokens"][:, :-1].contiguous()
    save_file(data, tmp_path / "shape.safetensors")
    fails(with_data(plan, tmp_path / "shape.safetensors"), "tokens", "31", "32")


def test_wrong_data_dtype(llama: Captured, plan: Path, tmp_path: Path) -> None:
    data = {name: x.to(torch.float32) for name, x in load_file(llama.data).items()}
    save_file(data, tmp_path / "dtype.safetensors")
    fails(with_data(plan, tmp_path / "dtype.safetensors"), "float32", "int64")


def test_data_is_no_safetensors(llama: Captured, plan: Path, tmp_path: Path) -> None:
    (tmp_path / "data.safetensors").write_bytes(b"\xff" * 100)
    fails(with_data(plan, tmp_path / "data.safetensors"), "data.safetensors")


# --- fsdp-run: what it writes


@pytest.mark.one_in(5)  # each option with one, and each kind of input
@pytest.mark.parametrize("name", ["plan.json", "hard.json", "--data", "w.safetensors"])
@pytest.mark.parametrize("option", ["--metrics", "--save-weights", "--profile", "--trace"])
def test_outputs_that_are_inputs(
    llama: Captured, plan: Path, tmp_path: Path, option: str, name: str
) -> None:
    own, weights = tmp_path / "plan.json", tmp_path / "w.safetensors"
    own.write_bytes(plan.read_bytes())
    weights.write_bytes(llama.weights.read_bytes())
    (tmp_path / "hard.json").hardlink_to(own)
    path = llama.data if name == "--data" else tmp_path / name
    role = {"--data": "--data", "w.safetensors": "--weights"}.get(name, "the plan")
    before = path.read_bytes()
    command = [*with_data(own, llama.data, steps=5), "--weights", weights, option, path]
    for more in ([], ["--dry-run"]):
        expected = f"error: {option} and {role}: expected two files, got one: {path}"
        done = execute([*command, *more], timeout=LIMIT_S, check=False)
        assert (done.returncode, done.stderr) == (2, f"fsdp-run: {expected}\n")
    assert path.read_bytes() == before


def test_the_plans_weights_as_output(llama: Captured, plan: Path) -> None:
    weights = plan.parent / json.loads(plan.read_text())["weights"]["path"]
    before = weights.read_bytes()
    command = [*with_data(plan, llama.data), "--save-weights", weights]
    fails(command, "--save-weights and the plan's weights: expected two files, got one")
    assert weights.read_bytes() == before


@pytest.mark.parametrize("option", ["--resume", "--checkpoint"])
def test_outputs_in_a_checkpoint(llama: Captured, plan: Path, tmp_path: Path, option: str) -> None:
    step = tmp_path / "step-2"
    step.mkdir()
    (step / "shard").write_text("old")
    given = step if option == "--resume" else tmp_path
    for file in (step / "shard", step / "new"):
        command = [*with_data(plan, llama.data), option, given, "--save-weights", file]
        fails(command, f"--save-weights and {option}: expected a file that is in no checkpoint")
    assert [path.name for path in step.iterdir()] == ["shard"]
    assert (step / "shard").read_text() == "old"


def test_two_outputs_in_one_place(llama: Captured, plan: Path, tmp_path: Path) -> None:
    command = [*with_data(plan, llama.data, steps=5), "--metrics", tmp_path / "x"]
    fails([*command, "--trace", tmp_path / "." / "x"], "--metrics and --trace: expected two files")
    assert not (tmp_path / "x").exists()


def test_metrics_to_a_pipe(llama: Captured, plan: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [*with_data(plan, llama.data), "--metrics", pipe]
    fails(command, "pipe: cannot write: a pipe that nobody reads")
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        execute(command, timeout=LIMIT_S)
        lines = reader.communicate(timeout=LIMIT_S)[0].splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_closed_standard_streams(llama: Captured, plan: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    command = [*with_data(plan, llama.data), "--metrics", metrics]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    execute(closed, timeout=LIMIT_S)
    lines = metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


# --- fsdp-run: ranks that die


def children(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_step(metrics: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no step within the limit"
        time.sleep(0.01)


@pytest.mark.parametrize("comm", ["shm", "gloo"])
@pytest.mark.parametrize("victim", [0, 1])
def test_rank_killed_in_mid_step(
    llama: Captured, plan: Path, tmp_path: Path, victim: int, comm: str
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    command = [*with_data(plan, llama.data, steps=1000000), "--metrics", metrics, "--comm", comm]
    with subprocess.Popen([str(x) for x in command], stderr=subprocess.PIPE, text=True) as process:
        wait_for_step(metrics, process)
        ranks = children(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[victim], signal.SIGKILL)
        stderr = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode > 0
    errors = [line for line in stderr.splitlines() if "error" in line]
    assert len(errors) == 1, stderr
    assert re.search(rf"rank {victim}\b.*(killed|died)", errors[0]), errors[0]
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.parametrize("comm", ["shm", "gloo"])
def test_rank_fails_in_mid_step(llama: Captured, plan: Path, comm: str) -> None:
    command = [*with_data(plan, llama.data), "--comm", comm, "--inject-fault", "1:2:30:throw"]
    done = execute(command, check=False)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(errors) == 1, done.stderr
    assert re.search(r"rank 1: step 2: .*injected fault", errors[0]), errors[0]


OPTIONS = {
    "unknown_device": (["--device", "gpu"], 'expected cpu, cuda or cuda:N, got "gpu"'),
    "unknown_comm": (["--comm", "mpi"], "--comm: mpi not in {gloo,nccl,shm}"),
    "nccl_on_the_cpu": (["--comm", "nccl"], "with --device cpu expected shm or gloo"),
    "gloo_on_a_gpu": (["--device", "cuda", "--comm", "gloo"], "expected nccl"),
    "graphs_on_the_cpu": (["--cuda-graphs"], "--cuda-graphs: expected --device cuda"),
    "rate_that_is_none": (["--peak-flops", "nan"], 'a number from 1 to 1e30, got "nan"'),
    "rate_too_small": (["--peak-flops", "1e-300"], 'from 1 to 1e30, got "1e-300"'),
    "rate_of_0": (["--peak-flops", "0"], '--peak-flops: expected a number from 1 to 1e30, got "0"'),
    "rate_without_end": (["--peak-flops", "inf"], 'from 1 to 1e30, got "inf"'),
    "no_initialisation": (["--init-seed", "1"], "--init-seed: the plan has no initialisation"),
    "threads_on_a_gpu": (["--device", "cuda", "--streams", "threads"], "expected serial"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_devices(llama: Captured, plan: Path, name: str) -> None:
    options, message = OPTIONS[name]
    done = execute([*with_data(plan, llama.data), *options], check=False)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(llama: Captured, plan: Path) -> None:
    done = execute([*with_data(plan, llama.data), "--device", "cuda", "--any-device"], check=False)
    assert done.returncode == 2
    expected = r"rank \d: (expected GPU \d, got no GPU|no CUDA in this program)"
    assert re.search(expected, done.stderr), done.stderr


def test_interrupted(llama: Captured, plan: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    command = [*with_data(plan, llama.data, steps=1000000), "--metrics", metrics]
    with subprocess.Popen([str(x) for x in command], stderr=subprocess.PIPE, text=True) as process:
        wait_for_step(metrics, process)
        ranks = children(process.pid)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_torchrun_world_size_mismatch(llama: Captured, plan: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    command = [*launcher, "--nproc-per-node", 1, *run_command(llama, plan, CASE)]
    done = execute(command, timeout=LIMIT_S, check=False)
    assert done.returncode != 0
    assert re.search("error: .*world", done.stderr), done.stderr


def test_ranks_on_two_hosts(llama: Captured, plan: Path) -> None:
    """A rank in a PID namespace of its own sees no other, as on another host."""
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if execute([*apart, "true"], check=False).returncode != 0:
        pytest.skip("no right to make a PID namespace (unshare --user --pid)")
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [str(word) for word in run_command(llama, plan, CASE)]
    ranks = [
        subprocess.Popen(
            [*prefix, *command],
            env={**os.environ, **common, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, prefix in enumerate([[], apart])
    ]
    for rank in ranks:
        stderr = rank.communicate(timeout=LIMIT_S)[1]
        assert rank.returncode > 0
        assert "expected all ranks on one host, got rank 1 on another than rank 0" in stderr
