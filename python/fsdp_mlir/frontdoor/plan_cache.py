"""Plans on disk, found again by another process that would record the same step (identity.py)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fsdp_mlir.frontdoor import identity
from fsdp_mlir.frontdoor.identity import file_line, file_of
from fsdp_mlir.frontdoor.planning import Captured
from fsdp_mlir.frontdoor.telling import Untold
from fsdp_mlir.modules.place import is_library
from fsdp_mlir.modules.python_state import PythonState
from fsdp_mlir.step.numbers import Taken
from fsdp_mlir.step.outputs import Outputs
from fsdp_mlir.support import build
from fsdp_mlir.support.errors import warn
from fsdp_mlir.support.files import file_hash
from fsdp_mlir.view.model_view import constant_name

_ENTRY = "entry.json"
_KEPT = ("plan.json", "model.pt", "model.safetensors", "policy.yaml")
_MOST_ENTRIES = 64
_MOST_VALUES = 4
# The folder may have other things in it: these forms, and what is in a file, tell an entry.
_NAME, _HEADER = re.compile("[0-9a-f]{32}"), re.compile(rb"xxh3:[0-9a-f]{32}\n")
_HEADER_BYTES = 38
# Where an entry is written; what a killed process left is removed after a day.
_WRITING, _WRITTEN = ".fsdp-mlir-", ".entry"
_LEFT = re.compile(re.escape(_WRITING) + "[a-z0-9_]{8}" + re.escape(_WRITTEN))
_MOST_SECONDS = 24 * 3600
_PACKAGE = __name__.partition(".")[0]
# What reading an entry raises that another program wrote, or that is damaged.
_DAMAGED = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError),
    *(NotImplementedError, ImportError, SafetensorError),
)


class PlanCache:
    """A folder with a folder for each plan, which holds what Recipe.capture and compiler.make_plan
    wrote, and entry.json. For one model and loss; warns once about plans that cannot be kept."""

    def __init__(self, folder: Path, model: nn.Module, loss: Any) -> None:
        self._folder = folder
        self._model = model
        self._loss = loss
        self._warned = False
        # The names of modules that were not loaded before captures, so far.
        self.imported: set[str] = set()

    def key(self, inputs: Mapping[str, Any], policy: str, world_size: int) -> str:
        """The name of the entry for the model as it is now; empty if there can be none. The model
        must have neither sharded parameters nor FSDP2's hooks (plain_model.py)."""
        try:
            code = identity.identity(self._model, self._loss, inputs, self.imported)
        except Untold as error:
            self.warn(str(error))
            return ""
        tools = []
        for name in (*build.COMPILER, "python/_runtime.so"):
            status = build.built(name).stat()
            tools.append(f"{status.st_size} {status.st_mtime_ns}")
        text = "\n".join([code, policy, str(world_size), *tools])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def find(self, key: str, target: Path) -> Path | None:
        """The folder of an entry that is complete, and whose code is still the same. Copies the
        entry's files to `target`: another process may replace or remove it at any time."""
        folder = self._folder / key
        with suppress(*_DAMAGED):
            entry = _read(folder)
            if any(_line_now(name, file) != line for name, file, line in entry["loaded"]):
                return None
            for name, has in entry["files"].items():
                _check_file(folder / name)
                shutil.copyfile(folder / name, target / name)
                if file_hash(target / name) != has:
                    return None
            with suppress(OSError):  # the folder may be one that is only read
                os.utime(folder)
            return folder
        return None

    def captured(self, folder: Path, batch: Mapping[str, Any]) -> Captured | None:
        """What the capture of an entry gave; None if a tensor is not in this model, or if it is not
        for the numbers in `batch` and those that the next step draws. Repeats the warnings of that
        capture."""
        captured, texts = None, []
        with suppress(*_DAMAGED):
            entry = _read(folder)
            training, evaluation = (Outputs.of(record) for record in entry["outputs"])
            constants = self._constants(entry, folder, [*training.slots, *evaluation.slots])
            if any(tensor is None for tensor in constants.values()):
                return None
            texts = [str(text) for text in entry["warnings"]]
            outputs, assigned = (training, evaluation), frozenset(entry["assigned"])
            numbers = Taken.recorded(entry["numbers"])
            if not numbers.serves_next(batch):
                return None
            taken = {str(name): list(map(str, keys)) for name, keys in entry["taken"].items()}
            captured = Captured(
                entry["digest"],
                constants,
                outputs,
                assigned=assigned,
                numbers=numbers,
                taken=taken,
                variables=frozenset(map(str, entry["variables"])),
            )
        if captured is not None:  # warnings may be errors, which are not the entry's
            for text in texts:
                warn(text)
        return captured

    def _constants(self, entry: Any, folder: Path, slots: list[Tensor]) -> dict[str, Any]:
        """The tensors that the graph took from elsewhere; None for one that is not there."""
        literals = {}
        if "literal" in entry["constants"].values():
            _check_file(folder / "model.safetensors")
            literals = load_file(folder / "model.safetensors")
        places = self._places() if entry["places"] else {}
        constants = {}
        for name, kind in entry["constants"].items():
            if kind == "literal":
                constants[name] = literals.get(name)
            elif kind == "output":
                constants[name] = slots[entry["places"][name]]
            else:
                constants[name] = places.get(entry["places"][name])
        return constants

    def add(self, key: str, source: Path, captured: Captured) -> None:
        """Keeps the files of `source`."""
        if any(captured.relied_on):
            self.warn("the values of an input, a buffer or a constant decide what the step is")
            return
        if captured.left or captured.unsettled or captured.followed.writes:
            self.warn("forward changes what the model keeps in Python")
            return
        if captured.followed.overwrites and captured.followed.places:
            self.warn("forward writes an input, whose memory a tensor may have that code replaces")
            return
        if any(each.slots for each in captured.counts):
            self.warn("forward adds up what it computes")
            return
        if any(captured.assumption.anywhere):
            self.warn("what it computes decides a branch")
            return
        if captured.others.called:
            self.warn("it calls another model that fully_shard was called on")
            return
        if captured.reads:
            self.warn(f"the step reads '{captured.reads[0]}', which may change")
            return
        new = sorted(self.imported)
        if late := next(_own_modules(new), ""):
            # What its code reads was not there to be described.
            self.warn(f"the step is the first to import '{late}'")
            return
        if captured.operators or captured.kernels:
            # Only the dispatcher knows their kernels, and what these read.
            self.warn("it calls operators of other libraries")
            return
        by_tensor = {id(tensor): path for path, tensor in self._places().items()}
        slots = [id(slot) for each in captured.outputs for slot in each.slots]
        kinds: dict[str, str] = {}
        places: dict[str, Any] = {}
        for index, (name, tensor) in enumerate(captured.constants.items()):
            assert name == constant_name(index)
            if index in captured.literals:
                kinds[name] = "literal"
            elif id(tensor) in slots:
                kinds[name], places[name] = "output", slots.index(id(tensor))
            elif id(tensor) in by_tensor:
                kinds[name], places[name] = "attribute", by_tensor[id(tensor)]
            else:
                self.warn(f"a tensor of shape {list(tensor.shape)} is no attribute")
                return
        try:
            outputs = [each.record() for each in captured.outputs]
        except NotImplementedError as error:
            self.warn(str(error))
            return
        names = [path.name for path in source.iterdir() if path.name in _KEPT]
        entry = {
            "digest": captured.digest,
            "constants": kinds,
            "outputs": outputs,
            "assigned": sorted(captured.assigned),
            "numbers": captured.numbers.record(),
            "taken": captured.taken,
            "places": places,
            "warnings": captured.warnings,
            "loaded": [
                [name, file, line]
                for name in new
                if (line := file_line(name, file := file_of(name))) is not None
            ],
            "files": {name: file_hash(source / name) for name in names},
            "variables": sorted(captured.variables),
        }
        try:
            self._write(key, source, names, json.dumps(entry))
        except OSError as error:
            self.warn(str(error))

    def _write(self, key: str, source: Path, names: list[str], entry: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(_WRITTEN, _WRITING, self._folder) as temporary:
            made = Path(temporary) / key
            made.mkdir()
            for name in names:
                shutil.copyfile(source / name, made / name)
            (made / _ENTRY).write_text(f"{_hashed(key, entry)}\n{entry}")
            target = self._folder / key
            with suppress(FileNotFoundError):  # there is none, or another process was faster
                if not {path.name for path in target.iterdir()} <= {_ENTRY, *_KEPT}:
                    raise FileExistsError(errno.EEXIST, "there is something else", str(target))
                target.rename(Path(temporary) / "old")
            try:
                made.rename(target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                # Another process has put the same entry there meanwhile.
        with suppress(OSError):
            self._tidy()

    def _tidy(self) -> None:
        """Removes entries that have not been used for longest, and what killed processes left."""
        entries: list[tuple[int, Path]] = []
        too_old = time.time_ns() - _MOST_SECONDS * 10**9
        for path in self._folder.iterdir():
            with suppress(OSError):  # another process may remove it
                written = path.stat().st_mtime_ns
                if _is_entry(path):
                    entries.append((written, path))
                elif _LEFT.fullmatch(path.name) and written < too_old:
                    for inside in path.iterdir():
                        _remove(inside)
                    path.rmdir()
        entries.sort()
        for _, path in entries[:-_MOST_ENTRIES]:
            _remove(path)

    def _places(self) -> dict[str, Tensor]:
        """The tensors that are attributes of the model, by their paths."""
        return PythonState.of(self._model, self._loss).tensors()

    def warn(self, why: str) -> None:
        """Once, that no plan is kept."""
        if not self._warned:
            warn(f"the plan is not kept in '{self._folder}': {why}")
        self._warned = True


def entry_names(key: str) -> list[str]:
    """Those of the plans for one key, each of which is for other values of what the step draws."""
    others = (hashlib.sha256(f"{key} {place}".encode()) for place in range(1, _MOST_VALUES))
    return [key, *(other.hexdigest()[:32] for other in others)]


def _is_entry(folder: Path) -> bool:
    """Whether it is one that a PlanCache wrote; nothing else may be removed."""
    record = folder / _ENTRY
    if _NAME.fullmatch(folder.name) is None or folder.is_symlink() or not record.is_file():
        return False
    with record.open("rb") as file:
        return _HEADER.fullmatch(file.read(_HEADER_BYTES)) is not None


def _remove(folder: Path) -> None:
    """Removes an entry's files, and the folder if there are no others."""
    with suppress(OSError):
        for name in (*_KEPT, _ENTRY):  # by which it is known until then
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _check_file(path: Path) -> None:
    """ValueError for something else: to open a pipe would wait for its other end."""
    if not path.is_file():
        raise ValueError(f"'{path}' is no file")


def _hashed(key: str, text: str) -> str:
    """A hash of an entry's record, by which it belongs to its name."""
    return f"xxh3:{xxhash.xxh3_128_hexdigest(f'{key}{chr(10)}{text}'.encode())}"


def _read(folder: Path) -> Any:
    """The record of an entry; ValueError if it is not what was written under this name."""
    _check_file(folder / _ENTRY)
    has, _, text = (folder / _ENTRY).read_text().partition("\n")
    if has != _hashed(folder.name, text):
        raise ValueError(f"'{folder / _ENTRY}' is damaged")
    return json.loads(text)


def _line_now(name: str, file: str) -> str | None:
    """That of file_line for a module that the capture imported from `file`; None if this process
    has another one, or would import it from elsewhere."""
    loaded = name in sys.modules
    found = file_of(name) if loaded else getattr(_spec(name), "origin", None)
    return file_line(name, file) if found == file else None


def _spec(name: str) -> ModuleSpec | None:
    """What importing a module would find; imports nothing."""
    parent = name.rpartition(".")[0]
    path = None
    if parent in sys.modules:
        path = sys.modules[parent].__path__
    elif parent:
        path = getattr(_spec(parent), "submodule_search_locations", None)
        if path is None:
            return None
    found = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


def _own_modules(names: Iterable[str]) -> Iterator[str]:
    """Those that are neither of a library nor of this package."""
    for name in names:
        module = sys.modules.get(name)
        if not isinstance(module, ModuleType) or name.partition(".")[0] == _PACKAGE:
            continue
        if file_of(name) is not None and not is_library(module):
            yield name
