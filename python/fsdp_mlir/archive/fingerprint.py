"""What identifies a captured step: its state, inputs and calls, as lines to compare."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAME = re.compile(r"%[cl]\d+\b")
_CONSTANT = re.compile(r"^ *(%c\d+) : \S+ = (?:prim::Constant(?:\[value=(.*)\])?|aten::Float)\(")
_CALL = re.compile(r"^ +(?:(%.*?) = )?((?!prim::)[A-Za-z_]\w*::\w+\(.*)$")
_LIST = re.compile(r"^ *(%l\d+) : \S+ = prim::ListConstruct\((.*)\)$")
_OF_GRAPH = ("buffer '(constant)", "gradients")
_SHOWN = 160  # characters of a line


@dataclass(frozen=True)
class Line:
    """`text` is what is compared; `place` is the model's line, "file:line" or empty."""

    text: str
    place: str = ""

    def __str__(self) -> str:
        shown = self.text if len(self.text) <= _SHOWN else self.text[:_SHOWN] + "…"
        return f"{shown} at {self.place}" if self.place else shown


NOTHING = Line("nothing")


@dataclass(frozen=True)
class Fingerprint:
    """The lines of one capture, in order. File names are not part of the comparison."""

    lines: tuple[Line, ...]

    @staticmethod
    def of(archive: Path) -> Fingerprint:
        """The fingerprint of a file that `capture` wrote."""
        with zipfile.ZipFile(archive) as opened:
            files = {
                name.rpartition("/")[2]: opened.read(name).decode()
                for name in opened.namelist()
                if "/extra/" in name
            }
        record = json.loads(files["capture.json"])
        states = list(_states(record))
        lines = [line for line in states if not line.text.startswith(_OF_GRAPH)]
        lines += _calls(record, record["nodes"], files["graph.ir"], "")
        for key, name, what in (
            ("evaluation", "eval.ir", " of the evaluation"),
            ("init", "init.ir", " of the initialisation"),
        ):
            if record[key] is not None:
                lines += _calls(record, record[key]["nodes"], files[name], what)
        # After the calls that made them.
        lines += [line for line in states if line.text.startswith(_OF_GRAPH)]
        return Fingerprint(tuple(lines))

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(line.text for line in self.lines).encode()).hexdigest()

    @property
    def digests(self) -> str:
        """Eight characters for each line."""
        return "".join(hashlib.sha256(line.text.encode()).hexdigest()[:8] for line in self.lines)

    def line(self, index: int) -> Line:
        return self.lines[index] if index < len(self.lines) else NOTHING


def first_difference(one: str, other: str) -> int:
    """The first line that differs, given two different `digests`."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return (min(len(one), len(other)) if at is None else at) // 8


def _states(record: dict[str, Any]) -> Iterator[Line]:
    for kind in ("params", "buffers", "inputs"):
        for state in record[kind]:
            state = {key: value for key, value in state.items() if key not in ("low", "high")}
            more = [
                f"{key}={value}"
                for key, value in state.items()
                if key not in ("name", "shape", "dtype") and value not in ([], state["dtype"])
            ]
            typed = f"{state['dtype']}{state['shape']}"
            yield Line(" ".join([f"{kind[:-1]} '{state['name']}' of {typed}", *more]))
    for name, operator in sorted(record["operators"].items()):
        yield Line(f"operator '{name}' of schema {operator['schema']}")
    yield Line(f"gradients of the params {record['grads']}")


def _calls(record: dict[str, Any], nodes: list[Any], text: str, what: str) -> Iterator[Line]:
    """A line for each call, with the values of its arguments instead of their names."""
    values: dict[str, str] = {}

    def shown(line: str) -> str:
        return _NAME.sub(lambda found: values.get(found[0], found[0]), line)

    calls: list[str] = []
    for line in text.splitlines():
        if found := _CONSTANT.match(line):
            values[found[1]] = found[2] or ("nan" if "aten::Float" in line else "None")
        elif found := _LIST.match(line):
            values[found[1]] = f"[{shown(found[2])}]"
        elif " = aten::Complex(" in line:
            name, _, call = line.strip().partition(" : complex = ")
            values[name] = shown(call)
        elif found := _CALL.match(line):
            results, call = found[1] or "", found[2]
            kept = " -> " + results.strip().replace(" : Tensor", "") if results.strip() else ""
            calls.append(shown(call) + kept)
        elif " = prim::ListUnpack" in line:
            calls[-1] += ": " + line.partition(" = ")[0].strip().replace(" : Tensor", "")
        elif line.strip().startswith("%result"):
            calls.append(shown(line.strip()))
    for number, call in enumerate(calls):
        if number == len(nodes):  # the results
            yield Line(f"results{what} {call}")
            continue
        node = nodes[number]
        module = record["modules"][node["module"]]
        place = f"{record['files'][node['file']]}:{node['line']}" if node["file"] >= 0 else ""
        typed = " ".join(
            "none" if out is None else f"{out['dtype']}{out['shape']}" for out in node["outs"]
        )
        inside = f" in module '{module}'" if module else ""
        yield Line(f"call {number + 1}{what} '{call}' of {typed}{inside}", place)
