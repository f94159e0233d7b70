"""Activation checkpointing: the bits of FSDP2 with torch.utils.checkpoint, and less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import (
    ADAMW_FUSED,
    GPT2,
    GPT2_DROPOUT,
    LLAMA,
    LLAMA_29M,
    Captured,
    Case,
    Model,
    Run,
    run_plan,
)
from test_parity import assert_equal_bits, assert_trained

Capture = Callable[[Model], Captured]
Reference = Callable[..., Run]

ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
LLAMA_LAYERS = {"match": "layers.*"}
POLICIES = {
    "llama_full": (LLAMA, LLAMA_LAYERS),
    "llama_save_matmul": (LLAMA, {**LLAMA_LAYERS, "save": ["aten::mm", ATTENTION]}),
    "llama_save_products": (LLAMA, {**LLAMA_LAYERS, "save": "products"}),
    "llama_part_of_a_unit": (LLAMA, {"match": "layers.*.feed_forward"}),
    # The reference keeps everything here: a ModuleList has no forward to wrap.
    "llama_several_units": (LLAMA, {"match": "layers"}),
    "gpt2_full": (GPT2, {"match": "transformer.h.*"}),
    "gpt2_save_addmm": (GPT2, {"match": "transformer.h.*", "save": ["aten::addmm"]}),
    "gpt2_save_products": (GPT2, {"match": "transformer.h.*", "save": "products"}),
    "gpt2_dropout": (GPT2_DROPOUT, {"match": "transformer.h.*"}),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_equals_fsdp2(captured: Capture, reference: Reference, policy: str) -> None:
    model, checkpoint = POLICIES[policy]
    case = Case(model, ADAMW_FUSED, steps=8, checkpoint=checkpoint)
    ours = run_plan(captured(model), case, "checkpoint")
    assert_trained(ours, case.steps)
    assert_equal_bits(ours, reference(case))


def test_gathered_through_backward(captured: Capture, reference: Reference) -> None:
    case = Case(LLAMA, ADAMW_FUSED, steps=8, reshard="false", checkpoint=LLAMA_LAYERS)
    assert_equal_bits(run_plan(captured(LLAMA), case, "gathered"), reference(case))


def peak_bytes(captured: Capture, checkpoint: dict[str, Any] | None) -> tuple[Run, int]:
    case = Case(LLAMA_29M, ADAMW_FUSED, steps=3, checkpoint=checkpoint)
    run = run_plan(captured(LLAMA_29M), case, "memory")
    return run, max(line["peak_bytes"] for line in run.metrics)


@pytest.mark.exhaustive
def test_less_memory(captured: Capture) -> None:
    none, without = peak_bytes(captured, None)
    some, selective = peak_bytes(captured, {**LLAMA_LAYERS, "save": ["aten::mm"]})
    kept, products = peak_bytes(captured, {**LLAMA_LAYERS, "save": "products"})
    every, full = peak_bytes(captured, LLAMA_LAYERS)
    assert_equal_bits(some, none)
    assert_equal_bits(kept, none)
    assert_equal_bits(every, none)
    # Attention is among the products.
    assert full < selective < products < without
