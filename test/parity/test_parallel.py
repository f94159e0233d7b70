"""Steps that communicate inside, such as those of tensor parallelism, beside FSDP2 bit for bit."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from fsdp_mlir.archive.fingerprint import Fingerprint
from harness import BIN
from parallel_ranks import CASES
from ranks import run_ranks, run_script

FAILING = """
import os, signal, threading, warnings
import fsdp_mlir, torch
import torch.distributed as dist
from functools import partial
from parallel_ranks import ADAMW, batches, loss_fn, parallel

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
model, seed = parallel()
step = fsdp_mlir.compile(
    model, loss=loss_fn, optimizer=ADAMW(model.parameters()), fallback="error", deadline=3
)
(batch,) = batches(seed, 1)
step(*batch)
if rank == 3:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGNAL)).start()
try:
    while True:
        step(*batch)
except RuntimeError as error:
    os.write(2, f"{error}".encode())
    os._exit(3)
"""

UNLIKE = """
import os, warnings
import fsdp_mlir, torch
import torch.distributed as dist
from parallel_ranks import SGD, batches, loss_fn, meeting

dist.init_process_group("gloo")
warnings.simplefilter("always")
for unlike in (True, False):
    model, seed = meeting("gather")
    if unlike and dist.get_rank() == 3:
        first = next(m for m in model.modules() if list(m.parameters(recurse=False)))
        first.register_forward_hook(lambda module, args, output: output.detach())
    try:
        step = fsdp_mlir.compile(
            model, loss=loss_fn, optimizer=SGD(model.parameters()), fallback="error"
        )
        (batch,) = batches(seed, 1)
        os.write(2, f"loss {step(*batch).item()}".encode())
    except Exception as error:
        os.write(2, f"{error};".encode())
os._exit(0)
"""

OVERLAPPING = """
import os
import fsdp_mlir, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Linear(4, 4)
meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [1, 2])]
fsdp_mlir.fully_shard(model, mesh=meshes[rank > 0])
try:
    sgd = (torch.optim.SGD, {"lr": 0.1})
    batch = torch.ones(2, 4)
    fsdp_mlir.compile(model, loss=torch.sum, optimizer=sgd, example=batch, fallback="error")
except Exception as error:
    os.write(2, f"{error}".encode())
os._exit(0)
"""

REAL = """
import os
import fsdp_mlir
import torch.distributed as dist
from parallel_ranks import SGD, batches, loss_fn, parallel

dist.init_process_group("gloo")
model, seed = parallel()
step = fsdp_mlir.compile(
    model, loss=loss_fn, optimizer=SGD(model.parameters()), fallback="error", path="FOLDER"
)
(batch,) = batches(seed, 1)
step(tokens=batch[0], targets=batch[1])
os._exit(0)
"""

PLANNED = """
import os
import parallel_ranks, torch
from fsdp_mlir import capture, planned_mesh

parallel_ranks.fully_shard = lambda module, **_: module
with planned_mesh({"data": 2, "tensor": 2}) as mesh:
    with torch.device("meta"):
        model, _ = parallel_ranks.parallel()
    (batch,) = parallel_ranks.batches(0, 1)
    capture(
        model, kwargs={"tokens": batch[0], "targets": batch[1]}, loss=parallel_ranks.loss_fn,
        config="FOLDER/policy.yaml", path="FOLDER/planned.pt",
        data_ranks=mesh["data"].mesh.tolist(),
    )
