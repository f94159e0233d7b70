"""Captures to the path that is given a model that calls operators of other libraries; with
--without and --other copies that archive without their schemas, and with another one's."""

import sys
import zipfile
from pathlib import Path

import fsdp_mlir
import numpy as np
import torch
from torch import Tensor, nn
from torch.library import Library, register_autograd, register_fake

LIBRARY = Library("lit_ops", "DEF")


def define(schema: str, body: object, key: str = "CPU", tags: tuple[torch.Tag, ...] = ()) -> None:
    LIBRARY.define(schema, tags=tags)
    LIBRARY.impl(schema.partition("(")[0], body, key)


def parts(x: Tensor, y: object = None, *, sizes: list[int], **options: object) -> object:
    assert options.keys() <= {"flag", "name", "dtype", "device"}
    pieces = np.split(x.numpy(), np.cumsum(sizes)[:-1], axis=1)
    return [torch.from_numpy(piece.copy()) for piece in pieces], torch.from_numpy(
        np.asfortranarray(x.numpy())
    )


def fake_parts(x: Tensor, y: object = None, *, sizes: list[int], **options: object) -> object:
    return [x.new_empty(4, size) for size in sizes], x.new_empty(3, 4).t()


def add(x: Tensor, y: Tensor) -> Tensor:
    x.numpy()[...] += y.numpy()
    return x


define(
    "parts.sized(Tensor x, Tensor? y=None, *, int[] sizes, Scalar flag=1, str name='a', "
    "ScalarType dtype=float, Device device) -> (Tensor[], Tensor)",
    parts,
)
define("add_(Tensor(a!) x, Tensor y) -> Tensor(a!)", add)
define(
    "noise(Tensor x) -> Tensor",
    lambda x: torch.from_numpy(x.numpy() * float(torch.rand(1))),
    tags=(torch.Tag.nondeterministic_seeded,),
)
define("check(Tensor x) -> ()", lambda x: None)
define("body(Tensor x) -> Tensor", lambda x: x.sin())
define("composite(Tensor x) -> Tensor", lambda x: x.cos(), "CompositeImplicitAutograd")
for name, fake in {
    "parts.sized": fake_parts,
    "add_": lambda x, y: x,
    "noise": torch.empty_like,
    "check": lambda x: None,
    "body": torch.empty_like,
}.items():
    register_fake(f"lit_ops::{name}", fake, lib=LIBRARY)
register_autograd("lit_ops::body", lambda ctx, gradient: gradient, lib=LIBRARY)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.lit_ops.composite(torch.ops.lit_ops.body(self.linear(x)))
        with torch.no_grad():
            pieces, whole = torch.ops.lit_ops.parts(
                y, sizes=[1, 2], flag=True, device=torch.device("cpu")
            )
            torch.ops.lit_ops.add_(pieces[1].repeat(1, 2)[:, :3].clone(), whole)
            noise = torch.ops.lit_ops.noise(whole.contiguous())
            torch.ops.lit_ops.check(noise)
        return (y * noise).sum()


def copy(archive: Path, to: str, change: object) -> None:
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(to, "w") as new:
        for entry in old.infolist():
            data = old.read(entry)
            new.writestr(entry, change(data) if entry.filename.endswith("capture.json") else data)


if len(sys.argv) > 2:
    options = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
    copy(Path(sys.argv[1]), options["--without"], lambda d: d.replace(b'"operators"', b'"others"'))
    copy(
        Path(sys.argv[1]),
        options["--other"],
        lambda d: d.replace(b'"schema":"lit_ops::parts.sized(', b'"schema":"lit_ops::parts('),
    )
else:
    torch.manual_seed(0)
    fsdp_mlir.capture(Model(), kwargs={"x": torch.ones(4, 4)}, path=Path(sys.argv[1]))
