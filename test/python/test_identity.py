"""What decides a step has a part in the name of a kept plan, wherever it lies."""

from __future__ import annotations

import builtins
import colorsys
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fsdp_mlir
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fsdp_mlir.frontdoor.identity import identity
from fsdp_mlir.frontdoor.telling import Untold
from fsdp_mlir.frontdoor.unchanged import Unchanged
from fsdp_mlir.modules.compute_loss import ComputeLoss
from torch import Tensor, nn

BATCH = {"x": torch.ones(2, 4)}


class Private:
    __slots__ = ("__by", "name")

    def __init__(self, by: float) -> None:
        self.__by = by
        self.name = "a"

    def __call__(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return y * self.__by

    def __repr__(self) -> str:
        return "Private()"


class Rate(float):
    def __repr__(self) -> str:
        return "a rate"


BY = 2.0


def reads_a_global(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return y * BY


class Owner:
    def hook(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return reads_a_global(module, x, y)


def keyword(by: float) -> Callable[..., Tensor]:
    def hook(module: nn.Module, x: Tensor, y: Tensor, *, f: object = lambda y: y * by) -> Tensor:
        return f(y)  # type: ignore[operator]

    return hook


def of_rate(by: float) -> Callable[..., Tensor]:
    rate = Rate(by)
    return lambda module, x, y, rate=rate: y * rate


def key_with(hook: Callable[..., Tensor] | None, forward: object = None) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    if hook is not None:
        model[0].register_forward_hook(hook)
    if forward is not None:
        model[0].forward = forward  # type: ignore[assignment]
    return identity(model, None, BATCH)


@pytest.fixture(scope="module", autouse=True)
def everything_is_imported() -> None:
    key_with(None)


@pytest.mark.parametrize("hook", [Private, keyword, of_rate], ids=lambda hook: hook.__name__)
def test_what_a_hook_holds(hook: Callable[[float], Callable[..., Tensor]]) -> None:
    keys = [key_with(hook(by)) for by in (2.0, 3.0, 2.0)]
    assert keys[0] != keys[1] and keys[0] == keys[2]


@pytest.mark.parametrize("kind", ["function", "method", "attribute"])
def test_what_it_reads_from_outside(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        if kind == "attribute":
            return key_with(None, lambda x: reads_a_global(None, x, x))  # type: ignore[arg-type]
        return key_with(reads_a_global if kind == "function" else Owner().hook)

    before, again = key(), key()
    monkeypatch.setattr(sys.modules[__name__], "BY", 3.0)
    assert before == again != key()


def test_a_class_of_a_library_that_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_with(None)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert key_with(None) != before


@pytest.mark.parametrize(
    "line",
    [
        "from ..settings import by",
        "from .. import settings; by = settings.by",
        "from ...above import by",
    ],
)
def test_a_relative_import(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "a_tree" / "middle" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent, inner.parent.parent):
        (folder / "__init__.py").touch()
    (inner.parent / "settings.py").write_text("by = 2.0\n")
    (inner.parent.parent / "above.py").write_text("by = 2.0\n")
    (inner / "models.py").write_text(
        "from torch import nn\n"
        "class Scaled(nn.Linear):\n"
        "    def forward(self, x):\n"
        f"        {line}\n"
        "        return super().forward(x) * by\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "a_tree"]:
        monkeypatch.delitem(sys.modules, name)
    names = ("middle.inner.models", "middle.settings", "above")
    models, *settings = (import_module(f"a_tree.{name}") for name in names)
    model = models.Scaled(4, 4)
    before = identity(model, None, BATCH)
    assert identity(model, None, BATCH) == before
    for module in settings:
        module.by = 3.0
    assert identity(model, None, BATCH) != before


CONFIG = ModuleType("config")
CONFIG.SCALE = 1.0  # type: ignore[attr-defined]


class ReadsLibraries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, activation=F.gelu)
        self.config = CONFIG
        self.settings = SimpleNamespace(inner=[CONFIG])

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.layer(x)) * math.sqrt(4.0) * colorsys.ONE_THIRD
        x = torch.sigmoid(x).relu() * self.config.SCALE
        return x * torch.linalg.vector_norm(x) * len(sys.argv)


def closure(by: float) -> Callable[..., Tensor]:
    return lambda x, *args: x * by


def with_default(by: float) -> Callable[..., Tensor]:
    return lambda x, *args, by=by: x * by


class Scaled:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Tensor, *args: object) -> Tensor:
        return x * self.by


# Replaced by values that tell only by what they hold.
PATCHES: dict[str, tuple[object, str, Callable[[float], object]]] = {
    "closure": (F, "gelu", closure),
    "default": (F, "gelu", with_default),
    "partial": (F, "gelu", lambda by: partial(F.leaky_relu, negative_slope=by)),
    "object": (F, "gelu", Scaled),
    "builtin": (F, "gelu", lambda by: torch.relu if by == 2 else torch.tanh),
    "torch": (torch, "sigmoid", lambda by: torch.relu if by == 2 else torch.tanh),
    "submodule": (torch.linalg, "vector_norm", closure),
    "standard_library": (math, "sqrt", closure),
    "method_of_tensors": (Tensor, "relu", closure),
    "operator_of_tensors": (Tensor, "__mul__", closure),
    "method_of_a_layer": (nn.TransformerEncoderLayer, "_ff_block", closure),
    "named_by_a_layer": (F, "layer_norm", closure),
    "builtins": (builtins, "len", lambda by: lambda x, real=len, by=by: real(x)),
    "constant": (colorsys, "ONE_THIRD", float),
    "config_module": (CONFIG, "SCALE", float),
    "arguments": (sys, "argv", lambda by: ["script", f"--by={by}"]),
}


@pytest.mark.parametrize("name", PATCHES)
def test_what_replaces_a_part_of_a_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, made = PATCHES[name]
    model = ReadsLibraries()

    def key() -> str:
        return identity(model, None, BATCH)

    unpatched = key()
    keys = []
    for by in (2.0, 3.0, 2.0):
        with monkeypatch.context() as context:
            context.setattr(owner, attribute, made(by))
            keys.append(key())
    assert keys[0] == keys[2] and len({unpatched, *keys}) == 3
    assert key() == unpatched


@pytest.mark.parametrize("name", PATCHES)
def test_a_compiled_step_sees_it_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, made = PATCHES[name]
    unchanged = Unchanged(ReadsLibraries(), None)
    assert unchanged.holds()
    with monkeypatch.context() as context:
        context.setattr(owner, attribute, made(2.0))
        assert not unchanged.holds()
    assert unchanged.holds()


def test_what_library_code_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What multi_head_attention_forward calls, which the model does not name."""
    model = ReadsLibraries()
    keys = []
    for by in (2.0, 3.0):
        with monkeypatch.context() as context:
            context.setattr(F, "_in_projection_packed", closure(by))
            keys.append(identity(model, None, BATCH))
    assert keys[0] != keys[1]


def with_hooks(before: int, changed: Callable[[nn.Module], object]) -> str:
    """After as many hooks of other modules."""
    for _ in range(before):
        nn.Identity().register_forward_hook(reads_a_global)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_hook(reads_a_global)
    model[1].handle = model[0].register_forward_hook(reads_a_global, always_call=True)
    model[1].register_full_backward_hook(lambda *_: None)
    changed(model)
    return identity(model, None, BATCH)


HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "another_is_always_called": lambda model: model[0]._forward_hooks_always_called.update(
        dict.fromkeys(model[0]._forward_hooks, True)
    ),
    "another_order": lambda model: model[0]._forward_hooks.move_to_end(
        next(iter(model[0]._forward_hooks))
    ),
    "another_handle": lambda model: setattr(
        model[1], "handle", model[1].register_forward_hook(reads_a_global)
    ),
    "removed": lambda model: model[1].handle.remove(),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_told_apart_by_their_places(name: str) -> None:
    """And not by the number that torch gives each hook of a process."""
    keys = {with_hooks(count, lambda model: None) for count in (0, 1, 10, 100, 1000)}
    assert len(keys) == 1 and with_hooks(3, HOOKS[name]) not in keys
    assert with_hooks(0, HOOKS[name]) == with_hooks(1, HOOKS[name])


def test_what_code_asks_of_the_process() -> None:
    before = torch.get_num_threads()
    keys = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            keys += [key_with(None, lambda x: x * torch.get_num_threads()), key_with(None)]
    finally:
        torch.set_num_threads(before)
    assert keys[0] != keys[2] and keys[1] == keys[3]


def test_it_is_the_same_in_each_process() -> None:
    """Also where sets have another order."""
    lines = [
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})",
        "import test_identity as it",
        "print(it.identity(it.ReadsLibraries(), None, it.BATCH))",
    ]
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    keys = {
        subprocess.run(
            [sys.executable, "-c", "\n".join(lines)],
            env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for _ in range(2)
    }
    assert len(keys) == 1 and keys != {b""}


class Parts(nn.Sequential):
    parts: set[Any]


def test_orders_of_each_process() -> None:
    """Of sets of strings, and of what a function may make of their hashes."""
    model = Parts(nn.Linear(4, 4))
    model.parts = {3, 11}
    first = identity(model, None, BATCH)
    model.parts = {11, 3}
    assert identity(model, None, BATCH) != first
    model.parts = {"a", "b"}
    told: list[Callable[[], str]] = [lambda: identity(model, None, BATCH)]
    hooks: list[Callable[..., Tensor]] = [
        lambda module, x, y: y * hash("a"),
        lambda module, x, y: y * len(set(str(module))),
        lambda module, x, y: y * sum(len(each) for each in {"a", "b"}),
        lambda module, x, y: y * len({name for name in ("a", "b")}),
        lambda module, x, y, names=frozenset(("a", "b")): y * len(names),  # type: ignore[misc]
    ]
    told += [partial(key_with, hook) for hook in hooks]
    for key in told:
        with pytest.raises(Untold, match="PYTHONHASHSEED"):
            key()
    key_with(lambda module, x, y: y * 2 if str(module) in {"a", "b"} else y)


LOG = logging.getLogger("fsdp_mlir_test")
SCALED = torch.ones(4)


def reads_more(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return y * SCALED if LOG.isEnabledFor(logging.DEBUG) else y


def test_levels_and_attributes_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key_with(reads_more)]
    monkeypatch.setattr(SCALED, "scale", 2.0, raising=False)
    keys.append(key_with(reads_more))
    monkeypatch.setattr(LOG, "level", logging.DEBUG)
    keys.append(key_with(reads_more))
    assert len(set(keys)) == 3


class Trainer:
    """It holds its step, of which nothing decides what the step is."""

    def __init__(self) -> None:
        self.model: Any = fsdp_mlir.fully_shard(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = fsdp_mlir.compile(
            self.model, compute_loss=self.compute_loss, optimizer=optimizer
        )

    def compute_loss(self, model: Any, x: Tensor) -> Tensor:
        return model(x).square().mean()


def test_a_trainer_that_holds_its_step() -> None:
    trainer = Trainer()
    plain = nn.Linear(4, 4)
    trainer.model = plain
    before = identity(plain, ComputeLoss(trainer.compute_loss), BATCH)
    assert identity(plain, ComputeLoss(trainer.compute_loss), BATCH) == before


@pytest.mark.parametrize("held", [[0] * 20_000, np.ones(5_000_000)], ids=["list", "array"])
def test_what_takes_too_long_to_tell(held: object) -> None:
    with pytest.raises(Untold, match=r"holds (20000 items|an array of 40000000 bytes)"):
        key_with(lambda module, x, y, held=[held] * 2: y)  # type: ignore[misc]
