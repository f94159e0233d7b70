"""The plans of one model: each is compiled once, and all of them train the same memory."""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import xxhash
import yaml
from torch import Tensor, nn

from fsdp_mlir.archive.fingerprint import Fingerprint
from fsdp_mlir.capture.capture import uncollected
from fsdp_mlir.frontdoor import compiler, planning
from fsdp_mlir.frontdoor.plain_model import forms, plain, whole_values
from fsdp_mlir.frontdoor.plan import LIMIT, Compiled
from fsdp_mlir.frontdoor.plan_cache import PlanCache, entry_names
from fsdp_mlir.frontdoor.planning import Captured, Recipe
from fsdp_mlir.frontdoor.requests import Request
from fsdp_mlir.frontdoor.together import EXCHANGE_SECONDS, NoPlan, OptionError, as_no_plan, together
from fsdp_mlir.frontdoor.unchanged import Unchanged, as_before
from fsdp_mlir.modules import sharding, weights
from fsdp_mlir.modules.growing import emptied
from fsdp_mlir.modules.left import Lasts, Leaving
from fsdp_mlir.modules.place import Place
from fsdp_mlir.record import collectives
from fsdp_mlir.state import optimizers
from fsdp_mlir.state.trained import Bound, Trained
from fsdp_mlir.step.nested import repetitions, replaced
from fsdp_mlir.step.training_step import EachLoss, Loss
from fsdp_mlir.support import build, policy_schema
from fsdp_mlir.support.errors import AssumesError, CompileError, warn

# Rank 0 compiles meanwhile.
_COMPILE_SECONDS = 3600
# Characters that the ranks' store takes at a time, with room.
_PIECE = 1 << 22


@dataclass(frozen=True)
class _Files:
    """What a capture gave, and the folder that has plan.json after `make_plan` on a rank that makes
    one. `makers`: which rank makes each rank's plan, as places among those that shard the model
    together: the first that captured the same step. `fingerprint`: of the capture."""

    folder: Path
    captured: Captured
    make_plan: Callable[[], None]
    makers: list[int]
    fingerprint: Fingerprint | None = None

    @property
    def alike(self) -> bool:
        """Whether all ranks have one plan."""
        return set(self.makers) == {0}


