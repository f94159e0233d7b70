"""What code reaches outside of the model, replaced or changed after compile: functions, objects and
modules that its names hold, members of classes, code. The next step is FSDP2's with the new ones.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import os
import sys
import weakref
from collections.abc import Callable, Generator
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import fsdp_mlir
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_mlir.frontdoor.plans import Plans
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

# Makes a model and a loss, and then changes, one at a time, what these reach.
Program = Callable[[], Generator[Any, Any, None]]
PROGRAMS: dict[str, Program] = {}
ACT: Any = torch.tanh
KEPT: list[Any] = []  # which no loss names


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@program
def a_forward_of_an_instance() -> Generator[Any, Any, None]:
    model = yield Net(), mean
    old = model.forward
    model.forward = lambda x: old(x) * 2
    yield
    model.forward = lambda x: old(x) * 3
    yield
    del model.forward
    yield
    model.b.forward = MethodType(lambda self, x: F.linear(x, self.weight) * 2, model.b)


@program
def a_global() -> Generator[Any, Any, None]:
    global ACT
    ACT = torch.tanh
    yield Net(), lambda model, x: ACT(model(x)).square().mean()
    ACT = F.relu
    yield
    ACT = nn.Tanhshrink()
    yield
    ACT = functools.partial(torch.mul, other=2.0)
    yield
    ACT.keywords["other"] = 3.0
    yield
    ACT = functools.partial(torch.mul, other=4.0)


@program
def a_global_object() -> Generator[Any, Any, None]:
    global ACT
    ACT = Tanh(2.0).times
    yield Net(), lambda model, x: ACT(model(x)).square().mean()
    ACT = Tanh(3.0).times
    yield
    ACT = Tanh(4.0)


class Tanh:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.factor

    def times(self, x: Tensor) -> Tensor:
        return x * self.factor


@program
def a_trainer() -> Generator[Any, Any, None]:
    class Trainer:
        def __init__(self) -> None:
            self.criterion: nn.Module = nn.MSELoss()

        def loss(self, model: nn.Module, x: Tensor) -> Tensor:
            return self.criterion(model(x), x)

    trainer = Trainer()
    yield Net(), trainer.loss
    trainer.criterion = nn.L1Loss()
    yield
    trainer.criterion.reduction = "sum"


@program
def a_closure_and_a_default() -> Generator[Any, Any, None]:
    act, criterion = torch.tanh, nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss(model: nn.Module, x: Tensor, crit: nn.Module = criterion) -> Tensor:
        return crit(act(model(x)), x.softmax(-1))

    yield Net(), loss
    act = torch.relu
    yield
    criterion.label_smoothing = 0.5
    yield
    loss.__defaults__ = (nn.MSELoss(),)
    yield
    loss.__code__ = (lambda model, x, crit: crit(act(model(x)), x * 2)).__code__


@program
def a_teacher() -> Generator[Any, Any, None]:
    teacher = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).requires_grad_(False).eval()
    nn.init.eye_(teacher[0].weight)
    yield Net(), lambda model, x: F.mse_loss(model(x), teacher(x))
    teacher.train()
    yield
    teacher[1].p = 0.25
    yield
    teacher.eval()
    state = {name: value * 3 for name, value in teacher.state_dict().items()}
    teacher.load_state_dict(state, assign=True)
    yield
    teacher[0].weight.data = teacher[0].weight * 2
    yield
    teacher.load_state_dict(state)
    yield
    handle = teacher[0].register_forward_hook(lambda module, args, output: output * 2)
    yield
    handle.remove()
    yield
    teacher[0].forward = torch.tanh
    yield
    teacher[0] = nn.Identity()


@program
def modules_in_lists_and_objects() -> Generator[Any, Any, None]:
    class Holder:
        def __init__(self) -> None:
            self.drop = nn.Dropout(0.5)

        def apply(self, x: Tensor) -> Tensor:
            return self.drop(x)

    class Holding(Net):
        def __init__(self) -> None:
            super().__init__()
            self.listed, self.holder = [{"drop": nn.Dropout(0.5)}], Holder()

        def forward(self, x: Tensor) -> Tensor:
            return self.holder.apply(self.listed[0]["drop"](super().forward(x)))

    model = yield Holding(), mean
    model.listed[0]["drop"].p = 0.25
    yield
    model.holder.drop.eval()
    yield
    model.holder.drop = nn.Tanh()


@program
def members_of_classes() -> Generator[Any, Any, None]:
    class Base(Net):
        def act(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

    class Derived(Base):
        @property
        def factor(self) -> float:
            return 1.0

        @staticmethod
        def add(x: Tensor) -> Tensor:
            return x + 1

        def forward(self, x: Tensor) -> Tensor:
            return helper(self.add(super().act(super().forward(x)))) * self.factor

    class Helper:
        def __call__(self, x: Tensor) -> Tensor:
            return x * 2

    helper = Helper()
    yield Derived(), mean
    Base.act = lambda self, x: torch.relu(x)  # type: ignore[method-assign]
    yield
    Derived.factor = property(lambda self: 3.0)  # type: ignore[assignment]
    yield
    Derived.add = staticmethod(torch.neg)  # type: ignore[assignment]
    yield
    Helper.__call__ = lambda self, x: x * 7  # type: ignore[method-assign]
    yield
    Base.act.__code__ = (lambda self, x: torch.sigmoid(x)).__code__


@program
def an_attrgetter() -> Generator[Any, Any, None]:
    get = operator.attrgetter("gain")

    class Getting(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * get(self)

    model = yield Getting(), mean
    model.gain = 3.0


@program
def attributes_of_an_object() -> Generator[Any, Any, None]:
    """Those that code reads: by name, in a method, a property or a slot, and all of them."""

    class Slotted:
        __slots__ = ("factor", "other")

    @dataclasses.dataclass
    class Config:
        factor: float = 1.0

    class Trainer:
        def __init__(self) -> None:
            self.gain, self.bias, self.power = 1.0, 0.0, 1.0
            self.config, self.slotted = Config(), Slotted()
            self.slotted.factor = 1.0
            self.steps = 0

        def shifted(self, x: Tensor) -> Tensor:
            return x + self.bias

        @property
        def exponent(self) -> float:
            return self.power

    trainer = Trainer()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = trainer.shifted(model(x) * trainer.gain) ** (2 * trainer.exponent)
        return y.mean() * dataclasses.asdict(trainer.config)["factor"] * trainer.slotted.factor

    yield Net(), loss
    for change in (
        lambda: setattr(trainer, "gain", 2.0),
        lambda: setattr(trainer, "bias", 0.5),
        lambda: setattr(trainer, "power", 2.0),
        lambda: setattr(trainer.config, "factor", 3.0),
        lambda: setattr(trainer.slotted, "factor", 0.5),
    ):
        trainer.steps += 1
        change()
        yield


def coefficient(owner: Any) -> float:
    return owner.weight


@program
def what_a_method_passes_on() -> Generator[Any, Any, None]:
    """Attributes of its object that other code reads."""

    class Strategy:
        def scale(self, trainer: Any) -> float:
            return trainer.scale + len(trainer)

    class Callback:
        def on_loss(self, trainer: Any, loss: Tensor) -> Tensor:
            return loss * trainer.of_callback()

    class Wrapped:
        def __init__(self, function: Any) -> None:
            self.function = function

        def __get__(self, owner: Any, kind: Any = None) -> Any:
            return functools.partial(self.function, owner)

    class Trainer:
        def __init__(self) -> None:
            self.weight, self.scale, self.epoch, self.length, self.wrapped = 1.0, 1.0, 0, 1, 1.0
            self.strategy, self.callbacks = Strategy(), [Callback()]
            self.ramp = lambda trainer: 1.0 + trainer.epoch

        def of_callback(self) -> float:
            return self.epoch + 1

        def __len__(self) -> int:
            return self.length

        @Wrapped
        def factor(self) -> float:
            return self.wrapped

        def loss(self, model: nn.Module, x: Tensor) -> Tensor:
            loss = mean(model, x) * coefficient(self) * self.strategy.scale(self) * self.ramp(self)
            for callback in self.callbacks:
                loss = callback.on_loss(self, loss)
            return loss * self.factor()

    trainer = Trainer()
    yield Net(), trainer.loss
    for name, value in (("weight", 2), ("scale", 3), ("epoch", 1), ("length", 0), ("wrapped", 0.5)):
        setattr(trainer, name, value)
        yield


@program
def an_object_that_is_read_whole() -> Generator[Any, Any, None]:
    @dataclasses.dataclass
    class Trainer:
        beta: float = 1.0

        def loss(self, model: nn.Module, x: Tensor) -> Tensor:
            return F.smooth_l1_loss(model(x), x, **dataclasses.asdict(self))

    trainer = Trainer()
    yield Net(), trainer.loss
    trainer.beta = 0.25


@program
def attributes_that_are_set_later() -> Generator[Any, Any, None]:
    class Trainer:
        of_a, kind = 1.0, "a"

        def loss(self, model: nn.Module, x: Tensor) -> Tensor:
            factor = getattr(self, "factor", 1.0) * getattr(self, f"of_{self.kind}")
            factor *= getattr(namespace, "factor", 1.0) * getattr(plain, "factor", 1.0)
            return mean(model, x) * factor * (2 if hasattr(plain, "doubles") else 1)

    class Plain:
        pass

    namespace, plain, trainer = SimpleNamespace(), Plain(), Trainer()
    yield Net(), trainer.loss
    for owner, name, value in (
        (trainer, "of_a", 2.0),
        (Trainer, "factor", 3.0),
        (trainer, "factor", 0.5),
        (namespace, "factor", 4.0),
        (plain, "factor", 5.0),
        (Plain, "doubles", True),
    ):
        setattr(owner, name, value)
        yield
    del namespace.factor


@program
def weak_references_and_nested_names() -> Generator[Any, Any, None]:
    class Trainer:
        gain, bias, power = 1.0, 0.0, 1.0

        def loss(self, model: nn.Module, x: Tensor) -> Tensor:
            return mean(model, x) * reference().gain + proxy.bias

    trainer = Trainer()
    KEPT.append(trainer)
    reference, proxy = weakref.ref(trainer), weakref.proxy(trainer)
    config = SimpleNamespace(loss=SimpleNamespace(factor=1.0))
    get = operator.attrgetter("loss.factor")

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return trainer_loss()(model, x) * get(config)

    trainer_loss = weakref.WeakMethod(trainer.loss)
    yield Net(), loss
    trainer.gain = 2.0
    yield
    trainer.bias = 0.5
    yield
    Trainer.gain = trainer.gain = 3.0
    yield
    config.loss.factor = 4.0


@program
def an_optimizer_in_a_container() -> Generator[Any, Any, None]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    held: dict[str, Any] = {"tools": [optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)]}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        optimizer, schedule = held["tools"]
        rates = optimizer.param_groups[0]["lr"] + schedule.get_last_lr()[0]
        return mean(model, x) * (rates + schedule.last_epoch)

    yield Net(), loss
    optimizer.param_groups[0]["lr"] = 0.25
    yield
    optimizer.step()
    held["tools"][1].step()


@program
def memos_of_calls() -> Generator[Any, Any, None]:
    """They keep what they have returned, as with FSDP2."""
    state = SimpleNamespace(factor=1.0, of=2, other=1.0)

    @functools.lru_cache
    def number(of: int) -> float:
        return state.factor * of

    @functools.lru_cache(maxsize=None, typed=True)
    def tensor(of: float, *, power: int) -> Tensor:
        return torch.linspace(0, 1, 8) ** power * state.factor * of

    tensor(1.5, power=2)
    state.factor = 2.0

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x * tensor(1.5, power=2) + tensor(state.of, power=1)
        return mean(model, x) * number(state.of) * state.other

    yield Net(), loss
    state.factor = 3.0
    yield
    state.of = 3
    yield
    state.of, state.other = 2, 0.5
    yield
    number.cache_clear()
    yield
    tensor.cache_clear()


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number + 10 * dist.get_rank())
    return torch.randn(4, 8, generator=generator)


def losses(run: Program, *, compiled: bool) -> list[float]:
    """Of two steps after each change."""
    torch.manual_seed(1)
    states = run()
    model, loss = next(states)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = None
    if compiled:
        step = fsdp_mlir.compile(model, compute_loss=loss, optimizer=optimizer, fallback="error")
    found: list[float] = []
    sent: Any = model
    has_ended = False
    while True:
        for number in range(2):
            torch.manual_seed(number + dist.get_rank())
            if step is not None:
                found.append(step(batch(number)).item())
                continue
            value = loss(model, batch(number))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(value.item())
        if has_ended:
            return found
        model.reshard()
        try:
            states.send(sent)
        except StopIteration:  # after the last change
            has_ended = True
        sent = None


@program
def what_needs_no_look() -> Generator[Any, Any, None]:
    """Values that are written in place, and objects that a loop makes anew with the same parts."""
    global ACT
    ACT = functools.partial(torch.mul, other=2.0)
    teacher = nn.Linear(8, 8).requires_grad_(False)

    class Trainer:
        def __init__(self) -> None:
            self.steps, self.criterion = 0, nn.MSELoss()

        def loss(self, model: nn.Module, x: Tensor) -> Tensor:
            loss = self.criterion(ACT(model(x)), teacher(x))
            return logged(self, loss) * held["factor"] * getattr(self, "factor", 1.0)

    def logged(trainer: Any, loss: Tensor) -> Tensor:
        trainer.shown = 1
        return loss

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    held = {"factor": 2.0, "optimizer": optimizer, "schedule": schedule}
    trainer = Trainer()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return trainer.loss(model, x)

    yield Net(), loss
    compile_ = Plans.compile
    Plans.compile = None  # type: ignore[method-assign, assignment]
    try:
        teacher.weight.mul_(2)
        yield
        teacher.load_state_dict({name: x * 2 for name, x in teacher.state_dict().items()})
        yield
        ACT = functools.partial(torch.mul, other=2.0)
        trainer.steps += 1
        optimizer.step()
        schedule.step()
        yield
        trainer.last, trainer.log = 0.5, [1, 2]  # type: ignore[attr-defined]
        yield
        teacher.bias.add_(1)
        yield
    finally:
        Plans.compile = compile_  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name, run in PROGRAMS.items():
        want = losses(run, compiled=False)
        try:
            got: Any = losses(run, compiled=True)
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
        if got != want:
            found[name] = f"{got}, FSDP2's: {want}"
    Path(f"{sys.argv[1]}.{dist.get_rank()}").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # Gloo's threads now and then abort at the end


def test_a_change_outside_the_model(tmp_path: Path) -> None:
    """All programs run in one job."""
    run_ranks("test_reached", [tmp_path / "found"], 2)
    for rank in range(2):
        assert json.loads((tmp_path / f"found.{rank}").read_text()) == {}
