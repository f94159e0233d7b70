"""One rank of models that communicate in forward and backward, with FSDP2 and compiled.

    parallel_ranks.py CASE FOLDER

Writes to FOLDER/RANK the differences between both, one to a line; FOLDER/RANK.notes has the
warnings of the compiled side.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsdp_mlir
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

WORDS, LENGTH, WIDTH, HEAD = 96, 16, 24, 6

Optimizer = Callable[..., torch.optim.Optimizer]


class Block(nn.Module):
    def __init__(self, *, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            each(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(heads.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Model(nn.Module):
    """`part` and `parts`: what of a sequence a rank has between blocks."""

    def __init__(self, mesh: DeviceMesh | None, *, tied: bool, drop: float) -> None:
        super().__init__()
        self.mesh = mesh
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(drop=drop) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places(torch.arange(tokens.shape[1]))
        if self.mesh is not None:
            places = places.chunk(self.mesh["tensor"].size())[self.mesh["tensor"].get_local_rank()]
        x = self.words(tokens) + places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallel(
    *,
    sequence: bool = True,
    tied: bool = False,
    drop: float = 0.0,
    frozen: bool = False,
    replicas: bool = False,
    wrapped: bool = False,
    units: bool = True,
    **policy: Any,
) -> tuple[nn.Module, int]:
    """A model on a mesh, and the number of this rank's batches. Without `sequence` the norms are
    plain parameters beside DTensors."""
    world = dist.get_world_size()
    shape, names = (world // 2, 2), ("data", "tensor")
    if replicas:
        shape, names = (2, world // 4, 2), ("replicas", "data", "tensor")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = Model(mesh if sequence else None, tied=tied, drop=drop)
    inside = Shard(1) if sequence else Replicate()
    columns, rows = ColwiseParallel(input_layouts=inside), RowwiseParallel(output_layouts=inside)
    layer = dict.fromkeys(("q", "k", "v", "up"), columns) | dict.fromkeys(("out", "down"), rows)
    ends: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=inside),
        "head": ColwiseParallel(input_layouts=inside, output_layouts=Replicate()),
    }
    if sequence:
        layer |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        layer["drop"] = SequenceParallel(use_local_output=True)
        ends |= {"norm": SequenceParallel(), "places": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tensor"], ends)
    if frozen:
        model.words.weight.requires_grad_(False)
        model.blocks[1].q.weight.requires_grad_(False)
    over = mesh["replicas", "data"] if replicas else mesh["data"]
    for index, block in enumerate(model.blocks):
        parallelize_module(block, mesh["tensor"], layer)
        if wrapped:
            model.blocks[index] = block = checkpoint_wrapper(block, preserve_rng_state=False)
        if units:
            fully_shard(block, mesh=over, **policy)
    fully_shard(model, mesh=over, **policy)
    return model, over.get_local_rank() if not replicas else dist.get_rank() // 2


class Meeting(nn.Module):
    """Ranks exchange values in forward, by the functions of torch."""

    def __init__(self, group: Any, ranks: int, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.group, self.ranks, self.how = group, ranks, how

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.words(tokens)))
        if self.how == "reduce":
            x = x - funcol.all_reduce(x.mean((0, 1)), "sum", self.group) / self.ranks
        elif self.how == "several":
            pair = [x.detach().mean(1), x.detach().square()]
            mean, square = funcol.all_reduce_coalesced(pair, "sum", self.group)
            x = x - mean[:, None] / self.ranks + square / self.ranks
        elif self.how == "evaluated":
            if not self.training:
                x = x - funcol.all_reduce(x, "sum", self.group)
        elif self.how == "gather":
            x = x + funcol.all_gather_tensor(x.detach().mean(1), 0, self.group).mean(0)
        else:
            half = funcol.reduce_scatter_tensor(x.detach(), "sum", 1, self.group)
            x = x - torch.cat([half, half], 1) / self.ranks
        return self.second(x)


def meeting(how: str, *, everybody: bool = False, alike: bool = True) -> tuple[nn.Module, int]:
    """Over all ranks, or over those that shard the model: each half of the ranks has its own, of
    other units if not `alike`."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("copies", "data"))["data"]
    torch.manual_seed(0)
    group, ranks = (dist.group.WORLD, world) if everybody else (mesh.get_group(), 2)
    model = Meeting(group, ranks, how)
    if alike or dist.get_rank() < 2:
        fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, dist.get_rank()


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def batches(seed: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, WORDS, (2, LENGTH), generator=generator)
    return [(draw(), draw()) for _ in range(count)]