class Plans:
    """Compiles them; every method is a collective. The files of the first lie in `path`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        optimizer: torch.optim.Optimizer | None,
        *,
        init: Callable[[], nn.Module] | None,
        init_seed: int | None,
        path: Path | None,
        cache: Path | None,
        rendezvous: Any,
        comm: str,
        deadline: float,
    ) -> None:
        self.comm = comm
        self._deadline = deadline
        self._model = model
        self._loss = loss
        self._optimizer = optimizer
        self._init = init
        self._init_seed = init_seed
        self._path = path
        self._cache = None if cache is None else PlanCache(cache, model, loss)
        self._rendezvous = rendezvous
        # The ranks that shard the model with this one, and where they meet; other ranks have a plan
        # of their own.
        self._group = list(range(rendezvous.world_size))
        self._meeting = rendezvous
        self._first: Any = None
        self._made: list[Compiled] = []
        self._lasts: Lasts = {}
        self.trained: Trained | None = None

    @uncollected()
    def compile(self, request: Request, allowed_library: str = "") -> Compiled:
        """The plan for the model as it is now; an earlier plan if that is the same. Raises NoPlan
        on all ranks, and CompileError for options that no plan has."""
        config = self._merged(request.config)
        text = _dumped(config)
        policy = text
        if self._optimizer is not None:
            policy = _dumped({**config, "optimizer": _fixed(config["optimizer"])})
        one_group = self._meeting is self._rendezvous  # else other ranks may have another policy
        if one_group and len(self._made) >= LIMIT and policy not in (m.policy for m in self._made):
            raise self._too_many()  # without a capture
        with ExitStack() as stack:
            key = self._key(request, policy)
            files, key = self._kept(request, key, stack)
            if files is None:
                files = self._captured(request, text, key, stack)
            captured = files.captured
            before, held = self._made_before(files, policy), _held_now(request)
            if before is not None:
                self._warn_of_what_is_not_done(before)
                # Python's part, such as a number that is returned, may be all that differs between
                # calls with one plan: each has its own.
                leaving = Leaving(self._lasts, captured.left, captured.followed.keys)
                made = replace(
                    before,
                    captured=captured,
                    unchanged=self._snapshot(captured, held),
                    leaving=leaving,
                    held=held,
                )
                self._begin(made)
                self._made[self._made.index(before)] = made
                return made
            if len(self._made) >= LIMIT:
                raise self._too_many()

            folder = self._sent(files, stack)
            session, plan_hash = self._open(folder, files, allowed_library)
        assert self.trained is not None
        bound = Bound(session, self._model, self.trained, self._optimizer)
        leaving = Leaving(self._lasts, captured.left, captured.followed.keys)
        unchanged = self._snapshot(captured, held)  # which holds what it compares
        made = Compiled(session, bound, captured, policy, unchanged, plan_hash, leaving, held)
        self._begin(made)
        self._made.append(made)
        return made

    def _too_many(self) -> NoPlan:
        text = f"there are {LIMIT} plans of the model already"
        if change := self._made[-1].unchanged.attribute():
            text += f"; {change}"
        return NoPlan(text)

    def _snapshot(self, captured: Captured, held: Mapping[str, tuple[Place, Any]]) -> Unchanged:
        with captured.others.sharded(), as_before(held):
            return Unchanged(self._model, self._loss, captured.kernels, captured.variables)

    def places(self) -> dict[str, Place]:
        """Those of numbers that code reads, and of lists, by their names."""
        found = Unchanged(self._model, self._loss)
        return found.lists() | {name: place for name, (place, _) in found.numbers().items()}

    def _begin(self, made: Compiled) -> None:
        if made.captured.left:
            made.renew()
        self._bind(made)

    def _made_before(self, files: _Files, policy: str) -> Compiled | None:
        """An earlier plan of the same step, on all ranks."""
        if not self._made:
            return None
        # Ranks may have other plans in common than each has with itself.
        key = policy, files.captured.digest
        own = [
            at for at, each in enumerate(self._made) if key == (each.policy, each.captured.digest)
        ]
        found = map(json.loads, self._meeting.exchange(json.dumps(own), EXCHANGE_SECONDS))
        common = set.intersection(*map(set, found))
        return self._made[min(common)] if common else None

    def _merged(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The policy of fully_shard and `config`, which must be the same on all ranks that shard
        the model together."""

        def merge() -> dict[str, Any]:
            own = sharding.config_of(self._model)
            for key in _OVER_ALL_PARTS if sharding.has_parts(self._model) else ():
                if config.get(key):
                    raise NotImplementedError(f"'{key}' with DTensors as parameters")
            clashes = sorted(set(config) & {*own, *_OF_FULLY_SHARD} - {"reshard_after_backward"})
            if clashes:
                raise OptionError(f"option '{clashes[0]}' follows from the other arguments")
            if "gradient_accumulation_steps" not in config:
                # One microbatch has no next one to keep parameters for.
                own.pop("reshard_after_backward", None)
            return {**own, **config}

        everybody = self._rendezvous.world_size
        group, texts = self.together(lambda: sharding.ranks_of(self._model, everybody), str)
        groups = [json.loads(text) for text in dict.fromkeys(texts)]
        if sorted(rank for ranks in groups for rank in ranks) != list(range(everybody)):
            raise NoPlan(f"the ranks shard the model in groups that overlap: {groups[:4]}")
        if group != self._group:
            self._group = group
            self._meeting = self._rendezvous.among(group)
        merged, texts = self.together(merge, _dumped)
        for first, *others in groups:
            for rank in others:
                if texts[rank] != texts[first]:
                    raise CompileError(f"the policy of rank {rank} is not that of rank {first}")
        return merged

    def _sent(self, files: _Files, stack: ExitStack) -> Path:
        """The folder where this rank finds its plan, until the end of `stack`."""
        maker, one_host = files.makers[self._meeting.rank], self._rendezvous.on_one_host()
        makes = maker == self._meeting.rank

        def make() -> str:
            if makes:
                files.make_plan()
            if one_host or not makes:
                return ""
            return b64encode(zlib.compress((files.folder / "plan.json").read_bytes())).decode()

        def said(plan: str) -> str:
            return str(files.folder.resolve()) if one_host else str(len(plan))

        plan, texts = self.together(make, said, _COMPILE_SECONDS)
        texts = [texts[rank] for rank in self._group]
        if one_host:
            return Path(texts[maker])
        pieces = [
            self._meeting.exchange(plan[begin : begin + _PIECE], EXCHANGE_SECONDS)[maker]
            for begin in range(0, max(map(int, texts)), _PIECE)
        ]
        if makes:
            return files.folder
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="fsdp-mlir-")))
        (folder / "plan.json").write_bytes(zlib.decompress(b64decode("".join(pieces))))
        return folder

    def _bind(self, made: Compiled) -> None:
        def bind() -> None:
            made.captured.others.gather()
            if not made.bind():
                raise NoPlan(f"{made.bound.misfit} is not what the plan expects")

        self.together(bind, lambda _: "")

    def _warn_of_what_is_not_done(self, made: Compiled) -> None:
        # What an unsettled step has registered itself is in the plan.
        if not made.captured.unsettled and (change := made.unchanged.hook()):
            warn(f"{change}; it does not change the plan, which will not call it")

    def _kept(self, request: Request, key: str, stack: ExitStack) -> tuple[_Files | None, str]:
        """What an earlier process kept of the same step, for what this one draws, if all ranks may
        take it, and the name of its entry; else a name for one, which may have another plan, or
        none. The files are there until the end of `stack`."""
        if not key or self._cache is None:
            return None, key
        names = entry_names(key)
        for name in names:
            files, has = self._entry(self._cache, name, request, stack)
            if files is not None or not has:
                return files, name
        return None, names[-1]

    def _entry(
        self, cache: PlanCache, name: str, request: Request, stack: ExitStack
    ) -> tuple[_Files | None, bool]:
        """The entry of this name, if all ranks may take it; and whether there is one."""
        first = self._rendezvous.rank == 0
        own = Path(stack.enter_context(TemporaryDirectory(prefix="fsdp-mlir-")))
        _, folders = self.together(
            lambda: cache.find(name, own) if first else None, lambda found: str(found or "")
        )
        if not folders[0]:
            return None, False
        folder = Path(folders[0])
        captured, found = self.together(
            lambda: cache.captured(folder, request.given),
            lambda it: "" if it is None else it.digest,
        )
        if "" in found or len(set(found)) > 1:  # it is another one, or has been removed
            return None, True

        def copy() -> None:
            if first and self._path is not None and not self._made:
                shutil.copytree(own, self._path, dirs_exist_ok=True)

        return _Files(own, captured, copy, [0] * len(self._group)), True

    def _key(self, request: Request, policy: str) -> str:
        """The same on all ranks; empty where nothing is kept."""
        # What follows is a collective: compile() sees to it that all ranks have a cache, or none.
        # What the ranks of a group have and those of another have not is not in a key.
        alone = self._meeting is not self._rendezvous
        if self._cache is None or request.each is not None or alone:  # a tensor of this process
            return ""
        if request.growing:
            return ""
        cache = self._cache
        numbers, unread = [*request.numbers, *request.held], frozenset(request.unread)
        given = {
            name: replaced(name, value, unread, lambda _, each: type(each).__name__)
            for name, value in request.given.items()
        }
        inputs = {name: value for name, value in given.items() if name not in numbers} | {
            "(positional)": len(request.args),
            "(order)": [*given],
            "(evaluation)": request.evaluation,
            "(outputs)": request.keeps_outputs,
            "(numbers)": [f"{type(given[name]).__name__} {name}" for name in numbers],
            "(place)": request.place,
            "(unread)": request.unread,
            "(repeated)": repetitions(request.batch),
        }

        def make() -> str:
            if any(param.is_meta for param in weights.of_model(self._model)):
                return ""
            # Whatever these are, the key is the same.
            held = {name: (place, type(place.value())()) for name, place in request.held.items()}
            with plain(self._model, forms(self._model)), as_before(held):
                return cache.key(inputs, policy, self._rendezvous.world_size)

        key, keys = self.together(make, str)
        if "" in keys:  # there can be no entry
            return ""
        other = next((rank for rank, each in enumerate(keys) if each != keys[0]), None)
        if other is not None:
            cache.warn(f"what decides the step is not the same on rank {other} as on rank 0")
            return ""
        return str(key)

    def _captured(self, request: Request, text: str, key: str, stack: ExitStack) -> _Files:
        """Captures the model; the files are there until the end of `stack`."""
        first = self._meeting.rank == 0
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="fsdp-mlir-")))
        if self._rendezvous.rank == 0 and self._path is not None and not self._made:
            folder = self._path
        if first:
            compiler.start()
        loaded = set(sys.modules)
        on_meta = any(tensor.is_meta for tensor in weights.of_model(self._model))
        options = {
            "loss": self._loss if request.each is None else EachLoss(self._loss, request.each),
            "init": self._init if on_meta else None,
            "evaluation": request.evaluation,
            "numbers": request.numbers,
            "held": request.held,
            "growing": request.growing,
            "unread": request.unread,
            "counting": request.counting,
            "assume": request.assume or False,
            "breaks": request.breaks,
            "data_ranks": self._group,
        }
        recipe = Recipe(
            self._model, request.args, request.kwargs, text, options, request.keeps_outputs
        )
        sharding.reshard(sharding.groups(self._model))
        values = whole_values(self._model)
        if not request.is_example and not any(value.is_meta for value in values.values()):
            options["check"] = True

        def make() -> tuple[Captured, Fingerprint]:
            made = recipe.capture(folder, values)
            if request.updates and made[0].assumption.here[0]:
                raise AssumesError("what the step computes decides a branch")
            return made

        (captured, fingerprint), told = self.together(
            make,
            lambda made: json.dumps([made[0].unsettled, *made[0].assumption.here]),
            _COMPILE_SECONDS,
        )
        if self._cache is not None:
            self._cache.imported |= sys.modules.keys() - loaded
        unsettled, *assumes = (any(each) for each in zip(*map(json.loads, told), strict=True))
        assumption = replace(captured.assumption, anywhere=tuple(assumes))
        captured = replace(captured, unsettled=unsettled, assumption=assumption)
        digests = self._meeting.exchange(captured.digest, EXCHANGE_SECONDS)
        makers = [digests.index(digest) for digest in digests]

        def make_plan() -> None:
            warned = compiler.make_plan(folder, self._meeting.world_size)
            captured.warnings.extend(warned)
            if key and self._cache is not None and first and set(makers) == {0}:
                self._cache.add(key, folder, captured)

        return _Files(folder, captured, make_plan, makers, fingerprint)

    def _open(self, folder: Path, files: _Files, allowed_library: str) -> tuple[Any, str]:
        """The session, and a hash of the plans of all ranks."""
        # Whoever writes a library into the script wants it to run.
        allowed = str(folder / allowed_library) if allowed_library else ""
        plan = str(folder / "plan.json")

        def opened() -> Any:
            with as_no_plan():
                return build.runtime().Session(plan, allowed, files.captured.operators)

        session, orders = self.together(opened, lambda session: _hashed(session.collectives))
        _, hashes = self.together(lambda: session.plan_hash, str)

        def exchange(own: str) -> list[str]:
            return self._meeting.exchange(own, EXCHANGE_SECONDS)

        def check_shared() -> None:
            if not files.alike and len(set(exchange(_hashed(session.shared)))) > 1:
                assert files.fingerprint is not None
                planning.refuse_difference(files.fingerprint, exchange, self._group)

        self.together(check_shared, lambda _: "")
        axes = {axis for _, axis in session.collectives if axis}

        def check_order() -> None:
            for rank in {rank for axis in axes for rank in collectives.ranks_of(axis)}:
                if orders[rank] != orders[self._rendezvous.rank]:
                    raise NoPlan(
                        f"the plans of ranks {self._rendezvous.rank} and {rank}, which communicate "
                        "in the step, do not have the same collectives in the same order"
                    )

        self.together(check_order, lambda _: "")

        def connect() -> None:
            for axis in axes:
                collectives.limit(axis, self._deadline)
            with as_no_plan():
                session.connect(self._meeting, self.comm, self._deadline, self._first)

        self.together(connect, lambda _: "")
        _, seeds = self.together(torch.initial_seed, str)
        seed = int(seeds[0]) if self._init_seed is None else self._init_seed

        def fill() -> Trained | None:
            trained = None if self.trained else self._fill(session, seed)
            session.start()
            return trained

        trained, _ = self.together(fill, lambda _: "")
        if trained is not None:
            self.trained, self._first = trained, session
        return session, hashes[0] if len(set(hashes)) == 1 else _hashed(hashes)

    def _fill(self, session: Any, seed: int) -> Trained:
        """Fills every rank's rows of the parameters; those on 'meta' are initialised."""
        buffers = {state.name: state.tensor for state in weights.buffers(self._model)}
        on_meta = any(
            tensor.is_meta for tensor in (*weights.of_model(self._model), *buffers.values())
        )
        if on_meta:
            with torch.random.fork_rng(devices=[]):
                session.initialise(seed)
        trained = Trained(self._model, session)
        trained.adopt()
        for index, entry in enumerate(session.buffers):
            if entry["name"] in buffers and buffers[entry["name"]].is_meta:
                _set_buffer(self._model, buffers[entry["name"]], session.buffer(index))
        sharding.initialise(self._model)
        return trained

    def together(
        self,
        make: Callable[[], Any],
        text: Callable[[Any], str],
        seconds: int = EXCHANGE_SECONDS,
    ) -> tuple[Any, list[str]]:
        """Calls make() on every rank, and returns its texts from all ranks. If one raises, all do:
        that error there, CompileError elsewhere."""
        return together(self._rendezvous, make, text, seconds)


