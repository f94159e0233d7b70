"""Calls that may fail on data: a branch of the model may keep such data from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from fsdp_mlir.record.cones import Cones
from fsdp_mlir.record.graph import Node, Ref, Trace, written_arguments
from fsdp_mlir.record.trace import ASSERTIONS

aten = torch.ops.aten

# By the names of arguments that have to be in a range, if they are integers.
_PLACES = {"index", "indices", "target", "targets", "offsets", "repeats"}

# By the beginnings of their names: what is singular, or a probability.
_OF_VALUES = (
    *("linalg_", "_linalg_", "cholesky", "lu_", "inverse", "svd", "geqrf", "ormqr", "triangular_"),
    *("binary_cross_entropy.", "binary_cross_entropy_backward", "bernoulli.default", "bernoulli.p"),
    *("bernoulli_.Tensor", "multinomial", "poisson", "binomial", "normal.Tensor", "normal.float_T"),
    *("_standard_gamma", "_sample_dirichlet", "ctc_loss", "_ctc_loss", "histc"),
)
_SAFE = ("linalg_vector_norm", "linalg_cross")
_OF_CLASSES = ("one_hot", "bincount")


# Whose only result are places along a dimension of what they take, or the second of two, and what
# keeps these.
_OF_PLACES = {aten.argmax, aten.argmin, aten.argsort}
_WITH_PLACES = {
    *(aten.max, aten.min, aten.topk, aten.sort, aten.median, aten.nanmedian, aten.mode),
    *(aten.kthvalue, aten.cummax, aten.cummin),
}
_JOINING = {aten.cat, aten.stack}
_KEEPING = {
    *(aten.view, aten._unsafe_view, aten.reshape, aten.expand, aten.squeeze, aten.unsqueeze),
    *(aten.transpose, aten.permute, aten.t, aten.select, aten.slice, aten.unbind, aten.split),
    *(aten.clone, aten.detach, aten.alias, aten.lift_fresh, aten.flatten, aten.repeat),
}
# By their own functions, for each: no code makes these places.
_OF_POOLS = {
    aten.max_pool2d_with_indices_backward: aten.max_pool2d_with_indices,
    aten.max_pool3d_with_indices_backward: aten.max_pool3d_with_indices,
}


def may_fail(
    trace: Trace, cones: Cones, behind: Callable[[OpOverload], bool] | None = None
) -> bool:
    """Whether a call may fail on values that do not follow from integers and bools from outside of
    the step alone: whether these are right does not depend on what the step computes. Nor does it
    of the places of the largest elements and the like, which are there. Of calls `behind` some,
    whether one may that takes what these make."""
    within = _Within(trace, cones)
    made = None if behind is None else _behind(trace, behind)

    def counts(value: Any) -> bool:
        leaves = (each for each in tree_leaves(value) if isinstance(each, Ref))
        return made is None or any(each.name in made for each in leaves)

    return any(
        (_named(node).startswith(_OF_VALUES) and not _is_safe(node))
        or (node.func in ASSERTIONS and not within.holds(node))
        or not all(
            cones.is_exact(name) or within.has(name, size) or not counts(Ref(name))
            for name, size in (() if within.pooled(node) else _places(node, cones))
        )
        for node in trace.nodes
        if counts(node.args)
    )


def _behind(trace: Trace, of: Callable[[OpOverload], bool]) -> set[str]:
    """What calls of such operators make or write, and what follows from it."""
    names: set[str] = set()
    for node in trace.nodes:
        taken = {each.name for each in tree_leaves(node.args) if isinstance(each, Ref)}
        if names & taken or of(node.func):
            written = tree_leaves(written_arguments(node.func, node.args))
            names |= {each.name for each in written if isinstance(each, Ref)}
            names |= {name for out in node.outs for name in _names(out)}
    return names


def _is_safe(node: Node) -> bool:
    """Whether such a call fails on no data; a histogram does not if its ends are given."""
    has_ends = node.func is aten.histc.default and node.args[2] < node.args[3]
    return has_ends or _named(node).startswith(_SAFE)


def _named(node: Node) -> str:
    return str(node.func).removeprefix("aten.")


def _places(node: Node, cones: Cones) -> Iterator[tuple[str, int]]:
    """The values of a call that have to be in a range from 0 on, and its end; 0 if that is not
    known."""
    of_classes = _named(node).startswith(_OF_CLASSES)
    for formal, value in zip(node.func._schema.arguments, node.args, strict=True):
        if formal.name in _PLACES or (of_classes and formal.name == "self"):
            several = isinstance(value, (list, tuple))
            for position, each in enumerate(value if several else [value]):
                if isinstance(each, Ref) and cones.dtype(each.name) not in _FLOATS:
                    yield each.name, _end(node, cones, position if several else None)


def _end(node: Node, cones: Cones, position: int | None) -> int:
    """That of the places in a list at `position`, or of the only ones."""
    given = dict(zip((x.name for x in node.func._schema.arguments), node.args, strict=True))
    for count in ("num_classes", "num_weights"):
        if count in given:
            return max(0, given[count])
    of = given.get("weight", given.get("self"))
    kind = cones.type(of.name) if isinstance(of, Ref) else None
    if kind is None:
        return 0
    if node.func.overloadpacket is aten.embedding:
        return kind.shape[0]
    indices = given.get("indices") if position is not None else ()
    if any(isinstance(x, Ref) and cones.dtype(x.name) in _MASKS for x in indices or ()):
        return 0  # a mask may be of several dimensions
    dim = position if position is not None else given.get("dim")
    return kind.shape[dim] if isinstance(dim, int) and kind.shape else 0


class _Within:
    """Which values are places that are there."""

    def __init__(self, trace: Trace, cones: Cones) -> None:
        self._cones = cones
        self._made: dict[str, Node] = {}
        for node in trace.nodes:
            for name in (each for out in node.outs for each in _names(out)):
                self._made.setdefault(name, node)  # what is written in place keeps its name
        self._written: dict[str, list[Node]] = {}
        for node in trace.nodes:
            for each in tree_leaves(written_arguments(node.func, node.args)):
                if isinstance(each, Ref):
                    self._written.setdefault(self._root(each.name), []).append(node)

    def _root(self, name: str) -> str:
        """The value of which that is a view, or a copy."""
        while (node := self._made.get(name)) is not None:
            formals = node.func._schema.arguments
            is_copy = node.func.overloadpacket in _KEEPING
            viewed = [
                value.name
                for formal, value in zip(formals, node.args, strict=True)
                if isinstance(value, Ref) and (is_copy or formal.alias_info is not None)
            ]
            if not viewed or viewed[0] == name:
                break
            name = viewed[0]
        return name

    def holds(self, node: Node) -> bool:
        """Whether it asserts what plain.composites does of classes, and they are such places."""
        every = self._made_by(node.args[0], aten.all.default)
        both = every and self._made_by(every.args[0], aten.bitwise_and.Tensor)
        if not both:
            return False
        least = self._made_by(both.args[0], aten.ge.Scalar)
        most = self._made_by(both.args[1], aten.lt.Scalar)
        if not least or not most or least.args[1] != 0 or least.args[0] != most.args[0]:
            return False
        return isinstance(most.args[0], Ref) and self.has(most.args[0].name, most.args[1])

    def _made_by(self, value: Any, func: OpOverload) -> Node | None:
        node = self._made.get(value.name) if isinstance(value, Ref) else None
        return node if node is not None and node.func is func else None

    def has(self, name: str, end: int) -> bool:
        """Whether all of its elements are from 0 to below `end`."""
        return 0 < self._end(name) <= end

    def pooled(self, node: Node) -> bool:
        """Whether a call in backward has the places that forward has found."""
        packet = node.func.overloadpacket
        forward = _OF_POOLS.get(packet)
        made = forward and self._made_by(node.args[-1], forward.default)
        return made is not None and node.args[1:7] == made.args[:6]

    def _end(self, name: str) -> int:
        """What is above all elements, none of which is negative; 0 if that is not known."""
        end = self._end_when_made(name)
        for node in self._written.get(self._root(name), ()) if end else ():
            terms = node.func is aten.add_.Tensor and node.args[2] == 1 and node.args[1]
            added = self._known(terms.name) if isinstance(terms, Ref) else 0
            if not added:
                return 0
            end += added - 1
        return end

    def _end_when_made(self, name: str) -> int:
        node = self._made.get(name)
        if node is None:
            return 0
        packet, taken = node.func.overloadpacket, node.args[0]
        if packet in _JOINING and isinstance(taken, list):
            ends = [self._end(x.name) if isinstance(x, Ref) else 0 for x in taken]
            return max(ends) if all(ends) else 0
        if not isinstance(taken, Ref):
            return 0
        if node.func is aten.add.Tensor and isinstance(node.args[1], Ref) and node.args[2] == 1:
            terms = [self._end(x.name) or self._known(x.name) for x in node.args[:2]]
            return sum(terms) - 1 if all(terms) else 0
        if node.func is aten.floor_divide.Scalar:
            by, end = node.args[1], self._end(taken.name)
            return (end - 1) // by + 1 if end and type(by) is int and by > 0 else 0
        if packet in _KEEPING or packet is aten.add_:  # of the same root
            return self._end_when_made(taken.name)
        if packet is aten._to_copy:
            is_long = self._cones.dtype(name) in (torch.int64, torch.int32)
            return self._end(taken.name) if is_long else 0
        kind = self._cones.type(taken.name)
        are_places = _OF_PLACES if len(node.outs) == 1 else _WITH_PLACES
        if packet not in are_places or name != node.outs[-1] or kind is None:
            return 0
        names = [formal.name for formal in node.func._schema.arguments]
        dim = node.args[names.index("dim")] if "dim" in names else None
        along = kind.shape[dim] if isinstance(dim, int) and kind.shape else 0
        return torch.Size(kind.shape).numel() if dim is None else along

    def _known(self, name: str) -> int:
        """The same of a value that each step has."""
        value = self._cones.value(name, literal=True)
        if value is None or value.dtype not in (torch.int64, torch.int32) or not value.numel():
            return 0
        with _disable_current_modes():
            return int(value.max()) + 1 if int(value.min()) >= 0 else 0


def _names(out: str | list[str]) -> list[str]:
    return [out] if isinstance(out, str) else out


_MASKS = {torch.bool, torch.uint8}
_FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
