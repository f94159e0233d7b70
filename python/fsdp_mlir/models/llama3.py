"""Llama 3 of `transformers`, for building on `meta`. Call with input_ids and labels."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM


def llama3_8b(layers: int = 32) -> LlamaForCausalLM:
    """The shape of Llama-3-8B: 8.03 B parameters at 32 layers, 32 GB unless built on `meta`."""
    return _llama3(layers, hidden=4096, intermediate=14336, heads=32)


def llama3_405b(layers: int = 126) -> LlamaForCausalLM:
    """The shape of Llama-3.1-405B: 405.9 B parameters at 126 layers, for `meta`."""
    return _llama3(layers, hidden=16384, intermediate=53248, heads=128)


def _llama3(layers: int, hidden: int, intermediate: int, heads: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()
