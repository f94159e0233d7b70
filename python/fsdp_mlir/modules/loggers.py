"""What decides which messages a logger takes: code may ask it, as by isEnabledFor."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from fsdp_mlir.modules.place import Place


def levels(label: str, logger: logging.Logger) -> Iterator[Place]:
    """Those of a logger and of the loggers above it."""
    above: logging.Logger | None = logger
    while above is not None:
        for name in ("level", "disabled", "propagate"):
            yield Place(vars(above), name, f"{label}.{name}", library=True)
        label, above = f"{label}.parent", above.parent
    yield Place(vars(logger.manager), "_disable", "logging.root.manager.disable", library=True)


def shown(logger: logging.Logger) -> str:
    """The same as text."""
    return f"{logger.name} {[place.value() for place in levels('', logger)]}"
