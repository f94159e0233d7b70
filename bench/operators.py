"""Where the time of a compiled step goes, by class of operator, and what fusion could save of it.

Trains each model with `fsdp-run --profile` on one rank of one thread and sums the seconds of its
instructions by class. What fused kernels can take the place of are the element-wise operators, the
reductions, the copies and the dispatch of views; if all of these took no time at all, the step
would be shorter by their share. That is a bound: a fused kernel still reads and writes what goes in
and out. Writes out/operators.json and out/operators.md.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "test" / "parity"))

from harness import (  # noqa: E402
    ADAMW_FUSED,
    GPT2,
    LLAMA_29M,
    RESNET18,
    Case,
    Model,
    capture,
    compile_plan,
    execute,
    run_command,
)

from bench import PRECISIONS, machine, spread  # noqa: E402

#: Classes of operators by the first pattern that matches an instruction's name whole.
CLASSES = {
    "products": r"mm|addmm|bmm|baddbmm|_grouped_mm|linear|convolution|convolution_backward",
    "attention": r"_scaled_dot_product_.*",
    "views": r"t|transpose|permute|view|_unsafe_view|expand|slice|split|split_with_sizes|select"
    r"|squeeze|unsqueeze|alias|detach|as_strided|unbind|narrow",
    "copies": r"clone|_to_copy|copy_|cat|stack|contiguous|slice_backward|select_backward"
    r"|zeros|zeros_like|ones_like|full|new_zeros|empty|empty_like|fill_|zero_",
    "reductions": r"sum|mean|var_mean|_?(log_)?softmax.*|_log_softmax.*|native_layer_norm.*"
    r"|native_batch_norm.*|native_group_norm.*|nll_loss.*|amax|logsumexp",
    "indexing": r"embedding.*|index.*|gather|scatter.*|max_pool2d.*|_adaptive_avg_pool2d.*|topk",
    "element-wise": r".*",
}
FUSIBLE = ("element-wise", "reductions", "copies", "views")
COLUMNS = (*CLASSES, "optimizer", "collectives", "outside")

VIT = Model("parity_models:vit_b_16", "net.encoder.layers.*", "images,labels", 10, 0, 1, pixels=224)
MODELS: dict[str, tuple[Model, str]] = {
    "Llama 29 M, batch 2 of 256": (LLAMA_29M, "fp32"),
    "Llama 29 M, batch 8 of 256": (replace(LLAMA_29M, batch=8), "fp32"),
    "Llama 29 M, batch 2 of 256, bf16": (LLAMA_29M, "bf16"),
    "GPT-2 124 M, batch 1 of 256": (
        replace(GPT2, factory="fsdp_mlir.models.gpt2:gpt2", vocab=50257, seq=256, batch=1),
        "fp32",
    ),
    "ViT-B/16, 1 image of 224 x 224": (VIT, "fp32"),
    "ResNet-18, 4 images of 32 x 32": (RESNET18, "fp32"),
}


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Which of the models to measure, and how often."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps a run, 2 of them warm-up")
    args = parser.parse_args()
    if args.steps < 3 or args.rounds < 1:
        parser.error("expected --steps > 2 and --rounds > 0")
    return args


def classify(what: str) -> str:
    """The column of an instruction of a profile."""
    name = what.partition(" ")[0]
    namespace, _, operator = name.rpartition("::")
    if name == "optimizer_step":
        return "optimizer"
    if name == "fused":
        return "element-wise"
    if not namespace:
        return "collectives"
    operator = operator.partition(".")[0]
    return next(c for c, pattern in CLASSES.items() if re.fullmatch(pattern, operator))


def sum_classes(profile: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """Milliseconds of a step, and how many instructions, by column."""
    milliseconds, count = Counter({"outside": 1e3 * profile["outside_seconds"]}), Counter()
    for instruction in profile["instructions"]:
        column = classify(instruction["what"])
        milliseconds[column] += 1e3 * instruction["seconds"]
        count[column] += 1
    return milliseconds, count


def measure(name: str, steps: int) -> Any:
    """Captures and compiles a model; returns what profiles it once."""
    model, precision = MODELS[name]
    folder = ROOT / "out" / "operators" / re.sub(r"\W+", "-", name)
    captured = capture(model, folder, samples=8 * model.batch, precision=PRECISIONS[precision])
    case = Case(
        model,
        ADAMW_FUSED,
        world=1,
        steps=steps,
        precision=PRECISIONS[precision],
        training={"schedule": {"fuse": "none"}},
    )
    plan, profile = compile_plan(captured, case, "profiled"), folder / "profile.json"

    def run() -> tuple[Counter[str], Counter[str]]:
        execute([*run_command(captured, plan, case), "--profile", profile], timeout=900)
        return sum_classes(json.loads(profile.read_text()))

    return run


def row(name: str, rounds: list[tuple[Counter[str], Counter[str]]]) -> str:
    steps = [sum(milliseconds.values()) for milliseconds, _ in rounds]
    shares = [
        {column: 100 * milliseconds[column] / step for column in COLUMNS}
        for step, (milliseconds, _) in zip(steps, rounds, strict=True)
    ]
    bounds = [sum(share[column] for column in FUSIBLE) for share in shares]
    cells = [f"{statistics.median(share[column] for share in shares):.1f}" for column in COLUMNS]
    calls = sum(rounds[0][1][column] for column in CLASSES)
    return f"| {' | '.join((name, str(calls), spread(steps, 0), *cells, spread(bounds, 1)))} |"


def main() -> None:
    args = parse_arguments(__doc__)

    runs = {name: measure(name, args.steps) for name in args.models}
    measured: dict[str, list[Any]] = {name: [] for name in args.models}
    for number in range(args.rounds):
        for name, run in runs.items():
            measured[name].append(run())
            print(f"round {number + 1}/{args.rounds}  {name}", flush=True)

    head = ["", "calls", "step, ms", *(f"{column}, %" for column in COLUMNS), "bound, %"]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    lines += [row(name, rounds) for name, rounds in measured.items()]
    text = "\n".join(lines)
    (ROOT / "out" / "operators.md").write_text(text + "\n")
    record = {"machine": machine(), "settings": vars(args), "milliseconds and calls": measured}
    (ROOT / "out" / "operators.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{text}\nwritten: out/operators.json, out/operators.md")


if __name__ == "__main__":
    main()
