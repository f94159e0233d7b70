"""The Python front door against FSDP2: the same script with either, bit for bit."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parity_models
import pytest
import torch
from harness import ROOT, execute
from ranks import free_port, run_program, run_ranks, run_script
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

EXAMPLES = ROOT / "examples" / "frontdoor"

ADAMW = {"name": "AdamW", "lr": 1e-2, "weight_decay": 0.1, "fused": True}
SGD = {"name": "SGD", "lr": 0.05, "momentum": 0.9}
LAYERS = [{"modules": ["layers.0"]}, {"modules": ["layers.1"]}]
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}

FAILING = """
import os, signal, time
import fsdp_mlir, parity_models, torch

model = parity_models.own_parameters()
fsdp_mlir.fully_shard(model)
batch = {name: torch.ones(2, 8, dtype=torch.int64) for name in ("tokens", "targets")}
sgd = (torch.optim.SGD, {"lr": 0.1})
step = fsdp_mlir.compile(model, optimizer=sgd, example=batch, comm=COMM, deadline=DEADLINE)
for number in range(5):
    if number == 2 and os.environ["RANK"] == "1":
        FAIL
    step(batch)
"""

MISUSES = """
import os, sys
import fsdp_mlir, parity_models, torch

rank = int(os.environ["RANK"])
torch.distributed.init_process_group("gloo")
model = parity_models.own_parameters()
batch = {name: torch.ones(2, 8, dtype=torch.int64) for name in ("tokens", "targets")}
sgd = (torch.optim.SGD, {"lr": 0.1})

def attempt(**options):
    try:
        return fsdp_mlir.compile(model, example=batch, fallback="error", **options)
    except Exception as error:
        print(type(error).__name__, error, sep=": ", file=sys.stderr)

attempt(optimizer=sgd)
for layer in model.layers:
    fsdp_mlir.fully_shard(layer)
