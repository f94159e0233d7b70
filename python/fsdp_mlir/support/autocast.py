"""Autocast around a call is that of forward, as FSDP2's loops enter it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def without_autocast() -> Iterator[None]:
    """The body, such as a backward, runs as outside of the autocast that the caller has entered."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