def _held_now(request: Request) -> dict[str, tuple[Place, Any]]:
    """Of lists that grow those of the first comparison: what is in them does not matter."""
    lists = {name: (place, emptied(place.value())) for name, place in request.growing.items()}
    return lists | {name: (place, place.value()) for name, place in request.held.items()}


def _hashed(value: object) -> str:
    return xxhash.xxh3_64_hexdigest(repr(value).encode())


def _dumped(config: Mapping[str, Any]) -> str:
    return str(yaml.dump(dict(config), Dumper=_PlainDumper, sort_keys=False))


def _fixed(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Those settings of the optimizer that a step does not follow."""
    kept = {key: value for key, value in optimizer.items() if key not in optimizers.FOLLOWED}
    if "groups" in kept:
        kept["groups"] = [_fixed(group) for group in kept["groups"]]
    if "momentum" in optimizer:
        kept["momentum"] = optimizer["momentum"] != 0
    return kept


# Keys of the config that only fully_shard determines.
_OF_FULLY_SHARD = policy_schema.keys_where("compile", "fully_shard")


# Keys of what is computed from all gradients: a plan knows those of its own ranks' parts.
_OVER_ALL_PARTS = ("clip_grad_norm", "grad_scaler")


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _set_buffer(model: nn.Module, before: Tensor, tensor: Tensor) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is before:
                module._buffers[name] = tensor