attempt(optimizer=sgd)
fsdp_mlir.fully_shard(model)
model.set_gradient_divide_factor(3.0 + rank)
attempt(optimizer=sgd)
model.set_gradient_divide_factor(3.0)
attempt(optimizer=sgd if rank == 0 else 3)
attempt(optimizer=sgd, loss=lambda output: torch.stack([output, output]))
attempt(optimizer=sgd)(batch)
os._exit(0)
"""

CASES: dict[str, dict[str, Any]] = {
    "layers": {"calls": LAYERS, "optimizer": ADAMW},
    "root_only": {"calls": [], "optimizer": {**SGD, "nesterov": True}},
    "mesh": {"calls": LAYERS, "optimizer": {"name": "Adam", "lr": 1e-2}, "mesh": [2]},
    "list": {
        "calls": [{"modules": ["layers.0", "output"], "reshard_after_forward": False}],
        "optimizer": SGD,
    },
    "nested": {
        "calls": [{"modules": ["layers.1.inner"]}, *LAYERS],
        "optimizer": {**ADAMW, "fused": False, "foreach": True, "amsgrad": True},
    },
    "ignored": {
        "calls": LAYERS,
        "optimizer": {**SGD, "weight_decay": 0.1},
        "ignored": ["shift", "layers.0.scale"],
    },
    "groups": {
        "calls": LAYERS,
        "optimizer": {**ADAMW, "fused": False},
        "groups": {"weight_decay": 0.0, "lr": 1e-3},
    },
    "one_cycle_of_betas": {"calls": LAYERS, "optimizer": ADAMW, "one_cycle": True},
    "one_cycle_of_momentum": {"calls": LAYERS, "optimizer": SGD, "one_cycle": True},
    "largest_dim": {"calls": LAYERS, "optimizer": ADAMW, "largest_dim": True},
    "clipping": {"calls": LAYERS, "optimizer": ADAMW, "max_norm": 0.1},
    "accumulation": {"calls": LAYERS, "optimizer": ADAMW, "accumulation": 2},
    "groups_of_one": {
        "calls": [{"modules": ["layers.0"], "reshard_after_forward": 1}],
        "optimizer": SGD,
    },
    "root_resharded": {"calls": LAYERS, "optimizer": SGD, "root": {"reshard_after_forward": True}},
    "mixed": {
        "calls": [
            {"modules": ["layers.0"], "mp_policy": {"param_dtype": "bfloat16"}},
            {
                "modules": ["layers.1"],
                "mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
            },
        ],
        "optimizer": ADAMW,
        "root": {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
    },
    "offloaded": {
        "calls": [{"modules": ["layers.0"], "offload": True}, {"modules": ["layers.1"]}],
        "optimizer": ADAMW,
    },
    "offloaded_root": {"calls": LAYERS, "optimizer": SGD, "root": {"offload": True}},
    "divided": {
        "calls": LAYERS,
        "optimizer": SGD,
        "methods": [
            ["", "set_gradient_divide_factor", 3.0],
            ["", "set_force_sum_reduction_for_comms", True],
            ["layers.0", "set_gradient_divide_factor", 2.0],
        ],
    },
    "resharded_by_methods": {
        "calls": LAYERS,
        "optimizer": SGD,
        "methods": [
            ["", "set_reshard_after_forward", True],
            ["layers.1", "set_reshard_after_forward", False],
        ],
    },
    "cast_later": {
        "calls": [{**layer, "mp_policy": BF16} for layer in LAYERS],
        "optimizer": ADAMW,
        "first_dtype": "bfloat16",
        "root": {"mp_policy": BF16},
    },
    "without_inputs": {"model": "WithoutInputs", "calls": LAYERS, "optimizer": ADAMW},
    "stateful": {"model": "Stateful", "calls": LAYERS, "optimizer": ADAMW},
    "renamed": {"model": "Renamed", "calls": LAYERS, "optimizer": ADAMW},
}


def torchrun(script: Path, world: int, *args: Any) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(sys.path)
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return execute([*command, "--nproc-per-node", world, script, *args], env=environment)


def torchrun_over_gloo(
    script: Path, world: int, *args: Any, attempts: int = 3
) -> subprocess.CompletedProcess[str]:
    """The same; again where a thread of Gloo outlived Python."""
    for _ in range(attempts - 1):
        try:
            return torchrun(script, world, *args)
        except RuntimeError as error:
            if "terminate called without an active exception" not in str(error):
                raise
            shutil.rmtree(args[0], ignore_errors=True)
    return torchrun(script, world, *args)


def assert_same(case: dict[str, Any], world: int, directory: Path) -> None:
    path = directory / "case.json"
    path.write_text(json.dumps(case))
    run_ranks("front_door_ranks", [path, directory / "found"], world)
    found = [json.loads((directory / f"found.{rank}").read_text()) for rank in range(world)]
    assert found == [[]] * world


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name: str, tmp_path: Path) -> None:
    assert_same(CASES[name], 2, tmp_path)


@pytest.mark.parametrize("name", ["ignored", "clipping", "largest_dim", "mixed", "offloaded"])
def test_over_gloo(name: str, tmp_path: Path) -> None:
    """As ranks of several hosts."""
    assert_same(CASES[name] | {"comm": "gloo"}, 2, tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        # Sums in Gloo's own order.
        {"mesh": [1, 4], "accumulation": 3, "all_reduce_each_microbatch": False},
        {"mesh": [2, 2], "methods": CASES["divided"]["methods"]},
        {"root": {"reshard_after_forward": 2}},
    ],
    ids=str,
)
def test_four_ranks_over_gloo(case: dict[str, Any], tmp_path: Path) -> None:
    assert_same(CASES["layers"] | case | {"comm": "gloo"}, 4, tmp_path)


def test_one_rank(tmp_path: Path) -> None:
    assert_same(CASES["layers"] | {"max_norm": 0.1, "accumulation": 2}, 1, tmp_path)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mesh", [[2, 2], [1, 4], [2, 1], [1, 2]], ids=str)
def test_replicas(mesh: list[int], tmp_path: Path) -> None:
    case = CASES["ignored"] | {"mesh": mesh}
    assert_same(case, mesh[0] * mesh[1], tmp_path)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("key", ["reduce_each_microbatch", "all_reduce_each_microbatch"])
@pytest.mark.parametrize("mesh", [[2, 1], [1, 2]], ids=str)
def test_accumulation(mesh: list[int], key: str, dtype: str, tmp_path: Path) -> None:
    """Beside ignored parameters, whose gradients each rank adds in their own dtype."""
    policy = {"reduce_dtype": dtype}
    calls = [{**call, "mp_policy": policy} for call in LAYERS]
    case = CASES["ignored"] | {"calls": calls, "root": {"mp_policy": policy}, "mesh": mesh}
    assert_same(case | {"accumulation": 3, key: False}, 2, tmp_path)


@pytest.mark.parametrize("count", [3, 41])
def test_microbatches_together(count: int, tmp_path: Path) -> None:
    """Of the sum of their losses; 1 / 41 times 41 is not 1 in float32, so these have no plan."""
    case = CASES["ignored"] | {"accumulation": count, "reduce_each_microbatch": False}
    assert_same(case | {"together": True}, 2, tmp_path)


def test_smaller_groups(tmp_path: Path) -> None:
    """Groups of two of four ranks."""
    calls = [{"modules": ["layers.0"], "reshard_after_forward": 2}, {"modules": ["layers.1"]}]
    case = {"calls": calls, "optimizer": SGD, "root": {"reshard_after_forward": 2}}
    assert_same(case, 4, tmp_path)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_the_examples(world: int, tmp_path: Path) -> None:
    """Both scripts print the same losses and write the same checkpoints."""
    printed, states = [], []
    for script in ("train_fsdp2.py", "train_fsdp_mlir.py"):
        run = run_program if script == "train_fsdp2.py" else torchrun
        done = run(EXAMPLES / script, world, tmp_path / script)
        # Two ranks may share a line.
        printed.append(sorted(re.findall(r"rank (\d): loss ([\d.]+)", done.stdout)))
        dcp_to_torch_save(tmp_path / script, tmp_path / f"{script}.pt")
        states.append(torch.load(tmp_path / f"{script}.pt"))
    assert len(printed[0]) == 20 * world and printed[0] == printed[1]
    assert list(states[0]) == list(states[1]) != []
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    losses = [float(loss) for _, loss in printed[0]]
    assert min(losses) < max(losses) - 0.5


@pytest.mark.exhaustive  # test_gloo.py has two hosts
def test_two_hosts(tmp_path: Path) -> None:
    """Two launchers that see no processes of each other, as on two hosts, with two ranks each."""
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if execute([*apart, "true"], check=False).returncode != 0:
        pytest.skip("no right to make a PID namespace (unshare --user --pid)")
    path = os.pathsep.join(sys.path)
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path)
    launcher = [*apart, sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
    launcher += ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    command = [*launcher, EXAMPLES / "train_fsdp_mlir.py", tmp_path / "ours"]
    hosts = [
        subprocess.Popen(
            [*map(str, command[:-2]), f"--node-rank={rank}", *map(str, command[-2:])],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [host.communicate(timeout=200) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert not any("runs as FSDP2 does" in errors for _, errors in outputs)
    done = run_program(EXAMPLES / "train_fsdp2.py", 4, tmp_path / "theirs")
    pattern = r"rank (\d): loss ([\d.]+)"
    ours = re.findall(pattern, outputs[0][0] + outputs[1][0])
    assert sorted(ours) == sorted(re.findall(pattern, done.stdout)) and len(ours) == 80
    states = []
    for name in ("ours", "theirs"):
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
        states.append(torch.load(tmp_path / f"{name}.pt"))
    assert list(states[0]) == list(states[1]) != []
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


FAILURES = {
    "error": "raise ValueError('no more data')",
    "death": "os.kill(os.getpid(), signal.SIGKILL)",
    "delay": "time.sleep(9)",
    "bad_batch": "batch['targets'] += 1000",
}


def run_processes(script: Path) -> tuple[list[int | None], list[str]]:
    """Two ranks that end as a user's do; their exit statuses and what they wrote to stderr."""
    port, ranks = str(free_port()), []
    for rank in range(2):
        environment = dict(os.environ, RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        ranks.append(
            subprocess.Popen([sys.executable, script], env=environment, stderr=subprocess.PIPE)
        )
    try:
        errors = [rank.communicate(timeout=200)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], errors


def failures() -> Iterator[Any]:
    """Over Gloo those in which a rank does not come."""
    for failure, comm in itertools.product(FAILURES, ("shm", "gloo")):
        runs = comm == "shm" or failure in ("death", "delay")
        yield pytest.param(failure, comm, marks=[] if runs else [pytest.mark.exhaustive])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("failure, comm", failures())
def test_a_failure_ends_every_rank(failure: str, comm: str, tmp_path: Path) -> None:
    """Rank 1 fails before its third step; rank 0, which waits for it, says so at once."""
    script = tmp_path / "script.py"
    # A process that ends on a busy machine may take longer than a short deadline.
    values = {"FAIL": FAILURES[failure], "COMM": repr(comm)}
    values["DEADLINE"] = "5" if failure == "delay" else "100"
    text = FAILING
    for name, value in values.items():
        text = text.replace(name, value)
    script.write_text(text)
    # How a process ends matters where one ends before the other.
    ends = failure in ("death", "error")
    statuses, errors = run_processes(script) if ends else run_script(script, 2)
    assert all(statuses)
    lines = [text.strip().splitlines()[-1] for text in errors if text]
    last = [re.sub(r"^\[rank\d\]: ", "", line) for line in lines]
    if failure == "bad_batch":
        assert last[0].startswith("RuntimeError: rank 1: step 3: aten::nll_loss_forward")
        assert last[0] == last[1]
        return
    hosts = 'call of the step (collective 3 of communicator "agreement")'
    as_many = "expected as many batches on every rank"
    if failure == "delay":
        late = {
            "shm": "rank 1 did not come to call 3 of the step within 5 s",
            "gloo": f"{hosts} has not finished after 5 s; rank 1 has not come to it",
        }
        assert last[0] == f"RuntimeError: {late[comm]}; {as_many}"
    elif comm == "shm":
        assert last[0].startswith("RuntimeError: rank 1 (pid ")
        assert last[0].endswith(" ended after 2 calls of the step, this rank makes call 3")
    else:
        assert last[0].startswith(f"RuntimeError: {hosts}: ")
        assert last[0].endswith(f"; rank 1 does not answer; {as_many}")


def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    """And what comes after it finds the ranks together again."""
    script = tmp_path / "script.py"
    script.write_text(MISUSES)
    statuses, errors = run_script(script, 2)
    lines = [[line for line in text.splitlines() if re.match(r"\w+: ", line)] for text in errors]
    assert statuses == [0, 0], errors
    no_call = "CompileError: expected a model that fully_shard was called on, found no call"
    no_root = "NoPlan: fully_shard was called on parts of the model alone"
    differs = "CompileError: the policy of rank 1 is not that of rank 0"
    assert lines[0][:3] == lines[1][:3] == [no_call, no_root, differs]
    bad = "expected an optimizer of torch.optim on model.parameters(), a class, or a class and"
    assert lines[0][3].startswith(f"CompileError: rank 1: {bad}")
    assert lines[1][3].startswith(f"CompileError: {bad}")
    assert lines[0][4].startswith("CaptureError: ") and "expected a floating scalar" in lines[0][4]
    assert lines[1][4] == lines[0][4]  # every rank captures


META = """
import os, sys
import fsdp_mlir, parity_models, torch
from safetensors.torch import save_file

with torch.device("meta"):
    model = parity_models.own_parameters()
for layer in model.layers:
    fsdp_mlir.fully_shard(layer)
fsdp_mlir.fully_shard(model)
batch = {name: torch.ones(2, 8, dtype=torch.int64) for name in ("tokens", "targets")}
torch.manual_seed(int(os.environ["RANK"]))
step = fsdp_mlir.compile(
    model, optimizer=torch.optim.SGD, example=batch, init=parity_models.own_parameters
)
state = step.full_state_dict()
if state:
    save_file(state, FILE)

torch.manual_seed(5)
objects = [parity_models.OwnParameters(256, 20, 2).state_dict() if state else None]
torch.distributed.broadcast_object_list(objects)
step.load_state_dict(objects[0])
loaded = step.full_state_dict()
assert all(torch.equal(loaded[name], objects[0][name]) for name in state)
os._exit(0)
"""


def test_a_model_on_meta(tmp_path: Path) -> None:
    """Sharded over two ranks it starts from the weights of one device at rank 0's seed, or takes
    those that rank 0 has."""
    script, file = tmp_path / "script.py", tmp_path / "state.safetensors"
    script.write_text(META.replace("FILE", repr(str(file))))
    statuses, errors = run_script(script, 2)
    assert statuses == [0, 0], errors
    state = load_file(file)
    torch.manual_seed(0)
    want = parity_models.OwnParameters(256, 20, 2).state_dict()
    assert list(state) == sorted(want)
    assert all(torch.equal(state[name], tensor) for name, tensor in want.items())
