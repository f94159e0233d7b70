"""The command line of capture.

    python -m fsdp_mlir.capture --model fsdp_mlir.models.llama:llama_debug \\
        --inputs 'tokens=int64[2,32]<256' 'targets=int64[2,32]<256' -o model.pt
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from fsdp_mlir.capture.capture import capture
from fsdp_mlir.capture.planned_mesh import planned_mesh
from fsdp_mlir.support.errors import CaptureError

_SAID = 400  # characters of an error that is not this package's
_INPUT = re.compile(
    r"(?P<name>[A-Za-z_]\w*)=(?P<dtype>[a-z]+\d*)\[(?P<shape>\d+(?:,\d+)*)\](?:<(?P<high>\d+))?"
)


def parse_input(text: str) -> tuple[str, Tensor]:
    """The name and an example tensor for `name=dtype[d0,d1,…]`, with `<high` for integers.

    Integers are drawn from [0, high), and include both 0 and high-1, so that the range is captured;
    floats are drawn from the normal distribution; bools are false. The values are the same in every
    run.
    """
    match = _INPUT.fullmatch(text.replace(" ", ""))
    if not match:
        raise CaptureError(
            f"input '{text}': expected name=dtype[d0,d1,...], or with <high at the end"
        )
    dtype = getattr(torch, match["dtype"], None)
    if not isinstance(dtype, torch.dtype) or dtype.is_complex:
        raise CaptureError(f"input '{text}': expected a real dtype, got '{match['dtype']}'")
    try:
        return match["name"], _example(match, dtype)
    except CaptureError as error:
        raise CaptureError(f"input '{text}': {error}") from error
    except (RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
        raise CaptureError(f"input '{text}': no such tensor: {_line(error)}") from error


def _example(match: re.Match[str], dtype: torch.dtype) -> Tensor:
    shape = [int(size) for size in match["shape"].split(",")]
    generator = torch.Generator().manual_seed(0)
    integer = not dtype.is_floating_point and dtype != torch.bool
    if match["high"] and not integer:
        raise CaptureError(f"'<' is for integers, got dtype '{match['dtype']}'")
    if not integer:
        if dtype == torch.bool:
            return torch.zeros(shape, dtype=dtype)
        return torch.randn(shape, generator=generator).to(dtype)
    high = int(match["high"] or 2)
    if high < 1:
        raise CaptureError(f"expected '<' and at least 1, got {high}")
    value = torch.randint(0, high, shape, generator=generator)
    if value.numel():
        value.view(-1)[0], value.view(-1)[-1] = high - 1, 0
    return value.to(dtype)


def _line(error: BaseException) -> str:
    """What an error of others says, in one line of bounded length, without C++'s frames."""
    return _line_of(str(error).partition("Exception raised from ")[0])


def _line_of(said: str) -> str:
    text = " ".join(said.split())
    return text if len(text) <= _SAID else f"{text[:_SAID]}…"


def resolve(name: str) -> Callable[..., Any]:
    """The callable named `package.module:attribute`; the working folder is searched too."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise CaptureError(f"expected package.module:name, got '{name}'")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise CaptureError(f"cannot import '{module_name}': {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise CaptureError(f"module '{module_name}' has no '{attribute}'")
        found = getattr(found, part)
    if not callable(found):
        raise CaptureError(f"'{name}' is not callable")
    return found


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose keys are different."""
    found: dict[str, Any] = {}
    for key, value in members:
        if key in found:
            raise CaptureError(f"--kwargs: key '{_line_of(key)}' is given twice")
        found[key] = value
    return found


def model_factory(
    name: str, kwargs: str, mesh: DeviceMesh | None = None
) -> Callable[[], nn.Module]:
    """The named factory bound to a JSON object's members, and to the mesh if there is one."""
    try:
        members = json.loads(kwargs, object_pairs_hook=_object)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CaptureError(f"--kwargs is not JSON: {_line(error)}") from error
    if not isinstance(members, dict):
        raise CaptureError(f"--kwargs: expected a JSON object, got '{kwargs}'")
    make = resolve(name)
    if mesh is not None:
        members["mesh"] = mesh

    def factory() -> nn.Module:
        try:
            model = make(**members)
        except (Exception, SystemExit) as error:
            raise CaptureError(
                f"'{name}' failed: {type(error).__name__}: {_line(error)}"
            ) from error
        if not isinstance(model, nn.Module):
            got = type(model).__name__
            raise CaptureError(f"'{name}': expected a torch.nn.Module, got '{got}'")
        return model

    return factory


def parse_mesh(text: str) -> dict[str, int]:
    """The axes of `data=256,tensor=8`, outermost first."""
    axes: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"([A-Za-z_]\w*)=(\d{1,7})", part)
        if not match or match[1] in axes:
            raise CaptureError(f"--mesh '{text}': expected name=ranks,... with different names")
        axes[match[1]] = int(match[2])
    return axes


