"""Checkpoints of a step: the same as fsdp-run's, with the same files, saved in the same way.

What is not a tensor (settings of the optimizer's groups, the caller's own state) is text; a rank's
text is saved as the tensor of bytes `rank.N.python`. docs/checkpoints.md says the rest.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_mlir.frontdoor.together import together
from fsdp_mlir.modules import sharding, weights
from fsdp_mlir.state import forms
from fsdp_mlir.state.optimizer_state import OptimizerState
from fsdp_mlir.support import build
from fsdp_mlir.support.errors import warn
from fsdp_mlir.support.layouts import bytes_of
from fsdp_mlir.support.plain_data import decoded, encoded

_STATE = "optimizer.state."
_OF_A_RANK = re.compile(r"rank\.[0-9]+\.")

# What the runtime takes: name, shape of the whole tensor, offsets of the box, the box.
Box = tuple[str, list[int], list[int], Tensor]


# Longer than a rank may take to read what the others have read.
_READ_SECONDS = 3600


@dataclass(frozen=True)
class Counters:
    """The position of a step: what is saved besides tensors. `updates` are the steps except those
    that a loss scaler skipped, if the optimizer is the plan's own; otherwise its state counts
    them."""

    step: int
    updates: int | None
    scaler: tuple[float, int] | None


@dataclass(frozen=True)
class Resumed:
    """What a run continues from."""

    path: str
    step: int
    samples: int
    world_size: int
    extra: Any  # this rank's; rank 0's if there was no such rank
    counters: Counters


class Checkpoints:
    """The checkpoints of one model; every method is a collective."""

    def __init__(self, model: nn.Module, rendezvous: Any) -> None:
        self._model = model
        self._rendezvous = rendezvous
        self._runtime = build.runtime().Checkpoints(rendezvous)
        self._writer = ThreadPoolExecutor(1, "fsdp-mlir-save")
        self._saved: Future[str] | None = None
        self._notices: list[str] = []  # to be told by rank 0, when no collective follows
        # Of the checkpoint that is being loaded: whether names in it have the prefix of
        # checkpoint_wrapper, as they once had, and its forms by name, if it has them.
        self._has_prefixes = False
        self._forms: dict[str, forms.Form] | None = None

    # --- saving

    def save(
        self,
        folder: str | Path,
        optimizer: OptimizerState,
        counters: Counters,
        *,
        samples: int,
        plan: str,
        extra: Any,
        keep: int,
        wait: bool,
    ) -> Future[str]:
        self._finish()
        path, step = _absolute(folder), counters.step

        def prepare() -> tuple[dict[str, Any], list[Box], list[Box], list[Any]]:
            if samples < 0:
                raise ValueError(f"samples: expected 0 or more, got {samples}")
            if not path:
                raise ValueError("save: expected a folder, got ''")
            if keep < 0 or keep == 1:
                raise ValueError(f"keep: expected 0 (all) or at least 2, got {keep}")
            chunks, own, copy, counted = self._parts(optimizer, extra)
            updates = counters.updates if counted is None else counted
            if not wait:
                chunks, own = _copies(chunks), _copies(own)
            state = {
                "step": step,
                "samples": samples,
                "updates": step if updates is None else updates,
                "seed": torch.initial_seed() % (1 << 64),
                "plan": plan,
                "scaler": counters.scaler,
            }
            return state, chunks, own, copy

        said = f"save({path!r}, samples={samples}, keep={keep})"
        (state, chunks, own, _), others = together(
            self._rendezvous, prepare, lambda made: json.dumps([said, made[-1]])
        )
        calls, copies = zip(*map(json.loads, others), strict=True)
        _check_alike(calls)
        _check_copies(copies)
        aliases = {
            self._name(alias): self._name(param.name)
            for param in weights.parameters(self._model)
            for alias in param.aliases
        }

        def write() -> str:
            world_size = self._rendezvous.world_size
            notice = self._runtime.save(
                path, state, world_size, self._is_gpu, aliases, chunks, own, keep
            )
            if notice:
                self._notices.append(notice)
            return f"{path}/step-{step}"

        saved = self._writer.submit(write)
        if not wait:
            self._saved = saved
        else:
            try:
                saved.result()
            except BaseException:
                # Even if this is interrupted: the tensors are the model's own.
                saved.exception()
                raise
        self._tell()
        return saved

    def _finish(self) -> None:
        """Waits for a save that runs in the background."""
        saved, self._saved = self._saved, None
        error = saved.exception() if saved is not None else None
        if error is not None:
            self._notices.append(str(error))

    def _tell(self) -> None:
        notices, self._notices = self._notices, []
        for notice in notices if self._rendezvous.rank == 0 else ():
            warn(notice)

    @property
    def _is_gpu(self) -> bool:
        return any(param.is_cuda for param in weights.of_model(self._model))

    def _parts(
        self, optimizer: OptimizerState, extra: Any
    ) -> tuple[list[Box], list[Box], list[Any], int | None]:
        """What this rank saves of the tensors that all ranks share, what it has for itself, what
        `_copy` says of it, and how often the optimizer has updated, if that is known."""
        given = optimizer.state_dict()
        if optimizer.is_new:
            # Not the zeros that a plan would begin with: the first step after those would differ.
            given["state"] = {}
        texts: dict[str, dict[str, Any]] = {}
        formed: dict[str, forms.Form] = {}
        self._check_names()
        named = list(self._tensors())
        names = self._names()
        updates = None
        for param, entries in given["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    name = f"{_STATE}{names[param]}.{key}"
                    named.append((name, value))
                    form = forms.form_of(name, value, optimizer.params[param])
                    if form is not None:
                        formed[name] = form
                    if key == "step" and value.numel() == 1:
                        updates = max(updates or 0, int(value))
                else:
                    texts.setdefault(param, {})[key] = value
        chunks: list[Box] = []
        own: list[Box] = []
        written: dict[int, int] = {}
        self._runtime.check_types([_box(name, tensor.detach()) for name, tensor in named])
        for name, tensor in named:
            tensor = tensor.detach()
            if not isinstance(tensor, DTensor):
                own.append(_whole(name, tensor))
                continue
            box = _box(name, tensor)
            writes = _writes(tensor, written)
            is_first = all(at == 0 for at in tensor.device_mesh.get_coordinate() or [])
            if writes and (box[3].numel() > 0 or (tensor.numel() == 0 and is_first)):
                chunks.append(box)
        text = {
            "extra": encoded(extra, "extra"),
            "forms": formed,
            "optimizer": optimizer.kind,
            "own": [name for name, *_ in own],
            "param_groups": encoded(given["param_groups"], "optimizer.param_groups"),
            "state": encoded(texts, "optimizer.state"),
        }
        rank = self._rendezvous.rank
        for name, generator in self._generators().items():
            chunks.append(_whole(f"rank.{rank}.{name}", generator.get_state()))
        blob = bytearray(json.dumps(text, allow_nan=False).encode())
        chunks.append(_whole(f"rank.{rank}.python", torch.frombuffer(blob, dtype=torch.uint8)))
        parts = [(name, each.detach()) for name, each in named if isinstance(each, DTensor)]
        return chunks, own, _copy(parts, self._rendezvous.world_size), updates

    # --- loading

    def load(
        self, path: str | Path, optimizer: OptimizerState, plan: str, *, scales: bool
    ) -> Resumed | None:
        """None if there is none. `scales`: whether the step has a loss scaler."""
        self._finish()
        where = _absolute(path)
        _check_alike(self._rendezvous.exchange(f"load({where!r})", 300))
        if not where:
            raise ValueError("load: expected a folder, got ''")
        skipped, found = self._runtime.open(where)
        self._notices += [f"{why}; this checkpoint is skipped" for why in skipped]
        resumed = None
        if found is not None:
            try:
                resumed = self._load(found, optimizer, scales=scales)
                differences = self._runtime.differences(
                    self._rendezvous.world_size, self._is_gpu, plan
                )
            finally:
                self._has_prefixes, self._forms = False, None
                self._runtime.close()
            if differences:
                self._notices.append(
                    f"{resumed.path}: losses may differ in bits from those of the run that was "
                    f"saved: {differences}"
                )
        self._tell()
        return resumed

    def _load(self, found: dict[str, Any], optimizer: OptimizerState, *, scales: bool) -> Resumed:
        if scales != (found["scaler"] is not None):
            have, has = ("a", "no") if scales else ("no", "a")
            raise ValueError(
                f"{found['path']}: expected {have} loss scaler, as the step has it, got {has} one"
            )
        self._has_prefixes = any(weights.saved_name(name) != name for name in found["tensors"])

        def checked() -> tuple[dict[str, Any], Any]:
            try:
                return self._checked(found, optimizer)
            except ValueError as error:
                if found["path"] in str(error):
                    raise
                raise ValueError(f"{found['path']}: {error}") from error

        (state, extra), _ = together(self._rendezvous, checked, lambda _: "", _READ_SECONDS)
        together(
            self._rendezvous,
            lambda: self._take(found, optimizer, state),
            lambda _: "",
            _READ_SECONDS,
        )
        self._runtime.go_on()
        counters = Counters(found["step"], found["updates"], found["scaler"])
        return Resumed(
            found["path"], found["step"], found["samples"], found["world_size"], extra, counters
        )

    def _checked(
        self, found: dict[str, Any], optimizer: OptimizerState
    ) -> tuple[dict[str, Any], Any]:
        """The optimizer's state, and the caller's own; ValueError if the checkpoint is not of this
        model. Changes nothing."""
        self._check_names()
        text = self._text(found)
        self._forms = text.get("forms")
        saved = self._had(found, text)
        known = set()
        for name, tensor in self._tensors():
            if tensor.is_meta:
                raise ValueError(
                    f"'{name}' is on 'meta': expected values; give compile an example, or call the "
                    "step once before load"
                )
            if name not in saved:
                raise ValueError(f"{found['path']}: no tensor '{name}', which the model has")
            self._runtime.check(self._own(found, _box(name, tensor.detach())))
            known.add(name)
        params = {new: old for old, new in self._names().items()}
        kinds = text.get("optimizer", ""), optimizer.kind
        if all(kinds) and kinds[0] != kinds[1]:
            raise ValueError(
                f"{found['path']}: expected a checkpoint of {kinds[1]}, got one of {kinds[0]}"
            )
        own = optimizer.state_dict()
        state: dict[str, Any] = {}
        for name, (dtype, shape) in saved.items():
            if name in known:
                continue
            param, _, key = name.removeprefix(_STATE).rpartition(".")
            if not name.startswith(_STATE) or param not in params:
                raise ValueError(f"{found['path']}: tensor '{name}' is not in the model")
            entries = state.setdefault(params[param], {})
            entries[key] = self._entry(found, optimizer, own, params[param], key, dtype, shape)
        for param, entries in decoded(text["state"]).items() if text else ():
            state.setdefault(param, {}).update(entries)
        groups = decoded(text["param_groups"]) if text else own["param_groups"]
        made = {"state": state, "param_groups": groups}
        optimizer.check(made, saved=True)
        return made, decoded(text["extra"]) if text else None

    def _entry(
        self,
        found: dict[str, Any],
        optimizer: OptimizerState,
        own: dict[str, Any],
        param: str,
        key: str,
        dtype: str,
        shape: list[int],
    ) -> Tensor:
        """An entry of the optimizer's state as this rank has it: sharded as its own, or as the
        parameter if it has the parameter's shape."""
        whole = optimizer.params[param].detach()
        made = getattr(torch, dtype)
        name = f"{_STATE}{self._names()[param]}.{key}"
        if self._forms is None:
            layout = forms.layout_like(own["state"].get(param, {}).get(key), whole, shape)
        else:
            layout = forms.layout_of(name, self._forms.get(name), whole, shape)
        if isinstance(layout, torch.device):
            self._check_ranks(found, name, whole, shape)
            tensor = torch.empty(shape, dtype=made, device="cpu")
            self._runtime.read(self._own(found, (name, list(shape), [0] * len(shape), tensor)))
            return tensor.to(layout)
        local, offsets = _geometry(name, layout)
        part = torch.empty(local, dtype=made, device="cpu")
        self._runtime.read((name, list(shape), offsets, part))
        return DTensor.from_local(
            part.to(layout.device),
            layout.device_mesh,
            layout.placements,
            run_check=False,
            shape=layout.shape,
            stride=torch.empty(layout.shape, device="meta").stride(),
        )

    def _check_ranks(
        self, found: dict[str, Any], name: str, param: Tensor, shape: Sequence[int]
    ) -> None:
        """ValueError for plain state of a rank's part of a parameter, if the parts are others."""
        ranks = found["world_size"]
        if not isinstance(param, DTensor) or not shape or ranks == self._rendezvous.world_size:
            return
        if any(f"rank.{rank}.{name}" in found["tensors"] for rank in range(ranks)):
            raise ValueError(f"'{name}': each rank has its own: expected {ranks} ranks")

    def _take(self, found: dict[str, Any], optimizer: OptimizerState, state: Any) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                box = _box(name, tensor.detach())
                self._runtime.read(self._own(found, box))
                if box[3].data_ptr() != local.data_ptr():
                    # Elements at the same address are the same.
                    dims = [d for d, step in enumerate(local.stride()) if step == 0]
                    to, part = local, box[3]
                    for dim in dims:
                        to, part = to.narrow(dim, 0, 1), part.narrow(dim, 0, 1)
                    to.copy_(part)
        optimizer.load_state_dict(state, saved=True)
        sharding.drop_gradients(self._model)
        step, seed = found["step"], found["seed"]
        for name, generator in self._generators().items():
            full = f"rank.{self._rendezvous.rank}.{name}"
            bytes_ = generator.get_state()
            _, shape = found["tensors"].get(full, ("", None))
            if found["world_size"] != self._rendezvous.world_size or shape != [bytes_.numel()]:
                # As fsdp-run does: a generator belongs to one rank.
                generator.manual_seed((seed + step) % (1 << 63))
                continue
            self._runtime.read((full, shape, [0], bytes_))
            generator.set_state(bytes_)

    def _text(self, found: dict[str, Any], *, of_first: bool = False) -> dict[str, Any]:
        """This rank's, or rank 0's. Empty in a checkpoint of fsdp-run."""
        for rank in (0,) if of_first else (self._rendezvous.rank, 0):
            name = f"rank.{rank}.python"
            if name in found["tensors"]:
                _, shape = found["tensors"][name]
                blob = torch.empty(shape, dtype=torch.uint8, device="cpu")
                self._runtime.read((name, shape, [0], blob))
                return _without_prefixes(json.loads(blob.numpy().tobytes()))
        return {}

    def _had(self, found: dict[str, Any], text: dict[str, Any]) -> dict[str, tuple[str, Any]]:
        """Dtypes and shapes of the tensors that this rank had, by name: of those that are not all
        ranks', not each rank had what rank 0 had."""
        ours = text.get("own", [])
        others = set(self._text(found, of_first=True).get("own", [])) - set(ours)
        saved = {
            name: spec
            for name, spec in found["tensors"].items()
            if not _OF_A_RANK.match(name) and name not in others
        }
        for name in ours:
            full, *_ = self._own(found, (name, [], [], torch.empty(0)))
            if full in found["tensors"]:
                saved[name] = found["tensors"][full]
        return saved

    def _own(self, found: dict[str, Any], box: Box) -> Box:
        """With the name of this rank's own tensor, if that is not rank 0's."""
        name = f"rank.{self._rendezvous.rank}.{box[0]}"
        return (name, *box[1:]) if name in found["tensors"] else box

    # --- what there is

    def _check_names(self) -> None:
        """ValueError if a checkpoint has something else under one of the model's names."""
        params = weights.parameters(self._model)
        aliases = [alias for param in params for alias in param.aliases]
        self._runtime.check_names([*aliases, *(name for name, _ in self._tensors())])

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for state in (*weights.parameters(self._model), *weights.buffers(self._model)):
            yield self._name(state.name), state.tensor

    def _names(self) -> dict[str, str]:
        """The names of parameters in a checkpoint, by those of the optimizer's state."""
        first = {id(state.tensor): state.name for state in weights.parameters(self._model)}
        return {
            weights.saved_name(name): self._name(first[id(param)])
            for name, param in self._model.named_parameters()
        }

    def _name(self, name: str) -> str:
        return name if self._has_prefixes else weights.saved_name(name)

    def _generators(self) -> dict[str, torch.Generator]:
        found = {"rng.cpu": torch.default_generator}
        if any(param.is_cuda for param in weights.of_model(self._model)):
            found["rng.device"] = torch.cuda.default_generators[torch.cuda.current_device()]
        return found


