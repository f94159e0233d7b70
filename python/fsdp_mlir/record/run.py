"""Runs a step under its recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fsdp_mlir.record import reads
from fsdp_mlir.record.trace import Recorder
from fsdp_mlir.support.errors import CaptureError, located


@contextmanager
def _located_errors(recorder: Recorder) -> Iterator[None]:
    try:
        with reads.asking(recorder, recorder.sources, recorder.check_read):
            yield
    except CaptureError:
        raise
    except Exception as error:
        location = recorder.sources.traceback(error.__traceback__)
        # contextlib takes a RuntimeError that a StopIteration has caused for the latter.
        cause = None if isinstance(error, StopIteration) else error
        raise located(location, f"{type(error).__name__}: {error}") from cause


def traced(
    forward: Callable[[], Tensor], differentiate: Callable[[Tensor], Any], recorder: Recorder
) -> tuple[Tensor, Any]:
    """Runs forward, then backward, under `recorder`; other errors become CaptureErrors."""
    with _located_errors(recorder), recorder, torch.enable_grad():
        loss = forward()
        recorder.begin_backward()
        return loss, differentiate(loss)


def evaluated(forward: Callable[[], Tensor], recorder: Recorder) -> Tensor:
    """Runs forward without gradients under `recorder`; other errors become CaptureErrors."""
    with _located_errors(recorder), recorder, torch.no_grad():
        return forward()
