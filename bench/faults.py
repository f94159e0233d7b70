"""The tables of docs/reliability.md, from what the tests of bench/faults.sh recorded."""

from __future__ import annotations

import argparse
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SIGNALS = ("KILL", "ABRT", "TERM", "STOP")
# As a save, the removal of old checkpoints, and a resumed run pass through them.
POINTS = (
    *("stage", "agree", "create", "open", "write", "sync-file", "report", "manifest"),
    *("sync-manifest", "sync-folder", "commit", "sync-parent", "acknowledge", "retire", "remove"),
    *("choose", "verify", "read"),
)


class Result(NamedTuple):
    """One case of test_killed. One that failed has no `resumed`, one that hung no `seconds`."""

    passed: bool
    properties: dict[str, str]


def read_results(path: Path) -> tuple[list[Result], list[tuple[str, bool]]]:
    """The cases of test_killed, and name and success of each other test."""
    killed, others = [], []
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        passed = case.find("failure") is None and case.find("error") is None
        properties = {x.get("name", ""): x.get("value", "") for x in case.iter("property")}
        if "point" in properties:
            killed.append(Result(passed, properties))
        else:
            others.append((case.get("name", "").partition("[")[0], passed))
    return killed, others


def render_row(name: str, results: list[Result]) -> str:
    passed = sum(result.passed for result in results)
    cells = [name, str(len(results)), str(passed)]
    resumed = [properties.get("resumed") for _, properties in results]
    cells += [str(resumed.count(kind)) for kind in ("old", "new", "none")]
    for stopped in (False, True):
        times = [
            float(properties["seconds"])
            for _, properties in results
            if "seconds" in properties and (properties["signal"] == "STOP") == stopped
        ]
        cells.append(f"{statistics.median(times):.1f} / {max(times):.1f}" if times else "")
    return f"| {' | '.join(cells)} |"


def render_table(
    title: str, results: list[Result], groups: list[tuple[str, Callable[[dict[str, str]], bool]]]
) -> list[str]:
    heads = [title, "cases", "passed", "old", "new", "none", "to the end", "to the end after STOP"]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for name, belongs in groups:
        if chosen := [result for result in results if belongs(result.properties)]:
            lines.append(render_row(name, chosen))
    return lines


def equal(key: str, value: str) -> Callable[[dict[str, str]], bool]:
    return lambda properties: properties[key] == value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="JUnit XML of test_save_faults.py")
    killed, others = read_results(parser.parse_args().results)
    points = dict.fromkeys([*POINTS, *(result.properties["point"] for result in killed)])
    print("\n".join(render_table("point", killed, [(f"`{x}`", equal("point", x)) for x in points])))
    print()
    groups = [(signal, equal("signal", signal)) for signal in SIGNALS]
    worlds = {"1": "1 rank", "2": "2 ranks", "4": "4 ranks"}
    groups += [(name, equal("world", world)) for world, name in worlds.items()]
    groups += [
        ("training waits", equal("mode", "sync")),
        ("beside training", equal("mode", "async")),
    ]
    groups += [
        ("first save", equal("first", "True")),
        ("later save, or load", equal("first", "False")),
    ]
    groups += [("all", lambda properties: True)]
    print("\n".join(render_table("", killed, groups)))
    print()
    for name in dict.fromkeys(name for name, _ in others):
        passed = [x for other, x in others if other == name]
        print(f"{name}: {sum(passed)} of {len(passed)} passed")


if __name__ == "__main__":
    main()
