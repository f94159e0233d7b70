"""Captures, compiles and trains two models, with FSDP2 beside them, and compares the numbers; then
kills a run that saves checkpoints, and lets it go on.

Everything it makes stays in out/demo/ to be looked at. Exits non-zero if a loss or a final
parameter differs from FSDP2's, or those of the resumed run from the whole one's.
"""

from __future__ import annotations

import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "test" / "parity"))

from harness import (  # noqa: E402
    ADAMW_FUSED,
    BIN,
    GPT2,
    LLAMA_29M,
    Captured,
    Case,
    Run,
    capture,
    compile_plan,
    execute,
    read_run,
    run_command,
    run_reference,
    train_plan,
)

OUT = ROOT / "out" / "demo"
CASES = {
    "Llama, 29 M parameters": ("llama_29m", Case(LLAMA_29M, ADAMW_FUSED, steps=10)),
    "GPT-2 of transformers, tied weights": ("gpt2", Case(GPT2, ADAMW_FUSED, steps=10)),
}


@dataclass(frozen=True)
class Result:
    title: str
    ours: Run
    theirs: Run

    @property
    def equal(self) -> bool:
        weights = self.theirs.weights
        return self.ours.rank_losses == self.theirs.rank_losses and all(
            name in self.ours.weights and torch.equal(self.ours.weights[name], weight)
            for name, weight in weights.items()
        )


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


def timed(text: str, start: float) -> None:
    say(f"  {text:<58} {time.monotonic() - start:6.1f} s")


def train(title: str, stem: str, case: Case) -> Result:
    say(f"{title}: 2 ranks, one thread each, {case.steps} steps on text")
    directory = OUT / stem
    start = time.monotonic()
    captured = capture(case.model, directory)
    timed("captured a training step    (model.pt)", start)

    start = time.monotonic()
    plan = compile_plan(captured, case, "fsdp")
    timed("compiled                    (fsdp.plan.json)", start)
    emit_mlir(directory)

    start = time.monotonic()
    ours = train_plan(captured, plan, case)
    timed("trained with fsdp-run       (fsdp.plan.jsonl)", start)
    start = time.monotonic()
    theirs = run_reference(captured, case, "reference")
    timed("trained with FSDP2 on Gloo  (reference.fsdp2.jsonl)", start)
    return Result(title, ours, theirs)


def emit_mlir(directory: Path) -> None:
    """The program before and after sharding, for the reader."""
    archive, config = directory / "model.pt", directory / "fsdp.yaml"
    command = [BIN / "fsdp-opt", archive, "--config", config, "--world-size", 2, "--emit", "mlir"]
    for level in ("captured", "sharded"):
        execute([*command, "--level", level, "-o", directory / f"{level}.mlir"])


def kill_and_resume(stem: str, case: Case, whole: Run) -> bool:
    """Whether a run that is killed and goes on has the losses and weights of the whole one."""
    directory, folder = OUT / stem, OUT / stem / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    metrics, weights = directory / "resumed.jsonl", directory / "resumed.safetensors"
    metrics.unlink(missing_ok=True)
    captured = Captured(case.model, directory)
    command = [*run_command(captured, directory / "fsdp.plan.json", case), "--metrics", metrics]
    command += ["--checkpoint", folder, "--checkpoint-every", 2, "--resume", "auto"]
    command = [str(word) for word in [*command, "--save-weights", weights]]
    say(f"killed and resumed: {stem}, a checkpoint every 2 steps")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step:  7"):
                break
        process.send_signal(signal.SIGKILL)
    say("  kill -9 after step 7; the same command again:")
    for line in execute(command).stderr.splitlines():
        if line.startswith("resumed: "):
            say(f"  {line.replace(str(OUT.parent.parent) + '/', '')}")
    resumed = read_run(metrics, weights)
    equal = resumed.rank_losses == whole.rank_losses and all(
        torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items()
    )
    say(f"  losses and weights {'equal' if equal else 'DIFFER FROM'} the undisturbed run's")
    return equal


def print_losses(result: Result) -> None:
    print(f"\n{result.title}: loss of rank 0 and rank 1")
    print(f"  {'step':>4}  {'fsdp-run':^25}  {'FSDP2':^25}")
    for step, (ours, theirs) in enumerate(
        zip(result.ours.rank_losses, result.theirs.rank_losses, strict=True)
    ):
        cells = "  ".join(" ".join(f"{x:12.9g}" for x in losses) for losses in (ours, theirs))
        print(f"  {step + 1:>4}  {cells}  {'equal' if ours == theirs else 'DIFFERENT'}")
    print(f"  losses and final parameters {'equal bit for bit' if result.equal else 'DIFFER'}")


def print_costs(results: list[Result]) -> None:
    print(f"\n  {'':<38}{'step time, ms':^22}  {'peak RSS a rank, MiB':^22}")
    print(f"  {'':<38}{'fsdp-run':>10}  {'FSDP2':>10}  {'fsdp-run':>10}  {'FSDP2':>10}")
    for result in results:
        runs = (result.ours, result.theirs)
        times = [statistics.median(x["step_ms"] for x in run.metrics[2:]) for run in runs]
        memory = [max(x["peak_rss_bytes"] for x in run.metrics) / 2**20 for run in runs]
        cells = [f"{x:10.1f}" for x in times] + [f"{x:10.0f}" for x in memory]
        print(f"  {result.title:<38}{'  '.join(cells)}")


def main() -> int:
    results = [train(title, *case) for title, case in CASES.items()]
    resumes = kill_and_resume(*CASES[results[-1].title], results[-1].ours)
    for result in results:
        print_losses(result)
    print_costs(results)
    print(f"""
Where to look next, in {OUT.relative_to(ROOT)}/<model>/:
  captured.mlir      the training step as captured: one device, no placement
  sharded.mlir       the same with units, all-gathers, reshards and reduce-scatters
  fsdp.yaml          the policy that turned one into the other
  fsdp.plan.json     what fsdp-run executes
`make bench` measures over several rounds, with the machine's floor beside.""")
    if not all(result.equal for result in results):
        print("demo: error: results differ from FSDP2's", file=sys.stderr)
        return 1
    if not resumes:
        print("demo: error: a resumed run differs from the whole one", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
