"""What other people's code does with Python, and a step has to stand."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import fsdp_mlir
import pytest
import torch
import torch.distributed.fsdp
from fsdp_mlir.modules.place import is_library, is_librarys
from torch import Tensor, nn

X = torch.linspace(-1, 1, 16).reshape(4, 4)
SETTING = os.environ.get  # a bound method, as decorators keep it


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


class Asking(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if SETTING("NO_SUCH_VARIABLE") is None else x * 2)


class Irreps(tuple[int]):
    """As e3nn's."""

    def __len__(self) -> int:
        raise NotImplementedError("ambiguous")


class Equivariant(Net):
    def __init__(self) -> None:
        super().__init__()
        self.irreps = Irreps((4,))


class Preferred(Net):
    """It hides the parameters of its reference, as that of DPO."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = copy.deepcopy(self.linear).requires_grad_(False)

    def parameters(self, recurse: bool = True) -> Any:
        return self.linear.parameters(recurse)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.reference(x)
        return (self.linear(x) - before + 1).square().mean()


class Diffusion(Net):
    """Its __init__ asks for classes, which no step does."""

    def __init__(self) -> None:
        super().__init__()
        assert not (type(self) is Net and self.linear.in_features != int(4.0))

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        self.last = loss.item()
        return loss


def compiled(model: nn.Module, **options: Any) -> Any:
    fsdp_mlir.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"compute_loss": lambda m, x: m(x), "fallback": "error", **options}
    return fsdp_mlir.compile(model, optimizer=optimizer, **options)


@pytest.mark.parametrize("kind", [Asking, Equivariant, Preferred, Diffusion])
def test_a_step(kind: type[Net]) -> None:
    model = kind()
    step = compiled(model)
    for number in range(3):
        want = model(X * number).detach()
        model.reshard()
        assert torch.equal(step(X * number), want)
    assert len(step._plans._made) == 1


class Scaled:
    scale = 1.0

    @classmethod
    def of_the_class(cls, model: Any, x: Tensor) -> Tensor:
        return model(x) * cls.scale

    def of_an_object(self, model: Any, x: Tensor) -> Tensor:
        return model(x) * self.scale

    def of_its_type(self, model: Any, x: Tensor) -> Tensor:
        return model(x) * getattr(type(self), "other", 1.0)


class Derived(Scaled):
    pass


@pytest.mark.parametrize(
    ("loss", "owner", "name"),
    [
        (Scaled.of_the_class, Scaled, "scale"),
        (Derived.of_the_class, Derived, "scale"),
        (Derived().of_an_object, Derived, "scale"),
        (Derived().of_its_type, Derived, "other"),
    ],
)
def test_an_attribute_of_a_class_appears(
    monkeypatch: pytest.MonkeyPatch, loss: Any, owner: type, name: str
) -> None:
    """Where it was inherited, or not there."""
    model = Net()
    step = compiled(model, compute_loss=loss)
    step(X)
    for value in (3.0, 2.0):
        monkeypatch.setattr(owner, name, value, raising=False)
        want = model(X).detach() * value
        model.reshard()
        assert torch.equal(step(X), want)


class Counted:
    calls = 0

    @classmethod
    def loss(cls, model: Any, x: Tensor) -> Tensor:
        cls.calls += 1
        return model(x) * (1 + cls.calls % 3)


@pytest.mark.parametrize("own", [{}, {"calls": 4}])
def test_a_method_sets_an_attribute_of_a_class_anew(own: dict[str, int]) -> None:
    """Each class then has its own, where it was inherited."""
    kind: Any = type("Derived", (Counted,), dict(own))
    model, first = Net(), kind.calls
    step = compiled(model, compute_loss=kind.loss, fallback="eager")
    for number in range(first + 1, first + 4):
        want = model(X).detach() * (1 + number % 3)
        model.reshard()
        assert torch.equal(step(X), want)
        assert (Counted.calls, vars(kind)["calls"]) == (0, number)


class Ending(Net):
    """Its third step ends an iteration."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise StopIteration(self.calls)
        return super().forward(x)


def test_the_end_of_an_iteration() -> None:
    model = Ending()
    step = compiled(model, fallback="eager")
    step(X), step(X)
    with pytest.raises(StopIteration) as caught:
        step(X)
    assert type(caught.value.args[0]) is int and model.calls == 3
    step(X)
    assert model.calls == 4


def test_the_seed_is_another_one_while_a_step_is_recorded() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x) * (1 + torch.initial_seed() % 2)

    torch.manual_seed(12344)
    model = Net()
    step = compiled(model, compute_loss=loss, fallback="eager")
    for seed in (12345, 12346):
        torch.manual_seed(seed)
        want = loss(model, X).detach()
        model.reshard()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert torch.equal(step(X), want)
        assert (seed == 12346) or "asks it for its seed" in str(caught[0].message)


def test_a_package_that_was_installed_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by --target: it is no code of the user's, which may be beside it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("package", "own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").write_text("")
    (tmp_path / "package-1.0.dist-info").mkdir()
    (tmp_path / "package-1.0.dist-info" / "RECORD").write_text("package/module.py,sha256=x,0\n")
    assert is_librarys(str(tmp_path / "package" / "module.py"))
    own = str(tmp_path / "own" / "module.py")
    assert not is_librarys(own)
    found = ModuleType("module")
    found.__file__ = own
    assert not is_library(found)


def test_an_error_that_the_loop_catches() -> None:
    """It skips the batch."""

    def loss(model: Any, x: Tensor) -> Tensor:
        value = model(x)
        if not torch.isfinite(value):
            raise FloatingPointError("bad batch")
        return value

    def run(ours: bool) -> list[Any]:
        model: Any = Net()
        if ours:
            step = compiled(model, compute_loss=loss, fallback="eager")
        else:
            torch.distributed.fsdp.fully_shard(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: list[Any] = []
        for number in range(8):
            x = X * (float("nan") if number in (3, 6) else number)
            try:
                if ours:
                    found.append(step(x).item())
                    continue
                value = loss(model, x)
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(value.item())
            except FloatingPointError as error:
                found.append(str(error))
        assert not ours or len(step._plans._made) == 1
        return found

    got, want = run(True), run(False)
    assert got == want and got.count("bad batch") == 2


@pytest.mark.parametrize("alone", [True, False])
def test_a_loss_of_one_element(alone: bool) -> None:
    """Which backward() takes."""

    def loss(model: Any, x: Tensor) -> Any:
        value = model(x).reshape(1)
        return value if alone else {"loss": value, "half": value / 2}

    model: Any = Net()
    step = compiled(model, compute_loss=loss)
    for number in range(3):
        want = loss(model, X * number)
        model.reshard()
        got = step(X * number)
        for key in [0] if alone else ["loss", "half"]:
            assert got[key].shape == want[key].shape and torch.equal(got[key], want[key].detach())
    assert step.evaluate(X)[0 if alone else "loss"].shape == want[0 if alone else "loss"].shape
