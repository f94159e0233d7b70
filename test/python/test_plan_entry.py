"""The entry of a kept plan is what was written, or none."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from fsdp_mlir.frontdoor.plan_cache import PlanCache
from fsdp_mlir.frontdoor.planning import Captured
from fsdp_mlir.step.outputs import Outputs
from torch import nn

KEY = "0123456789abcdef" * 2
CAPTURED = Captured(
    "digest", {}, (Outputs(keeps=False), Outputs(keeps=False)), warnings=["careful"]
)


@pytest.fixture
def cache(tmp_path: Path) -> PlanCache:
    source = tmp_path / "source"
    source.mkdir()
    (source / "plan.json").write_text("{}")
    made = PlanCache(tmp_path / "cache", nn.Linear(4, 4), None)
    made.imported = {"json", "safetensors.torch"}
    made.add(KEY, source, CAPTURED)
    return made


@pytest.fixture
def add(cache: PlanCache, tmp_path: Path) -> Callable[[str], None]:
    """Keeps a plan under another name; no warning may say that it is not kept."""

    def added(key: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.add(key, tmp_path / "source", CAPTURED)

    return added


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


@pytest.fixture
def entry(cache: PlanCache, tmp_path: Path) -> Path:
    return tmp_path / "cache" / KEY / "entry.json"


def test_a_whole_entry_is_taken(cache: PlanCache, target: Path) -> None:
    folder = cache.find(KEY, target)
    assert folder is not None and (target / "plan.json").read_text() == "{}"
    with pytest.warns(UserWarning, match="careful"):
        captured = cache.captured(folder, {})
    assert captured is not None and captured.digest == "digest"


def test_every_bit_of_an_entry_counts(cache: PlanCache, entry: Path, target: Path) -> None:
    whole = entry.read_bytes()
    end = whole.index(b'"loaded"')  # many modules follow, which are alike
    for at in range(end):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        entry.write_bytes(damaged)
        assert cache.find(KEY, target) is None and cache.captured(entry.parent, {}) is None, at


DAMAGES: dict[str, Callable[[str], str]] = {
    "less": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "outputs"}),
    "null": lambda text: json.dumps({**json.loads(text), "outputs": None}),
    "list": lambda text: "[]",
    "deep": lambda text: "[" * 100_000,
    "none": lambda text: "",
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("hashed", [True, False])
def test_an_entry_of_another_form(
    name: str, hashed: bool, cache: PlanCache, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has, _, text = entry.read_text().partition("\n")
    entry.write_text(f"{has}\n{DAMAGES[name](text)}")
    if hashed:  # whoever wrote it gave it a hash
        monkeypatch.setattr("fsdp_mlir.frontdoor.plan_cache._hashed", lambda key, text: has)
    assert cache.captured(entry.parent, {}) is None


def test_an_entry_under_another_name(cache: PlanCache, entry: Path, target: Path) -> None:
    entry.parent.rename(entry.parent.with_name("another"))
    assert cache.find("another", target) is None


def test_nothing_but_entries_is_ever_removed(entry: Path, add: Callable[[str], None]) -> None:
    """The folder may be one that the user has other things in."""
    folder = entry.parents[1]
    others = {
        "results/model.pt": "",
        f"{'a' * 32}/model.pt": "",
        f"{'b' * 32}/entry.json": '{"mine": 1}',
        f"{'c' * 31}/entry.json": entry.read_text(),
        f"{'C' * 32}/entry.json": entry.read_text(),
        f"{'d' * 32}/notes.txt": "",
        ".git/config": "",
        ".fsdp-mlir-settings/plan.json": "",
        "notes.txt": "",
        "e" * 32: "",
    }
    for name, text in others.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    shutil.copyfile(entry, folder / ("d" * 32) / "entry.json")
    (folder / ("f" * 32)).symlink_to(entry.parent)
    for path in (*folder.iterdir(), entry.parent):
        os.utime(path, (0, 0), follow_symlinks=False)
    for number in range(70):
        add(f"{number:032}")
    assert all((folder / name).exists() for name in others)
    assert (folder / ("f" * 32)).is_symlink() and not entry.exists()
    kept = {path.name for path in folder.iterdir() if path.name.startswith("0")}
    assert kept == {f"{number:032}" for number in range(6, 70)}


def test_another_folder_of_that_name_is_not_replaced(
    cache: PlanCache, entry: Path, tmp_path: Path
) -> None:
    (entry.parent / "notes.txt").touch()
    with pytest.warns(UserWarning, match=r"is not kept in .*there is something else"):
        cache.add(KEY, tmp_path / "source", CAPTURED)
    assert (entry.parent / "notes.txt").exists()


def test_what_a_killed_process_left_is_removed_after_a_day(
    entry: Path, add: Callable[[str], None]
) -> None:
    folder = entry.parents[1]
    left = [folder / f".fsdp-mlir-{name}.entry" for name in ("abcd_123", "abcd_456", "abcd_789")]
    for path in left:
        shutil.copytree(entry.parent, path / KEY)
    (left[2] / KEY / "notes.txt").touch()
    for path in (left[0], left[2]):
        os.utime(path, (0, 0))
    add(KEY)
    assert [path.exists() for path in left] == [False, True, True]
    assert (left[2] / KEY / "notes.txt").exists()


def test_a_folder_that_is_only_read(
    cache: PlanCache, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refused)
    assert cache.find(KEY, target) is not None


@pytest.mark.parametrize("name", ["entry.json", "plan.json"])
def test_a_pipe_is_not_opened(
    name: str, cache: PlanCache, entry: Path, target: Path, add: Callable[[str], None]
) -> None:
    (entry.parent / name).unlink()
    os.mkfifo(entry.parent / name)
    assert cache.find(KEY, target) is None
    add("1" * 32)
    add(KEY)
    assert cache.find(KEY, target) is not None


@pytest.mark.parametrize("there", [True, False])
def test_two_processes_keep_the_same_plan_at_once(
    there: bool,
    cache: PlanCache,
    entry: Path,
    target: Path,
    add: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other is faster at any moment: to move an outdated entry away, and to put its own."""
    if not there:
        shutil.rmtree(entry.parent)
    rename = Path.rename

    def renamed(path: Path, to: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        add(KEY)
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", renamed)
    add(KEY)
    assert cache.find(KEY, target) is not None
    assert [path.name for path in entry.parents[1].iterdir()] == [KEY]


def test_entries_that_another_process_removes_meanwhile(
    entry: Path, add: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = Path.stat
    gone = entry.parents[1] / ("1" * 32)

    def removed(path: Path, **options: bool) -> os.stat_result:
        if path == gone:
            shutil.rmtree(gone, ignore_errors=True)
        return stat(path, **options)

    add(gone.name)
    monkeypatch.setattr(Path, "stat", removed)
    add("2" * 32)
    assert not gone.exists()


def test_an_entry_that_is_removed_after_it_was_found(
    cache: PlanCache, entry: Path, target: Path
) -> None:
    folder = cache.find(KEY, target)
    shutil.rmtree(entry.parent)
    assert folder is not None and cache.captured(folder, {}) is None
    assert (target / "plan.json").read_text() == "{}"
