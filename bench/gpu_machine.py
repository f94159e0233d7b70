"""What bench/gpu.py says of the machine, as JSON on stdout; run as a program, it asks the GPU.

A program of its own, so that bench/gpu.py holds no memory of the GPU that it measures.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpu_process import Deadline, RunFailed, last_line, run_program, tail

LIMIT = 120.0


def facts(device: str, folder: Path) -> dict[str, Any]:
    """Without the date. Throws RunFailed if the GPU does not answer."""
    result: dict[str, Any] = {
        "gpu": "none",
        "torch": version("torch"),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
    if device == "cuda":
        log = folder / "machine.log"
        status = run_program([sys.executable, __file__], Deadline(LIMIT), log)
        text = tail(log)
        if status:
            raise RunFailed(f"expected a GPU that answers, got: {last_line(text, status)}")
        result |= json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    return result


def gpu_facts() -> dict[str, Any]:
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    return {
        "gpu": torch.cuda.get_device_name(0),
        "gpus": torch.cuda.device_count(),
        "driver": driver,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cudnn": torch.backends.cudnn.version(),
    }


if __name__ == "__main__":
    print(json.dumps(gpu_facts()))
