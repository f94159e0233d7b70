"""What capture needs of a policy file: the units, and the mixed precision of each.

The rest of the file is fsdp-opt's. Units are formed as fsdp-assign-units forms them: a parameter
belongs to its innermost module that a pattern matches, else to the root unit; of two patterns that
match one module the first wins. A parameter that is ignored belongs to no unit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _apply_to_tensors

from fsdp_mlir.modules.sharding import Shown, class_name
from fsdp_mlir.modules.weights import State
from fsdp_mlir.policy.unit_entry import Entries, Keeping
from fsdp_mlir.support import policy_schema
from fsdp_mlir.support.errors import CaptureError

# Of PyTorch: major and minor.
Version = tuple[int, int]
KEEPS_GRADIENTS: Version = (2, 15)


@dataclass(frozen=True)
class MixedPrecision:
    """FSDP2's MixedPrecisionPolicy of one unit."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter of `dtype` is gathered."""
        return self.param_dtype if self.param_dtype and dtype.is_floating_point else dtype

    def grad_dtype(self, dtype: torch.dtype, version: Version = KEEPS_GRADIENTS) -> torch.dtype:
        """The dtype to which autograd casts a gradient of a parameter of `dtype`, unless
        `keeps_gradients`.

        Before PyTorch 2.15 a gradient has the dtype of what was gathered.
        """
        if version < KEEPS_GRADIENTS:
            return self.computed(dtype)
        return self.reduce_dtype or dtype

    def keeps_gradients(self, dtype: torch.dtype, version: Version = KEEPS_GRADIENTS) -> bool:
        """Whether there is no such cast from where backward has reached the outputs of the unit.

        FSDP2 leaves the cast to the reduction if the reduction has a wider dtype than the parameter
        (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _set_unsharded_grad_dtypes). What
        comes before, from a use of the parameter outside the unit's forward, is cast.
        """
        return self.grad_dtype(dtype, version).itemsize > self.computed(dtype).itemsize

    def cast_inputs(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """FSDP2's forward pre-hook."""
        if not (self.cast_forward_inputs and self.param_dtype):
            return args, kwargs
        cast = partial(_cast, self.param_dtype)
        return _apply_to_tensors(cast, args), _apply_to_tensors(cast, kwargs)

    def cast_output(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """FSDP2's forward hook."""
        if self.output_dtype is None:
            return output
        return _apply_to_tensors(partial(_cast, self.output_dtype), output)


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@dataclass(frozen=True)
class Entry:
    """One element of `units`: patterns of module names, or of class names."""

    patterns: tuple[re.Pattern[str], ...]
    by_class: bool
    precision: MixedPrecision | None
    reshards: bool = True  # after forward

    def matches(self, name: str, class_name: str) -> bool:
        subject = class_name if self.by_class else name
        return any(pattern.fullmatch(subject) for pattern in self.patterns)


@dataclass(frozen=True)
class Policy:
    """The units and their mixed precision, that of the root unit, and parameters in no unit.
    `sums_first`: gradients of several microbatches are added before they are reduced."""

    units: tuple[Entry, ...] = ()
    root: MixedPrecision | None = None
    ignore: tuple[re.Pattern[str], ...] = ()
    sums_first: bool = False
    reshards_root: bool = False


class Units:
    """The units that a policy makes of a model."""

    def __init__(self, policy: Policy, model: nn.Module) -> None:
        self._policy = policy
        self._model = model
        self._classes = {name: class_name(module) for name, module in model.named_modules()}

    @property
    def sums_first(self) -> bool:
        return self._policy.sums_first

    def _entry(self, module: str) -> Entry | None:
        class_name = self._classes.get(module, "")
        return next((e for e in self._policy.units if e.matches(module, class_name)), None)

    def _unit_of(self, name: str) -> tuple[str, MixedPrecision | None]:
        """The module that is the unit of a parameter ("" for the root), and its policy."""
        while "." in name:
            name = name.rpartition(".")[0]
            if entry := self._entry(name):
                return name, entry.precision
        return "", self._policy.root

    def _units_of(self, param: State) -> dict[str, MixedPrecision | None]:
        """The units of all names of a parameter; none of one that is ignored."""
        names = (param.name, *param.aliases)
        if any(pattern.fullmatch(name) for pattern in self._policy.ignore for name in names):
            return {}
        return dict(self._unit_of(name) for name in names)

    def ignores(self, param: State) -> bool:
        return not self._units_of(param)

    def precision_of(self, param: State) -> MixedPrecision | None:
        """CaptureError for a tied parameter whose units differ in mixed precision."""
        units = self._units_of(param)
        if len(set(units.values())) > 1:
            raise CaptureError(
                f"parameter '{param.name}' is in units of different mixed precision: "
                + ", ".join(f"'{name or '(root)'}'" for name in units)
            )
        return next(iter(units.values()), None)

    def with_precision(self, params: Iterable[State]) -> dict[str, MixedPrecision]:
        """The units with mixed precision by module name; the root is one without parameters too."""
        units: dict[str, MixedPrecision | None] = {"": self._policy.root}
        for param in params:
            units.update(self._units_of(param))
        return {name: precision for name, precision in units.items() if precision}

    def formed(self, params: Iterable[State]) -> list[list[str]]:
        """The modules of each unit that has parameters, except the root unit.

        The modules that a list of patterns matches are one unit, and so are those that share a
        parameter; a unit that shares one with the root is part of the root unit.
        """
        unit_of: dict[Any, set[str]] = {}
        for param in params:
            modules = set(self._units_of(param))
            for claim in map(self._claim, list(modules)):
                modules |= unit_of.get(claim, set())
            unit_of |= dict.fromkeys(map(self._claim, modules), modules)
        units = {id(unit): unit for unit in unit_of.values()}
        return [sorted(unit) for unit in units.values() if "" not in unit]

    def _claim(self, module: str) -> Any:
        """What modules of one call of fully_shard have in common."""
        entry = self._entry(module) if module else None
        return entry if entry and len(entry.patterns) > 1 else module

    def _resharded(self, units: Sequence[Sequence[str]]) -> set[str]:
        """Those that are freed after forward, by their first modules."""
        entries = {unit[0]: self._entry(unit[0]) for unit in units}
        freed = {name for name, entry in entries.items() if entry and entry.reshards}
        return freed | ({""} if self._policy.reshards_root else set())

    def _keeping(
        self, params: Iterable[State], unit_of: Mapping[str, str], version: Version
    ) -> Keeping:
        """By a unit's first module ("" for the root): its parameters that keep gradients."""
        keeping: Keeping = {}
        for param in params:
            precision, dtype = self.precision_of(param), param.tensor.dtype
            # One that may be summed over other ranks first is cast before (FSDPParam,
            # may_reduce_grad_outside_dp).
            summed = param.spec is not None and any(p.is_replicate() for p in param.spec.placements)
            if precision and not summed and precision.keeps_gradients(dtype, version):
                cast = precision.grad_dtype(dtype, version)
                keeping.setdefault(unit_of[param.name], []).append((param.name, cast))
        return keeping

    @contextmanager
    def hooked(
        self, params: Sequence[State], version: Version, shown: Shown | None
    ) -> Iterator[Entries]:
        """Makes casts at unit boundaries and entry functions as FSDP2 of PyTorch `version` has
        them, and leaves gradients in their dtype where it does.

        Every module that a pattern matches is cast here, even one without parameters of its own. In
        a unit of several modules FSDP2 casts at each of them (_register_group_forward_hooks).
        Hooks of the model that are outside of FSDP2's own, as `shown` has them, are outside here.
        """
        units = self.formed(params)
        first = {name: unit[0] for unit in units for name in unit}
        unit_of = {
            param.name: first.get(next(iter(found)), "")
            for param in params
            if (found := self._units_of(param))
        }
        keeping, resharded = self._keeping(params, unit_of, version), self._resharded(units)
        kept = shown is not None and shown.kept
        entries = Entries(self._model, units, unit_of, keeping, resharded, kept=kept)
        handles: list[Any] = list(entries.attach())
        hooked: set[int] = set()
        for name, module in self._model.named_modules(remove_duplicate=False):
            entry = self._entry(name) if name else None
            precision = entry.precision if entry else self._policy.root
            if not (entry or module is self._model) or precision is None or id(module) in hooked:
                continue
            hooked.add(id(module))
            handles.append(
                module.register_forward_pre_hook(
                    precision.cast_inputs, prepend=True, with_kwargs=True
                )
            )
            handles.append(module.register_forward_hook(precision.cast_output))
        for module in self._model.modules() if shown else ():
            for key in reversed(shown.before.get(id(module), ())):
                module._forward_pre_hooks.move_to_end(key, last=False)
            for key in shown.behind.get(id(module), ()):
                module._forward_hooks.move_to_end(key)
        try:
            yield entries
        finally:
            for handle in handles:
                handle.remove()


def pattern_to_regex(pattern: str) -> re.Pattern[str]:
    """`*` stays within one dotted segment of a name, `**` crosses segments, `?` is one letter."""
    wildcards = {"*": r"[^.]*", "**": r".*", "?": r"[^.]"}
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    return re.compile("".join(wildcards.get(part, re.escape(part)) for part in parts))


def read_policy(path: Path | None) -> Policy:
    """Reads a policy file; CaptureError for one that capture cannot follow."""
    config = policy_schema.read(path) if path else {}
    root = _mixed_precision(config.get("mixed_precision"))
    entries = config.get("units", [])
    if entries == "auto":
        if root:
            raise CaptureError(
                f"'mixed_precision' in '{path}' needs units by name or class, got 'units: auto'"
            )
        entries = []
    units = [
        Entry(
            _patterns(entry.get("class", entry.get("match"))),
            "class" in entry,
            _mixed_precision(entry["mixed_precision"]) if "mixed_precision" in entry else root,
            _reshards(entry.get("reshard_after_forward", True)),
        )
        for entry in entries
    ]
    sums_first = not config.get("reduce_each_microbatch", True)
    reshards_root = _reshards(config.get("reshard_after_forward", False))
    ignore = _patterns(config.get("ignore", []))
    return Policy(tuple(units), root, ignore, sums_first, reshards_root)


def _reshards(given: bool | str) -> bool:
    """Of a group of one rank, each keeps the whole parameters."""
    return given if isinstance(given, bool) else int(given) > 1


def _patterns(given: str | list[str]) -> tuple[re.Pattern[str], ...]:
    """The patterns: a single one, or a list of them."""
    return tuple(map(pattern_to_regex, [given] if isinstance(given, str) else given))


def _mixed_precision(given: dict[str, Any] | bool | None) -> MixedPrecision | None:
    """None where nothing is cast."""
    if not given or given is True:
        return None
    dtypes = [name and getattr(torch, name) for name in map(given.get, policy_schema.DTYPE_KEYS)]
    casts = given.get("cast_forward_inputs", True)
    return MixedPrecision(*dtypes, casts) if any(dtypes) else None
