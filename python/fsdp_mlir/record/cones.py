"""What the values of a recording follow from, and those values that do not depend on data.

Integers that follow from literals are known at once (known.py). Other values, such as a mask that
is computed from floats or held as a buffer, are computed when a call's result depends on them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import make_contiguous_strides_for
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_mlir.record.draws import is_draw
from fsdp_mlir.record.graph import Node, Ref, Reliance, TensorType, Trace, written_arguments
from fsdp_mlir.record.graph_breaks import is_break
from fsdp_mlir.support.formulas import Formula

aten = torch.ops.aten

# Larger values are not computed: 4 Mi elements.
_MAX_ELEMENTS = 1 << 22

# Of what a step relies on: it is compared before each call.
_MOST_NUMBERS = 1024

# Of integers: draws up to an argument, places in a tensor, sums of its elements, and what has no
# larger ones.
_DRAWS = {aten.randint}
_PLACES = {aten.argmax, aten.argmin, aten.count_nonzero}
_SUMS = {aten.sum}
_KEEPING = {
    *(aten.clone, aten.detach, aten._to_copy, aten.view, aten._unsafe_view, aten.reshape),
    *(aten.select, aten.slice, aten.squeeze, aten.unsqueeze, aten.unbind, aten.alias),
    *(aten.abs, aten.neg, aten.amax, aten.amin, aten.max, aten.min, aten.expand, aten.t),
}

# Draws whose arguments decide nothing else than the results.
_BY_FORM = {
    overload
    for packet in (
        *(aten.rand, aten.randn, aten.randint, aten.randperm, aten.rand_like, aten.randn_like),
        *(aten.randint_like, aten.uniform_, aten.normal_, aten.exponential_, aten.random_),
    )
    for overload in (getattr(packet, name) for name in packet.overloads())
} | {aten.bernoulli_.float}

_UNINITIALISED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}


class Cones:
    """The calls that values of `trace` follow from. Values are named as in its nodes.

    `bind` says where each value lies, and for a constant or a buffer which tensor it stands for.
    `numbers`: whether the caller compares, before each step, what was relied on for those too. A
    step may write what it relies on if a caller `rereads` that before each run; it may then also
    rely on what follows from draws alone, of which the example has those of `generator`, if given.
    """

    def __init__(
        self, trace: Trace, numbers: bool, rereads: bool, generator: Tensor | None
    ) -> None:
        self._trace = trace
        self._generator = generator if rereads else None
        self._numbers, self._rereads = numbers, rereads
        self._storages: dict[str, int] = {}
        self._same: dict[int, int] = {}  # storages of stand-ins
        self._sources: dict[str, Tensor] = {}
        # Storages of what is relied on, and whether a step may write it.
        self._relied_on: dict[int, bool] = defaultdict(lambda: True)

    def bind(self, name: str, tensor: Tensor, source: Tensor | None) -> None:
        self._storages.setdefault(name, self._storage(tensor))
        if source is not None:
            self._sources[name] = source

    def stands_for(self, tensor: Tensor, other: Tensor) -> None:
        """Before `tensor` is bound: what is written to one of them is written to both."""
        self._same[tensor.untyped_storage()._cdata] = self._storage(other)

    def _storage(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()._cdata
        return self._same.get(storage, storage)

    def draw(self, name: str) -> Node | None:
        """The random call that decides a value, if nothing from outside the step does."""
        calls, outside = self._cone(name)
        draws = [node for node in calls if torch.Tag.nondeterministic_seeded in node.func.tags]
        return draws[-1] if draws and not outside else None

    def value(self, name: str, *, literal: bool, by_count: bool = False) -> Tensor | None:
        """The value for the example; with `literal`, only if it is the same in every run.

        None for one that depends on parameters, or on draws that hardly recur. Inputs, constants
        and buffers that it is computed from are relied on from now on; `by_count` if only the
        number of its non-zero elements matters.
        """
        reliance = self._reliance((name,), literal=literal)
        if reliance is not None and reliance.draws and not self._is_integer(name):
            return None
        # What each step writes is hardly ever the same in the next, but for what follows from it.
        if reliance is None or (reliance.written and not (by_count and self._rereads)):
            return None
        return self._rely(replace(reliance, by_count=by_count))[0]

    def number(self, name: str, *, literal: bool) -> Any:
        """The Python number of a value of one element, as `value` gives it; None if there is none
        that may be relied on."""
        if not literal and not self._may_rely:
            return None
        value = self.value(name, literal=literal)
        with _disable_current_modes():
            return None if value is None else value.item()

    def follows(self, name: str) -> bool:
        """Whether the step may rely on formulas over this value."""
        return self._may_rely and self._reliance((name,)) is not None

    def draws(self, name: str) -> bool:
        """Whether the step may rely on formulas over this value, which it draws."""
        if self._generator is None or not self._may_rely:
            return False
        reliance = self._reliance((name,))
        return reliance is not None and reliance.draws

    def truth(self, names: Sequence[str], formula: Formula) -> bool | None:
        """The truth value of a formula over values of one element, which it has by their places.
        Only that is relied on from now on. None if it may not be. Raises what the calculation
        does."""
        reliance = self._reliance(tuple(names))
        if reliance is None or (reliance.written and not self._rereads) or not self._may_rely:
            return None
        reliance = replace(reliance, formula=formula)
        values = self._rely(reliance)
        with _disable_current_modes():
            return reliance.truth(values)

    @property
    def _may_rely(self) -> bool:
        return self._numbers and len(self._trace.relied_on) < _MOST_NUMBERS

    def _reliance(self, names: tuple[str, ...], *, literal: bool = False) -> Reliance | None:
        """On the values, if they can be computed where the step is not run."""
        calls, outside = self._cone(*names)
        if any(map(_draws, calls)):
            calls = [] if literal else self._with_earlier(calls)
            if not calls:
                return None
        if (
            any(each not in self._sources or self._sources[each].is_meta for each in outside)
            or (literal and outside)
            or not all(self._computable(node) or _is_filled(node, calls) for node in calls)
        ):
            return None
        storages = set().union(*map(self._written, calls))
        written = [name for name in outside if self._storages[name] in storages]
        if len({self._storages[name] for name in outside}) < len(outside) and written:
            return None  # the copies would not share memory
        return Reliance(tuple(sorted(outside)), tuple(calls), names, frozenset(written))

    def _rely(self, reliance: Reliance) -> list[Tensor]:
        """The values for the example."""
        varies = reliance.by_count or reliance.formula is not None
        for each in reliance.outside:
            self._relied_on[self._storages[each]] &= varies
        with _disable_current_modes():
            values = reliance.found(self._sources, self._generator)
            if reliance.outside or reliance.draws:
                self._trace.relied_on.append(replace(reliance, form=reliance.form_of(values)))
        return values

    def recurs(self, name: str, value: Tensor) -> bool:
        """Whether a value may be the same in another step, as floating-point data hardly ever is:
        an integer, or what follows from integers alone."""
        return _is_exact(value) or self.is_exact(name)

    def is_exact(self, name: str) -> bool:
        """Whether a value follows from integers and bools alone, and not from parameters. Those of
        a graph break are what the model's code has made of data, as those of an input are."""
        calls, outside = self._cone(name, until=is_break)
        sources = [self._sources.get(each) for each in outside]
        made = (kind for node in calls if is_break(node.func) for kind in node.types)
        return all(kind is not None and not kind.dtype.is_floating_point for kind in made) and all(
            x is not None and _is_exact(x) for x in sources
        )

    def dtype(self, name: str) -> torch.dtype | None:
        """That of a value, if it is known."""
        kind = self.type(name)
        return None if kind is None else kind.dtype

    def most(self, name: str) -> int | None:
        """A bound of the magnitudes in a value of integers or bools, if one is known from what it
        follows from."""
        kind = self.type(name)
        if kind is None or kind.dtype.is_floating_point or kind.dtype.is_complex:
            return None
        if kind.dtype == torch.bool:
            return 1
        if kind.dtype != torch.int64:
            return -torch.iinfo(kind.dtype).min or torch.iinfo(kind.dtype).max
        node = next((x for x in self._trace.nodes[::-1] if name in _results([x])), None)
        if node is None or len(node.types) != 1 or self.written([name]):
            return None
        packet, numbers = node.func.overloadpacket, [x for x in node.args if type(x) is int]
        if packet in _DRAWS:
            return max(map(abs, numbers), default=None)
        taken = next(_refs(node.args), None)
        of = None if taken is None else self.type(taken.name)
        if taken is None or of is None:
            return None
        count = torch.Size(of.shape).numel()
        if packet in _PLACES:
            return count
        inner = self.most(taken.name) if packet in (*_KEEPING, *_SUMS) else None
        return inner and inner * (count if packet in _SUMS else 1)

    def type(self, name: str) -> TensorType | None:
        """That of a value, if it is known."""
        if name in self._sources:
            return TensorType.of(self._sources[name])
        for node in self._trace.nodes:
            for out, kind in zip(_results([node]), node.types, strict=False):
                if out == name:
                    return kind
        return None

    def written(self, names: Iterable[str]) -> set[str]:
        """Those of these values whose memory a call writes."""
        storages = set().union(*map(self._written, self._trace.nodes))
        return {name for name in names if self._storages.get(name) in storages}

    def needs(self, tensor: Tensor) -> bool:
        """Whether the step may not write the memory where `tensor` lies, because a value that was
        returned depends on it. The outcome of a formula and a number of elements recur."""
        storage = self._storage(tensor)
        return storage in self._relied_on and not (self._rereads and self._relied_on[storage])

    def _cone(
        self, *names: str, until: Callable[[OpOverload], bool] = lambda _: False
    ) -> tuple[list[Node], set[str]]:
        """The calls, in order, also those that write the memory of such values, and the names of
        what they take that no call makes, without those of calls `until` which it goes."""
        wanted, calls = set(names), []
        storages = {self._storages.get(name) for name in names}
        for node in reversed(self._trace.nodes):
            if wanted.isdisjoint(_results([node])) and storages.isdisjoint(self._written(node)):
                continue
            calls.append(node)
            if until(node.func):
                continue
            taken = {ref.name for ref in _refs(node.args)}
            wanted |= taken
            storages |= {self._storages.get(name) for name in (*taken, *_results([node]))}
        return calls[::-1], wanted.difference(_results(calls))

    def _with_earlier(self, calls: list[Node]) -> list[Node]:
        """The calls, with the draws of the step before the last of theirs, on tensors of the same
        form; empty if these may draw differently on them."""
        if self._generator is None:
            return []
        own, found = set(map(id, calls)), list[Node]()
        last = max(
            at for at, node in enumerate(self._trace.nodes) if _draws(node) and id(node) in own
        )
        for at, node in enumerate(self._trace.nodes):
            if id(node) not in own and (at > last or not _draws(node)):
                continue
            if id(node) in own:
                found.append(node)
            elif node.func in _BY_FORM:
                found += self._elsewhere(node)
            else:
                return []
        return found

    def _elsewhere(self, node: Node) -> Iterator[Node]:
        """A draw on other tensors, whose results have other names."""
        args = list(node.args)
        for at, arg in enumerate(args):
            if isinstance(arg, Ref):
                form = self.type(arg.name)
                assert form is not None
                args[at] = Ref(f"{arg.name} of {node.outs}")
                strides = form.strides or make_contiguous_strides_for(form.shape)
                like = [form.shape, strides, form.dtype, None, None, None]
                yield replace(
                    node,
                    func=aten.empty_strided.default,
                    args=like,
                    outs=[args[at].name],
                    types=[form],
                )
        yield replace(node, args=args, outs=[f"other {out}" for out in node.outs])

    def _is_integer(self, name: str) -> bool:
        dtype = self.dtype(name)
        return dtype is not None and not dtype.is_floating_point and not dtype.is_complex

    @staticmethod
    def _computable(node: Node) -> bool:
        return (
            (torch.Tag.nondeterministic_seeded not in node.func.tags or _draws(node))
            and node.func.namespace == "aten"
            and node.func.overloadpacket not in _UNINITIALISED
            and all(
                type_ is None or torch.Size(type_.shape).numel() <= _MAX_ELEMENTS
                for type_ in node.types
            )
        )

    def _written(self, node: Node) -> set[int | None]:
        """The storages that a call writes in place."""
        return {
            self._storages.get(ref.name) for ref in _refs(written_arguments(node.func, node.args))
        }


def _draws(node: Node) -> bool:
    return is_draw(node.func, node.args)


def _is_filled(node: Node, calls: Sequence[Node]) -> bool:
    """Whether a draw writes all of a tensor first that has no values."""
    if node.func.overloadpacket not in _UNINITIALISED:
        return False
    users = (each for each in calls if Ref(node.outs[0]) in each.args)
    user = next(users, node)
    return user.func in _BY_FORM and user.func._schema.is_mutable


def _is_exact(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _results(calls: list[Node]) -> Iterator[str]:
    for node in calls:
        for out in node.outs:
            yield from [out] if isinstance(out, str) else out


def _refs(value: Any) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _refs(item)
