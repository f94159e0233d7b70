"""Where the report of bench/gpu.py lies: what earlier calls left there, and how it is replaced."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_report import FAILURES, Report, render, render_failures

REPORT = "report.json"

# Characters of all stderr that the report keeps: what comes back from a host is limited.
OUTPUT_LIMIT = 6_000_000

# A report of other hardware or software is another report.
SAME = ("gpu", "gpus", "driver", "torch", "cuda", "nccl", "cudnn", "cpu")


class Store:
    """Writes a report into folders, each file at once. The first folder's is the one that the next
    call goes on with. A folder that cannot be written costs a warning: the others may do."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = list(dict.fromkeys(folder.resolve() for folder in folders))

    def open(self, machine: dict[str, Any]) -> Report:
        """The report of earlier calls, for this machine; one of another machine, and one that
        cannot be read, is renamed and said."""
        path = self.folders[0] / REPORT
        report = Report(machine)
        if not path.exists():
            return report
        try:
            earlier = Report.from_json(json.loads(path.read_text()))
        except (KeyError, TypeError, ValueError) as error:
            self._set_aside(path, f"it cannot be read: {error!r}")
            return report
        for key in SAME:
            if earlier.machine.get(key) != machine.get(key):
                got = f"expected {key} {machine.get(key)}, got {earlier.machine.get(key)}"
                self._set_aside(path, got)
                return report
        earlier.machine = machine
        return earlier

    def _set_aside(self, path: Path, reason: str) -> None:
        number = 1
        while (other := path.with_name(f"report-{number}.json")).exists():
            number += 1
        path.rename(other)
        print(f"gpu.py: the earlier report is now {other.name}: {reason}", file=sys.stderr)

    def write(self, report: Report) -> None:
        limited = limit_output(report)
        texts = {
            "report.txt": render(limited),
            REPORT: json.dumps(limited.to_json(), indent=1, ensure_ascii=False) + "\n",
            FAILURES: render_failures(limited),
        }
        for folder in self.folders:
            try:
                for name, text in texts.items():
                    write_file(folder / name, text)
            except OSError as error:
                print(f"gpu.py: warning: {error}", file=sys.stderr)


def write_file(path: Path, text: str) -> None:
    """Nobody sees a part of it. No text: no file."""
    if not text:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, errors="replace")
    os.replace(new, path)


def limit_output(report: Report) -> Report:
    """The same with outputs of OUTPUT_LIMIT characters in all; the middle of longer ones is left
    out, where the files of logs/ have it."""
    each = OUTPUT_LIMIT // max(1, len(report.failures))
    items = [replace(item, output=shorten(item.output, each)) for item in report.items]
    return replace(report, items=items)


def shorten(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head = limit // 3
    left = limit - head
    return f"{text[:head]}\n[{len(text) - limit} characters left out]\n{text[-left:]}"
