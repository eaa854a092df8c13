"""A source file that is made of one that is served; and one folder with the files of several tasks."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from web_server import LoopbackServer, clean_environment, code, cut, served, whole

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import Root
from autorl_hpc.records.task import SourceFile
from autorl_hpc.stage import stage
from autorl_hpc.stage.tasks import is_pinned, make_derived, stage_task
from autorl_hpc.tasks.loader import load_task

RAW = [{"instruction": f"Say {n} \u2028 \u00e9 {'x' * n}", "input": "", "output": str(n)} for n in range(40)]
TEXT = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in RAW[:5]).encode()
FILE = "rows.jsonl.gz"
ITEM = b'{"id": "a", "question": "q", "answer": "#### 1"}\n'
PREPARE = """
import gzip

def prepare(source, out):
    for split in ("feedback", "report"):
        (out / split).mkdir()
        (out / split / "items.jsonl").write_bytes(%r)
    (out / "train").mkdir()
    (out / "train" / "train.jsonl").write_bytes(gzip.decompress((source / "rows.jsonl.gz").read_bytes()))
"""


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackServer]:
    clean_environment(monkeypatch, tmp_path / "home")
    with served() as running:
        yield running


@pytest.fixture
def root(tmp_path: Path) -> Root:
    (tmp_path / "root").mkdir()
    return Root(tmp_path / "root")


def make_task(folder: Path, name: str, url: str, **changes: Any) -> None:
    place = folder / name
    place.mkdir(parents=True)
    (place / "prepare.py").write_text(PREPARE % ITEM)
    (place / "description.md").write_text("x\n")
    derived = {"url": url, "make": "first_rows_jsonl_gz", "n": 5, "sha256": sha(TEXT), **changes}
    value = yaml.safe_load((load_task("arithmetic").folder / "task.yaml").read_text())
    value |= {
        "name": name,
        "sources": [{"file": FILE, "sha256": "0" * 64, "derived": derived}],
        "train_files": {"train/train.jsonl": sha(TEXT)},
        "splits": {split: {"n": 1, "sha256": sha(ITEM)} for split in ("feedback", "report")},
    }
    (place / "task.yaml").write_text(yaml.safe_dump(value))


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTORL_TASKS_PATH", str(tmp_path / "tasks"))
    return tmp_path / "tasks"


@pytest.mark.slow
def test_it_is_made_of_what_is_served_and_pinned_by_its_text(server: LoopbackServer, root: Root, tasks: Path) -> None:
    data = json.dumps(RAW, indent=4).encode()
    server.answers["/raw.json"] = [cut(data, 100), code(503), whole(data)]
    make_task(tasks, "made", server.url("/raw.json"))
    said: list[str] = []
    stage_task(root, load_task("made"), None, keep_sources=True, say=said.append)
    assert (root.task_train("made") / "train.jsonl").read_bytes() == TEXT
    kept = root.vault / ".sources" / "made"
    assert [path.name for path in kept.iterdir()] == [FILE] and gzip.decompress((kept / FILE).read_bytes()) == TEXT
    asked = len(server.seen)
    stage_task(root, load_task("made"), None, again=True)
    assert len(server.seen) == asked, "what was made is taken"


BAD = [
    (json.dumps(RAW[:3]).encode(), "holds 3 rows, needed are 5 rows"),
    (b"{}", "holds no list"),
    (b"<html>", "is no JSON"),
    (json.dumps(RAW[1:]).encode(), f"the task pins {sha(TEXT)}"),
]


@pytest.mark.parametrize(("data", "words"), BAD, ids=[row[1][:20] for row in BAD])
def test_what_is_served_is_something_else(
    server: LoopbackServer, root: Root, tasks: Path, data: bytes, words: str
) -> None:
    server.answers["/raw.json"] = [whole(data)]
    make_task(tasks, "made", server.url("/raw.json?token=x"))
    with pytest.raises(AutorlError) as caught:
        stage_task(root, load_task("made"), None)
    assert words in caught.value.what and "token" not in caught.value.what
    assert caught.value.exit_code is Exit.FAILED and "--from DIR" in (caught.value.next_step or "")
    assert not list(root.path.rglob("items.jsonl")) and not list(root.path.rglob(FILE))


def test_a_file_that_is_given_may_be_packed_by_another_zlib(root: Root, tasks: Path, tmp_path: Path) -> None:
    make_task(tasks, "made", "https://h/raw.json")
    given = tmp_path / "given"
    given.mkdir()
    for level in (1, 9):
        (given / FILE).write_bytes(gzip.compress(TEXT, level, mtime=level))
        stage_task(root, load_task("made"), given, again=True)
    for bad in (gzip.compress(TEXT + b"x"), gzip.compress(TEXT)[:-9], gzip.compress(TEXT) + b"x", TEXT):
        (given / FILE).write_bytes(bad)
        with pytest.raises(AutorlError, match="truncated, re-encoded or altered"):
            stage_task(root, load_task("made"), given, again=True)


def test_the_shipped_pin_is_that_of_the_official_rows(data: Path, tmp_path: Path) -> None:
    """The rows of the file that is here, served as one list again, give the pinned text."""
    pinned = next(one for one in load_task("alpacaeval").file.sources if one.derived is not None)
    assert pinned.derived is not None
    path = data / "alpacaeval" / pinned.file
    assert is_pinned(path, pinned) is None
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).split(b"\n") if line]
    raw = tmp_path / "alpaca_data.json"
    raw.write_text(json.dumps([*rows, {"instruction": "more"}], indent=4))
    make_derived(raw, tmp_path / pinned.file, pinned.derived)
    other = SourceFile(file=pinned.file, sha256="0" * 64, derived=pinned.derived)
    assert is_pinned(tmp_path / pinned.file, other) is None


def test_each_task_has_its_own_folder_below_the_one_that_is_given(root: Root, tasks: Path, tmp_path: Path) -> None:
    given = tmp_path / "data"
    for name in ("one", "two", "three"):
        make_task(tasks, name, "https://h/raw.json")
        if name != "three":
            (given / name).mkdir(parents=True)
            (given / name / FILE).write_bytes(gzip.compress(TEXT))
    with pytest.raises(AutorlError, match="is missing") as caught:
        stage.stage(root, ["one", "two", "three"], stage.Ways(source=given))
    assert caught.value.where == str(given / FILE), "without a folder of its own it is DIR itself"
    (given / FILE).write_bytes(gzip.compress(TEXT))
    done = stage.stage(root, ["one", "two", "three"], stage.Ways(source=given))
    assert [manifest["name"] for manifest in done if manifest["kind"] == "task"] == ["one", "two", "three"]
