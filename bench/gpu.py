"""Tests and measures a built runtime on this machine's GPU, with FSDP2 beside it.

bench/gpu.sh builds the runtime and runs this. Needs torch and the standard library. Runs the items
of gpu_items.py that the options pick, each under its deadline, and after each writes report.txt,
report.json and failures.log into --out, and into the folder that OUT names if it is set. Results
of earlier calls stay in the report; an item that runs again replaces its own. Exit status: 1 if an
item of this call failed, 2 if nothing could be run. `--device cpu` runs the same over Gloo, which
tests this script.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import gpu_digest
from gpu_cases import BENCH, MODELS, ROOT, Case, is_other_fsdp2
from gpu_items import (
    SECTIONS,
    Planned,
    SelectionError,
    everything,
    listing,
    pick,
)
from gpu_machine import facts
from gpu_process import Deadline, RunFailed, last_line, run_program, run_ranks, tail
from gpu_report import Item, Report, Sample, first_difference, item_line, predicted_peak, render
from gpu_store import Store
from gpu_trace import disorder

# Exit status of the tests that need a GPU, without one.
SKIPPED = 77

GRAPHS = "--cuda-graphs"
REPLAYED = ("graphs", "unfused")
COMM = {"cuda": "nccl", "cpu": "gloo"}

# Equal results of equal calls, whichever stream cuBLAS runs on.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

FSDP2 = BENCH / "gpu_fsdp2.py"

Metrics = list[dict[str, Any]]


@dataclass(frozen=True)
class Setup:
    build: Path
    out: Path
    device: str
    parity_steps: int = 10
    rounds: int = 3
    steps: int = 20
    warmup: int = 5
    deadline: float | None = None  # of every item, in place of its own

    @property
    def fsdp_run(self) -> Path:
        return self.build / "bin" / "fsdp-run"

    @property
    def logs(self) -> Path:
        return self.out / "logs"

    def log(self, item: Planned) -> Path:
        return self.logs / (re.sub(r"[^\w.]+", "-", item.name) + ".log")


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def run_side(
    setup: Setup,
    item: Planned,
    files: tuple[Path, Path],
    steps: int,
    deadline: Deadline,
    options: tuple[Any, ...] = (),
) -> Metrics:
    """Trains the item's case with the item's side. Throws RunFailed, also if what should have been
    replayed as graphs was not."""
    assert item.case
    case, metrics = item.case, files[0].with_name(f"{item.side}.jsonl")
    metrics.unlink(missing_ok=True)  # what an earlier run left proves nothing of this one
    command: list[Any] = ["--weights", files[0], "--data", files[1], "--steps", steps]
    command += ["--metrics", metrics, "--device", setup.device, *options]
    if item.side in ("fsdp2", "compile"):
        command = [sys.executable, FSDP2, "--case", case.name, *command]
        command += ["--compile"] if item.side == "compile" else []
    else:
        command = [setup.fsdp_run, case.plan, "--comm", COMM[setup.device], *command]
        command += [GRAPHS] if item.side in REPLAYED else []
        command += ["--no-kernels"] if item.side == "unfused" else []
        command += ["--any-device"] if case.arch is None and setup.device == "cuda" else []

    def run() -> None:
        def env(rank: int) -> dict[str, str]:
            return DETERMINISTIC | item.environment(rank)

        run_ranks(command, case.world, env, deadline, setup.log(item))

    try:
        run()
    except RunFailed as error:
        # Gloo aborts now and then while it starts or ends its threads.
        if setup.device == "cuda" or item.side != "fsdp2" or not error.by_signal:
            raise
        run()
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    if item.side in REPLAYED and (reason := not_captured(steps)):
        raise RunFailed(reason)
    return steps


def not_captured(steps: list[dict[str, Any]]) -> str | None:
    """What of the last step ran eagerly in spite of --cuda-graphs, by the metrics."""
    said = steps[-1].get("cuda_graphs") if steps else None
    if not said:
        return f"expected the metrics of fsdp-run to say what {GRAPHS} captured, got nothing"
    return f"cuda graphs: {said}" if "not captured" in said else None


class Runner:
    """Runs items and records them. `save` is called after every change of the report."""

    def __init__(self, setup: Setup, report: Report, save: Callable[[], None]) -> None:
        self.setup = setup
        self.report = report
        self.save = save
        self.call = now()
        self.done: dict[str, Item] = {}
        """Of this call, by name."""
        self.written: dict[tuple[Any, ...], tuple[Path, Path]] = {}

    def inputs(self, case: Case) -> tuple[Path, Path]:
        """Weights and batches, written once a call for all cases of a model and its sizes."""
        key = (case.model, *case.sizes.items())
        if key not in self.written:
            import gpu_files  # and with it torch, which takes seconds

            self.written[key] = gpu_files.write_inputs(case, self.setup.out / case.name)
        return self.written[key]

    def run(self, items: list[Planned]) -> None:
        try:
            self.run_all(items)
        finally:
            for weights in self.setup.out.glob("*/weights.safetensors"):
                weights.unlink()

    def run_all(self, items: list[Planned]) -> None:
        for case, group in itertools.groupby(
            items, key=lambda item: item.case if item.section == "bench" else None
        ):
            if case is not None:
                self.bench(case, list(group))
                continue
            for item in group:
                self.run_one(item)

    def run_one(self, item: Planned) -> None:
        sections: dict[str, Callable[[Planned], Item]] = {
            "tests": self.tests,
            "sanitizer": self.sanitizer,
            "parity": self.parity,
            "trace": self.trace,
        }
        if item.section == "parity" and item.side != "fsdp2":
            self.need_reference(item)
        self.attempt(item, lambda: sections[item.section](item))

    def attempt(self, item: Planned, work: Callable[[], Item]) -> Item:
        """Whatever goes wrong in an item fails it alone."""
        self.report.running = f"{item.name}, since {now()}"
        self.save()
        log = self.setup.log(item)
        log.unlink(missing_ok=True)
        start = time.monotonic()
        try:
            result = work()
        except RunFailed as error:
            result = Item(item.name, "failed", str(error))
        except Exception as error:  # of a result that cannot be read, a full disk
            line = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            result = Item(item.name, "failed", line[:300], output=traceback.format_exc())
        return self.record(result, time.monotonic() - start, log)

    def record(self, item: Item, seconds: float, log: Path) -> Item:
        output = item.output
        if item.status in ("failed", "refused") and log.exists():
            output = log.read_text(errors="replace") + output
        item = replace(item, seconds=round(seconds, 1), date=now(), output=output)
        self.done[item.name] = item
        self.report.record(item)
        self.report.running = ""
        self.save()
        print(item_line(item), flush=True)
        return item

    def tests(self, item: Planned) -> Item:
        path = self.setup.build / "bin" / item.program
        if not path.exists():
            return Item(item.name, "skipped", "not built")
        env = {}
        if item.shard:
            number, total = item.shard.split("/")
            env = {"GTEST_SHARD_INDEX": str(int(number) - 1), "GTEST_TOTAL_SHARDS": total}
        return self.program(item, [path], env)

    def sanitizer(self, item: Planned) -> Item:
        tool = shutil.which("compute-sanitizer") or shutil.which(
            "compute-sanitizer", path="/usr/local/cuda/bin"
        )
        tests = self.setup.build / "bin" / "CudaTests"
        if not tool or self.setup.device == "cpu":
            return Item(item.name, "skipped", "no compute-sanitizer on the PATH, or no GPU")
        if not tests.exists():
            return Item(item.name, "skipped", "CudaTests is not built")
        options = ["--error-exitcode", "1", tests, "--gtest_filter=CudaFlatCopyTest.*"]
        return self.program(item, [tool, *options], {})

    def program(self, item: Planned, command: list[Any], env: dict[str, str]) -> Item:
        log = self.setup.log(item)
        try:
            status = run_program(command, Deadline(item.deadline), log, env)
        except RunFailed as error:
            return Item(item.name, "failed", f"{error}; last line: {last_line(tail(log), 0)}")
        text = tail(log)
        if status == SKIPPED:
            return Item(item.name, "skipped", last_line(text, status))
        if status:
            detail = f"exit status {status}: {last_line(text, status)}"
            return Item(item.name, "failed", detail)
        counts = [
            line for line in text.splitlines() if line.startswith(("[  PASSED", "[  SKIPPED"))
        ]
        return Item(item.name, "passed", ", ".join(counts[:2]))

    def parity(self, item: Planned) -> Item:
        """Losses of all steps and final parameters of both sides."""
        if item.side == "fsdp2":
            return self.refer(item)
        reference = self.report.references.get(item.reference)
        if not reference:
            reason = self.done[self.theirs(item).name].detail
            return Item(item.name, "skipped", f"nothing to compare with: {reason}")
        assert item.case
        if is_other_fsdp2(item.case, version("torch")):
            reason = "the plan is for another version of FSDP2, which rounds gradients otherwise"
            return Item(item.name, "skipped", f"{reason}: GPU_TORCH in bench/gpu_cases.py")
        losses, parameters = self.train(item, Deadline(item.deadline))
        difference = first_difference(losses, reference["losses"])
        difference = difference or gpu_digest.difference(parameters, reference["parameters"])
        if difference:
            return Item(item.name, "failed", difference)
        detail = f"{len(losses)} steps, losses and final parameters bit for bit"
        return Item(item.name, "passed", detail)

    def train(self, item: Planned, deadline: Deadline) -> tuple[list[list[float]], dict[str, str]]:
        """Losses of a step's ranks, and digests of the final parameters."""
        assert item.case
        files = self.inputs(item.case)
        final = files[0].with_name(f"{item.side}.final.safetensors")
        final.unlink(missing_ok=True)
        options = ("--save-weights", final)
        metrics = run_side(self.setup, item, files, self.setup.parity_steps, deadline, options)
        parameters = gpu_digest.of_tensors(final)
        final.unlink()
        return [line["rank_losses"] for line in metrics], parameters

    def refer(self, item: Planned) -> Item:
        """Twice: a kernel that differs from itself proves nothing."""
        assert item.case
        self.report.references.pop(item.reference, None)
        deadline = Deadline(item.deadline)
        try:
            losses, parameters = self.train(item, deadline)
            again, parameters_again = self.train(item, deadline)
        except RunFailed as error:
            status = "refused" if item.case.world > 1 else "failed"
            return Item(item.name, status, f"FSDP2: {error}")
        difference = first_difference(again, losses)
        difference = difference or gpu_digest.difference(parameters_again, parameters)
        if difference:
            return Item(item.name, "skipped", f"FSDP2 differs from itself: {difference}")
        self.report.references[item.reference] = {
            "inputs": self.inputs_digest(item.case),
            "losses": losses,
            "parameters": parameters,
        }
        return Item(item.name, "passed", f"{len(losses)} steps, twice the same")

    def theirs(self, item: Planned) -> Planned:
        """FSDP2's side of the item's comparison."""
        known = everything(self.setup.device)
        found = next(
            other
            for other in known
            if (other.section, other.side) == ("parity", "fsdp2")
            and other.reference == item.reference
        )
        return replace(found, deadline=self.setup.deadline or found.deadline)

    def need_reference(self, item: Planned) -> None:
        """Runs FSDP2, as an item of its own, unless it ran in this call, or ran the same steps on
        the same inputs in an earlier one."""
        assert item.case
        theirs = self.theirs(item)
        if theirs.name in self.done:
            return
        known = self.report.references.get(item.reference)
        try:
            if (
                known
                and len(known["losses"]) == self.setup.parity_steps
                and known["inputs"] == self.inputs_digest(item.case)
            ):
                return
        except OSError:  # of the inputs: FSDP2's item says so
            pass
        self.attempt(theirs, lambda: self.refer(theirs))

    def inputs_digest(self, case: Case) -> str:
        """Of all that FSDP2's results come from, torch aside."""
        sources = (FSDP2, MODELS[case.model], BENCH / "gpu_cases.py")
        return gpu_digest.of_files([*self.inputs(case), *sources])

    def trace(self, item: Planned) -> Item:
        """A step's times by the streams' events, which the plan orders."""
        assert item.case
        files = self.inputs(item.case)
        trace = files[0].with_name("trace.json")
        trace.unlink(missing_ok=True)
        deadline = Deadline(item.deadline)
        run_side(self.setup, item, files, 4, deadline, ("--trace", trace))
        wrong = disorder(trace, item.case.plan)
        status = "failed" if wrong else "passed"
        return Item(item.name, status, wrong or "streams and events in the plan's order")

    def bench(self, case: Case, items: list[Planned]) -> None:
        """Rounds of A B C A B C, so that drift of the machine meets all sides alike."""
        if not case.plan.exists():
            reason = "no plan: bench/gpu.sh pack makes it, where the compiler is"
            for item in items:
                self.record(Item(item.name, "skipped", reason), 0, self.setup.log(item))
            return
        samples: dict[str, list[Sample]] = {item.side: [] for item in items}
        seconds: dict[str, float] = {item.side: 0 for item in items}
        for number, item in itertools.product(range(self.setup.rounds), items):
            if number and self.done[item.name].status == "failed":
                continue
            self.attempt(item, lambda item=item: self.round(item, samples[item.side]))
            done = self.done[item.name]
            seconds[item.side] += done.seconds or 0
            self.report.record(replace(done, seconds=round(seconds[item.side], 1)))
            self.save()

    def round(self, item: Planned, samples: list[Sample]) -> Item:
        assert item.case
        setup, plan = self.setup, item.case.plan
        files = self.inputs(item.case)
        stats = plan.with_suffix(".stats")
        predicted = predicted_peak(stats.read_text()) if stats.exists() else None
        try:
            metrics = run_side(setup, item, files, setup.steps, Deadline(item.deadline))
            samples.append(Sample(item.side, metrics, setup.warmup, self.call))
        finally:
            self.report.record_benchmark(item.case, item.side, samples, predicted)
        return Item(item.name, "passed", f"{len(samples)} of {setup.rounds} rounds")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line."""
        self.exit(2, f"gpu.py: error: {message}\n")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print what would run, and its options")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument(
        "--tests", nargs="+", metavar="PROGRAM", help="of tests; PROGRAM:2/4 is a shard"
    )
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="of parity, trace and bench")
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help="of parity, trace and bench")
    parser.add_argument("--deadline", type=float, help="seconds of an item, in place of its own")
    parser.add_argument("--parity-steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of a benchmark's run")
    parser.add_argument("--warmup", type=int, default=5, help="of those, not measured")
    parser.add_argument("--build", type=Path, default=ROOT / "build-gpu")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args(argv)
    if args.warmup >= args.steps or args.rounds < 1 or args.parity_steps < 1:
        parser.error("expected --steps above --warmup, and a round and a step at least")
    if args.deadline is not None and args.deadline <= 0:
        parser.error(f"--deadline: expected seconds above 0, got {args.deadline:g}")
    try:
        args.items = pick(args.device, args.only, args.tests, args.cases, args.sides, args.deadline)
    except SelectionError as error:
        parser.error(str(error))
    runs = any(item.case for item in args.items)
    fsdp_run = args.build / "bin" / "fsdp-run"
    if runs and not args.list and not fsdp_run.exists():
        parser.error(f"expected fsdp-run at {fsdp_run}: run bench/gpu.sh build")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.list:
        print(listing(args.items), end="")
        return 0
    names = [field.name for field in fields(Setup)]
    setup = Setup(**{name: getattr(args, name) for name in names})
    setup.logs.mkdir(parents=True, exist_ok=True)
    try:
        machine = facts(args.device, setup.logs)
    except RunFailed as error:
        print(f"gpu.py: error: {error}", file=sys.stderr)
        return 2
    folders = [setup.out, *([Path(os.environ["OUT"])] if os.environ.get("OUT") else [])]
    store = Store(folders)
    report = store.open({"date": now(), **machine})
    runner = Runner(setup, report, lambda: store.write(report))
    runner.run(args.items)
    print(f"\n{render(report)}", end="")
    return 1 if any(item.status == "failed" for item in runner.done.values()) else 0


if __name__ == "__main__":
    # So that what runs ends with this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
