"""What agents get of an rl-smith folder holds no held-out row, however the folder is laid out and the question is spelt."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import Root
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.folders import scorer_sha256
from autorl_hpc.tasks.heldout import with_pins
from autorl_hpc.tasks.loader import PATH_VARIABLE, load_task, task_names
from autorl_hpc.tasks.smith import question_key, split_rows

ROWS = [{"question": f"What is half of {2 * n}?", "answer": n} for n in range(40)]


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "benchmarks"))
    path = tmp_path / "benchmarks" / "halves"
    (path / "data").mkdir(parents=True)
    (path / "eval.py").write_text("def evaluate(question, answer, reference, **kw):\n    return 1.0\n")
    (path / "data" / "train.jsonl").write_text(lines(ROWS))
    expose(path)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Root:
    (tmp_path / "root").mkdir()
    return Root(tmp_path / "root")


def expose(folder: Path, *names: str) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump({"name": "halves", "expose_files": list(names)}))


def copy_rows(folder: Path) -> str:
    (folder / "train.jsonl").write_bytes((folder / "data" / "train.jsonl").read_bytes())
    return "train.jsonl"


def link(folder: Path) -> str:
    (folder / "extra.jsonl").symlink_to("data/train.jsonl")
    return "extra.jsonl"


def hard_link(folder: Path) -> str:
    os.link(folder / "data" / "train.jsonl", folder / "extra.jsonl")
    return "extra.jsonl"


def linked_folder(folder: Path) -> str:
    (folder / "more").symlink_to("data")
    return "more/train.jsonl"


def link_elsewhere(folder: Path) -> str:
    (folder.parent / "outside.txt").write_text("x")
    (folder / "notes.txt").symlink_to("../outside.txt")
    return "notes.txt"


def same_name(folder: Path) -> str:
    (folder / "train.jsonl").write_text("no rows\n")
    return "./train.jsonl"


def other_form(folder: Path) -> str:
    held_out = split_rows(ROWS, "x", folder)["report"][0]
    spelt = {"question": f"  {held_out['question'].upper()} "}
    (folder / "hints.json").write_text(json.dumps({"all": [spelt]}, indent=1))
    return "hints.json"


def packed(folder: Path) -> str:
    (folder / "old.gz").write_bytes(gzip.compress((folder / "data" / "train.jsonl").read_bytes()))
    return "old.gz"


@pytest.mark.parametrize(
    "lay",
    [packed, copy_rows, link, hard_link, linked_folder, link_elsewhere, same_name, other_form],
    ids=lambda f: f.__name__,
)
def test_no_exposed_file_gives_held_out_rows(folder: Path, root: Root, lay: Callable[[Path], str]) -> None:
    expose(folder, lay(folder))
    with pytest.raises(AutorlError) as caught:
        stage_task(root, load_task("smith-halves"), None)
    assert caught.value.exit_code is Exit.USAGE and caught.value.fault is None and caught.value.next_step
    assert not [path for path in root.path.rglob("*") if path.is_file()], "something was laid before the error"


@pytest.mark.parametrize("lay", [copy_rows, hard_link, other_form, packed], ids=lambda f: f.__name__)
def test_no_copy_of_the_rows_is_frozen(folder: Path, root: Root, lay: Callable[[Path], str]) -> None:
    stage_task(root, load_task("smith-halves"), None)
    name = lay(folder)  # after the staging: launch looks again before it freezes
    with pytest.raises(AutorlError, match="holds held-out rows") as caught:
        with_pins(root, load_task("smith-halves"))
    assert caught.value.where == str(folder / name) and caught.value.exit_code is Exit.USAGE
    with pytest.raises(AutorlError, match="holds held-out rows"):
        stage_task(root, load_task("smith-halves"), None, again=True)


SPELLINGS = [
    ("What is half of 2?", "what is  half of 2? "), ("What is half of 2?", "WHAT IS\u00a0HALF OF \uff12?"),
    ("Stra\u00dfe", "STRASSE"), ("caf\u00e9", "cafe\u0301"), ({"grid": ["A b"]}, {"grid": ["a  B"]}),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SPELLINGS)
def test_spellings_of_one_question_fall_into_one_split(one: Any, other: Any, tmp_path: Path) -> None:
    assert question_key(one) == question_key(other)
    assert question_key(one) != question_key("What is half of 4?")
    for split in split_rows(
        [*ROWS[2:], {"question": one, "answer": 1}, {"question": other, "answer": 1}], "x", tmp_path
    ).values():
        assert [row["question"] for row in split].count(one) == [row["question"] for row in split].count(other)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (lines(ROWS).encode("utf-16"), "line 1 is not UTF-8: it holds the byte 0xff"),
        (lines(ROWS).encode() + b'{"question": "\xe9", "answer": 1}\n', "line 41 is not UTF-8: it holds the byte 0xe9"),
        (lines([*ROWS, {"question": "a"}]).encode(), "line 41 has no `answer`"),
        (lines([*ROWS, {"question": "a", "answer": None}]).encode(), "line 41 has no `answer`"),
        (lines([*ROWS, [1]]).encode(), "line 41 is not an object"),
        (b'{"question": "a"\n', "line 1 is not JSON"),
        (lines(ROWS[:1] * 10).encode(), "1 distinct questions are too few"),
    ],
)
def test_rows_that_could_not_be_scored(folder: Path, root: Root, data: bytes, words: str) -> None:
    (folder / "data" / "train.jsonl").write_bytes(data)
    with pytest.raises(AutorlError) as caught:
        stage_task(root, load_task("smith-halves"), None)
    assert words in caught.value.what and caught.value.where == str(folder / "data" / "train.jsonl")
    assert not [path for path in root.path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["prepare.py", "environment.py", "config.yaml", "download_data.py", "lib/words.txt"])
def test_the_scorer_s_hash_covers_what_it_may_import_or_read(folder: Path, name: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("A = 1\n")
    before = scorer_sha256(folder)
    path.write_text("A = 2\n")
    assert scorer_sha256(folder) != before
    (folder / "data" / "train.jsonl").write_text("")
    (folder / "description.md").write_text("x")
    after = scorer_sha256(folder)
    (folder / "description.md").write_text("y")
    assert scorer_sha256(folder) == after


def test_a_folder_is_found_by_the_name_in_it_which_one_alone_may_have(folder: Path, root: Root) -> None:
    folder.rename(moved := folder.with_name("My Halves (2)"))
    assert load_task("smith-halves").folder == moved and "smith-halves" in task_names()
    stage_task(root, load_task("smith-halves"), None)
    assert with_pins(root, load_task("smith-halves")).file.splits["report"].n == 8
    shutil.copytree(moved, folder.with_name("copy"))
    with pytest.raises(AutorlError, match="are both the task smith-halves"):
        load_task("smith-halves")


def test_data_of_a_task_of_our_own_are_among_it(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("task.yaml", "evaluate.py", "data/words.txt"):
        (tmp_path / name).write_text("a")
    before = scorer_sha256(tmp_path)
    (tmp_path / "task.yaml").write_text("b")
    assert scorer_sha256(tmp_path) == before
    (tmp_path / "data" / "words.txt").write_text("b")
    assert scorer_sha256(tmp_path) != before
