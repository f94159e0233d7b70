"""What decides a step has a part in the name of a kept plan, wherever it lies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from fsdp_mlir.frontdoor.identity import Untold, identity
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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
    RemovableHandle.next_id = 0  # as in another process
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


@pytest.mark.parametrize("held", [[0] * 20_000, np.ones(5_000_000)], ids=["list", "array"])
def test_what_takes_too_long_to_tell(held: object) -> None:
    with pytest.raises(Untold, match=r"holds (20000 items|an array of 40000000 bytes)"):
        key_with(lambda module, x, y, held=[held] * 2: y)  # type: ignore[misc]
