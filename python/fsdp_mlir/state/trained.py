"""The memory that compiled steps and eager code both train: parameters, buffers, optimizer state.

FSDP2's DTensors stay what they are. The storages of their local tensors are moved into the memory
of the first session, or the local tensors re-pointed there, the way FSDP2 itself re-points them
after load_state_dict(assign=True); a session of another plan uses the same memory. Buffers and the
optimizer's state are the model's and the optimizer's own tensors, which a session is given. So each
side sees the changes that the other makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from fsdp_mlir.modules import sharding, weights
from fsdp_mlir.support import build

# The optimizer's name for state that is not a tensor of the parameter's shape.
_COUNT = "step"


class Order:
    """Which tensors of a model the parameters of a session's plan are, by the plan's index, as the
    names are now: code may exchange modules, or put them in another order."""

    def __init__(self, model: nn.Module, session: Any) -> None:
        self.groups = sharding.groups(model)
        names = {
            name: state.tensor
            for state in weights.parameters(model)
            for name in (state.name, *state.aliases)
        }
        records = sharding.managed(model)
        # In the plan's order.
        self.sharded: list[tuple[int, FSDPParam]] = []
        self.ignored: list[tuple[int, nn.Parameter]] = []
        for index, entry in enumerate(session.params):
            param = names[entry["name"]]
            if id(param) in records:
                self.sharded.append((index, records[id(param)]))
            else:
                self.ignored.append((index, param))
        self.held = tuple((index, id(each)) for index, each in (*self.sharded, *self.ignored))


class Trained:
    """The memory of one model. `session` has the memory of the parameters; all sessions are of
    plans with as many parameters, of the same shapes in the same units."""

    def __init__(self, model: nn.Module, session: Any) -> None:
        self._session = session
        self._order = Order(model, session)
        self._records = dict(self._order.sharded)
        self._pointers: dict[int, int] = {}
        self._forms = _forms(model)
        self._fits = True  # as `settle` found
        self._forwarded = False

    def has(self, order: Order) -> bool:
        """Whether each parameter lies where a plan of that order expects it."""
        return self._fits and (order is self._order or order.held == self._order.held)

    def changed(self, model: nn.Module) -> str:
        """What no plan can follow: the memory is for as many parameters of each shape and dtype as
        the model had. Empty if it still has these, by whatever names."""
        sharding.reshard(sharding.groups(model))
        before, now = self._forms, _forms(model)
        if Counter(before.values()) == Counter(now.values()):
            return ""
        name = next(name for name in (*before, *now) if before.get(name) != now.get(name))
        what = f"is {now.get(name)} and was {before.get(name)}"
        if name not in before or name not in now:
            what = "is gone" if name in before else "is new"
        return f"the model's parameters are not those of its first plan: '{name}' {what}"

    def arrange(self, order: Order) -> bool:
        """Moves parameters to where a plan of that order expects them; returns whether they fit
        there."""
        if not self._fits:
            return False
        before = {**self._records, **dict(self._order.ignored)}
        sharded = [each for each in order.sharded if before.get(each[0]) is not each[1]]
        ignored = [each for each in order.ignored if before.get(each[0]) is not each[1]]
        for index, record in sharded:
            memory = self._session.padded_shard(index)
            param = record.sharded_param
            form = record.padded_sharded_param_size, param.dtype, False
            if index not in self._records or (memory.shape, memory.dtype, param.is_meta) != form:
                return False
        for index, param in ignored:
            memory = self._session.shard(index)
            form = param.shape, param.dtype, False
            if index in self._records or (memory.shape, memory.dtype, param.is_meta) != form:
                return False
        with torch.no_grad():
            # First away from where others will lie.
            for index, _ in sharded:
                self._put(self._records[index], torch.zeros_like(self._session.padded_shard(index)))
            for index, _ in ignored:
                _put_ignored(before[index], torch.empty_like(self._session.shard(index)))
            self._order, self._records = order, dict(order.sharded)
            for index, record in sharded:
                self._move(index, record)
            for index, param in ignored:
                self._move_ignored(index, param)
        return True

    def adopt(self) -> None:
        """Moves the values of all parameters to the session's memory, and frees their old memory.
        Parameters on 'meta' take the session's values."""
        with torch.no_grad():
            for index, record in self._order.sharded:
                self._move(index, record)
            for index, param in self._order.ignored:
                self._move_ignored(index, param)

    def settle(self) -> None:
        """Prepares a compiled step: registers the sharded parameters, and moves values that have
        since been put elsewhere back. One that has another dtype or shape now stays where it is,
        for FSDP2."""
        sharding.reshard(self._order.groups)
        self._fits = True
        for index, record in self._order.sharded:
            local = record.sharded_param._local_tensor
            if local.data_ptr() == self._pointers[index]:
                continue
            own = _shard(record, self._session.padded_shard(index))
            if not _are_alike(local, own):
                self._fits = False
                continue
            with torch.no_grad():
                self._move(index, record)
        for index, param in self._order.ignored:
            if param.data_ptr() == self._pointers[index]:
                continue
            own = self._session.shard(index)
            if not _are_alike(param, own):
                self._fits = False
                continue
            with torch.no_grad():
                self._move_ignored(index, param)

    def has_run(self) -> None:
        """After a call of a plan: leaves what FSDP2's first forward would have left, memory of the
        dtypes that it gathers, so that it takes or refuses later dtypes as it would have."""
        if self._forwarded:
            return
        for _, record in self._order.sharded:
            if record.all_gather_outputs:
                continue
            dtype = record.param_dtype or record.sharded_param.dtype
            size = record.padded_sharded_param_size.numel()
            ranks, device = record.mesh_info.shard_mesh_size, record.sharded_param.device
            record.init_all_gather_outputs([size], [dtype], ranks, device)
            record.free_all_gather_outputs()
        self._forwarded = True

    @property
    def params(self) -> dict[int, nn.Parameter]:
        """The model's parameters, by the plan's index."""
        found = {index: record.sharded_param for index, record in self._order.sharded}
        return found | dict(self._order.ignored)

    def as_part(self, index: int, local: Tensor) -> Tensor:
        """A tensor of the shape of this rank's shard, as this rank's part of a whole one."""
        record = self._records.get(index)
        return local if record is None else record.to_sharded_dtensor(local)

    def add_gradients(self, gradients: list[tuple[int, Tensor]]) -> None:
        """Reduced gradients of this rank's shards, by the plan's index, as FSDP2 leaves them."""
        params = self.params
        with torch.no_grad():
            for index, gradient in gradients:
                param, part = params[index], self.as_part(index, gradient)
                if param.grad is None:
                    param.grad = part
                else:
                    param.grad += part
                for hook in (param._post_accumulate_grad_hooks or {}).values():
                    hook(param)

    def _move(self, index: int, record: FSDPParam) -> None:
        self._put(record, self._session.padded_shard(index))
        self._pointers[index] = record.sharded_param._local_tensor.data_ptr()

    @staticmethod
    def _put(record: FSDPParam, flat: Tensor) -> None:
        local = _shard(record, flat)
        param = record.sharded_param
        if param.is_meta:
            made = nn.Parameter(record.to_sharded_dtensor(local), requires_grad=param.requires_grad)
            # The same object for whoever holds it, such as an optimizer.
            torch.utils.swap_tensors(param, made)
        elif _moved(param._local_tensor, flat):
            local = param._local_tensor
        else:
            local.copy_(param._local_tensor)
        record._sharded_param_data = flat.view(-1)
        record.sharded_param._local_tensor = local

    def _move_ignored(self, index: int, param: nn.Parameter) -> None:
        own = self._session.shard(index)
        _put_ignored(param, own)
        self._pointers[index] = own.data_ptr()


