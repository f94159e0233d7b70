"""Complex parameters: spectral convolutions beside real layers, with FSDP2's bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_script

SCRIPT = """
import os
import fsdp_mlir, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

class Spectral(nn.Module):
    # A Fourier neural operator's layer; fewer rows than some meshes have ranks.
    def __init__(self, width, modes, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(modes, width, width, dtype=dtype) / width)
        self.register_buffer("phase", torch.polar(torch.ones(modes), torch.arange(modes) / modes))

    def forward(self, x):
        spectrum = torch.fft.rfft(x, dim=1)[:, : self.weight.shape[0]]
        mixed = torch.einsum("bmi,mio->bmo", spectrum.to(self.weight.dtype), self.weight)
        mixed = mixed * self.phase[:, None].conj()
        power = torch.view_as_real(mixed.conj() * (1 + 2j)).square().mean()
        return (torch.fft.irfft(mixed, n=x.shape[1], dim=1) * (1 + power)).to(x.dtype)

class Operator(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.lift, self.project = nn.Linear(3, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(Spectral(8, modes, dtype) for modes in (5, 2))

    def forward(self, x, y):
        x = self.lift(x)
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return (self.project(x) - y).square().mean()

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}

def trained(name, dtype, compiled):
    model = Operator(dtype)
    # Groups of two: Gloo adds more terms in an order of its own.
    shape, names = ((2, 2), ("replicate", "shard")) if world == 4 else ((world,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = OPTIMIZERS[name](model.parameters())
    step = None
    if compiled:
        step = fsdp_mlir.compile(
            model, optimizer=optimizer, max_norm=0.5, comm=COMM, fallback="error"
        )
    torch.manual_seed(rank)
    seen = []
    for number in range(3):
        x, y = torch.randn(2, 16, 3), torch.randn(2, 16, 1)
        if compiled:
            loss = step(x=x, y=y) if number < 2 else step.backward(x=x, y=y)
            if number == 2:
                step.update()
            norm = step.grad_norm
        else:
            loss = model(x, y)
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), 0.5).full_tensor().item()
            optimizer.step()
            optimizer.zero_grad()
        seen += [loss.item(), norm]
    state = [p.to_local().detach().clone() for p in model.parameters()]
    for p in model.parameters():
        for value in optimizer.state[p].values():
            state.append(value.to_local() if hasattr(value, "to_local") else torch.as_tensor(value))
    return seen, state

DTYPES = torch.complex64, torch.complex128
for index, name in enumerate(OPTIMIZERS):
    for dtype in DTYPES if EACH else DTYPES[index % 2 :][:1]:
        want, got = trained(name, dtype, False), trained(name, dtype, True)
        assert want[0] == got[0], (name, dtype, want[0], got[0])
        for a, b in zip(want[1], got[1], strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), (name, dtype, a, b)
dist.barrier()
os._exit(0)
"""


def run(world: int, tmp_path: Path, text: str) -> tuple[list[int], list[str]]:
    script = tmp_path / "script.py"
    script.write_text(text)
    return run_script(script, world)


@pytest.mark.parametrize(
    ("world", "comm", "each"),
    [
        (2, "gloo", False),  # each optimizer with one of the dtypes
        *(
            pytest.param(world, comm, True, marks=pytest.mark.exhaustive)
            for world, comm in [(1, "shm"), (4, "shm"), (2, "shm"), (2, "gloo"), (4, "gloo")]
        ),
    ],
)
def test_spectral_layers(world: int, comm: str, each: bool, tmp_path: Path) -> None:
    script = SCRIPT.replace("COMM", repr(comm)).replace("EACH", str(each))
    statuses, errors = run(world, tmp_path, script)
    assert statuses == [0] * world, errors


@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_over_three_ranks_there_is_no_plan(each: bool, tmp_path: Path) -> None:
    """PyTorch rounds the quotient of a complex number by its place in FSDP2's flat tensor."""
    script = SCRIPT.replace("COMM", "None").replace("EACH", str(each))
    statuses, errors = run(3, tmp_path, script)
    assert statuses == [1] * 3
    assert "the average of complex gradients over 3 ranks is not supported" in errors[0]
    statuses, errors = run(3, tmp_path, script.replace('fallback="error"', 'fallback="eager"'))
    assert statuses == [0] * 3, errors
