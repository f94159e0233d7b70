"""Captures and compiles the plans that bench/gpu.py runs; needs the compiler, and no GPU.

    python bench/gpu_plans.py small    those of the parity runs, into test/Inputs/gpu
    python bench/gpu_plans.py large    those of the benchmark, into out/gpu-plans

Beside each large plan lies what `fsdp-opt --emit stats` says of it, `<plan>.stats`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_cases import CASES, MODELS, ROOT, Case

FOLDERS = dict.fromkeys([ROOT / "python", *(file.parent for file in MODELS.values())])
sys.path[:0] = map(str, FOLDERS)

from fsdp_mlir.capture import cli  # noqa: E402


def execute(command: list[str | Path]) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"gpu_plans: error: exit status {done.returncode} of {words[0]}: {done.stderr}")
    return done.stdout


def captured(arguments: list[str]) -> None:
    """`python -m fsdp_mlir.capture` in a process of its own, forked after the imports."""
    process = multiprocessing.get_context("fork").Process(target=run_capture, args=(arguments,))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"gpu_plans: error: exit status {process.exitcode} of a capture: {arguments}")


def run_capture(arguments: list[str]) -> None:
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        sys.exit(cli.main(arguments))


def capture(case: Case, directory: Path) -> tuple[Path, Path]:
    """The config and the archive. Weights are not captured: the runs give both sides the same
    file. Cases that differ in their ranks share a capture."""
    words = [
        case.model,
        kwargs(case),
        *case.inputs,
        case.config,
        case.arch or "cpu",
        case.torch or "",
    ]
    stem = directory / hashlib.sha256(" ".join(words).encode()).hexdigest()
    config, archive = stem.with_suffix(".yaml"), stem.with_suffix(".pt")
    if not archive.exists():
        config.write_text(case.config)
        command = ["--meta", "--no-init", "--model", f"{MODELS[case.model].stem}:{case.model}"]
        command += ["--kwargs", kwargs(case), "--config", str(config), "-o", str(archive)]
        command += ["--device", "cuda", "--device-arch", case.arch] if case.arch else []
        command += ["--torch-version", case.torch] if case.torch else []
        captured([*command, "--inputs", *case.inputs])
    return config, archive


def compile_case(case: Case, opt: Path, plan: Path, captures: Path) -> None:
    """`captures` is where those of other cases are."""
    config, archive = capture(case, captures)
    command = [opt, archive, "--config", config, "--world-size", str(case.world)]
    plan.parent.mkdir(parents=True, exist_ok=True)
    execute([*command, "--emit", "plan", "-o", plan])
    if case.large:
        stats = execute([*command, "--emit", "stats", "--device", "h100"])
        plan.with_suffix(".stats").write_text(stats)


def kwargs(case: Case) -> str:
    return json.dumps(case.sizes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", choices=["small", "large"])
    parser.add_argument("--opt", type=Path, default=ROOT / "build" / "bin" / "fsdp-opt")
    parser.add_argument("--out", type=Path, help="another folder")
    args = parser.parse_args()
    if not args.opt.exists():
        parser.error(f"expected fsdp-opt at {args.opt}: run make build, or pass --opt")
    with tempfile.TemporaryDirectory() as captures:
        for case in CASES.values():
            if case.large == (args.which == "large"):
                plan = args.out / case.plan.name if args.out else case.plan
                compile_case(case, args.opt, plan, Path(captures))
                print(f"{plan.name}: {plan.stat().st_size / 1024:.0f} KiB", flush=True)


if __name__ == "__main__":
    main()
