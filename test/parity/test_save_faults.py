"""Killed, stopped or failing at any point of a save: old or new checkpoint is there, whole.

--save-faults all runs every point, rank, signal and world size, which takes long.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness import BIN, Captured, Case, execute
from test_bad_input import children, nothing_left
from test_mixed_precision import NORMS
from test_saved_runs import Runs

__all__ = ["nothing_left"]  # a fixture of every test here

Capture = Callable[..., Captured]

ADAMW = {"name": "adamw", "lr": 1e-2, "fused": True}
OLD, NEW, END = 2, 3, 4  # steps: checkpoints before the fault and of it, the last step
PATIENCE_S = 2  # of a rank that waits for another
DEADLINE_S = 5  # of the waits of training
LIMIT_S = 60  # more is a hang
OF_ALL = ("stage", "agree", "open", "write", "sync-file", "report", "acknowledge")
OF_FIRST = ("create", "manifest", "sync-manifest", "sync-folder", "commit", "sync-parent")
AFTER = ("retire", "remove")  # of rank 0, once the new one is there
LOAD = ("choose", "verify", "read")


class Fault(NamedTuple):
    point: str
    rank: int
    signal: str
    world: int = 2
    mode: str = "sync"
    first: bool = False  # the first save of a run, else one that removes an older one
    times: int = 1


def faults_of(world: int) -> Iterator[tuple[str, int, int]]:
    """Points, the ranks that come there, and how often they have been there."""
    ranks = sorted({0, world // 2, world - 1})
    for point, rank in itertools.product(OF_ALL + LOAD, ranks):
        yield point, rank, 1
        if point == "acknowledge":
            yield point, rank, 2
        if point == "write":
            yield point, rank, 3
    for point in OF_FIRST + AFTER:
        yield point, 0, 1
    yield "remove", 0, 2


def all_faults() -> Iterator[Fault]:
    signals = ("KILL", "TERM", "STOP", "ABRT")
    for world, mode, first in itertools.product((1, 2, 4), ("sync", "async"), (False, True)):
        for (point, rank, times), name in itertools.product(faults_of(world), signals):
            if first and point in AFTER + LOAD:
                continue
            yield Fault(point, rank, name, world, mode, first, times)


def some_faults() -> Iterator[Fault]:
    """Each point once; each signal, mode and kind of save with a few of them."""
    for point in OF_FIRST + AFTER:
        yield Fault(point, 0, "KILL")
    for number, point in enumerate((*OF_ALL, "read")):
        yield Fault(point, number % 2, "KILL")
    yield Fault("write", 1, "KILL", mode="async", first=True, times=3)
    yield Fault("commit", 0, "KILL", mode="async", first=True)
    yield Fault("acknowledge", 0, "KILL", times=2)
    yield Fault("sync-file", 1, "STOP")
    yield Fault("commit", 0, "STOP", mode="async")
    yield Fault("remove", 0, "STOP")  # when the other rank has ended
    yield Fault("write", 0, "STOP", world=1)
    yield Fault("write", 0, "ABRT")
    yield Fault("report", 1, "TERM")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--save-faults") == "all"
        faults = list(all_faults() if everything else some_faults())
        metafunc.parametrize("fault", faults, ids=["-".join(map(str, f)) for f in faults])


class World(NamedTuple):
    runs: Runs
    result: tuple[list[Any], bytes]


@pytest.fixture(scope="module")
def worlds(captured: Capture, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], World]:
    """By world size: a run's result, and its checkpoints up to the old one."""
    made: dict[int, World] = {}

    def make(world: int) -> World:
        if world not in made:
            folder = tmp_path_factory.mktemp("faults")
            runs = Runs(captured(NORMS), Case(NORMS, ADAMW, world=world), folder)
            runs.train(steps=END)
            result = runs.result()
            options = ["--checkpoint", folder / "saved", "--checkpoint-every", 1]
            runs.train(*options, steps=OLD)
            made[world] = World(runs, result)
        return made[world]

    return make


