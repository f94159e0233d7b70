"""What the ranks of a model do together before a step runs, and the errors after which they all do
what FSDP2 does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import xxhash

from fsdp_mlir.step import batches
from fsdp_mlir.support import build
from fsdp_mlir.support.errors import CaptureError, CompileError, CountedError, warn

EXCHANGE_SECONDS = 300

# Why a rank does what FSDP2 does that could do otherwise.
ELSEWHERE = "so does the call on another rank"


class NoPlan(Exception):
    """The model, as it is, has no plan: it trains as FSDP2 does."""


class OptionError(CompileError):
    """An error that is not the model's: an option that no model has, or any error on another
    rank."""


def together(
    rendezvous: Any,
    make: Callable[[], Any],
    text: Callable[[Any], str],
    seconds: int = EXCHANGE_SECONDS,
) -> tuple[Any, list[str]]:
    """Calls make() on every rank, and returns its texts from all ranks. If one raises, all do: that
    error there, CompileError elsewhere."""
    made, error = None, None
    try:
        made = make()
        own = "=" + text(made)
    except Exception as raised:
        error, own = raised, f"{'?' if has_no_plan(raised) else '!'}{raised}"
    texts = rendezvous.exchange(own, seconds)
    if error is not None:
        raise error
    for rank, other in enumerate(texts):
        if not other.startswith("="):
            kind = CompileError if other.startswith("?") else OptionError
            raise kind(f"rank {rank}: {other[1:]}")
    return made, [other[1:] for other in texts]


# What a rank tells the others before a call.
READY, COMPILE, RELIES, EAGER, OTHER_VALUES, FOR_FSDP2 = range(6)
_BITS = 3  # of one of these
_PLANS = 5  # bits, for the plans that serve the values of a call


@dataclass(frozen=True)
class Agreed:
    """What all ranks do, with the reason if that is what FSDP2 does. `serving`: the plans that
    serve the values of all ranks. `first`: whether each rank has spoken of the first of these."""

    said: int
    why: str = ""
    serving: int = 0
    first: bool = True


class Calls:
    """The calls of a step, which all ranks make. Without `has_met` there are no plans."""

    def __init__(self) -> None:
        self._agreement: Any = None
        self._failure = ""

    def meet(self, comm: str, rendezvous: Any, deadline: float) -> None:
        """NoPlan or RuntimeError on all ranks if they cannot."""
        self._agreement, _ = together(
            rendezvous,
            lambda: build.runtime().Agreement(comm, rendezvous, deadline),
            lambda _: "",
        )

    @property
    def has_met(self) -> bool:
        return self._agreement is not None

    def agreed(self, key: Any, own: int, why: str = "", serving: int = 1) -> Agreed:
        """What all ranks do, after each has said what it would do with the first of the plans that
        are `serving` its values: they compile if one must, and do what FSDP2 does if one must or if
        their calls differ. The reason for that is `why` where this rank is FOR_FSDP2."""
        if not self.has_met:
            return Agreed(EAGER)
        bits = _BITS + _PLANS
        word = xxhash.xxh3_64_intdigest(repr(key).encode()) >> bits << bits
        words = self.run(self._agreement.exchange, word | serving << _BITS | own)
        if any(other >> bits << bits != word for other in words):
            if key[0] == "evaluate":
                return Agreed(EAGER)
            return Agreed(FOR_FSDP2, batches.OTHER_CALL)
        said = max(other & (1 << _BITS) - 1 for other in words)
        plans = [(other - word) >> _BITS for other in words]
        common = reduce(and_, plans)
        if said == OTHER_VALUES:
            why = batches.OTHER_VALUES
        elif said != FOR_FSDP2:
            why = ""
        else:
            why = why or ELSEWHERE
        same = all(each & -each == common & -common for each in plans)
        return Agreed(said, why, common, same)

    def run(self, call: Callable[[Any], Any], argument: Any) -> Any:
        """A call that all ranks make. After a failed call no other is possible: the ranks may be
        anywhere in it."""
        if self._failure:
            raise RuntimeError(f"the step cannot be used any more: {self._failure}")
        try:
            return call(argument)
        except RuntimeError as error:
            self._failure = str(error)
            raise


@contextmanager
def as_no_plan() -> Iterator[None]:
    """Of the runtime, which has not begun to train."""
    try:
        yield
    except RuntimeError as error:
        raise NoPlan(str(error)) from error


def has_no_plan(error: Exception) -> bool:
    """Whether an error means that a model has no plan, and not that an option is wrong."""
    if isinstance(error, CompileError):
        return not isinstance(error, OptionError) and "policy.yaml:" not in str(error)
    return isinstance(error, (NoPlan, CaptureError, NotImplementedError))


def warn_of_fallback(rank: int, what: str, error: Exception) -> None:
    """One line, of rank 0."""
    if rank == 0:
        reason = " ".join(str(error).split())
        shown = reason if len(reason) <= 400 else reason[:400] + "…"
        warn(f"{what} runs as FSDP2 does, without a plan: {shown}")


def told_as(error: Exception) -> str:
    """What is not to be said twice."""
    return error.path if isinstance(error, CountedError) else str(error)
