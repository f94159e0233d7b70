"""Modules that run in Python, in the middle of a plan, because no plan can have them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fsdp_mlir
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fsdp_mlir.frontdoor.plan import Compiled
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twins import Twins

SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
ADAMW = (torch.optim.AdamW, {"lr": 1e-3})


def tokens(seed: int, rows: int = 12) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The modules that ran in Python, for each step that a plan has made."""
    found: list[list[str]] = []
    leave = Compiled.leave

    def noted(self: Compiled, microbatches: int) -> None:
        found.append([each.key for each in self.captured.assumption.breaks])
        leave(self, microbatches)

    monkeypatch.setattr(Compiled, "leave", noted)
    return found


class Experts(nn.Module):
    """Each token goes through the experts that it has chosen; one may get none."""

    def __init__(self, count: int = 4, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, width, 16) * 0.1)
        self.down = nn.Parameter(torch.randn(count, 16, width) * 0.1)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows, which = torch.where(chosen == index)
            if len(rows):
                y = F.linear(F.silu(F.linear(x[rows], up)), down)
                out.index_add_(0, rows, y * weights[rows, which, None])
        return out


class Block(nn.Module):
    def __init__(self, experts: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(16), nn.Linear(16, 4, bias=False)
        self.experts = experts()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights, chosen = self.gate(y).softmax(-1).topk(2)
        return x + F.dropout(self.experts(y, chosen, weights), 0.1, self.training)


class Mixture(nn.Module):
    def __init__(
        self, experts: Callable[[], nn.Module] = Experts, *, reentrant: bool | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(16, 16), nn.ModuleList(Block(experts) for _ in "ab")
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            recomputes = self.reentrant is not None
            x = checkpoint(block, x, use_reentrant=self.reentrant) if recomputes else block(x)
        return x.tanh().square().mean()


EXPERTS = ["blocks.0.experts", "blocks.1.experts"]


def train(pair: Twins, steps: int) -> list[str]:
    """Trains with other tokens in each step; returns the lines of warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(steps):
            pair.batch = {**pair.batch, "x": tokens(seed)}
            pair.assert_equal_steps(1)
    return [str(each.message) for each in caught if "Python" in str(each.message)]


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_experts_by_masks(optimizer: Any, runs: list[list[str]]) -> None:
    lines = train(Twins(Mixture, {"x": tokens(0)}, optimizer), 6)
    assert runs == [EXPERTS] * 5  # FSDP2 makes the step in which they are seen
    assert len(lines) == 2
    assert "'blocks.0.experts' of FSDPMixture runs in Python, in the middle" in lines[0]
    assert "test_graph_breaks.py:" in lines[0] and "'aten.nonzero.default'" in lines[0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_checkpoints(reentrant: bool, runs: list[list[str]]) -> None:
    train(Twins(lambda: Mixture(reentrant=reentrant), {"x": tokens(0)}, SGD), 4)
    assert runs == [[*EXPERTS, *EXPERTS[::-1]]] * 3


def test_several_threads(runs: list[list[str]]) -> None:
    torch.set_num_threads(2)
    try:
        train(Twins(Mixture, {"x": tokens(0)}, SGD), 3)
    finally:
        torch.set_num_threads(1)
    assert len(runs) == 2


def test_other_forms(runs: list[list[str]]) -> None:
    pair = Twins(Mixture, {"x": tokens(0)}, SGD)
    for rows in (12, 12, 7, 7, 12, 7):
        pair.batch = {"x": tokens(rows, rows)}
        pair.assert_equal_steps(1)
    assert len(runs) == 4


class Dropping(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return F.dropout(super().forward(x, chosen, weights), 0.3, self.training)


class Frozen(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)
        self.register_buffer("scale", torch.full((16,), 1.5))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, chosen, weights) * self.scale


class Bfloat(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            rows = (chosen == 1).any(1).nonzero().flatten()
            y = F.linear(F.linear(x[rows], self.up[0]), self.down[0]).float()
        return x.index_put((rows,), y * weights[rows, :1])


@pytest.mark.parametrize("experts", [Dropping, Frozen, Bfloat])
def test_kinds_of_modules(experts: type[nn.Module], runs: list[list[str]]) -> None:
    train(Twins(lambda: Mixture(experts), {"x": tokens(0)}, SGD), 4)
    assert runs == [EXPERTS] * 3


class Twice(nn.Module):
    """The module is called twice; its first results may be used around the second call."""

    def __init__(self, *, around: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.rows, self.around = nn.Linear(16, 16), Rows(), around

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.rows(self.rows(y).tanh() + (y if self.around else 0)).square().mean()


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.detach()[:, 0] > 0).nonzero().flatten()
        return (x @ self.weight).index_add(0, rows, x[rows])


@pytest.mark.parametrize(("around", "planned"), [(False, 3), (True, 0)])
def test_a_module_that_is_called_twice(around: bool, planned: int, runs: list[list[str]]) -> None:
    """The parameter's gradient is that of both calls. Where sums would have another order, there is
    no plan."""
    train(Twins(lambda: Twice(around=around), {"x": tokens(0)}, SGD), 4)
    assert runs == [["rows", "rows"]] * planned


class Turned(nn.Module):
    """The gradient of its input has the layout of a transposed matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.turn = nn.Linear(16, 16), Turn()

    def forward(self, x: Tensor) -> Tensor:
        return self.turn(self.first(x).tanh().t()).square().mean()


class Turn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found = (x.detach() > 0).nonzero()
        return (x.t() @ x).relu() if len(found) else x.t() @ x


def test_layouts_of_gradients(runs: list[list[str]]) -> None:
    train(Twins(Turned, {"x": tokens(0)}, SGD), 4)
    assert runs == [["turn"]] * 3


# --- outside of the model


class Boxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).sigmoid()


class Matcher(nn.Module):
    """The nearest box of each target, which no other target has."""

    def __init__(self, norm: float = 1.0) -> None:
        super().__init__()
        self.norm = norm

    @torch.no_grad()
    def forward(self, boxes: Tensor, targets: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        costs = torch.cdist(boxes, targets["boxes"], p=self.norm).numpy()
        found = []
        for target in range(costs.shape[1]):
            found.append(int(np.argmin(costs[:, target])))
            costs[found[-1]] = np.inf
        return [(torch.as_tensor(found), torch.arange(len(found)))]


TARGETS = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))


