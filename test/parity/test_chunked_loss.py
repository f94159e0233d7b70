"""`inexact: {loss_chunks: n}`: the logits in parts, with results that differ by rounding alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    ADAMW_FUSED,
    BIN,
    GPT2,
    LLAMA,
    SGD,
    Captured,
    Case,
    Model,
    Run,
    compile_plan,
    execute,
    run_plan,
    train_plan,
    write_config,
)
from safetensors.torch import load_file
from test_parity import assert_equal_bits

Capture = Callable[..., Captured]


def body(name: str, batch: int = 4, seq: int = 9) -> Model:
    return Model(f"chunked_models:{name}", "layers.*", "tokens,targets", 50, seq, batch)


CHUNKED = ["Body", "Capped", "Summed", "Weighted", "Tied", "Transposed", "Penalised"]
STATS = ("--world-size", 2, "--emit", "stats")
SIZES = {2: [18, 18], 5: [8, 8, 8, 8, 4], 100: [1] * 36}
WHOLE = {
    "Measured": "aten::mean",
    "Smoothed": "aten::sum.dim_IntList",
    "Balanced": "has weights for the classes",
    "Regression": "found none",
}


def chunked(case: Case, chunks: int) -> Case:
    return replace(case, training={**case.training, "inexact": {"loss_chunks": chunks}})


def rows_at_once(plan: Path) -> list[int]:
    """Of each part of the training step's log-softmax, the rows."""
    tree = json.loads(plan.read_text())
    outs = [
        instruction["outs"][0]
        for instruction in tree["instructions"]
        if instruction.get("call") == "aten::_log_softmax"
    ]
    return [tree["values"][out]["shape"][0] for out in outs]


def assert_close(ours: Run, theirs: Run, tolerance: float) -> None:
    torch.testing.assert_close(
        torch.tensor(ours.rank_losses), torch.tensor(theirs.rank_losses), rtol=tolerance, atol=0
    )
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=tolerance, atol=tolerance)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CHUNKED)
def test_differs_by_rounding_alone(captured: Capture, name: str) -> None:
    model = body(name)
    case = Case(model, SGD, steps=6)
    whole = run_plan(captured(model), case, "whole")
    for chunks, rows in SIZES.items():
        if name == CHUNKED[0] or chunks == 5:
            parts = run_plan(captured(model), chunked(case, chunks), f"chunks_{chunks}")
            assert_close(parts, whole, 1e-10)
            plan = captured(model).directory / f"chunks_{chunks}.plan.json"
            assert rows_at_once(plan) == rows


@pytest.mark.parametrize("name", WHOLE)
def test_says_why_the_loss_stays_whole(captured: Capture, name: str) -> None:
    model = body(name)
    case = Case(model, SGD, steps=4)
    config = captured(model).directory / "chunks.yaml"
    write_config(chunked(case, 3), config)
    done = execute([*(BIN / "fsdp-opt", captured(model).archive, "--config", config), *STATS])
    assert re.search(f"warning: the loss stays whole: .*({WHOLE[name]})", done.stderr), done.stderr
    assert_equal_bits(
        run_plan(captured(model), chunked(case, 3), "chunks"),
        run_plan(captured(model), case, "whole"),
    )


TRAINING: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"clip_grad_norm": {"max_norm": 0.5}},
    "scaler": {"grad_scaler": {"init_scale": 1024.0}},
    "calls": {"schedule": {"fuse": "none"}},
    "fsdp2": {"schedule": "fsdp2"},
    "offload": {"cpu_offload": True},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("training", TRAINING.values(), ids=TRAINING)
def test_with_other_policies(captured: Capture, training: dict[str, Any]) -> None:
    """A model of real operators, where the chunks change the sums in float32."""
    case = Case(GPT2, ADAMW_FUSED, steps=6, training=training)
    whole = run_plan(captured(GPT2), case, "whole")
    parts = run_plan(captured(GPT2), chunked(case, 4), "chunks")
    torch.testing.assert_close(
        torch.tensor(parts.rank_losses), torch.tensor(whole.rank_losses), rtol=1e-4, atol=0
    )


def test_bf16_and_checkpointed_blocks(captured: Capture) -> None:
    precision = {"": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
    case = Case(LLAMA, ADAMW_FUSED, steps=6, precision=precision, checkpoint={"match": "layers.*"})
    files = captured(LLAMA, precision)
    whole = run_plan(files, case, "whole")
    parts = run_plan(files, chunked(case, 4), "chunks")
    torch.testing.assert_close(
        torch.tensor(parts.rank_losses), torch.tensor(whole.rank_losses), rtol=2e-2, atol=0
    )


def test_bits_of_the_same_chunks_in_pytorch(captured: Capture) -> None:
    """The oracle makes the chunks by hand: products, losses and sums in the plan's order."""
    model, chunks, rate = body("Body"), 4, 0.05
    case = chunked(Case(model, {"name": "sgd", "lr": rate}, world=1, steps=5), chunks)
    files = captured(model)
    run = train_plan(files, compile_plan(files, case, "oracle"), case)
    losses, weights = by_hand(files, chunks, case.steps, rate)
    assert run.column("loss") == [float(f"{loss:.9g}") for loss in losses]
    for name, weight in weights.items():
        assert torch.equal(run.weights[name], weight), name


def by_hand(
    files: Captured, chunks: int, steps: int, rate: float
) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    model = files.model.build()
    model.load_state_dict(load_file(files.weights))
    data = load_file(files.data)
    losses = []
    aten = torch.ops.aten
    for step in range(steps):
        rows = slice(step * files.model.batch, (step + 1) * files.model.batch)
        tokens, targets = data["tokens"][rows], data["targets"][rows].flatten()
        x = model.hidden(tokens).flatten(0, 1)
        weight = model.head.weight
        count = (targets != -100).sum().double()
        total, grads, sum_grad = None, [], None
        size = -(-len(targets) // chunks)
        with torch.no_grad():
            for first in range(0, len(targets), size):
                part, want = x[first : first + size], targets[first : first + size]
                log = aten._log_softmax(aten.mm(part, weight.t()), 1, False)
                loss, _ = aten.nll_loss_forward(log, want, None, 2, -100)
                total = loss if total is None else total + loss
                one = torch.ones((), dtype=log.dtype)
                grad = aten.nll_loss_backward(one, log, want, None, 1, -100, count)
                grad = aten._log_softmax_backward_data(grad, log, 1, log.dtype)
                if sum_grad is None:
                    sum_grad = grad.t() @ part
                else:
                    sum_grad.addmm_(grad.t(), part)
                grads.append(grad @ weight)
            losses.append(float(total / count))
        x.backward(torch.cat(grads))
        model.head.weight.grad = sum_grad
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-rate)
                parameter.grad = None
    return losses, dict(model.state_dict())
