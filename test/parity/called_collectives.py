"""Programs of around_ranks.py: steps that call collectives of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsdp_mlir
import torch
import torch.distributed as dist
from around_loop import Loop, Net, batch, trained
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn import functional as differentiable


def _losses(compiled: bool, compute_loss: Callable[..., Tensor]) -> list[Any]:
    model = fully_shard(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = None
    if compiled:
        step = fsdp_mlir.compile(model, optimizer=optimizer, compute_loss=compute_loss)
    found: list[Any] = trained(model, optimizer, step, compute_loss)
    return found + [param.full_tensor().tolist() for param in model.parameters()]


def counts_over_the_ranks(compiled: bool) -> list[Any]:
    """The loss is that of all tokens of the job, of which each rank has other numbers."""

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        wanted = x.sum(1) > 0
        count, most = wanted.sum(), x.amax()
        dist.all_reduce(count)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
        losses = model.b(torch.tanh(model.a(x / most))).square().mean(1)
        return torch.where(wanted, losses, 0).sum() * dist.get_world_size() / count

    model = Net()
    model.forward = lambda x: compute_loss(model, x)
    loop = Loop(model, compiled)
    return [loop.step(batch(number, 16)) for number in range(4)] + loop.weights()


def features_of_all_ranks(compiled: bool) -> list[Any]:
    """A contrastive loss over them, through which gradients flow to all ranks."""

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        own, other = model(x).tanh().expand(1) * x, model(x + 1) * x.cos()
        every, others = (
            torch.cat(differentiable.all_gather(nn.functional.normalize(each, dim=1)))
            for each in (own, other)
        )
        labels = torch.arange(len(every))
        logits = every @ others.T * 5
        losses = [nn.functional.cross_entropy(each, labels) for each in (logits, logits.T)]
        return sum(losses, torch.zeros(()))

    return _losses(compiled, compute_loss)


def features_in_their_places(compiled: bool) -> list[Any]:
    """Gathered without gradient, but for the own ones, which are put among them: the step of each
    rank is another one."""

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        own = nn.functional.normalize(x * model(x), dim=1)
        every = [torch.zeros_like(own) for _ in range(ranks)]
        dist.all_gather(every, own)
        every[rank] = own
        labels = torch.arange(len(x)) + len(x) * rank
        return nn.functional.cross_entropy(own @ torch.cat(every).T * 5, labels)

    return _losses(compiled, compute_loss)


def through_collectives(compiled: bool) -> list[Any]:
    """Those that autograd knows."""

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x)
        summed = differentiable.all_reduce(loss * x)
        out = torch.empty_like(x)
        exchanged = differentiable.all_to_all_single(out, loss * x.sin())
        parts = [torch.empty(2, 8), torch.empty(2, 8)]
        parts = differentiable.all_to_all(parts, list((loss * x.cos()).split(2)))
        return (summed * exchanged).mean() + (parts[0] * parts[1]).sum()

    return _losses(compiled, compute_loss)


def in_place_and_out(compiled: bool) -> list[Any]:
    """Statistics of all ranks, by each of them."""

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        ranks, rank = dist.get_world_size(), torch.tensor(float(len(x)))
        with torch.no_grad():
            rows = [torch.empty_like(x) for _ in range(ranks)]
            dist.all_gather(rows, x)
            whole = torch.empty(ranks * len(x), 8)
            work = dist.all_gather_into_tensor(whole, x.sin(), async_op=True)
            work.wait()
            own = torch.empty_like(x)
            dist.reduce_scatter_tensor(own, whole)
            first = x.clone()
            dist.broadcast(first, 1)
            swapped = torch.empty_like(x)
            dist.all_to_all_single(swapped, x)
            uneven = torch.empty(4, 8)
            dist.all_to_all_single(uneven, x, [2, 2], [2, 2])
            dist.all_reduce(rank, op=dist.ReduceOp.AVG)
            mean = torch.stack(rows).mean(0) + whole.mean(0) + own + first * swapped + uneven
        return model(x - mean) * rank

    return _losses(compiled, compute_loss)


# As those of around_models.py.
PROGRAMS: dict[Callable[[bool], list[Any]], str] = {
    counts_over_the_ranks: "",
    features_of_all_ranks: "",
    features_in_their_places: "",
    through_collectives: "",
    in_place_and_out: "",
}
