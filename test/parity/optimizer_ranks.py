"""One rank of training with optimizers whose settings or state are not what most loops have.

    optimizer_ranks.py OUT

Runs each of CASES with FSDP2 and compiled, and writes to OUT.<rank>, by the case's name, what both
give and what kinds of plans the compiled one made (JSON).
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsdp_mlir
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

Optimizer = torch.optim.Optimizer

STEPS = 6
CHANGE = 2  # the step before which something changes
# A plan that updates, and one whose optimizer makes its own step.
IN, OUT = "update", "gradients"


class Net(nn.Module):
    """One of whose parameters has no elements on the second rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))).square().mean()


@dataclass
class Case:
    make: Callable[[Any], Optimizer]
    plans: list[str]
    change: Callable[[Any, Optimizer], Any] = field(default=lambda model, optimizer: None)
    frozen: str = ""  # a module, until the change
    error: str = ""  # of both


def sgd(**options: Any) -> Callable[[Any], Optimizer]:
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, **options}
    return lambda model: torch.optim.SGD(model.parameters(), **options)


def sgd_of_groups(second: dict[str, Any], **options: Any) -> Callable[[Any], Optimizer]:
    options = {"lr": 0.1, "momentum": 0.9, **options}
    return lambda model: torch.optim.SGD(
        [
            {"params": [*model.a.parameters(), *model.c.parameters()]},
            {"params": model.b.parameters(), **second},
        ],
        **options,
    )


def adam(kind: Any = torch.optim.Adam, **options: Any) -> Callable[[Any], Optimizer]:
    options = {"lr": 0.05, "weight_decay": 0.3, **options}
    return lambda model: kind(model.parameters(), **options)


def having(make: Callable[[Any], Optimizer], **settings: Any) -> Callable[[Any], Optimizer]:
    """With settings that the constructor would refuse, or that it does not have."""

    def made(model: Any) -> Optimizer:
        optimizer = make(model)
        optimizer.param_groups[-1].update(settings)
        return optimizer

    return made


def setting(**settings: Any) -> Callable[[Any, Optimizer], None]:
    return lambda model, optimizer: optimizer.param_groups[-1].update(settings)


def each_state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any, Optimizer], Any]:
    return lambda model, optimizer: [change(state) for state in optimizer.state.values()]


def loaded(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any, Optimizer], None]:
    """A state dict that was written by another script."""

    def load(_: Any, optimizer: Optimizer) -> None:
        state = optimizer.state_dict()
        change(state)
        optimizer.load_state_dict(state)

    return load


def without_buffers(state: dict[str, Any]) -> None:
    state["state"] = {
        index: {"momentum_buffer": None if index % 2 else entry["momentum_buffer"]}
        for index, entry in state["state"].items()
    }


def of_one_count(_: Any, optimizer: Optimizer) -> None:
    count = torch.tensor(2.0)
    for state in optimizer.state.values():
        state["step"] = count


def zero_grad_replaced(make: Callable[[Any], Optimizer]) -> Callable[[Any], Optimizer]:
    def made(model: Any) -> Optimizer:
        optimizer = make(model)
        optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
        return optimizer

    return made


def of_default_dtype(model: Any) -> Optimizer:
    torch.set_default_dtype(torch.float64)  # until the case ends
    return torch.optim.Adam(model.parameters(), lr=0.05)