def matched(boxes: Tensor) -> Tensor:
    [(own, of)] = Matcher()(boxes, {"boxes": TARGETS})
    return F.l1_loss(boxes[own], TARGETS[of])


def test_a_matcher_that_the_loss_makes(runs: list[list[str]]) -> None:
    train(Twins(Boxes, {"x": tokens(0)}, SGD, loss=matched), 4)
    assert runs == [["class test_graph_breaks.Matcher"]] * 3


def of_large_ones(boxes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    large = boxes[boxes.detach() > 0.5]
    return F.l1_loss(large, torch.ones_like(large)), {"mean": large.detach().mean()}


def test_a_loss_function(runs: list[list[str]]) -> None:
    """It may run in Python as a whole, and return more than the loss."""
    model, twin = fsdp_mlir.fully_shard(Boxes()), Boxes()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = fsdp_mlir.compile(model, loss=of_large_ones, optimizer=optimizers[0])
        for seed in range(5):
            got, metrics = step(tokens(seed))
            want, others = of_large_ones(twin(tokens(seed)))
            want.backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            assert torch.equal(got, want.detach())
            assert torch.equal(metrics["mean"], others["mean"])
    assert runs == [["loss"]] * 4


def test_two_steps_with_modules_of_a_class() -> None:
    """Each has its own."""

    def loss_of(norm: float) -> Callable[[Tensor], Tensor]:
        matcher = Matcher(norm)

        def loss(boxes: Tensor) -> Tensor:
            [(own, of)] = matcher(boxes, {"boxes": TARGETS})
            return F.l1_loss(boxes[own], TARGETS[of]) * norm

        return loss

    model, twin = fsdp_mlir.fully_shard(Boxes()), Boxes()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    losses = [loss_of(1.0), loss_of(3.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps = [fsdp_mlir.compile(model, loss=x, optimizer=optimizers[0]) for x in losses]
        for seed in range(10):
            got = steps[seed % 2](tokens(seed))
            want = losses[seed % 2](twin(tokens(seed)))
            want.backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            assert torch.equal(got, want.detach()), seed


def test_ctc(runs: list[list[str]]) -> None:
    """With lengths that are tensors: what is in between has a size that follows from data."""
    g = torch.Generator().manual_seed(0)
    targets, lengths = torch.randint(1, 4, (2, 3), generator=g), torch.tensor([3, 2])

    def loss(boxes: Tensor) -> Tensor:
        found = boxes.view(6, 2, 4).log_softmax(-1)
        return F.ctc_loss(found, targets, torch.tensor([6, 5]), lengths)

    train(Twins(Boxes, {"x": tokens(0)}, SGD, loss=loss), 4)
    assert runs == [["ctc_loss"]] * 3


def of_some(boxes: Tensor, kinds: Tensor) -> Tensor:
    some = boxes[kinds > 0]
    return F.mse_loss(some, torch.ones_like(some))


def test_counts_that_vary(runs: list[list[str]]) -> None:
    """There are plans for few of them, and then one for all."""
    model, twin = fsdp_mlir.fully_shard(Boxes()), Boxes()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = fsdp_mlir.compile(model, loss=of_some, optimizer=optimizers[0])
        for count in (*range(1, 12), 1, 2):
            kinds = torch.ones(12).cumsum(0).le(count).long()
            got = step(tokens(count), kinds)
            want = of_some(twin(tokens(count)), kinds)
            want.backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            assert torch.equal(got, want.detach()), count
    assert runs == [[]] * 5 + [["loss"]] * 7
    lines = [str(each.message) for each in caught if "Python" in str(each.message)]
    assert len(lines) == 1 and "follows from values that vary" in lines[0]


# --- what is no graph break


class Counting(Experts):
    calls = 0

    def forward(self, *args: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(*args)


class Reading(Experts):
    """What the block leaves there is not among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[Any] = [None]

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        return super().forward(x, *args) * self.left[0]


class Leaving(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.experts.left[0] = x.detach().abs().mean()
        return super().forward(x)


class Drawing(Experts):
    def forward(self, *args: Tensor) -> Tensor:
        return super().forward(*args) * float(np.random.rand() + 1)


class WithLosses(Experts):
    """Losses that the model adds up are left outside of the module."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        LOSSES.append(weights.square().mean())
        return super().forward(x, chosen, weights)


LOSSES: list[Tensor] = []


class Collecting(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x) + sum(LOSSES)
        LOSSES.clear()
        return loss


def leaving() -> nn.Module:
    model = Mixture(Reading)
    for index in range(len(model.blocks)):
        torch.manual_seed(index)
        model.blocks[index] = Leaving(Reading)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mixture(Counting),
        lambda: Mixture(Drawing),
        leaving,
        lambda: Collecting(WithLosses),
    ],
    ids=["attributes", "draws", "reads", "leaves"],
)
def test_what_a_plan_would_not_see(make: Callable[[], nn.Module], runs: list[list[str]]) -> None:
    pair = Twins(make, {"x": tokens(0)}, SGD)
    for seed in range(5):
        np.random.seed(seed)
        pair.batch = {"x": tokens(seed)}
        states = np.random.get_state()
        torch.manual_seed(seed)
        got = pair.step(pair.batch)
        np.random.set_state(states)
        torch.manual_seed(seed)
        want = pair.theirs(**pair.batch)
        want.backward()
        pair.optimizers[1].step()
        pair.optimizers[1].zero_grad()
        assert torch.equal(got, want.detach())
    pair.assert_equal_state()
    # A block has what is read in it, so it may run in Python as a whole.
    assert runs == ([["blocks.0", "blocks.1"]] * len(runs) if make is leaving else [])


# --- runs that do something else


class Moody(nn.Module):
    """What it does follows from the mood."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.register_buffer("steps", torch.zeros(()))
        self.mood = Mood()

    def forward(self, x: Tensor, mood: Tensor) -> Tensor:
        self.steps += 1
        y = F.dropout(self.norm(self.first(x)), 0.2, self.training)
        return self.mood(y, mood).square().mean() * self.steps


class Mood(nn.Module):
    def forward(self, x: Tensor, mood: Tensor) -> Tensor:
        rows = (x.detach() > 0).nonzero()[:, 0]
        if mood == 1:
            return torch.cat([x, x[rows[:1]]])
        if mood == 2:
            raise ValueError("a bad mood")
        return x * 2


def with_moods(pair: Twins, moods: Sequence[int]) -> Iterator[int]:
    for seed, mood in enumerate(moods):
        pair.batch = {"x": tokens(seed), "mood": torch.tensor([mood])}
        yield mood


def test_a_run_that_does_something_else(runs: list[list[str]]) -> None:
    """All is put back, and FSDP2 makes the step; the plan makes the next one."""
    pair = Twins(Moody, {"x": tokens(0), "mood": torch.tensor([0])}, ADAMW)
    for _ in with_moods(pair, [0, 0, 1, 0, 1, 1, 0]):
        pair.assert_equal_steps(1)
    assert len(runs) == 3


def test_an_error_is_that_of_the_model(runs: list[list[str]]) -> None:
    pair = Twins(Moody, {"x": tokens(0), "mood": torch.tensor([0])}, ADAMW)
    for mood in with_moods(pair, [0, 0, 2, 0, 0]):
        if mood < 2:
            pair.assert_equal_steps(1)
            continue
        for step in (pair.step, lambda batch: pair.theirs(**batch)):
            torch.manual_seed(1)
            with pytest.raises(ValueError, match=r"^a bad mood$"):
                step(pair.batch)
        pair.theirs.reshard()
    assert len(runs) == 3


def test_a_module_that_hardly_ever_does_what_it_did(runs: list[list[str]]) -> None:
    pair = Twins(Moody, {"x": tokens(0), "mood": torch.tensor([0])}, SGD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in with_moods(pair, [0, 0] + [1] * 6 + [0] * 2):
            pair.assert_equal_steps(1)
    assert len(runs) == 1
    lines = [str(each.message) for each in caught if "hardly ever" in str(each.message)]
    assert len(lines) == 1 and "a module that runs in Python" in lines[0]


# --- branches and assertions beside it


class Asserting(nn.Module):
    """A branch, and an assertion that its other way would have kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if not (y < 50).all():
            y = y.clamp(max=1.0)
        places = y.topk(4)[1]
        places += 16 * torch.arange(len(x))[:, None]
        picked = self.last(y).reshape(-1)[places.view(-1)]
        assert (y > -1e4).all(), "too small"
        return picked.square().mean()


def test_assertions_beside_a_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan assumes both; where an assertion does not hold, FSDP2 raises its error."""
    made: list[int] = []
    leave = Compiled.leave
    monkeypatch.setattr(Compiled, "leave", lambda *args: made.append(1) or leave(*args))
    pair = Twins(Asserting, {"x": tokens(0)}, ADAMW)
    train(pair, 3)
    assert len(made) == 3
    pair.batch = {"x": tokens(0) * 1e6}
    for step in (pair.step, lambda batch: pair.theirs(**batch)):
        with pytest.raises(AssertionError, match="too small"):
            step(pair.batch)
    pair.theirs.reshard()
    pair.batch = {"x": tokens(0) * 200}
    pair.assert_equal_steps(1)
    train(pair, 2)
    assert len(made) >= 5
