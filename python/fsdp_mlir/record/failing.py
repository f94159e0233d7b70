"""Calls that may fail on data: a branch of the model may keep such data from them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fsdp_mlir.record.cones import Cones
from fsdp_mlir.record.graph import Node, Ref, Trace

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


def may_fail(trace: Trace, cones: Cones) -> bool:
    """Whether a call may fail on values that do not follow from integers and bools from outside of
    the step alone: whether these are right does not depend on what the step computes."""
    return any(
        (_named(node).startswith(_OF_VALUES) and not _named(node).startswith(_SAFE))
        or not all(cones.is_exact(name) for name in _places(node, cones))
        for node in trace.nodes
    )


def _named(node: Node) -> str:
    return str(node.func).removeprefix("aten.")


def _places(node: Node, cones: Cones) -> Iterator[str]:
    """The values of a call that have to be in a range."""
    of_classes = _named(node).startswith(_OF_CLASSES)
    for formal, value in zip(node.func._schema.arguments, node.args, strict=True):
        if formal.name in _PLACES or (of_classes and formal.name == "self"):
            for each in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(each, Ref) and cones.dtype(each.name) not in _FLOATS:
                    yield each.name


_FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
