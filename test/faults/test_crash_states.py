"""A save that a crash interrupts leaves the old checkpoint or the new one, whole.

One save of a real run on two ranks is recorded, operation by operation; every state that a crash
may leave (crash_states.py) is then loaded as `--resume auto` would. The harness is proven by
mutants: a program without one of its fsyncs, with the rename before the manifest, or with a loader
that trusts what it reads must be caught.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import crash_states
import pytest
from crash_states import Record, State
from runs import BIN, FILE_RECORDER, Job


@dataclass(frozen=True)
class Saved:
    """A recorded save; `old` and `new` are the step and digest before and after."""

    record: Record
    old: tuple[int, str] | None
    new: tuple[int, str]
    done: int  # operations after which the save has been acknowledged


def load(folders: list[Path], *options: str) -> list[tuple[int, str] | None]:
    """What a run would resume from, for each folder of checkpoints."""
    output = subprocess.run(
        [BIN / "load-checkpoints", *options],
        input="".join(f"{folder}\n" for folder in folders),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = [json.loads(line) for line in output.splitlines()]
    return [None if one["step"] is None else (one["step"], one["digest"]) for one in found]


def record_save(job: Job, folder: Path, before: int, *options: str) -> Saved:
    """Saves step `before` + 1 on top of the checkpoints of `before` steps."""
    folder.mkdir()
    if before:
        job.train(folder, before, "--checkpoint-every", "1", *options)
    old = load([folder])[0]
    tree, inodes = crash_states.read_tree(folder), crash_states.inodes(folder)
    log = folder.with_suffix(".log")
    environment = {
        "LD_PRELOAD": str(FILE_RECORDER),
        "FILE_RECORDER_ROOT": str(folder),
        "FILE_RECORDER_LOG": str(log),
    }
    job.train(folder, before + 1, *options, env=environment)
    record = crash_states.read_record(log, tree, inodes)
    new = load([folder])[0]
    assert new is not None and new != old

    last = crash_states.Folder(record)
    for operation in record.operations:
        last.apply(operation)
    assert last.tree() == crash_states.read_tree(folder), "the record does not explain the folder"
    return Saved(record, old, new, acknowledged(record, before + 1))


def acknowledged(record: Record, step: int) -> int:
    """The operations up to the sync of the name `step-N`, which ends the save's promise."""
    renamed = [
        i
        for i, operation in enumerate(record.operations)
        if operation.kind == "rename" and operation.fields["to_name"] == f"step-{step}"
    ]
    root = record.objects[""]
    return 1 + next(
        i
        for i, operation in enumerate(record.operations)
        if i > renamed[0] and operation.kind == "fsync" and operation.inode == root
    )


@pytest.fixture(scope="module")
def saves(job: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    parent = tmp_path_factory.mktemp("saves")
    return {
        "first": record_save(job, parent / "first", 0),
        "third": record_save(job, parent / "third", 2, "--keep", "2"),
        "async": record_save(job, parent / "async", 2, "--keep", "2", "--checkpoint-async"),
    }


def violations(
    saved: Saved, states: Iterable[State], scratch: Path, *options: str
) -> tuple[int, list[str]]:
    """How many states there are, and those that load something else than they should."""
    listed: list[State] = []
    folders: list[Path] = []
    seen: set[tuple[bool, int]] = set()
    for state in states:
        # What counts of `done` is whether the save has been acknowledged.
        key = state.done >= saved.done, hash(tuple(state.tree.items()))
        if key in seen:
            continue
        seen.add(key)
        folders.append(scratch / str(len(listed)))
        crash_states.write_tree(state.tree, folders[-1])
        listed.append(state)
    loaded = load(folders, *options)
    shutil.rmtree(scratch)
    wrong = []
    for state, found in zip(listed, loaded, strict=True):
        allowed = [saved.new] if state.done >= saved.done else [saved.old, saved.new]
        if found not in allowed:
            wrong.append(f"after {state.done} operations, {state.what}: {found}")
    return len(listed), wrong


@pytest.mark.parametrize("which", ["first", "third", "async"])
def test_every_crash_state_loads_old_or_new(
    saves: dict[str, Saved], which: str, scratch: Path, exhaustive: bool
) -> None:
    saved = saves[which]
    states = crash_states.crash_states(saved.record, pairs=exhaustive)
    count, wrong = violations(saved, states, scratch)
    print(f"{which}: {len(saved.record.operations)} operations, {count} states")
    assert count > 100
    assert not wrong, wrong[:5]


def fsyncs(record: Record) -> list[int]:
    return [i for i, operation in enumerate(record.operations) if operation.kind == "fsync"]


def test_each_fsync_is_needed(saves: dict[str, Saved], scratch: Path) -> None:
    saved = saves["third"]
    needed = [i for i in fsyncs(saved.record) if i < saved.done]
    assert len(needed) >= 5  # two ranks' files, the manifest, its folder, and the parent
    for i in needed:
        mutant = crash_states.without(saved.record, [i])
        states = crash_states.crash_states(mutant, pairs=False)
        # The same promise, one operation earlier.
        _, wrong = violations(replace(saved, done=saved.done - 1), states, scratch)
        assert wrong, (
            f"a program without operation {i}, {saved.record.operations[i]}, is not caught"
        )


def test_the_manifest_must_come_before_the_name(saves: dict[str, Saved], scratch: Path) -> None:
    saved = saves["third"]
    operations = saved.record.operations
    manifest = next(o.inode for o in operations if o.fields.get("name") == "manifest.json")
    later = [o for o in operations[: saved.done] if o.inode == manifest]
    mutant = [o for o in operations[: saved.done] if o.inode != manifest] + later
    states = crash_states.crash_states(replace(saved.record, operations=mutant), pairs=False)
    promise = saved.done - len(later)
    _, wrong = violations(replace(saved, done=promise), states, scratch)
    assert wrong


def test_a_loader_that_trusts_is_caught(saves: dict[str, Saved], scratch: Path) -> None:
    """Without the syncs of the ranks' files, only hashes tell what was torn."""
    saved = saves["third"]
    files = {o.inode for o in saved.record.operations if "safetensors" in o.fields.get("name", "")}
    syncs = [i for i in fsyncs(saved.record) if saved.record.operations[i].inode in files]
    mutant = crash_states.without(saved.record, syncs)
    late = replace(saved, done=len(saved.record.operations) + 1)
    states = list(crash_states.crash_states(mutant, pairs=False))
    assert not violations(late, states, scratch)[1]
    assert violations(late, states, scratch, "--trusting")[1]


def damaged(tree: crash_states.Tree, path: str, data: bytes) -> crash_states.Tree:
    return {**tree, path: data}


def test_files_of_two_checkpoints_are_refused(job: Job, tmp_path: Path, scratch: Path) -> None:
    folder = tmp_path / "mixed"
    job.train(folder, 2, "--checkpoint-every", "1")
    for file in sorted((folder / "step-1").iterdir()):
        mixed = scratch / file.name
        shutil.copytree(folder, mixed)
        shutil.copy(file, mixed / "step-2" / file.name)
        found = load([mixed])[0]
        # A manifest of step 1 in the folder of step 2 is one of other files.
        assert found is not None and found[0] == 1, file.name
