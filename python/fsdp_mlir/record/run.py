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

# As torch says what code in C++ reads of a fake tensor.
_NO_DATA = "its data is not allocated yet"


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
        text = f"{type(error).__name__}: {error}"
        if _NO_DATA in text:
            text = (
                "the data of a tensor is read, as by torch.tensor of a list of tensors, and the "
                "captured step is static; use tensor operations such as torch.stack"
            )
        raise located(location, text) from cause


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