Results = dict[str, Any]


def whole(model: nn.Module) -> Results:
    state = model.state_dict()
    return {k: v.full_tensor().clone() if isinstance(v, DTensor) else v for k, v in state.items()}


def eager_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    loss = loss_fn(model(batch[0]), batch[1])
    loss.backward()
    return loss.item()


def evaluated_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    model.eval()
    with torch.no_grad():
        loss = loss_fn(model(batch[0]), batch[1])
    model.train()
    return loss.item()


def train(
    make: Callable[[], tuple[nn.Module, int]],
    optimizer: Optimizer,
    clip: float | None,
    compiled: bool,
) -> Results:
    model, seed = make()
    own = optimizer(model.parameters())
    torch.manual_seed(100 + dist.get_rank())  # for dropout
    step = None
    if compiled:
        step = fsdp_mlir.compile(
            model, loss=loss_fn, optimizer=own, max_norm=clip, fallback="error", evaluation=True
        )
    losses, norms = [], []
    for batch in batches(seed, 3):
        if step is not None:
            losses += [step(*batch).item(), step.evaluate(*batch).item()]
            norms.append(step.grad_norm)
            continue
        losses.append(eager_loss(model, batch))
        if clip is not None:
            norm = clip_grad_norm_(model.parameters(), clip)
            norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        own.step()
        own.zero_grad()
        losses.append(evaluated_loss(model, batch))
    return {"losses": losses, "norms": norms if clip is not None else [], **whole(model)}


def mix(make: Callable[[], tuple[nn.Module, int]], compiled: bool) -> Results:
    """Every kind of call, and eager steps between them. Accumulated gradients that ranks exchange
    after their sum have no plan."""
    model, seed = make()
    own = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first, second, third, *rest = batches(seed, 7)
    small = tuple(each[:1] for each in first)
    step = None
    if compiled:
        step = fsdp_mlir.compile(model, loss=loss_fn, optimizer=own, evaluation=True)

    def update() -> None:
        own.step()
        own.zero_grad()

    def accumulate() -> list[float]:
        model.set_requires_gradient_sync(False)
        losses = [eager_loss(model, rest[0])]
        model.set_requires_gradient_sync(True)
        return [*losses, eager_loss(model, rest[1])]

    losses = []
    for batch in (first, small):
        losses.append(step(*batch).item() if step else eager_loss(model, batch))
        if step is None:
            update()
        losses.append(step.evaluate(*second).item() if step else evaluated_loss(model, second))
    for batch in (second, third):
        losses.append(step.backward(*batch).item() if step else eager_loss(model, batch))
    step.update() if step else update()
    losses += [x.item() for x in step.accumulate(rest[:2])] if step else accumulate()
    step.update() if step else update()
    losses.append(eager_loss(model, rest[2]))
    update()
    losses.append(step(*rest[3]).item() if step else eager_loss(model, rest[3]))
    if step is None:
        update()
    return {"losses": losses, **(step.full_state_dict() if step else whole(model))}


def save_and_load(folder: Path) -> list[str]:
    """A checkpoint of one mesh is read on another, and a run goes on from its own with the same
    bits."""
    meshes: dict[str, Callable[[], tuple[nn.Module, int]]] = {
        "sequence": parallel,
        "plain norms": partial(parallel, sequence=False),
        "replicas": partial(parallel, replicas=True),
        "data": data_alone,
    }

    def run(name: str, last: int, *, load: str = "", save: str = "") -> Results:
        model, seed = meshes[name]()
        own = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = fsdp_mlir.compile(model, loss=loss_fn, optimizer=own, fallback="error")
        if load:
            step.load(folder / load)
        loaded = whole(model)
        losses = [step(*batch).item() for batch in batches(seed, last)[step.steps :]]
        if save:
            step.save(folder / save)
        return {"losses": losses, "loaded": loaded, **whole(model)}

    found = []
    for name in meshes:
        straight, begun = run(name, 4), run(name, 2, save=name)
        resumed = run(name, 4, load=name)
        resumed["losses"] = begun["losses"] + resumed["losses"]
        found += differences(straight, resumed, name)
        saved = {key: value for key, value in begun.items() if isinstance(value, Tensor)}
        others = list(meshes)
        other = others[others.index(name) - 1]
        loaded = run(other, 2, load=name)["loaded"]
        found += differences(saved, loaded, f"{other} from {name}")
    return found