CASES: dict[str, Case] = {
    # Momentum of some parameters only.
    "unfrozen": Case(sgd(), [IN, IN], frozen="b"),
    "unfrozen_foreach": Case(sgd(foreach=True), [IN, IN], frozen="b"),
    "unfrozen_nesterov": Case(sgd(dampening=0, nesterov=True), [IN, IN], frozen="c"),
    "unfrozen_adam": Case(adam(), [IN, IN], frozen="c"),
    "unfrozen_fused_adam": Case(adam(fused=True, amsgrad=True), [IN, IN], frozen="b"),
    "dropped": Case(sgd(), [IN], lambda m, o: o.state.pop(m.a.weight)),
    "dropped_all": Case(sgd(), [IN], lambda m, o: o.state.clear()),
    "dropped_adam": Case(adam(), [IN], lambda m, o: o.state.pop(m.a.weight)),
    "loaded_in_part": Case(sgd(), [IN], loaded(lambda s: s["state"].pop(0))),
    "loaded_without_buffers": Case(sgd(), [IN], loaded(without_buffers)),
    "none_from_the_start": Case(
        lambda m: [o := sgd()(m), o.state[m.a.weight].update(momentum_buffer=None)][0], [IN]
    ),
    "momentum_of_one_group": Case(
        sgd_of_groups({"momentum": 0.0}, dampening=0.5), [IN, IN], setting(momentum=0.8)
    ),
    # Which Adam it is.
    "adamw_that_is_none": Case(having(adam(torch.optim.AdamW), decoupled_weight_decay=False), [IN]),
    "adam_decoupled": Case(having(adam(), decoupled_weight_decay=True), [IN]),
    "decoupled_later": Case(adam(), [IN, IN], setting(decoupled_weight_decay=True)),
    "coupled_later": Case(
        adam(torch.optim.AdamW, fused=True), [IN, IN], setting(decoupled_weight_decay=False)
    ),
    "loaded_from_adamw": Case(
        adam(), [IN, IN], loaded(lambda s: s["param_groups"][0].update(decoupled_weight_decay=True))
    ),
    # Numbers whose arithmetic is or is not Python's.
    "lr_float32": Case(adam(), [IN, OUT], setting(lr=np.float32(0.03))),
    "lr_float64": Case(adam(), [IN], setting(lr=np.float64(0.03))),
    "lr_float16_sgd": Case(sgd(), [IN, OUT], setting(lr=np.float16(0.03))),
    "lr_integer": Case(adam(), [IN], setting(lr=0, weight_decay=1)),
    "lr_numpy_integer": Case(adam(), [IN, OUT], setting(lr=np.int64(1))),
    "lr_tensor_sgd": Case(sgd(), [IN], setting(lr=torch.tensor(0.03))),
    "lr_array": Case(sgd(), [IN, OUT], setting(lr=np.array(0.03, dtype=np.float32))),
    "betas_float32": Case(adam(), [IN, OUT], setting(betas=(np.float32(0.8), np.float32(0.99)))),
    "betas_float64": Case(adam(), [IN], setting(betas=[np.float64(0.8), np.float64(0.99)])),
    "eps_float32": Case(adam(), [IN, OUT], setting(eps=np.float32(1e-3))),
    "weight_decay_float32": Case(
        adam(torch.optim.AdamW), [IN, OUT], setting(weight_decay=np.float32(0.2))
    ),
    "dampening_tensor": Case(sgd(), [IN, OUT], setting(dampening=torch.tensor(0.3))),
    "momentum_float32": Case(sgd(), [IN, OUT], setting(momentum=np.float32(0.7))),
    "maximize_integer": Case(sgd(), [IN, OUT], setting(maximize=1)),
    "amsgrad_integer": Case(having(adam(), amsgrad=1), [OUT]),
    # What the policy of a plan refuses, and torch.optim does not.
    "nesterov_without_momentum": Case(sgd_of_groups({"momentum": 0.0}, nesterov=True), [IN]),
    "nesterov_loses_momentum": Case(
        sgd_of_groups({}, nesterov=True), [IN, IN], setting(momentum=0.0)
    ),
    "nesterov_loses_all_momentum": Case(
        sgd(dampening=0, nesterov=True), [IN, IN], setting(momentum=0)
    ),
    "nesterov_with_dampening": Case(having(sgd(dampening=0, nesterov=True), dampening=0.5), [OUT]),
    "nesterov_and_dampening_later": Case(
        sgd(dampening=0, nesterov=True), [IN, OUT], setting(dampening=0.5)
    ),
    "negative_lr": Case(having(sgd(), lr=-0.01), [OUT]),
    "negative_momentum": Case(sgd(), [IN, OUT], setting(momentum=-0.5)),
    "no_setting": Case(
        sgd(), [IN, OUT], lambda m, o: o.param_groups[0].pop("maximize"), error="KeyError"
    ),
    # State of another form.
    "step_float64": Case(
        adam(), [IN, OUT], each_state(lambda s: s.update(step=s["step"].double()))
    ),
    "step_of_a_dimension": Case(
        adam(), [IN, OUT], each_state(lambda s: s.update(step=s["step"].reshape(1)))
    ),
    "step_float64_fused": Case(
        adam(fused=True), [IN, OUT], each_state(lambda s: s.update(step=s["step"].double()))
    ),
    "step_of_the_default_dtype": Case(of_default_dtype, [OUT]),
    "step_of_all": Case(adam(), [IN, OUT], of_one_count),
    "step_number": Case(
        adam(), [IN, OUT], each_state(lambda s: s.update(step=2.0)), error="RuntimeError"
    ),
    "momentum_bfloat16": Case(
        sgd(),
        [IN, OUT],
        each_state(lambda s: s.update(momentum_buffer=s["momentum_buffer"].bfloat16())),
    ),
    "amsgrad_later": Case(adam(), [IN, OUT], setting(amsgrad=True), error="KeyError"),
    "zero_grad_replaced": Case(zero_grad_replaced(sgd()), [OUT]),
    "zero_grad_replaced_adam": Case(zero_grad_replaced(adam()), [OUT]),
}


def batch(number: int) -> Tensor:
    seed = number + 10 * dist.get_rank()
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def bits(value: Any) -> Any:
    """What JSON can say of a tensor's bits and form."""
    if not isinstance(value, Tensor):
        return repr(value)
    local = value.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    text = local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(local.dtype), list(local.shape), hashlib.sha256(text).hexdigest()]


def trained(case: Case, compiled: bool, plans: list[str]) -> list[Any]:
    model: Any = Net()
    if case.frozen:
        model.get_submodule(case.frozen).requires_grad_(False)
    fully_shard(model)
    optimizer = case.make(model)
    step = fsdp_mlir.compile(model, optimizer=optimizer, fallback="error") if compiled else None
    found: list[Any] = []
    try:
        for number in range(STEPS):
            if number == CHANGE:
                model.requires_grad_(True)
                case.change(model, optimizer)
            if step is not None:
                loss = step(batch(number))
            else:
                loss = model(batch(number))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
    except (RuntimeError, TypeError, KeyError, AttributeError, fsdp_mlir.CompileError) as error:
        found.append(type(error).__name__ if case.error else repr(error))
    if step is not None:
        plans += [key[0] for key in step._cache]
    for param in model.parameters():
        found.append([bits(param), bits(param.grad)])
        state = optimizer.state.get(param, {})
        # The error comes after parts of the step.
        found.append({} if case.error else {name: bits(x) for name, x in sorted(state.items())})
    return found[: CHANGE + 1] if case.error else found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    found = {}
    for name, case in CASES.items():
        plans: list[str] = []
        results = []
        for compiled in (False, True):
            results.append(trained(case, compiled, plans))
            torch.set_default_dtype(torch.float32)
        found[name] = [*results, plans]
    Path(f"{sys.argv[1]}.{dist.get_rank()}").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
