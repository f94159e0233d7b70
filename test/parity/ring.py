"""The order in which Gloo adds, written once more: around a ring (gloo/allreduce.cc).

A message is cut into a piece for each rank. The first of the terms of piece c is rank c - 1's, then
comes rank c - 2's, and so on; the last one is rank c's. FSDP2's message is the gradients of a unit,
of each the first rank's rows, padded, then the second's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def piece(elements: int, width: int, ranks: int) -> int:
    """Elements of a piece of a message of elements of `width` bytes."""
    total, most = elements * width, (1 << 20) // width * width
    segments = math.ceil(max(math.ceil(total / most), 2 * ranks) / ranks) * ranks
    return segments // ranks * math.ceil(math.ceil(total / segments) / width)


def add(terms: list[Tensor]) -> Tensor:
    """The sum of flat tensors, one of each rank."""
    ranks, result = len(terms), torch.empty_like(terms[0])
    size = piece(result.numel(), result.element_size(), ranks)
    for index in range(ranks):
        part = slice(index * size, (index + 1) * size)
        total = terms[index - 1][part].clone()
        for back in range(2, ranks + 1):
            total += terms[(index - back) % ranks][part]
        result[part] = total
    return result


def add_units(grads: list[dict[str, Tensor]], units: list[list[str]]) -> dict[str, Tensor]:
    """The sums of all ranks' gradients, which are reduced unit by unit."""
    ranks, sums = len(grads), {}
    for unit in units:
        if not (names := [name for name in unit if name in grads[0]]):
            continue
        messages = [torch._chunk_cat([own[n] for n in names], 0, ranks).flatten() for own in grads]
        rows, begin = add(messages).view(ranks, -1), 0
        for name in names:
            chunks = grads[0][name].chunk(ranks)
            parts = [rows[i, begin : begin + each.numel()] for i, each in enumerate(chunks)]
            sums[name] = torch.cat(parts).view_as(grads[0][name])
            begin += chunks[0].numel()
    return sums
