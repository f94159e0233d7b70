"""Operators that change a tensor's shape or strides in place, such as unsqueeze_ and resize_."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from fsdp_mlir.support.errors import Location, located

aten = torch.ops.aten

_RESIZES = {aten.resize_.default, aten.resize_as_.default}


def keeps_size(func: OpOverload, values: list[Any]) -> bool:
    """Whether a call resizes a tensor to the size that it has."""
    return func in _RESIZES and values[0].shape == tuple(getattr(values[1], "shape", values[1]))


def out_of_place(func: OpOverload, location: Location | None, *, is_made: bool) -> OpOverload:
    """x.unsqueeze_(…) renames x to a view of itself, so it is captured as x.unsqueeze(…). Not so a
    resize_, whose result has other memory, of a tensor that the step has not made (`is_made`)."""

    def formals(overload: OpOverload) -> list[tuple[str, str]]:
        return [(formal.name, str(formal.type)) for formal in overload._schema.arguments]

    if func in _RESIZES and not is_made:
        what = f"'{func}' changes the shape of a tensor that the step has not made"
        raise located(location, f"{what}; make a new one")
    packet = getattr(aten, func._schema.name.removeprefix("aten::").removesuffix("_"), None)
    for name in packet.overloads() if packet else ():
        found = getattr(packet, name)
        if formals(found) == formals(func) and not found._schema.is_mutable:
            return found
    raise located(location, f"'{func}' changes a tensor's shape in place; use a view")