def _absolute(path: str | Path) -> str:
    if path == "":  # which would be the working directory
        return ""
    return os.path.abspath(Path(path).expanduser())


def _without_prefixes(text: dict[str, Any]) -> dict[str, Any]:
    """With the optimizer's names as they are now."""
    for group in text["param_groups"]:
        group["params"] = [weights.saved_name(name) for name in group["params"]]
    text["state"] = {weights.saved_name(name): value for name, value in text["state"].items()}
    return text


def _copy(parts: Sequence[tuple[str, DTensor]], world_size: int) -> list[Any]:
    """Of tensors that only some ranks shard with each other, of which rank 0's group saves its own:
    the ranks of this group, this one's place among them, and a hash of its parts by name. Empty
    without any."""
    found = xxhash.xxh3_128()
    group: list[int] = []
    for name, part in parts:
        ranks = part.device_mesh.mesh.flatten().tolist()
        if len(ranks) < world_size:
            group = ranks
            found.update(f"{name} {part.dtype} {list(part.shape)}\n".encode())
            found.update(bytes_of(_plain(part.to_local())).numpy())
    return [group, group.index(dist.get_rank()), found.hexdigest()] if group else []


def _check_copies(copies: Sequence[list[Any]]) -> None:
    """ValueError if another group of ranks than rank 0's has other values."""
    for rank, copy in enumerate(copies):
        if not copy or 0 in copy[0]:
            continue
        first = next((x for x in copies if x and 0 in x[0] and x[1] == copy[1]), None)
        if first is None or first[2] != copy[2]:
            raise ValueError(
                f"rank {rank} shards other values with ranks {copy[0]} than rank 0 does with its "
                "group: a checkpoint has one value for each name; save the model of each group by "
                "torch.distributed.checkpoint"
            )