def go_on(world: World, folder: Path) -> int:
    """Resumes to the end, and returns after which step it did; 0: at the beginning."""
    words = ["--checkpoint", folder, "--resume", "auto", "--keep", 2]
    done = world.runs.train(*words, steps=END)
    found = re.search(r"resumed: .*, after step (\d+)", done.stderr)
    lines, weights = world.runs.result()
    want, whole = world.result
    assert weights == whole
    assert lines[-1] == want[-1]
    # What the fault has left is gone.
    names = {path.name for path in folder.iterdir()}
    assert all(re.fullmatch(r"step-\d+", name) for name in names), names
    assert "is skipped" not in done.stderr
    return int(found[1]) if found else 0


@pytest.mark.one_in(3)
def test_killed(
    worlds: Callable[[int], World],
    fault: Fault,
    tmp_path: Path,
    record_property: Callable[[str, Any], None],
) -> None:
    """What it records is for bench/faults.py."""
    world = worlds(fault.world)
    folder = tmp_path / "saved"
    loads = fault.point in LOAD
    if not fault.first:
        shutil.copytree(world.runs.folder / "saved", folder)
    words = ["--steps", NEW, "--checkpoint", folder, "--resume", "auto", "--keep", 2]
    words += ["--checkpoint-piece", 4096, "--checkpoint-patience", PATIENCE_S]
    words += ["--deadline", DEADLINE_S]
    number = signal.Signals[f"SIG{fault.signal}"].value
    step = OLD if loads else NEW
    words += ["--checkpoint-fault", f"{fault.point}:{fault.rank}:{step}:{fault.times}:{number}"]
    if fault.mode == "async":
        words.append("--checkpoint-async")
    command = [str(word) for word in [*world.runs.command, *words]]
    for name, value in fault._asdict().items():
        record_property(name, value)
    began = time.monotonic()
    done = subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True, check=False)
    record_property("seconds", time.monotonic() - began)
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    if fault.signal == "TERM":
        # A request, which is of no account in the last step.
        assert done.returncode in (0, 143), done.stderr
    elif fault.signal == "STOP":
        assert done.returncode == 1, done.stderr
        assert len(errors) == 1, done.stderr
        assert f"rank {fault.rank}" in errors[0] or "rank 0 did not come" in errors[0]
    else:
        assert done.returncode == 1, done.stderr
        assert len(errors) == 1, done.stderr
        assert f"rank {fault.rank} was killed by signal {number}" in errors[0]
        assert f"in the checkpoint of step {step} ({fault.point})" in errors[0]
    after = go_on(world, folder)
    record_property("resumed", {NEW: "new", OLD: "old"}.get(after, "none"))
    assert after in (NEW, 0 if fault.first else OLD)
    acknowledged = fault.point == "acknowledge" and fault.rank == 0 and fault.times == 2
    if fault.point in AFTER or acknowledged or fault.signal == "TERM":
        assert after == NEW
    if loads and fault.signal != "TERM":
        assert after == OLD


SHIM = BIN.parent / "lib" / "libfailing_calls.so"
# Call, error, the so-many-th time, on a path with this.
ERRORS = {
    "no_space": "pwrite:ENOSPC:1:shard-00002",
    "no_space_for_rank_0": "pwrite:ENOSPC:3:shard-00001",
    "quota": "pwrite:EDQUOT:2:shard-00001",
    "disk": "pwrite:EIO:1:manifest.json",
    "sync_file": "fsync:EIO:1:shard-00002",
    "sync_manifest": "fsync:EIO:1:manifest.json",
    "sync_folder": "fsync:EIO:2:.inflight",
    "close": "close:EIO:1:.inflight",
    "make_folder": "mkdir:ENOSPC:1:.inflight",
    "rename": "renameat2:EIO:1:step-",
    "read_only": "renameat2:EROFS:1:step-",
    "vanished": "pwrite:VANISH:2:shard-00002",
}
HARMLESS = {
    "short_write": "pwrite:SHORT:1:shard-00002",
    "interrupted": "pwrite:EINTR:1:shard-00001",
    "rename_unknown": "renameat2:EINVAL:1:step-",
    "rename_missing": "renameat2:ENOSYS:1:step-",
}


