"""A plan of a model that is open, and which of the plans there are for other numbers is one's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdp_mlir.frontdoor.planning import Captured
from fsdp_mlir.frontdoor.together import COMPILE, OTHER_VALUES, READY
from fsdp_mlir.frontdoor.unchanged import Unchanged, as_before
from fsdp_mlir.modules.left import Leaving
from fsdp_mlir.modules.place import Place
from fsdp_mlir.record.graph import Reliance
from fsdp_mlir.state.trained import Bound
from fsdp_mlir.step.batches import tensors
from fsdp_mlir.step.nested import shares
from fsdp_mlir.support.generators import set_states, states, undone
from fsdp_mlir.support.layouts import bytes_of, storage_of

# Elements of a source that a plan relies on, and sets of such sources that are known to serve.
_SMALL = 64
_MOST_SEEN = 256

# Plans of one model, as torch.compile's limit of recompilations.
LIMIT = 8

# What a rank says of a run that is in vain, as a module in Python has done something else.
BROKEN = OTHER_VALUES


@dataclass(eq=False)
class Compiled:
    """A plan that is open, and what the model was when it was captured. Captures of one step share
    the session, and each has its own part in Python."""

    session: Any
    bound: Bound
    captured: Captured
    policy: str
    unchanged: Unchanged
    plan_hash: str  # of the plans of all ranks
    leaving: Leaving
    held: Mapping[str, tuple[Place, Any]]  # numbers of each call when it was captured, and lists
    loss_dtype: torch.dtype = field(init=False)
    _has_run: Captured | None = field(default=None, init=False)
    seen: set[Any] = field(default_factory=set, init=False)
    _next: list[dict[str, Any]] = field(default_factory=list, init=False)  # those that ran last
    _undrawn: list[Any] | None = field(default=None, init=False)  # generators before that

    def __post_init__(self) -> None:
        self.loss_dtype = getattr(torch, self.session.loss_dtype)

    def takes(self, batches: Sequence[Mapping[str, Any]], *, evaluation: bool = False) -> bool:
        """Whether it can make the step of these microbatches."""
        return self.fits(batches) and self.serves(batches, evaluation=evaluation)

    def fits(self, batches: Sequence[Mapping[str, Any]]) -> bool:
        """Whether it may, whatever their values are, and other models have the parameters that
        FSDP2 computes with."""
        given = self._given(batches)
        # Keys that the step takes out of a mapping would be gone wherever else that comes.
        if self.captured.taken and shares(batches, list(self.captured.taken)):
            return False
        if self.captured.followed.would_miss(x for batch in batches for x in tensors(batch)):
            return False
        return not self.captured.others.are_stale() and all(
            map(self.captured.numbers.serves, given)
        )

    def serves(self, batches: Sequence[Mapping[str, Any]], *, evaluation: bool = False) -> bool:
        """Whether the values that decide what the step is, such as those of a mask or what it draws
        in Python, do so for these microbatches."""
        if self.captured.numbers.draws[evaluation]:
            with undone():
                given = self._given(batches, draws=True, evaluation=evaluation)
            if not all(map(self.captured.numbers.serves, given)):
                return False
        relied_on, buffers = self.captured.relied_on[evaluation], {}
        for name, buffer in self.captured.sources.items() if relied_on else ():
            if (tensor := self.bound.buffer(buffer)) is not None:
                buffers[name] = tensor
        return all(
            self._served(relied_on, buffers | {f"i{index}": x for index, x in enumerate(inputs)})
            for inputs in (self._inputs(batches, self._given(batches)) if relied_on else ())
        )

    def inputs(
        self, batches: Sequence[Mapping[str, Any]], *, evaluation: bool = False
    ) -> list[list[Tensor]]:
        """Those of the plan for each of these microbatches, the next ones to run. Draws."""
        if any(self.captured.numbers.draws):
            self._undrawn = states()
        self._next = self._given(batches, draws=True, evaluation=evaluation)
        return self._inputs(batches, self._next)

    def _inputs(
        self, batches: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]
    ) -> list[list[Tensor]]:
        numbers = self.captured.numbers
        own = ([numbers.input(each)] if numbers.names else [] for each in given)
        return [tensors(batch) + number for batch, number in zip(batches, own, strict=True)]

    def _given(
        self,
        batches: Sequence[Mapping[str, Any]],
        *,
        draws: bool = False,
        evaluation: bool = False,
    ) -> list[dict[str, Any]]:
        """The microbatches with the numbers that code reads elsewhere, as each of them finds them,
        and those that it draws."""
        held, given = {name: place.value() for name, (place, _) in self.held.items()}, []
        for batch in batches:
            drawn = self.captured.numbers.drawn(evaluation=evaluation) if draws else {}
            given.append({**batch, **held, **drawn})
            if len(batches) > 1 and (draws or not any(self.captured.numbers.draws)):
                held |= self.captured.numbers.after(given[-1])
        return given

    def _served(self, relied_on: Sequence[Reliance], sources: Mapping[str, Tensor]) -> bool:
        small = {
            name: bytes_of(x).numpy().tobytes()
            for name in dict.fromkeys(x for each in relied_on for x in each.outside)
            if (x := sources.get(name)) is not None and 0 < x.numel() <= _SMALL
        }
        # Most follow from a few numbers, which have been seen before.
        key = id(relied_on), tuple(small.items())
        for each in relied_on:
            seen = key in self.seen and small.keys() >= set(each.outside) and not each.draws
            if not seen and sources.keys() >= set(each.outside) and not each.holds(sources):
                return False
        if len(self.seen) < _MOST_SEEN:
            self.seen.add(key)
        return True

    def is_current(self, *, training: bool) -> bool:
        """Whether the model is what it was when it was captured, as far as that matters."""
        with self._compared():
            if not self.unchanged.holds():
                if not self.unchanged.holds_what_matters(training=training):
                    return False
                if training:
                    self.unchanged.renew()
            return self.captured.others.hold()

    def gathered(self) -> Compiled:
        """Before a call of all ranks: itself, with what it takes of other models in place."""
        if self.captured.others.gather():
            self.bind()
        return self

    def bind(self) -> bool:
        """Gives the session the tensors of the model as it was captured; returns whether they fit.
        Others with the same plan may have been captured with modules in other places."""
        if self.bound.given_for is not self:
            self.bound.renew()
            self.bound.given_for = self
        constants = self.captured.constants | self.captured.followed.tensors()
        return self.bound.tensors(constants, self.captured.assigned)

    def renew(self) -> None:
        """Takes the model as it is now for what was captured."""
        with self._compared():
            self.unchanged.renew()

    @contextmanager
    def _compared(self) -> Iterator[None]:
        """In the body, the model is as it was before it was captured."""
        with (
            as_before(self.held),
            self.leaving.compared(),
            self.captured.others.sharded(),
            self.captured.followed.as_captured(self._storages),
        ):
            yield

    def _storages(self, only_buffers: bool) -> set[int]:
        """Of what the plan may write, but for what it follows."""
        given = self.bound.buffers(without=self.captured.followed.names)
        if not only_buffers:
            given += self.bound.params
        return set(map(storage_of, given))

    def changed(self) -> str:
        """What has changed first since the capture; empty if nothing has."""
        with self._compared():
            return self.unchanged.changed()

    def moved(self) -> list[str]:
        """The names of numbers that code reads, if these alone have changed since the capture."""
        with self._compared():
            return self.unchanged.moved()

    def assumes(self, *, evaluation: bool) -> bool:
        """Whether it assumes what decides a branch, here or on another rank."""
        return self.captured.assumption.anywhere[evaluation]

    def undoing(self, inputs: Sequence[Tensor], *, evaluation: bool) -> Callable[[], None]:
        """Before it runs on `inputs`: what puts back what it writes, but for gradients, and what it
        draws."""
        assumption = self.captured.assumption
        tensors = [inputs[place] for place in assumption.inputs(evaluation=evaluation)]
        tensors += [x for name in assumption.written if (x := self.bound.buffer(name)) is not None]
        kept = [(tensor, tensor.clone()) for tensor in tensors]
        generator = torch.get_rng_state()
        for each in assumption.breaks:
            each.begin()

        def undo() -> None:
            torch.set_rng_state(generator)
            if self._undrawn is not None:
                set_states(self._undrawn)
            for each in reversed(assumption.breaks):
                each.undo()
            for tensor, before in kept:
                tensor.copy_(before)
            for each in assumption.breaks:
                each.raise_interrupt()

        return undo

    def decided(self, *, evaluation: bool) -> Sequence[bool]:
        """The truth values of the last run, with one that it did not have where it was captured as
        the last; empty if they are as it assumes."""
        assumed = self.captured.assumption.of(evaluation=evaluation)
        if assumed is None:
            return []
        now = assumed.now(self.captured.numbers.of(self._next[0]))
        return [] if now == assumed.outcomes else now

    def broken(self) -> int:
        """What a rank says of the modules that have run in Python: BROKEN if one has done something
        else than it was seen to do, COMPILE if another capture would have that, or READY."""
        failed = [each for each in self.captured.assumption.breaks if each.failed]
        if all(each.learned for each in failed):
            return COMPILE if failed else READY
        return BROKEN

    def leave(self, microbatches: int) -> None:
        """After a step: puts what its forward leaves in Python in place."""
        self._set_numbers()
        self.leaving.after_step(microbatches)
        self.captured.others.after_step()
        if self.captured.left and self._has_run is not self.captured:
            self.renew()
            self._has_run = self.captured

    def _set_numbers(self, *, evaluation: bool = False) -> None:
        """What forward has set of those that code reads elsewhere."""
        after = self.captured.numbers.after(self._next[-1], evaluation=evaluation)
        numbers = self.captured.numbers.of(self._next[-1])
        after |= self.captured.counts[evaluation].value(None, numbers) or {}
        for name, value in after.items():
            place, _ = self.held[name]
            if isinstance(value, list):
                place.value().extend(value)
            else:
                place.put(value)

    def take(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Takes out of containers among the inputs what the step does, as by pop()."""
        for name, keys in self.captured.taken.items():
            for batch in batches:
                for key in keys:
                    batch[name].pop(key, None)

    def evaluated(self, batch: Mapping[str, Any]) -> None:
        """After an evaluation."""
        self._set_numbers(evaluation=True)
        self.take([batch])

    def returned(self, loss: float, *, evaluation: bool = False) -> Any:
        """What the last step gave, or the last evaluation, with its first microbatch."""
        value = torch.tensor(loss, dtype=self.loss_dtype)
        numbers = self.captured.numbers.of(self._next[0])
        return self.captured.outputs[evaluation].value(value, numbers)


def with_place(
    key: tuple[Any, ...], batch: Mapping[str, Any], cache: Mapping[Any, Compiled | None]
) -> tuple[Any, ...]:
    """The key with the place, among the plans for one form, of the one for the numbers of `batch`:
    there is one for each outcome of the comparisons. LIMIT if there are more, or if the step raises
    an error for these numbers."""
    for place in range(LIMIT):
        made = cache.get((*key, place))
        try:
            if made is None or made.captured.numbers.holds(batch):
                return *key, place
        except Exception:  # which FSDP2's step raises
            break
    return *key, LIMIT