def _check_alike(said: Sequence[str]) -> None:
    for rank, other in enumerate(said):
        if other != said[0]:
            raise ValueError(f"rank {rank} calls {other}, rank 0 {said[0]}")


def _geometry(name: str, tensor: DTensor | forms.Layout) -> tuple[list[int], list[int]]:
    """Shape and offsets of this rank's part."""
    mesh, placements = tensor.device_mesh, tensor.placements
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            # One box, if it splits what the axes behind it have left.
            behind = (
                mesh.size(other)
                for other in range(axis + 1, mesh.ndim)
                if placements[other].is_shard(placement.dim)
            )
            if placement.split_factor != math.prod(behind):
                raise ValueError(f"'{name}': expected parts that are boxes, got {placements}")
        elif type(placement) not in (Shard, Replicate):
            raise ValueError(f"'{name}': expected shards or replicas, got {placement}")
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return list(shape), list(offsets)


def _box(name: str, tensor: Tensor) -> Box:
    if not isinstance(tensor, DTensor):
        return _whole(name, tensor)
    _, offsets = _geometry(name, tensor)
    return name, list(tensor.shape), offsets, _plain(tensor.to_local())


def _whole(name: str, tensor: Tensor) -> Box:
    return name, list(tensor.shape), [0] * tensor.dim(), _plain(tensor)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _copies(boxes: Iterable[Box]) -> list[Box]:
    return [(name, shape, offsets, data.clone()) for name, shape, offsets, data in boxes]


def _writes(tensor: DTensor, written: dict[int, int]) -> bool:
    """Whether this rank's replica saves the tensor: it is the one that has saved the fewest bytes
    so far, which all ranks count alike."""
    mesh = tensor.device_mesh
    if not (mesh.mesh == 0).any():
        return False  # rank 0's mesh has the same
    own, replicas = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            own = own * mesh.size(axis) + mesh.get_local_rank(axis)
            replicas *= mesh.size(axis)
    writer = min(range(replicas), key=lambda replica: written.get(replica, 0))
    if replicas > 1:
        written[writer] = written.get(writer, 0) + tensor.numel() * tensor.element_size()
    return own == writer
