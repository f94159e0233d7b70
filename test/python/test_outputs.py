"""What a step gives beside its loss: the same as with FSDP2, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsdp_mlir
import pytest
import torch
import torch.distributed.fsdp
from fsdp_mlir.support.errors import CaptureError
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from transformers import GPT2Config, GPT2LMHeadModel


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.dropout(torch.tanh(self.first(x)))
        return self.second(hidden), hidden


def as_tuple(output: tuple[Tensor, Tensor], y: Tensor) -> Any:
    logits, hidden = output
    loss = nn.functional.cross_entropy(logits, y)
    return loss, logits, hidden.abs().mean(), (logits.argmax(-1) == y).sum()


def as_mapping(output: tuple[Tensor, Tensor], y: Tensor) -> Any:
    loss, logits, penalty, correct = as_tuple(output, y)
    metrics = {"correct": correct, "of": y.shape[0], "nothing": None, "name": "batch"}
    # A view, with strides of its own, and what is of another dtype.
    return {"metrics": metrics, "loss": loss + penalty, "logits": [logits.t(), logits.half()]}


def as_scalar_in_a_list(output: tuple[Tensor, Tensor], y: Tensor) -> Any:
    return [as_tuple(output, y)[0]]


def same(left: Any, right: Any) -> bool:
    ours, form = tree_flatten(left)
    theirs, other = tree_flatten(right)
    return form == other and all(
        torch.equal(a, b.detach()) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b
        for a, b in zip(ours, theirs, strict=True)
    )


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(6, 8, generator=generator),
            "y": torch.randint(0, 4, (6,), generator=generator),
        }
        for _ in range(count)
    ]


def theirs(loss: Callable[..., Any], count: int) -> list[tuple[Any, Any]]:
    """What FSDP2's steps give, and evaluations behind them."""
    model = torch.distributed.fsdp.fully_shard(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    given = []
    for number, batch in enumerate(batches(count)):
        torch.manual_seed(number)
        value = loss(model(batch["x"]), batch["y"])
        (value["loss"] if isinstance(value, dict) else value[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            given.append((value, loss(model(batch["x"]), batch["y"])))
        model.train()
    return given


@pytest.mark.parametrize("loss", [as_tuple, as_mapping, as_scalar_in_a_list])
@pytest.mark.parametrize("way", ["step", "backward"])
def test_outputs_are_those_of_fsdp2(loss: Callable[..., Any], way: str) -> None:
    model = fsdp_mlir.fully_shard(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = fsdp_mlir.compile(
        model, loss=loss, optimizer=optimizer, evaluation=way == "step", fallback="error"
    )
    given = []
    for number, batch in enumerate(batches(3)):
        torch.manual_seed(number)
        if way == "step":
            value = step(batch)
        else:
            value = step.backward(batch)
            step.update()
        given.append((value, step.evaluate(batch)))
    # What was given is not written by later steps.
    for got, want in zip(given, theirs(loss, 3), strict=True):
        assert same(got, want)


def test_of_several_microbatches_the_mean_loss_is_given() -> None:
    model = fsdp_mlir.fully_shard(Classifier().eval())
    twin = torch.distributed.fsdp.fully_shard(Classifier().eval())
    step = fsdp_mlir.compile(
        model,
        loss=as_mapping,
        optimizer=(torch.optim.SGD, {"lr": 0.1}),
        fallback="error",
        gradient_accumulation_steps=2,
    )
    one, two = batches(2)
    got = step({name: torch.cat([one[name], two[name]]) for name in one})
    want = [as_mapping(twin(each["x"]), each["y"])["loss"].item() for each in (one, two)]
    assert got.shape == () and got.item() == pytest.approx(sum(want) / 2, rel=1e-6)


@pytest.mark.parametrize("wanted", [False, True])
def test_the_model_s_own_outputs(wanted: bool) -> None:
    config = GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=2,
        vocab_size=64,
        n_positions=16,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )

    def made() -> nn.Module:
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).eval()

    model, twin = fsdp_mlir.fully_shard(made()), torch.distributed.fsdp.fully_shard(made())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    step = fsdp_mlir.compile(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        outputs=wanted,
        fallback="error",
    )
    for seed in range(2):
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed))
        got, want = step(input_ids=tokens, labels=tokens), twin(input_ids=tokens, labels=tokens)
        want.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert type(got) is (type(want) if wanted else Tensor)
        assert same(got, want if wanted else want.loss)


def test_an_output_that_is_no_data() -> None:
    def loss(output: tuple[Tensor, Tensor], y: Tensor) -> Any:
        return as_tuple(output, y)[0], object()

    model = fsdp_mlir.fully_shard(Classifier())
    sgd = (torch.optim.SGD, {"lr": 0.1})
    step = fsdp_mlir.compile(model, loss=loss, optimizer=sgd, fallback="error")
    with pytest.raises(CaptureError, match=r"test_outputs.py:\d+: an output is of type 'object'"):
        step(batches(1)[0])
    step = fsdp_mlir.compile(model, loss=loss, optimizer=sgd)
    with pytest.warns(UserWarning, match="runs as FSDP2 does"):
        assert isinstance(step(batches(1)[0])[1], object)
