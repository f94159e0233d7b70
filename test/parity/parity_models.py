"""Models that only the parity tests need; both sides import them by name."""

from __future__ import annotations

import fnmatch

from fsdp_mlir.models import llama
from torch import nn


def frozen_llama(pattern: str) -> nn.Module:
    """The debug Llama with the parameters that match `pattern` frozen."""
    model = llama.llama_debug()
    for name, parameter in model.named_parameters():
        if fnmatch.fnmatchcase(name, pattern):
            parameter.requires_grad_(False)
    return model
