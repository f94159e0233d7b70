"""Whether a model is still the one that a step was compiled from, looked at before each step.

A compiled step does not follow its model. What changes in it since must have no say in the step,
or is an error: tensors must have the bits that the step has itself, and with other flags,
attributes, hooks or modules the model must be captured as the same graph. Writes that PyTorch does
not count, those through `.data`, are seen where they reach one of a few bytes of a tensor.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_mlir import hooks, weights
from fsdp_mlir.errors import CompileError, prefixed, source_of
from fsdp_mlir.outside import ABSENT, places
from fsdp_mlir.planning import Captured

# Whether the step has the bits of a tensor under the first name of a parameter or buffer, or under
# that of a constant.
HasBits = Callable[[str, Tensor], bool]

_SAMPLES = 16  # bytes
_PLAIN = (bool, int, float, str, type(None), tuple, list, dict, set, torch.dtype, torch.device)
_MOST_ITEMS = 64  # of a list or the like that is compared by its items

# Attributes of nn.Module that have no say in a step, and those that hold its hooks.
_STATE_DICT_HOOKS = {
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
}
_HOOKS = {
    "_forward_pre_hooks": "register_forward_pre_hook",
    "_forward_hooks": "register_forward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
    "_backward_hooks": "register_full_backward_hook",
}
_TENSORS = ("_parameters", "_buffers")
_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


class _TensorState:
    """A tensor as it was: its identity, its place, PyTorch's count of writes, some bytes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.requires_grad = tensor.requires_grad
        self.pointer = _pointer(tensor)
        self.counts = not tensor.is_inference()
        self.version = tensor._version if self.counts else 0
        self.sample = _sample(tensor)
        self.bytes = self.sample.tobytes()

    def changed(self) -> bool:
        tensor = self.tensor
        return (
            (self.counts and tensor._version != self.version)
            or self.sample.tobytes() != self.bytes
            or tensor.requires_grad is not self.requires_grad
            or _pointer(tensor) != self.pointer
            or bool(tensor._backward_hooks)
            or bool(tensor._post_accumulate_grad_hooks)
        )


def _pointer(tensor: Tensor) -> int:
    return 0 if tensor.is_meta else int(tensor.data_ptr())