@contextlib.contextmanager
def _placed(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Within the body, the process is rank 0 of --mesh; yields what the factory and capture are
    told of it."""
    if options.mesh is None:
        if options.shard_over or options.loss_parallel:
            asked = "--shard-over" if options.shard_over else "--loss-parallel"
            raise CaptureError(f"{asked}: expected --mesh too, got none")
        yield {}
        return
    axes = parse_mesh(options.mesh)
    over = (options.shard_over or next(iter(axes))).split(",")
    for name in over:
        if name not in axes:
            raise CaptureError(
                f"--shard-over: expected axes of the mesh ({', '.join(axes)}), got '{name}'"
            )
    if not options.meta:
        raise CaptureError("--mesh: expected --meta too, as the other ranks are not there")
    with (
        planned_mesh(axes) as mesh,
        loss_parallel() if options.loss_parallel else contextlib.nullcontext(),
    ):
        data = mesh if len(axes) == len(over) else mesh[tuple(over)]
        yield {"mesh": mesh, "data_ranks": data.mesh.flatten().tolist()}


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    result = argparse.ArgumentParser(
        prog="python -m fsdp_mlir.capture",
        description="Capture one training step (forward, loss, backward) of a model into model.pt.",
    )
    result.add_argument(
        "--model", required=True, metavar="MODULE:NAME", help="module class or factory"
    )
    result.add_argument(
        "--kwargs", default="{}", metavar="JSON", help="keyword arguments of the factory"
    )
    result.add_argument(
        "--inputs",
        required=True,
        nargs="+",
        metavar="SPEC",
        help="the model's keyword inputs, as 'input_ids=int64[2,256]<50257'",
    )
    result.add_argument(
        "--meta",
        action="store_true",
        help="build the model on the meta device: captures no weights, but the initialisation",
    )
    result.add_argument(
        "--no-init", action="store_true", help="with --meta: do not capture the initialisation"
    )
    mode = result.add_mutually_exclusive_group()
    mode.add_argument(
        "--train", action="store_true", default=None, help="put the model in train mode"
    )
    mode.add_argument(
        "--eval", dest="train", action="store_false", help="put the model in eval mode"
    )
    result.add_argument(
        "--loss", metavar="MODULE:NAME", help="function from the model's output to a scalar"
    )
    result.add_argument(
        "--evaluation",
        action="store_true",
        help="capture the loss in eval mode too, for fsdp-run --eval-every",
    )
    result.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run the captured step beside eager PyTorch; by default if the model is small",
    )
    result.add_argument(
        "--assume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="take branches on data as the example does; a step that would go another way stops",
    )
    result.add_argument(
        "--device",
        default="cpu",
        metavar="cpu|cuda",
        help="device whose operators are captured [cpu]",
    )
    result.add_argument(
        "--device-arch",
        metavar="ARCH",
        help="with --device cuda: the GPU's architecture, such as sm_90",
    )
    result.add_argument(
        "--torch-version",
        metavar="V",
        help="the PyTorch version whose FSDP2 to match [the installed one]",
    )
    result.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="with --meta: capture rank 0 of such a mesh, outermost axis first; the factory gets "
        "it as its argument 'mesh', to parallelise the model with",
    )
    result.add_argument(
        "--shard-over",
        metavar="AXIS,...",
        help="the mesh's axes that FSDP shards and replicates over [the first]",
    )
    result.add_argument(
        "--loss-parallel",
        action="store_true",
        help="with --mesh: within DTensor's loss_parallel()",
    )
    result.add_argument("--config", metavar="FILE", help="policy file (YAML), as for fsdp-opt")
    result.add_argument("-o", "--output", default="model.pt", metavar="FILE", help="[%(default)s]")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 if the file was written, else 1 after one line on standard
    error."""
    options = parser().parse_args(argv)
    try:
        inputs: dict[str, Tensor] = {}
        for text in options.inputs:
            name, example = parse_input(text)
            if name in inputs:
                raise CaptureError(f"input '{name}' is given twice")
            inputs[name] = example
        with _placed(options) as place:
            factory = model_factory(options.model, options.kwargs, place.pop("mesh", None))
            with torch.device("meta") if options.meta else contextlib.nullcontext():
                model = factory()
            if options.train is not None:
                model.train(options.train)
            initialises = options.meta and not options.no_init and not options.mesh
            summary = capture(
                model,
                kwargs=inputs,
                loss=resolve(options.loss) if options.loss else None,
                init=factory if initialises else None,
                evaluation=options.evaluation,
                config=options.config,
                check=options.check,
                assume=options.assume,
                path=options.output,
                device=options.device,
                device_arch=options.device_arch,
                torch_version=options.torch_version,
                **place,
            )
    except (CaptureError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summary)
    return 0