def _forms(model: nn.Module) -> dict[str, str]:
    """Of the whole parameters, by name."""
    records = sharding.managed(model)
    return {
        name: f"{param.dtype}{list(param.shape)}{'' if id(param) in records else ' (ignored)'}"
        for name, param in model.named_parameters()
    }


def _shard(record: FSDPParam, flat: Tensor) -> Tensor:
    """The memory of a shard in that of its padded one."""
    dim = record.fsdp_placement.dim
    return flat.narrow(dim, 0, record.sharded_size[dim])


def _are_alike(tensor: Tensor, memory: Tensor) -> bool:
    is_empty = tensor.numel() == memory.numel() == 0
    return tensor.dtype == memory.dtype and (is_empty or tensor.shape == memory.shape)


def _put_ignored(param: nn.Parameter, own: Tensor) -> None:
    if param.is_meta:
        torch.utils.swap_tensors(param, nn.Parameter(own, requires_grad=param.requires_grad))
    elif not _moved(param, own):
        own.copy_(param)
        param.data = own


def _moved(tensor: Tensor, memory: Tensor) -> bool:
    """Moves the storage of a tensor to that of `memory`, if it is equally large: then whatever else
    shares the storage, such as an earlier state dict, still sees the same values. A NumPy array
    would not follow; it makes the storage one that cannot be resized."""
    storage = tensor.untyped_storage()
    same = (
        tensor.numel() > 0
        and tensor.storage_offset() == 0
        and tensor.is_contiguous()
        and storage.nbytes() == memory.numel() * memory.element_size()
        and storage.resizable()
        and tensor.device == memory.device
    )
    if same:
        build.runtime().move_storage(tensor, memory)
    return same