def _sample(tensor: Tensor) -> Any:
    """A view of bytes all over a dense tensor's memory, as an array of NumPy."""
    if tensor.device.type != "cpu" or tensor.numel() == 0 or not tensor.is_contiguous():
        return torch.empty(0, dtype=torch.uint8).numpy()
    data = tensor.detach().reshape(-1).view(torch.uint8)
    stride = max(1, data.numel() // _SAMPLES - 1) | 1  # odd: every byte of an element in turn
    return data.numpy()[::stride]


@dataclass(frozen=True)
class _Change:
    """What is another one: an attribute of a module (or of an object that a module holds)."""

    key: tuple[int, str]
    text: str
    location: tuple[str, int] | None = None
    hook: bool = False  # a new one
    mode: bool = False  # train or eval mode


class Unchanged:
    """A look at `model`, at `loss` where it is a module, at what their code reads from outside,
    and at the constants that the graph of `captured` took from elsewhere. `again` captures the
    model once more."""

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        captured: Captured,
        again: Callable[[], Captured],
    ) -> None:
        self._model = model
        self._loss = loss
        self._constants = dict(captured.constants)
        self._fingerprint = captured.fingerprint
        self._again = again
        self._unread: set[tuple[int, str]] = set()  # attributes that changed without consequence
        self._autocast = _autocast()
        self._look()

    def check(self, has_bits: HasBits, *, training: bool = True) -> None:
        """CompileError where the step would now be another one. Without `training` the modes of
        the modules do not matter."""
        if _autocast() != self._autocast:
            raise CompileError(
                f"torch.autocast is {_autocast()} here, the step was compiled with "
                f"{self._autocast}; compile it in the same context"
            )
        if not self._changed():
            return
        changes = [c for c in self._changes() if c.key not in self._unread]
        self._check_tensors(has_bits)
        if not training:
            changes = [change for change in changes if not change.mode]
        if changes:
            self._check_graph(changes, has_bits, training)
        if training:
            self._look()

    # --- the look

    def _look(self) -> None:
        self._modules = []
        self._objects: dict[int, tuple[str, Any, dict[str, Any]]] = {}
        classes = {}
        for name, module in self._named_modules().items():
            attributes = {key: _shallow(value) for key, value in vars(module).items()}
            self._modules.append((name, module, type(module), attributes))
            classes[type(module)] = type(module).forward
            for key, value in vars(module).items():
                if _is_settings(value):
                    shallow = {k: _shallow(v) for k, v in vars(value).items()}
                    self._objects.setdefault(id(value), (_dotted(name, key), value, shallow))
        self._forwards = list(classes.items())
        self._globals = _global_hooks()
        self._outside = [
            (place, _shallow(place.value())) for place in places(self._model, self._loss)
        ]
        self._look_at_tensors()

    def _named_modules(self) -> dict[str, nn.Module]:
        named = dict(self._model.named_modules())
        if isinstance(self._loss, nn.Module):
            named |= dict(self._loss.named_modules(prefix="(loss)"))
        return named

    def _look_at_tensors(self) -> None:
        states = (*weights.parameters(self._model), *weights.buffers(self._model))
        self._names = [(state.name, state.aliases) for state in states]
        self._tensors = {state.name: _TensorState(state.tensor) for state in states}
        self._tensors |= {name: _TensorState(tensor) for name, tensor in self._constants.items()}
        self._states = list(self._tensors.values())

    def _changed(self) -> bool:
        for state in self._states:
            if state.changed():
                return True
        for _, module, kind, attributes in self._modules:
            if type(module) is not kind or not _equal(module.__dict__, attributes):
                return True
        for _, value, attributes in self._objects.values():
            if not _equal(value.__dict__, attributes):
                return True
        if any(kind.forward is not forward for kind, forward in self._forwards):
            return True
        if any(not _same(place.value(), before) for place, before in self._outside):
            return True
        return not _equal(_global_hooks(), self._globals)

    # --- what changed

    def _check_tensors(self, has_bits: HasBits) -> None:
        states = (*weights.parameters(self._model), *weights.buffers(self._model))
        names = [(state.name, state.aliases) for state in states]
        if names != self._names:
            moved = sorted({name for name, _ in {*names} ^ {*self._names}})
            raise CompileError(
                "the parameters and buffers of the model are not those that the step was compiled "
                f"with: '{moved[0] if moved else names[0][0]}' is new, gone or at another place; "
                "compile it again"
            )
        now = {state.name: state.tensor for state in states} | self._constants
        for name, before in self._tensors.items():
            tensor = now[name]
            if tensor is before.tensor and not before.changed():
                continue
            if tensor.requires_grad != before.requires_grad:
                raise CompileError(
                    f"'{name}': requires_grad is {tensor.requires_grad}, the step was compiled "
                    f"with {before.requires_grad}; compile it again"
                )
            if not tensor.is_meta and not has_bits(name, tensor):
                what = "constant of the graph" if name in self._constants else "model"
                raise CompileError(
                    f"'{name}' of the {what} was written since the step was compiled, and is not "
                    "what the step has, which trains a copy of its own; load values with "
                    "step.load_state_dict, or compile again"
                )

    def _changes(self) -> Iterator[_Change]:
        modules = self._named_modules()
        for name, module, kind, before in self._modules:
            now = modules.get(name)
            if now is not module or type(now) is not kind:
                yield _Change((id(module), ""), f"{_module(name)} is another one")
                continue
            for key in sorted({*vars(module), *before}):
                if key in _STATE_DICT_HOOKS or key in _TENSORS or key == "_modules":
                    continue
                yield from _attribute(id(module), name, key, vars(module), before)
        known = {name for name, _, _, _ in self._modules}
        for name, module in modules.items():
            if name not in known:
                yield _Change((id(module), ""), f"{_module(name)} is new")
        for place, value, before in self._objects.values():
            for key in sorted({*vars(value), *before}):
                yield from _attribute(id(value), place, key, vars(value), before)
        for kind, forward in self._forwards:
            if kind.forward is not forward:
                where = source_of(kind.forward)
                yield _Change((id(kind), ""), f"forward of '{kind.__name__}' is another one", where)
        for place, before in self._outside:
            now = place.value()
            if not _same(now, before):
                text = f"'{place.label}' is {_shown(now)}, the step was compiled with"
                yield _Change(place.key, f"{text} {_shown(before)}")
        for name, before in self._globals.items():
            for hook in _new_hooks(_global_hooks()[name], before):
                method = f"register_module{name.removeprefix('_global').removesuffix('s')}"
                yield _new_hook(method, "every module", 0, hook)

    def _check_graph(self, changes: Sequence[_Change], has_bits: HasBits, training: bool) -> None:
        first = changes[0]
        more = f" (and {len(changes) - 1} more changes)" if len(changes) > 1 else ""
        with contextlib.ExitStack() as stack:
            if not training:
                stack.enter_context(self._compiled_modes())
            try:
                again = self._again()
            except Exception as error:
                message = f"{first.text}{more}, and it cannot be captured so: {error}"
                raise CompileError(prefixed(first.location, message)) from error
            finally:
                # Capture runs the model and puts its buffers back, which counts as writes.
                self._look_at_tensors()
        now = again.fingerprint
        at = self._fingerprint.difference(now)
        if at is not None:
            raise CompileError(
                prefixed(
                    first.location,
                    f"{first.text}{more}, which changes the step: it was compiled with "
                    f"{self._fingerprint.line(at)}, now it is {now.line(at)}; compile again",
                )
            )
        for name, tensor in again.constants.items():
            if not tensor.is_meta and not has_bits(name, tensor):
                message = f"{first.text}{more}, which changes a constant of the graph"
                raise CompileError(prefixed(first.location, f"{message}; compile again"))
        for change in changes:
            if change.mode:
                continue
            self._unread.add(change.key)
            not_done = "call it" if change.hook else "follow it"
            warnings.warn(
                f"{change.text}; it does not change the step, which will not {not_done}",
                stacklevel=4,
            )

    @contextlib.contextmanager
    def _compiled_modes(self) -> Iterator[None]:
        """The modules in the modes that the step was compiled in, for the body."""
        modes = [(module, module.training) for _, module, _, _ in self._modules]
        for _, module, _, before in self._modules:
            module.training = before["training"]
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


