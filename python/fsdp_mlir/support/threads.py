"""What is replaced while a step is recorded, on the thread that records it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def while_recorded(original: Callable[..., Any], recorded: Callable[..., Any]) -> Any:
    """`recorded`; `original` on other threads, such as one that saves, and where `recorded` gives
    NotImplemented."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if not _get_current_dispatch_mode_stack():
            return original(*args, **kwargs)
        given = recorded(*args, **kwargs)
        return original(*args, **kwargs) if given is NotImplemented else given

    return called
