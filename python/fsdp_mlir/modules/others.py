"""Models that fully_shard was called on and that a step calls besides its own, such as a frozen
reference: what their parameters are in the step.

FSDP2 gathers a group before forward and frees it after it, or keeps it until a backward comes by,
as it does with a root's. So does the step: it takes the shards of the first kind, and gathers them;
of the second kind, it takes the whole parameters that FSDP2 itself keeps, and has it gather them
before the step if it does not hold them, with the values, even of an earlier time, that it has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from fsdp_mlir.modules import sharding
from fsdp_mlir.support.autograd import nodes_from
from fsdp_mlir.support.errors import CaptureError, SourceMap, located
from fsdp_mlir.support.layouts import bytes_of
from fsdp_mlir.support.threads import while_recorded

_collectives = torch.ops._c10d_functional


class Revised(CaptureError):
    """A recording was made under an assumption about another model that it has refuted. The next
    one will not make it."""


@dataclass
class _Family:
    """The states of one model. `differentiated`: whether backward comes by its outputs, after which
    FSDP2 keeps none of its parameters."""

    states: list[FSDPState]
    differentiated: bool
    # Of one recording:
    outputs: list[Any] = field(default_factory=list)  # the autograd nodes that made them
    leaves: list[Tensor] = field(default_factory=list)
    name: str = ""


class Others:
    """The other models of a step, over all its recordings and calls."""

    def __init__(self) -> None:
        self._families: dict[int, _Family] = {}  # by the id of what the states share
        self._taken: dict[int, tuple[FSDPParam, Tensor, Tensor]] = {}
        self._settings: tuple[Any, ...] = ()
        self._recording: _Recording | None = None
        self._cold: list[FSDPState] = []  # which had no forward yet

    @property
    def called(self) -> bool:
        """Whether there are any."""
        return bool(self._families)

    # --- for a recording

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """In the body, which records a step, the forward of another sharded model computes with
        gathers that are part of the step. CaptureError if the step cannot have these."""
        recording = self._recording = _Recording(self)
        try:
            with recording.patched():
                yield
        finally:
            self._recording = None
            recording.restore()
        self._settings = self._settings_now()

    def initialise(self) -> bool:
        """After a recording that raised Revised: as FSDP2 does in the first forward, what the step
        calls and had none yet. Hooks that this registers would be undone after a recording. Returns
        whether there was anything."""
        cold, self._cold = self._cold, []
        for state in cold:
            state._lazy_init()
        return bool(cold)

    def before_evaluation(self) -> None:
        """Between the graphs of a step and of its evaluation: each gathers for itself."""
        if self._recording is not None:
            self._recording.forget()

    def check(self, loss: Tensor) -> None:
        """After the forward of the step: raises Revised, or CaptureError if the gradient of `loss`
        reaches a parameter of another model."""
        if self._cold:  # and code has caught the error
            raise Revised
        if not self._families:
            return
        nodes = nodes_from(loss.grad_fn)
        ends = {id(node.variable) for node in nodes if hasattr(node, "variable")}
        seen = set(map(id, nodes))
        revised = False
        for family in self._families.values():
            if any(id(leaf) in ends for leaf in family.leaves):
                raise CaptureError(
                    f"the loss has a gradient for parameters of '{family.name}', which fully_shard "
                    "was called on and which is not the model; freeze them with requires_grad_("
                    "False), or call it under torch.no_grad()"
                )
            differentiated = any(id(node) in seen for node in family.outputs)
            revised |= differentiated != family.differentiated
            family.differentiated = differentiated
        if revised:
            self._taken.clear()
            raise Revised

    def family(self, state: FSDPState, inputs: Any, name: str) -> _Family:
        """That of a state. Raises Revised for one that is to be initialised."""
        if state._is_root is None:
            self._cold.append(state)
            raise Revised
        key = id(state._state_ctx)
        if key not in self._families:
            states = list(state._state_ctx.all_states)
            params = [p.sharded_param for group in _groups(states) for p in group.fsdp_params]
            flows = torch.is_grad_enabled() and any(
                isinstance(each, Tensor) and each.requires_grad
                for each in (*tree_leaves(inputs), *params)
            )
            self._families[key] = _Family(states, flows)
        family = self._families[key]
        family.name = family.name or name
        return family

    def shard(self, record: FSDPParam) -> Tensor:
        """This rank's elements of a parameter, with padding, in one dimension."""
        data = record._sharded_param_data
        self._taken[id(record)] = record, data, data
        return data

    def whole(self, record: FSDPParam) -> Tensor:
        """The parameter that FSDP2 gathers and keeps. It has no memory until it is gathered."""
        taken = self._taken.get(id(record))
        unsharded = getattr(record, "_unsharded_param", None)
        if taken is not None and taken[1] is unsharded:
            return taken[2]
        with _disable_current_modes():
            if unsharded is None:
                numel, ranks = record._sharded_param_data.numel(), _ranks(record)
                dtype = record.param_dtype or record.orig_dtype
                # The step fills it outside of the inference mode in which its code may be.
                with torch.inference_mode(False):
                    record.init_all_gather_outputs([numel], [dtype], ranks, record.device)
                    record.alloc_all_gather_outputs()  # which an earlier step may have freed
                    record.init_unsharded_param()
                unsharded = record._unsharded_param
                record.free_unsharded_param()
            data = unsharded.detach()
        self._taken[id(record)] = record, unsharded, data
        return data

    # --- for a step

    def gather(self) -> bool:
        """Before a step, with the other ranks: what FSDP2 keeps is there. Returns whether any of it
        was not."""
        missing = [group for group in self._kept() if not group.is_unsharded]
        for group in missing:
            made = [each for record in group.fsdp_params for each in record.all_gather_outputs]
            with torch.inference_mode(any(each.is_inference() for each in made)):
                group.unshard()
                group.wait_for_unshard()
        return bool(missing)

    def are_stale(self) -> bool:
        """Whether FSDP2 holds whole parameters with other values than those of the shards, which
        the step would gather: of an earlier forward without backward, of unshard(), or of a time
        when the group was kept after forward."""
        groups = [group for group in self._freed() if group.is_unsharded]
        return any(_is_stale(record) for group in groups for record in group.fsdp_params)

    def after_step(self) -> None:
        """FSDP2 frees what a backward came by, and what it does not keep after forward."""
        sharding.reshard(self._freed())

    def hold(self) -> bool:
        """Whether what the step takes lies where it did, and is used as it was."""
        return self._settings == self._settings_now() and all(
            source is record._sharded_param_data or source is getattr(record, "_unsharded_param", 0)
            for record, source, _ in self._taken.values()
        )

    @contextmanager
    def sharded(self) -> Iterator[None]:
        """In the body, the modules have the parameters that they have while nothing is gathered."""
        groups = [group for each in self._families.values() for group in _groups(each.states)]
        gathered = [group for group in groups if group.is_unsharded]
        for record in (record for group in gathered for record in group.fsdp_params):
            record._setattr_on_modules(record.sharded_param)
        try:
            yield
        finally:
            for record in (record for group in gathered for record in group.fsdp_params):
                record._setattr_on_modules(record._unsharded_param)

    def _freed(self) -> list[FSDPParamGroup]:
        """Those that the step gathers, and that FSDP2 frees in it."""
        return [
            group
            for family in self._families.values()
            for group in _groups(family.states)
            if family.differentiated or (group._reshard_after_forward and self._takes(group))
        ]

    def _takes(self, group: FSDPParamGroup) -> bool:
        return any(id(record) in self._taken for record in group.fsdp_params)

    def _kept(self) -> list[FSDPParamGroup]:
        return [
            group
            for family in self._families.values()
            if not family.differentiated
            for group in _groups(family.states)
            if not group._reshard_after_forward and self._takes(group)
        ]

    def _settings_now(self) -> tuple[Any, ...]:
        return tuple(
            (group._reshard_after_forward, group.reshard_after_backward)
            for family in self._families.values()
            for group in _groups(family.states)
        )