# Where the data of a tensor lies, and in which form.
_Placed = tuple[Any, ...]


def _placed(tensor: Tensor) -> _Placed:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.data_ptr(), local.dtype, local.shape, local.stride()


def _is_bound(bound: tuple[Tensor, _Placed] | None, tensor: Tensor) -> bool:
    """Whether a session has this tensor as it is now: `.data =`, `set_` and swap_tensors put other
    memory into the same object."""
    return bound is not None and bound[0] is tensor and bound[1] == _placed(tensor)


class Bound:
    """The tensors of the model, of constants, and of an optimizer that one session was given."""

    def __init__(
        self,
        session: Any,
        model: nn.Module,
        trained: Trained,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._session = session
        self._model = model
        self.trained = trained
        self._optimizer = optimizer
        self.given_for: object = None  # which of the calls with the plan has its names in place
        self.misfit = ""  # what `tensors` has found last that does not fit
        self._buffers: dict[int, tuple[Tensor, _Placed]] = {}
        self._states: dict[int, dict[str, tuple[Tensor, _Placed]]] = {}
        self._names = [entry["name"] for entry in session.buffers]
        self._updated = {
            index: names
            for index in range(len(session.params))
            if (names := list(session.optimizer_state(index)))
        }
        self.renew()

    def renew(self) -> None:
        """Finds the plan's parameters and buffers by the names that they have in the model now."""
        self._order, model = Order(self._model, self._session), self._model
        # Where the model holds the plan's buffers; the others are constants.
        slots, modules = {}, weights.modules_by_path(model)
        for state in weights.buffers(model):
            path, _, attribute = state.name.rpartition(".")
            slots[state.name] = modules[path]._buffers, attribute
        self._slots = [slots.get(name) for name in self._names]

    def tensors(
        self, constants: Mapping[str, Tensor], assigned: Collection[str] = frozenset()
    ) -> bool:
        """Gives the session the model's parameters and buffers, and constants by their names;
        returns whether they fit. Buffers on 'meta' remain the session's. Those of `assigned` become
        new tensors: the step writes in place what forward would have assigned, and who holds the
        tensor from before keeps its values."""
        # State that only the session has would stay with other parameters.
        may = self._optimizer is not None
        self.misfit = "a parameter"
        if not self.trained.has(self._order) and not (may and self.trained.arrange(self._order)):
            return False
        for index, (name, slot) in enumerate(zip(self._names, self._slots, strict=True)):
            tensor = constants[name] if slot is None else slot[0].get(slot[1])
            self.misfit = f"buffer '{name}'"
            if tensor is None or tensor.requires_grad:
                return False
            if name in assigned and slot is not None and not tensor.is_meta:
                tensor = slot[0][slot[1]] = tensor.clone()
            if tensor.is_meta or _is_bound(self._buffers.get(index), tensor):
                continue
            if tensor.numel() > 0 and tensor.data_ptr() == 0:  # to be gathered (modules/others.py)
                continue
            own = self._session.buffer(index)
            self.misfit = (
                f"'{name}', a {tensor.dtype} of shape {list(tensor.shape)} and strides "
                f"{list(tensor.stride())} on {tensor.device.type},"
            )
            fits = (
                tensor.device.type == "cpu"
                and (tensor.dtype, tensor.shape) == (own.dtype, own.shape)
                and tensor.stride() == own.stride()
            )
            if not fits:
                return False
            self._session.bind_buffer(index, tensor)
            self._buffers[index] = tensor, _placed(tensor)
        return True

    @property
    def params(self) -> list[Tensor]:
        return list(map(_local, self.trained.params.values()))

    def buffers(self, *, without: Collection[str]) -> list[Tensor]:
        """The model's, and constants, but for those of these names."""
        buffers = []
        for index, (name, slot) in enumerate(zip(self._names, self._slots, strict=True)):
            bound = self._buffers.get(index)
            now = slot[0].get(slot[1]) if slot else bound and bound[0]
            if now is not None and name not in without:
                buffers.append(now)
        return buffers

    def buffer(self, name: str) -> Tensor | None:
        """What the session has for a buffer or constant; None for one that the plan lacks."""
        bound = self._buffers.get(self._names.index(name)) if name in self._names else None
        return bound and bound[0]

    def optimizer_state(self, steps: int) -> None:
        """Gives the session the optimizer's tensors, if they are different from before, and the
        number of steps so far."""
        given = self._given_state()
        if given:
            stateful = any(given.values())
            # Without updates SGD's next one is the first of all parameters.
            steps = max(1, steps) if stateful else 0
            if (self._session.steps, bool(self._session.updates)) != (steps, stateful):
                self._session.steps = steps
            for index, tensors in given.items():
                self._give(index, tensors, stateful=stateful)
        elif self._session.steps != steps:
            self._session.steps = steps

    def _given_state(self) -> dict[int, dict[str, Tensor]]:
        """What the optimizer has of the state that the session updates, by the plan's index."""
        if self._optimizer is None:
            return {}
        params, found = self.trained.params, {}
        for index, names in self._updated.items():
            state = self._optimizer.state.get(params[index], {})
            found[index] = {name: state[name] for name in names if state.get(name) is not None}
        return found

    def _give(self, index: int, given: dict[str, Tensor], *, stateful: bool) -> None:
        bound = self._states.get(index, {})
        same = given.keys() == bound.keys() and all(_is_bound(bound[n], given[n]) for n in given)
        # The session forgets with its next update that one among others has no state yet.
        if same and (given or not stateful):
            return
        tensors = [(name, _local(tensor)) for name, tensor in given.items()]
        self._session.bind_optimizer_state(index, tensors)
        self._states[index] = {name: (given[name], _placed(given[name])) for name in given}

    def _made(self) -> list[int]:
        """The parameters that are updated, in the order in which FSDP2's step makes their state."""
        assert self._optimizer is not None
        own = (param for group in self._optimizer.param_groups for param in group["params"])
        order = {id(param): place for place, param in enumerate(own)}
        return sorted(self._updated, key=lambda index: order.get(id(self.trained.params[index]), 0))

    def fill(self, *, skipped: bool) -> None:
        """After a step: the optimizer's state is what the session updates."""
        if self._optimizer is None or skipped:
            return
        params = self.trained.params
        for index in self._updated if all(map(self._states.get, self._updated)) else self._made():
            names = self._updated[index]
            param = params[index]
            state = self._optimizer.state[param]
            is_empty = _local(param).numel() == 0
            if self._states.get(index):
                # For a shard without elements only the count of steps is updated.
                if _COUNT in state and is_empty:
                    state[_COUNT] += 1
                continue
            for name, tensor in self._session.optimizer_state(index).items():
                sharded = name != _COUNT
                state[name] = self.trained.as_part(index, tensor) if sharded else tensor
            if _COUNT in names and is_empty:
                state[_COUNT].fill_(1)  # other parameters may have more
            self._states[index] = {name: (state[name], _placed(state[name])) for name in names}


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