def save_copies(folder: Path) -> list[str]:
    """Groups of ranks that train copies of a model on data of their own: while these are equal they
    are saved once; then a checkpoint would lack all but one."""
    model, seed = meeting("gather")
    optimizer = ADAMW(model.parameters())
    step = fsdp_mlir.compile(model, loss=loss_fn, optimizer=optimizer, fallback="error")
    step.save(folder / "saved")
    (batch,) = batches(seed, 1)
    step(*batch)
    try:
        step.save(folder / "saved")
    except ValueError as error:
        expected = "rank 2 shards other values with ranks [2, 3] than rank 0 does with its group"
        saved = [path.name for path in (folder / "saved").iterdir()]
        return [] if expected in str(error) and saved == ["step-0"] else [f"{error}, {saved}"]
    return ["saved one of two copies"]


def data_alone() -> tuple[nn.Module, int]:
    torch.manual_seed(0)
    model = Model(None, tied=False, drop=0.0)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model), dist.get_rank()


def differences(want: Results, got: Results, where: str) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b

    names = [key for key in want if key != "loaded" and key in got]
    missing = [key for key in want if key not in got]
    unlike = [key for key in names if not same(want[key], got[key])]
    return [f"{where}: {key} differs" for key in unlike] + [f"{where}: no {x}" for x in missing]


ADAMW: Optimizer = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD: Optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
NADAM: Optimizer = partial(torch.optim.NAdam, lr=1e-2)
BF16 = partial(MixedPrecisionPolicy, param_dtype=torch.bfloat16)

Case = tuple[Callable[[], tuple[nn.Module, int]], Optimizer, float | None]
CASES: dict[str, Case] = {
    "sequence": (parallel, ADAMW, 0.5),
    "plain norms": (partial(parallel, sequence=False), ADAMW, None),
    "tied": (partial(parallel, tied=True), SGD, 0.5),
    "dropout": (partial(parallel, drop=0.2), ADAMW, None),
    "frozen": (partial(parallel, frozen=True), SGD, 0.5),
    "replicas": (partial(parallel, replicas=True), ADAMW, 0.5),
    "recomputed": (partial(parallel, wrapped=True), ADAMW, None),
    "kept": (partial(parallel, reshard_after_forward=False), SGD, None),
    "one unit": (partial(parallel, units=False), NADAM, 0.5),
    "bf16": (partial(parallel, mp_policy=BF16(reduce_dtype=torch.float32)), ADAMW, 0.5),
    "bf16 reduced": (partial(parallel, mp_policy=BF16()), SGD, None),
    "reduce": (partial(meeting, "reduce"), SGD, 0.5),
    "reduce over all": (partial(meeting, "reduce", everybody=True), SGD, None),
    "gather": (partial(meeting, "gather"), ADAMW, None),
    "several": (partial(meeting, "several"), SGD, None),
    "evaluated": (partial(meeting, "evaluated"), SGD, None),
    "scatter": (partial(meeting, "scatter"), ADAMW, None),
}


def main() -> None:
    _, name, folder = sys.argv
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if name == "saved":
            found = save_and_load(Path(folder))
        elif name == "copies":
            found = save_copies(Path(folder))
        elif name == "unlike":
            unlike = partial(meeting, "reduce", everybody=True, alike=False)
            found = differences(mix(unlike, False), mix(unlike, True), "")
        elif name == "mix":
            found = differences(mix(parallel, False), mix(parallel, True), "")
        else:
            case = CASES[name]
            found = differences(train(*case, False), train(*case, True), "")
    rank = dist.get_rank()
    if name in ("unlike", "mix") and rank > 0:  # whose whole state is empty
        found = [text for text in found if " no " not in text]
    (Path(folder) / f"{rank}.notes").write_text("\n".join(str(each.message) for each in caught))
    (Path(folder) / str(rank)).write_text("\n".join(found))
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    dist.destroy_process_group()