class _Recording:
    """Of one recording: what takes the place of FSDP2's methods."""

    def __init__(self, others: Others) -> None:
        self._others = others
        self._sources = SourceMap()
        self._states: list[FSDPState] = []
        self._registered: dict[int, tuple[FSDPParam, nn.Parameter]] = {}  # with what was there
        self._gathered: dict[int, list[Tensor]] = {}  # of groups that stay so in the step
        for family in others._families.values():
            family.outputs.clear()
            family.leaves.clear()

    @contextmanager
    def patched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, method in (
                (FSDPState, "_root_pre_forward", self._root_pre_forward),
                (FSDPState, "_register_pre_backward_hook", self._note_output),
                (FSDPParamGroup, "pre_forward", self._pre_forward),
                (FSDPParamGroup, "post_forward", self._post_forward),
                (FSDPParamGroup, "_prefetch_unshard", staticmethod(self._prefetch)),
            ):
                patched = while_recorded(getattr(owner, name), method)
                static = isinstance(method, staticmethod)
                stack.enter_context(
                    mock.patch.object(owner, name, staticmethod(patched) if static else patched)
                )
            yield

    def forget(self) -> None:
        """What stayed gathered."""
        self._gathered.clear()

    def restore(self) -> None:
        """Also after a forward that has failed."""
        for key in list(self._registered):
            self._put_back(key)
        for state in self._states:
            state._training_state = TrainingState.IDLE

    def _root_pre_forward(
        self, state: FSDPState, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        self._states.append(state)
        name = sharding.class_name(module)
        why = _not_taken(state)
        if why:
            raise located(
                self._sources.frame(sys._getframe(2)),
                f"the step calls '{name}', which fully_shard was called on and which is not the "
                f"model, with {why}",
            )
        self._others.family(state, (args, kwargs), name)
        return args, kwargs

    def _pre_forward(
        self, group: FSDPParamGroup, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        family = next(
            family for family in self._others._families.values() if group in _groups(family.states)
        )
        wholes = self._gathered.get(id(group))
        if wholes is None:
            keeps = not group._reshard_after_forward
            taken = self._others.whole if keeps and not family.differentiated else self._whole
            wholes = [taken(record) for record in group.fsdp_params]
            if keeps:
                self._gathered[id(group)] = wholes
        for record, whole in zip(group.fsdp_params, wholes, strict=True):
            if id(record) in self._registered:
                continue  # as a part of the group has run
            leaf = whole.detach().requires_grad_(record.sharded_param.requires_grad)
            leaf._is_param = True
            family.leaves.append(leaf)
            info = record._module_info
            self._registered[id(record)] = record, info.module._parameters[info.param_name]
            record._setattr_on_modules(leaf)
        return args, kwargs

    def _whole(self, record: FSDPParam) -> Tensor:
        """Gathered by calls of the step."""
        part, ranks = self._others.shard(record), _ranks(record)
        if record.param_dtype is not None:
            part = part.to(record.param_dtype)
        shape = record._orig_size
        if ranks > 1:
            group = record.mesh_info.shard_process_group
            part = _collectives.all_gather_into_tensor(part, ranks, group.group_name)
            part = _collectives.wait_tensor(part)
        dim = record.fsdp_placement.dim
        if dim != 0 and ranks > 1:
            parts = part.view(ranks, *record.padded_sharded_param_size)
            return torch.cat(parts.unbind(0), dim)
        return part.narrow(0, 0, shape.numel()).view(shape)

    def _post_forward(self, group: FSDPParamGroup, _module: Any, _input: Any, output: Any) -> Any:
        for record in group.fsdp_params:
            self._put_back(id(record))
        return output

    def _put_back(self, key: int) -> None:
        if key in self._registered:
            record, before = self._registered.pop(key)
            record._setattr_on_modules(before)

    def _note_output(self, state: FSDPState, output: Any) -> Any:
        if torch.is_grad_enabled():
            family = self._others._families[id(state._state_ctx)]
            found = (each for each in tree_leaves(output) if isinstance(each, Tensor))
            family.outputs += [each.grad_fn for each in found if each.grad_fn is not None]
        return output

    def _prefetch(self, _group: FSDPParamGroup, _pass_type: str) -> None:
        """Nothing: the step gathers where it needs to."""


def _groups(states: Iterable[FSDPState]) -> list[FSDPParamGroup]:
    return [group for state in states for group in state._fsdp_param_groups]


def _ranks(record: FSDPParam) -> int:
    return int(record.mesh_info.shard_mesh_size)


def _is_stale(record: FSDPParam) -> bool:
    """Whether this rank's rows of the whole parameter are not what its shard is now."""
    own = record.sharded_param._local_tensor
    dim, rank = record.fsdp_placement.dim, record.mesh_info.shard_mesh_rank
    begin = min(rank * record.padded_sharded_param_size[dim], record._orig_size[dim])
    with torch.no_grad():
        rows = record._unsharded_param.narrow(dim, begin, own.shape[dim])
        both = map(bytes_of, (rows, own.to(rows.dtype)))
        return not torch.equal(*both)


def _not_taken(state: FSDPState) -> str:
    """Why a state's parameters are not taken into a step; empty if they are."""
    for group in state._fsdp_param_groups:
        if why := next(sharding.not_compiled(group, state._mp_policy), ""):
            return why
        if group.mesh_info.mesh.device_type != "cpu":
            return f"a mesh on '{group.mesh_info.mesh.device_type}'"
        if group._use_post_forward_mesh:
            return "an integer for 'reshard_after_forward'"
        if not group.reshard_after_backward:
            return "set_reshard_after_backward(False)"
        if any(record.is_dtensor for record in group.fsdp_params):
            return "parameters that were DTensors before"
        if any(record.sharded_param.is_meta for record in group.fsdp_params):
            return "parameters on 'meta'"
    return ""
