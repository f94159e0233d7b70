"""Trains architectures of the zoo here and with FSDP2, and says how they compare.

    PYTHONPATH=test/parity python test/zoo/zoo.py [--write docs/models.md] [KEY ...]

Two ranks, a unit for each module of the model's longest list, three steps of AdamW over Gloo on
both sides. Every loss and every final parameter and buffer must have equal bits. Exit status 1
where a model is neither equal nor refused.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import fsdp_mlir
import ranks
import torch
import zoo_models
from harness import ADAMW, Captured, Case, Model, run_plan, run_reference, write_config
from safetensors.torch import save_file
from zoo_rows import BY_KEY

WORLD = 2
STEPS = 3
BATCH = 2

ranks.PRELOAD += ["zoo_models", "transformers", "torchvision"]

# What `make test` trains: one of each kind of model, and what once differed.
SUBSET = [
    "gemma2-causal",
    "gpt2-causal",
    "mamba-causal",
    "mixtral-causal",
    "deberta-v2-masked",
    "t5-seq2seq",
    "bart-seq2seq",
    "swin-image",
    "dinov3_vit-image-encoder",
    "clip-contrastive",
    "wav2vec2-audio",
    "shufflenet_v2_x0_5-torchvision",
]


@dataclass(frozen=True)
class Outcome:
    """`verdict` is equal, refused (then `detail` is the message), different (what differs), or "not
    with FSDP2" (its message)."""

    key: str
    verdict: str
    detail: str = ""


def compare(key: str, folder: Path) -> Outcome:
    """Trains one architecture on both sides. FSDP2 may fail itself: then there is no verdict."""
    model = zoo_models.build(key)
    batches = zoo_models.batch(key, samples=2 * WORLD * BATCH)
    row = Model(
        "zoo_models:build",
        zoo_models.longest_list(model),
        ",".join(batches),
        vocab=0,
        seq=0,
        batch=BATCH,
        kwargs={"key": key},
    )
    case = Case(row, ADAMW, world=WORLD, steps=STEPS)
    captured = Captured(row, folder)
    save_file(batches, captured.data)
    config = folder / "capture.yaml"
    write_config(case, config)
    example = {name: tensor[:BATCH] for name, tensor in batches.items()}
    try:
        fsdp_mlir.capture(model, kwargs=example, config=config, path=captured.archive, assume=True)
        ours = run_plan(captured, case, "zoo", comm="gloo")
    except (fsdp_mlir.CaptureError, RuntimeError) as error:
        return Outcome(key, "refused", str(error).splitlines()[-1])
    try:
        theirs = run_reference(captured, case, "zoo")
    except RuntimeError as error:
        return Outcome(key, "not with FSDP2", str(error).strip().splitlines()[-1])
    if ours.rank_losses != theirs.rank_losses:
        return Outcome(key, "different", f"losses {ours.rank_losses} and {theirs.rank_losses}")
    differing = [
        name for name, want in theirs.weights.items() if not torch.equal(ours.weights[name], want)
    ]
    if differing:
        count = f"{len(differing)} of {len(theirs.weights)}"
        return Outcome(key, "different", f"{count} parameters and buffers, first '{differing[0]}'")
    return Outcome(key, "equal")


_HEAD = ["| architecture | task | outcome | |", "| --- | --- | --- | --- |"]
_ROW = re.compile(r"\| (\S+) \| (\S+) \| (equal|refused|different|not with FSDP2) \| (.*) \|")


def written(path: Path) -> list[Outcome]:
    """The outcomes on a page, of architectures that there still are."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines[lines.index(_HEAD[-1]) + 1 :] if lines else []:
        row = _ROW.fullmatch(line)
        if row is None:
            sys.exit(f"zoo: error: {path}: expected a row of an architecture, got: {line}")
        name, task, verdict, detail = row.groups()
        if f"{name}-{task}" in BY_KEY:
            found.append(Outcome(f"{name}-{task}", verdict, detail.strip().replace("\\|", "|")))
    return found


def page(outcomes: list[Outcome]) -> str:
    """docs/models.md."""
    verdicts = ("equal", "refused", "different", "not with FSDP2")
    counts = {verdict: sum(o.verdict == verdict for o in outcomes) for verdict in verdicts}
    lines = [
        "# Models",
        "",
        "<!-- made by `make test-zoo`; do not edit -->",
        "",
        "Architectures of `transformers` and `torchvision` in tiny configurations, trained here",
        f"and with FSDP2 for {STEPS} steps on {WORLD} ranks, a unit for each module of the longest",
        "list. *Equal*: every loss, parameter and buffer has the same bits. *Refused*: capture or",
        "`fsdp-opt` stops with the message. Branches on data go the way of the example, and a step",
        "that would go another way stops.",
        "",
        f"{len(outcomes)} architectures: {counts['equal']} equal, {counts['refused']} refused, "
        f"{counts['different']} different, {counts['not with FSDP2']} that FSDP2 itself fails on.",
        "",
        *_HEAD,
    ]
    for outcome in outcomes:
        row = BY_KEY[outcome.key]
        detail = outcome.detail.replace("|", "\\|")
        lines.append(f"| {row.name} | {row.task} | {outcome.verdict} | {detail} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--write", type=Path, help="write the page here; of other architectures it stays as it is"
    )
    parser.add_argument("keys", nargs="*", metavar="KEY", help="architectures; default: all")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    outcomes = []
    for key in options.keys or list(BY_KEY):
        with tempfile.TemporaryDirectory() as folder:
            outcome = compare(key, Path(folder))
        print(f"{key}: {outcome.verdict} {outcome.detail}".rstrip(), flush=True)
        outcomes.append(outcome)
    if options.write:
        every = {each.key: each for each in [*written(options.write), *outcomes]}
        options.write.write_text(page([every[key] for key in BY_KEY if key in every]))
    return int(any(outcome.verdict == "different" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