os._exit(0)
"""


def run(name: str, folder: Path, world: int = 4) -> list[str]:
    """Returns the warnings of each rank."""
    run_ranks("parallel_ranks", [name, folder], world)
    assert [(folder / str(rank)).read_text() for rank in range(world)] == [""] * world
    return [(folder / f"{rank}.notes").read_text() for rank in range(world)]


@pytest.mark.one_in(11)
@pytest.mark.parametrize("name", CASES)
def test_like_fsdp2(name: str, tmp_path: Path) -> None:
    run(name, tmp_path)


@pytest.mark.exhaustive
def test_eight_ranks(tmp_path: Path) -> None:
    """2 replicas of 2 data ranks of 2 tensor ranks: each sum is of two."""
    notes = run("replicas", tmp_path, world=8)
    assert "without a plan" not in "".join(notes)


def test_all_kinds_of_calls(tmp_path: Path) -> None:
    notes = run("mix", tmp_path)
    reason = "is exchanged with other ranks after those of all microbatches are added"
    assert [reason in text for text in notes] == [True, False, False, False]


def test_halves_of_other_units(tmp_path: Path) -> None:
    """Ranks that communicate in the step must do the same between, or they could wait for each
    other in a circle."""
    notes = run("unlike", tmp_path)
    assert re.search(
        r"the plans of ranks 0 and \d, which communicate in the step, do not have the same",
        notes[0],
    )


@pytest.mark.exhaustive  # test_loops.py saves and loads over one mesh
def test_checkpoints_on_other_meshes(tmp_path: Path) -> None:
    run("saved", tmp_path)


def test_copies_of_their_own(tmp_path: Path) -> None:
    run("copies", tmp_path)


@pytest.mark.parametrize(("name", "status"), [("SIGKILL", -9), ("SIGSTOP", None)])
def test_a_rank_fails(name: str, status: int | None, tmp_path: Path) -> None:
    """The others end within the deadline, and what they say has the ranks' own numbers."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING.replace("SIGNAL", name))
    statuses, errors = run_script(script, 4, awaited=3 if status is None else None)
    assert statuses == [3, 3, 3, status]
    # Whoever sees the first failure names rank 3; a rank that has ended for it may be named, too.
    assert any(re.search("rank 3|ranks [0-2], 3", error) for error in errors), errors
    assert all(re.search("ranks? [0-3]", error) for error in errors[:3]), errors


def test_a_rank_with_another_step(tmp_path: Path) -> None:
    """Is an error on all ranks, those that do not shard the model with it too. Then they are
    together again."""
    script = tmp_path / "unlike.py"
    script.write_text(UNLIKE)
    statuses, errors = run_script(script, 4)
    assert statuses == [0] * 4, errors
    for error in errors:
        _, found, after = error.partition("the step of rank 3 is not that of rank 2")
        assert found and "loss " in after, errors


def test_groups_that_overlap(tmp_path: Path) -> None:
    script = tmp_path / "overlapping.py"
    script.write_text(OVERLAPPING)
    _, errors = run_script(script, 3)
    assert all("groups that overlap: [[0, 1], [1, 2]]" in error for error in errors)


def test_a_planned_mesh_is_the_real_one(tmp_path: Path) -> None:
    """One process that stands for a mesh captures what its ranks do, and fsdp-opt makes the same
    plan of it."""
    for name, script, ranks in (("real", REAL, 4), ("planned", PLANNED, 1)):
        path = tmp_path / f"{name}.py"
        path.write_text(script.replace("FOLDER", str(tmp_path)))
        statuses, errors = run_script(path, ranks)
        assert statuses == [0] * ranks, errors
    real, planned = (Fingerprint.of(tmp_path / name) for name in ("model.pt", "planned.pt"))
    assert [str(line) for line in real.lines] == [str(line) for line in planned.lines]
    remade = tmp_path / "planned.json"
    config = ["--config", tmp_path / "policy.yaml", "--world-size", "2"]
    command = [BIN / "fsdp-opt", tmp_path / "planned.pt", *config, "--emit", "plan", "-o", remade]
    subprocess.run(command, check=True)
    plans = [json.loads(file.read_text()) for file in (tmp_path / "plan.json", remade)]
    for plan in plans:
        del plan["weights"], plan["digest"]
    assert plans[0] == plans[1]
    axis = {"ranks": 2, "data_stride": 2, "axes": [{"name": "tensor", "ranks": 2, "stride": 1}]}
    assert plans[0]["model_parallel"] == axis