def _attribute(
    owner: int, place: str, key: str, now: dict[str, Any], before: dict[str, Any]
) -> Iterator[_Change]:
    if key in now and key in before and _equal({key: now[key]}, {key: before[key]}):
        return
    if key == "training":
        mode = "train" if now[key] else "eval"
        was = "train" if before[key] else "eval"
        text = f"{_module(place)} is in {mode} mode, the step was compiled with it in {was} mode"
        yield _Change((owner, key), text, mode=True)
    elif key in _HOOKS:
        new = list(_new_hooks(now[key], before[key]))
        for hook in new:
            yield _new_hook(_HOOKS[key], _module(place), owner, hook)
        if not new:
            method = _HOOKS[key]
            yield _Change((owner, key), f"a hook of {method} of {_module(place)} was removed")
    else:
        got, was = (_shown(values.get(key, ABSENT)) for values in (now, before))
        name = _dotted(place, key)
        yield _Change(
            (owner, key), f"attribute '{name}' is {got}, the step was compiled with {was}"
        )


def _new_hooks(now: Mapping[int, Any], before: Mapping[int, Any]) -> list[Any]:
    return [hook for key, hook in now.items() if before.get(key) is not hook]


def _new_hook(method: str, of: str, owner: int, hook: Any) -> _Change:
    name = hooks.named(hook)
    text = f"the hook {name} of {method} of {of} was registered after the step was compiled"
    return _Change((owner, method), text, source_of(hook), hook=True)


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    if isinstance(value, Tensor):
        text = f"a tensor of shape {list(value.shape)}"
    return text if len(text) <= 60 else text[:60] + "…"


def _module(name: str) -> str:
    return f"module '{name}'" if name else "the model"


def _dotted(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _shallow(value: Any) -> Any:
    """A copy of a list or the like, so that its items are compared."""
    if isinstance(value, dict) and len(value) <= _MOST_ITEMS:
        return dict(value)
    if type(value) in (list, set) and len(value) <= _MOST_ITEMS:
        return type(value)(value)
    return value


def _same(now: Any, before: Any) -> bool:
    return now is before or _equal({"": now}, {"": before})


def _equal(now: dict[str, Any], before: dict[str, Any]) -> bool:
    try:
        return now == before
    except Exception:  # such as the truth of a tensor that is another one
        return False


def _is_settings(value: Any, depth: int = 2) -> bool:
    """Whether an attribute holds an object of plain values, such as a configuration."""
    if isinstance(value, (type, Tensor, nn.Module, Mapping)) or callable(value):
        return False
    attributes = getattr(value, "__dict__", None)
    return isinstance(attributes, dict) and all(
        isinstance(item, _PLAIN) or (depth > 1 and _is_settings(item, depth - 1))
        for item in attributes.values()
    )


def _global_hooks() -> dict[str, dict[int, Any]]:
    return {name: dict(getattr(nn.modules.module, name)) for name in _GLOBAL_HOOKS}


def _autocast() -> str:
    if not torch.is_autocast_enabled("cpu"):
        return "off"
    return f"on with {torch.get_autocast_dtype('cpu')}"
