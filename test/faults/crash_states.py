"""Which states a folder may be in after a crash, from a record of the operations on it.

`unittests/Faults/FileRecorder.cpp` records what processes do below a folder: a line of JSON for
each operation, followed by as many bytes as its `bytes` says (the data of a write). Files and
folders are told by inode, so that renames do not confuse them.

After the death of a process the folder is what the operations so far made of it. After a power cut
POSIX promises less: the data of a file are there once it has been synced, and a name in a folder
(made, changed or removed) once the folder has been. Of all else any part may be there or not. So a
state is a prefix of the operations, of which some that were not synced are lost, and a write may be
torn.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ENTRY_OPERATIONS = {"create", "mkdir", "rename", "unlink", "link"}
DATA_OPERATIONS = {"write", "truncate"}
SECTORS = (512, 4096)

Tree = dict[str, bytes | None]  # by relative path; None: a folder


@dataclasses.dataclass(frozen=True)
class Operation:
    """One record; `inode` and folders are objects: numbers that are never used twice."""

    kind: str
    inode: int
    fields: dict[str, Any]
    data: bytes = b""

    def __str__(self) -> str:
        name = self.fields.get("to_name") or self.fields.get("name") or f"#{self.inode}"
        return f"{self.kind} {name}"


@dataclasses.dataclass(frozen=True)
class Record:
    """The operations of a run, and what was there before: `tree` by path, and `inodes` of these."""

    operations: list[Operation]
    tree: Tree
    objects: dict[str, int]


def inodes(root: Path) -> dict[str, int]:
    """Of all that is below the folder, and of itself, the empty path."""
    found = {"": root.stat().st_ino}
    for path in sorted(root.rglob("*")):
        found[str(path.relative_to(root))] = path.lstat().st_ino
    return found


def read_tree(root: Path) -> Tree:
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in sorted(root.rglob("*"))
    }


def write_tree(tree: Tree, root: Path) -> None:
    root.mkdir(parents=True)
    for path, data in sorted(tree.items()):
        if data is None:
            (root / path).mkdir(parents=True, exist_ok=True)
        else:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)


def read_record(log: Path, tree: Tree, before: dict[str, int]) -> Record:
    """Of a log, and what `read_tree` and `inodes` gave of the folder before."""
    text = log.read_bytes()
    operations = []
    # A number of an inode is used again once its file is gone: objects are counted.
    objects = {inode: number for number, inode in enumerate(before.values())}
    fresh = itertools.count(len(objects))

    def object_of(inode: int, new: bool = False) -> int:
        if new or inode not in objects:
            objects[inode] = next(fresh)
        return objects[inode]

    at = 0
    while at < len(text):
        end = text.index(b"\n", at)
        fields = json.loads(text[at:end])
        data = text[end + 1 : end + 1 + fields["bytes"]]
        at = end + 1 + fields["bytes"]
        kind = fields.pop("op")
        inode = object_of(fields.pop("inode"), kind in {"create", "mkdir", "unnamed"})
        for key in ("folder", "to_folder"):
            if key in fields:
                fields[key] = object_of(fields[key])
        operations.append(Operation(kind, inode, fields, data))
    return Record(operations, tree, {path: objects_of(before)[path] for path in before})


def objects_of(before: dict[str, int]) -> dict[str, int]:
    return {path: number for number, path in enumerate(before)}


class Folder:
    """What operations make of a tree. Some may be missing: each does what it still can."""

    def __init__(self, record: Record) -> None:
        self.root = record.objects[""]
        self.files: dict[int, bytearray] = {}
        self.folders: dict[int, dict[str, int]] = {self.root: {}}
        for path, data in sorted(record.tree.items()):
            number = record.objects[path]
            parent = record.objects[os.path.dirname(path)]
            self.folders[parent][os.path.basename(path)] = number
            if data is None:
                self.folders[number] = {}
            else:
                self.files[number] = bytearray(data)

    def apply(self, operation: Operation, size: int | None = None) -> None:
        """With `size`, a write of which only the first bytes came to the disk; the file is as long
        as with all of them."""
        fields = operation.fields
        match operation.kind:
            case "create" | "unnamed":
                self.files.setdefault(operation.inode, bytearray())
            case "mkdir":
                self.folders.setdefault(operation.inode, {})
            case "write":
                data = operation.data if size is None else operation.data[:size]
                file = self.files.setdefault(operation.inode, bytearray())
                begin, end = fields["offset"], fields["offset"] + len(operation.data)
                file.extend(bytes(max(0, end - len(file))))
                file[begin : begin + len(data)] = data
            case "truncate":
                file = self.files.setdefault(operation.inode, bytearray())
                length = fields["size"]
                del file[length:]
                file.extend(bytes(length - len(file)))
        match operation.kind:
            case "create" | "mkdir" | "link":
                self.entries(fields["folder"])[fields["name"]] = operation.inode
            case "unlink":
                self.entries(fields["folder"]).pop(fields["name"], None)
            case "rename":
                source = self.entries(fields["folder"])
                if source.get(fields["name"]) == operation.inode:
                    del source[fields["name"]]
                self.entries(fields["to_folder"])[fields["to_name"]] = operation.inode

    def entries(self, folder: int) -> dict[str, int]:
        return self.folders.setdefault(folder, {})

    def tree(self) -> Tree:
        tree: Tree = {}

        def visit(folder: int, prefix: str) -> None:
            for name, number in sorted(self.entries(folder).items()):
                path = prefix + name
                if number in self.folders:
                    tree[path] = None
                    visit(number, path + "/")
                else:
                    tree[path] = bytes(self.files.get(number, b""))

        visit(self.root, "")
        return tree


def durable(operations: list[Operation]) -> list[bool]:
    """Which of the operations a sync has made durable."""
    result = []
    synced: set[int] = set()
    for operation in reversed(operations):
        if operation.kind == "fsync":
            synced.add(operation.inode)
            result.append(True)
        elif operation.kind in DATA_OPERATIONS or operation.kind == "unnamed":
            result.append(operation.inode in synced)
        else:
            folders = {operation.fields["folder"], operation.fields.get("to_folder")} - {None}
            result.append(folders <= synced)
    return result[::-1]


@dataclasses.dataclass(frozen=True)
class State:
    """A folder as a crash may leave it, after the first `done` operations."""

    done: int
    what: str
    tree: Tree


def power_cuts(operations: list[Operation], pairs: bool) -> Iterator[tuple[str, Any]]:
    """(what, {index of an operation: None where it is lost, or the bytes that are left of it})"""
    kept = durable(operations)
    pending = [
        i
        for i, operation in enumerate(operations)
        if not kept[i] and operation.kind in ENTRY_OPERATIONS | DATA_OPERATIONS
    ]
    yield "process death", {}
    if not pending:
        return
    yield "synced alone", dict.fromkeys(pending)
    for i in pending:
        yield f"lost: {operations[i]}", {i: None}
        yield f"alone: {operations[i]}", dict.fromkeys(j for j in pending if j != i)
        if operations[i].kind == "write":
            length = len(operations[i].data)
            for size in {0, *(s for s in SECTORS if s < length), max(0, length - 512)}:
                yield f"torn at {size}: {operations[i]}", {i: size}
    if pairs:
        for i, j in itertools.combinations(pending, 2):
            yield f"lost: {operations[i]}, {operations[j]}", {i: None, j: None}


def crash_states(record: Record, *, pairs: bool = True) -> Iterator[State]:
    """Every state that the enumeration above gives, each tree once for each `done` at which what
    is expected of it may differ: the first and the last."""
    for done in range(len(record.operations) + 1):
        seen: set[int] = set()
        operations = record.operations[:done]
        for what, changed in power_cuts(operations, pairs):
            folder = Folder(record)
            for i, operation in enumerate(operations):
                if i not in changed:
                    folder.apply(operation)
                elif changed[i] is not None:
                    folder.apply(operation, changed[i])
            tree = folder.tree()
            key = hash(tuple(tree.items()))
            if key not in seen:
                seen.add(key)
                yield State(done, what, tree)


def without(record: Record, indices: Iterable[int]) -> Record:
    """The record of a program that does not make these operations."""
    missing = set(indices)
    operations = [o for i, o in enumerate(record.operations) if i not in missing]
    return dataclasses.replace(record, operations=operations)
