"""GPT-2 of `transformers`, initialised at a seed. Call with input_ids and labels for the loss.

The token embedding and the output layer are tied; labels are shifted by the model itself.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_DEBUG = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 64}


def _build(seed: int, **config: Any) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config.setdefault("use_cache", False)
    config.setdefault("bos_token_id", 0)
    config.setdefault("eos_token_id", 0)
    model = GPT2LMHeadModel(GPT2Config(**config)).train()
    model.loss_type = "ForCausalLM"  # its default, given explicitly to avoid a warning
    return model


def gpt2_debug(seed: int = 0, **config: Any) -> GPT2LMHeadModel:
    """Two layers of width 64, vocabulary 256, no dropout."""
    return _build(seed, **(_DEBUG | _NO_DROPOUT | config))


def gpt2_debug_dropout(seed: int = 0, **config: Any) -> GPT2LMHeadModel:
    """As `gpt2_debug`, with dropout 0.1 on embeddings, attention and residuals."""
    return _build(seed, **(_DEBUG | config))


def gpt2(seed: int = 0, **config: Any) -> GPT2LMHeadModel:
    """GPT-2's published sizes (124 M parameters), no dropout unless asked for."""
    return _build(seed, **(_NO_DROPOUT | config))
