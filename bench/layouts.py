"""Seconds to plan torchtitan's Llama 3 for meshes of data and tensor parallel ranks.

Captures it with `--mesh` in one process for each size of the tensor axis, and lets fsdp-opt search
the meshes of so many devices, as examples/planned/titan.py describes. Writes out/layouts.md: the
times, and the search's table.

    .venv/bin/python bench/layouts.py [--flavor 8B] [--gpus 1024] [--tensor 1,2,4,8]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLANNED = ROOT / "examples" / "planned"
CONFIG = PLANNED / "fsdp.yaml"
LENGTH, VOCABULARY = 8192, 128256


def timed(*command: object) -> tuple[float, str]:
    """Seconds, and standard output; ends the script if the command fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    begin = time.monotonic()
    done = subprocess.run(
        [str(word) for word in command],
        cwd=PLANNED,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"layouts: error: exit status {done.returncode}\n{done.stderr[-2000:]}")
    return time.monotonic() - begin, done.stdout


def capture(flavor: str, tensor: int, gpus: int, path: Path) -> float:
    tokens = f"int64[1,{LENGTH}]<{VOCABULARY}"
    command = [sys.executable, "-m", "fsdp_mlir.capture", "--model", "titan:llama3", "--meta"]
    command += ["--kwargs", f'{{"flavor": "{flavor}"}}', "--config", str(CONFIG)]
    command += ["--mesh", f"data={gpus // tensor},tensor={tensor}", "--loss-parallel"]
    command += ["--loss", "titan:loss", "--inputs", f"tokens={tokens}", f"labels={tokens}"]
    return timed(*command, "-o", path)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flavor", default="8B", help="as torchtitan names them [%(default)s]")
    parser.add_argument("--gpus", type=int, default=1024)
    parser.add_argument("--tensor", default="1,2,4,8", help="sizes of the axis [%(default)s]")
    arguments = parser.parse_args()
    out = ROOT / "out" / "layouts"
    out.mkdir(parents=True, exist_ok=True)
    opt = ROOT / "build" / "bin" / "fsdp-opt"
    lines = ["| tensor | capture, s | `--emit plan`, s |", "| ---: | ---: | ---: |"]
    paths = []
    for tensor in map(int, arguments.tensor.split(",")):
        paths.append(out / f"{arguments.flavor}-tensor{tensor}.pt")
        captured = capture(arguments.flavor, tensor, arguments.gpus, paths[-1])
        ranks = arguments.gpus // tensor
        common = [opt, paths[-1], "--config", CONFIG, "--world-size", ranks, "--emit", "plan"]
        planned, _ = timed(*common, "-o", out / "plan.json")
        lines.append(f"| {tensor} | {captured:.1f} | {planned:.2f} |")
        print(lines[-1], flush=True)
    search = [opt, paths[0], *(["--captures", ",".join(map(str, paths[1:]))] if paths[1:] else [])]
    search += ["--config", CONFIG, "--emit", "layouts", "--gpus", arguments.gpus]
    seconds, table = timed(*search)
    meshes = sum(line.lstrip()[:1].isdigit() for line in table.splitlines())
    lines += ["", f"{meshes} meshes of {arguments.gpus} devices in {seconds:.1f} s:", "", "```"]
    text = "\n".join([*lines, table.rstrip(), "```"])
    (out.parent / "layouts.md").write_text(text + "\n")
    print(f"{text}\nwritten: out/layouts.md")


if __name__ == "__main__":
    main()
