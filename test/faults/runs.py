"""A small real run, of two ranks, and the tools of these tests."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / "build" / "bin"
FILE_RECORDER = ROOT / "build" / "lib" / "FileRecorder.so"


@dataclass(frozen=True)
class Job:
    """A plan, its weights and its data."""

    plan: Path
    data: Path

    def command(self, folder: Path, steps: int, *options: str) -> list[str]:
        words = [BIN / "fsdp-run", self.plan, "--nproc", 2, "--data", self.data, "--seed", 3]
        words += ["--steps", steps, "--checkpoint", folder, "--resume", "auto"]
        # Several writes for each file.
        words += ["--checkpoint-piece", 4096, *options]
        return [str(word) for word in words]

    def train(
        self,
        folder: Path,
        steps: int,
        *options: str,
        env: dict[str, str] | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Goes on from what the folder has, to so many steps in all."""
        done = subprocess.run(
            self.command(folder, steps, *options),
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert not check or done.returncode == 0, done.stderr
        return done