def run_with(call: str, world: World, folder: Path, *words: Any) -> Any:
    shutil.copytree(world.runs.folder / "saved", folder)
    options = ["--checkpoint", folder, "--resume", "auto", "--checkpoint-piece", 4096]
    environment = os.environ | {"LD_PRELOAD": str(SHIM), "FAILING_CALL": call}
    command = [*world.runs.command, *options, *words]
    return execute(command, env=environment, timeout=LIMIT_S, check=False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ERRORS)
def test_a_save_that_fails(worlds: Callable[[int], World], name: str, tmp_path: Path) -> None:
    world = worlds(2)
    folder = tmp_path / "saved"
    done = run_with(ERRORS[name], world, folder, "--steps", NEW)
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert done.returncode == 1, done.stderr
    assert len(errors) == 1, done.stderr
    assert f"step-{NEW} was not saved: " in errors[0]
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-2"]
    assert go_on(world, folder) == OLD


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_fail_a_save(
    worlds: Callable[[int], World], name: str, tmp_path: Path
) -> None:
    world = worlds(2)
    done = run_with(HARMLESS[name], world, tmp_path / "saved", "--steps", NEW)
    assert done.returncode == 0, done.stderr
    assert go_on(world, tmp_path / "saved") == NEW


def test_the_parent_is_not_durable(worlds: Callable[[int], World], tmp_path: Path) -> None:
    """The save has failed, though the checkpoint may be there."""
    done = run_with("fsync:EIO:2:/saved", worlds(2), tmp_path / "saved", "--steps", NEW)
    assert done.returncode == 1, done.stderr
    assert go_on(worlds(2), tmp_path / "saved") in (OLD, NEW)


def test_training_goes_on(worlds: Callable[[int], World], tmp_path: Path) -> None:
    """Beside training, a save that fails is a warning; the last one is an error."""
    world = worlds(2)
    call = ERRORS["no_space"]
    done = run_with(
        call,
        world,
        tmp_path / "saved",
        *["--steps", END, "--checkpoint-async", "--checkpoint-every", 1],
    )
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "warning: " in line]
    assert len(warnings) == 1, done.stderr
    assert f"step-{NEW} was not saved: rank 1: " in warnings[0]
    assert "No space left on device" in warnings[0]
    assert go_on(world, tmp_path / "saved") == END
    done = run_with(call, world, tmp_path / "again", "--steps", NEW, "--checkpoint-async")
    assert done.returncode == 1, done.stderr


def test_restarts(captured: Capture, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Killed at random, by whole runs and by single ranks, again and again."""
    kills = 200 if pytestconfig.getoption("--save-faults") == "all" else 4
    steps, seed = 10 * kills, random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    runs = Runs(captured(NORMS), Case(NORMS, ADAMW), tmp_path)
    runs.train(steps=steps)
    want = runs.result()
    runs.metrics.unlink()
    words = ["--steps", steps, "--metrics", runs.metrics, "--save-weights", runs.weights]
    words += ["--checkpoint", tmp_path / "saved", "--checkpoint-every", 1, "--keep", 2]
    words += ["--resume", "auto"]
    for number in range(kills):
        # Each gets a few steps further than the one before.
        last = steps * (number + 1) // (kills + 1)
        mode = ["--checkpoint-async"] if chance.random() < 0.5 else []
        command = [str(word) for word in [*runs.command, *words, *mode]]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if (found := re.match(r"step: +(\d+) ", line)) and int(found[1]) >= last:
                    break
            time.sleep(chance.uniform(0, 0.02))
            ranks = children(process.pid)
            victim = chance.choice([process.pid, *ranks])
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            process.stderr.read()
            process.wait(timeout=LIMIT_S)
    done = execute([*runs.command, *words])
    assert runs.result() == want, f"seed {seed}: {done.stderr}"


def test_files_may_not_grow(worlds: Callable[[int], World], tmp_path: Path) -> None:
    world = worlds(2)
    folder = tmp_path / "saved"
    shutil.copytree(world.runs.folder / "saved", folder)
    words = ["--steps", NEW, "--checkpoint", folder, "--resume", "auto"]
    limited = ["bash", "-c", 'ulimit -f 4; exec "$@"', "bash", *world.runs.command, *words]
    done = execute(limited, check=False)
    assert done.returncode == 1, done.stderr
    assert "File too large" in done.stderr
    assert go_on(world, folder) == OLD
