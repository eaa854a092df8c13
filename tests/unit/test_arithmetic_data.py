"""The data of the task `arithmetic`: splits by a secret, right answers, and splits that share no problem."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import Root
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.heldout import load_items
from autorl_hpc.tasks.loader import PUBLIC_SPLITS, load_task

TASK = Path(__file__).resolve().parents[2] / "tasks" / "arithmetic"
SIZES = {
    "train/train.jsonl": 1500,
    "train/demonstrations.jsonl": 300,
    "feedback/items.jsonl": 300,
    "report/items.jsonl": 500,
}
Rows = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def task() -> Iterator[ModuleType]:
    name = "arithmetic_prepare_under_test"
    spec = importlib.util.spec_from_file_location(name, TASK / "prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture(scope="module")
def out(task: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arithmetic")
    task.prepare(None, folder)
    return folder


@pytest.fixture(scope="module")
def rows(out: Path) -> Rows:
    return {name: [json.loads(line) for line in (out / name).read_text().splitlines()] for name in SIZES}


def story(question: str) -> tuple[str, tuple[int, ...], int]:
    """Kind, numbers and result of a question, read without the help of `prepare.py`."""
    numbers = [int(number) for number in re.findall(r"\d+", question)]
    buys, gives = "buys" in question, "gives away" in question
    if buys and gives:
        a, b, c = numbers
        return "two-step", (*sorted((a, b)), c), a + b - c
    a, b = numbers
    return ("sum", tuple(sorted((a, b))), a + b) if buys else ("difference", (a, b), a - b)


def gold(row: dict[str, str]) -> int:
    return int(row["answer"].rpartition("#### ")[2])


def test_splits_by_a_secret_are_another_task_with_other_held_out_problems(
    task: ModuleType, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public script alone makes none of them, and staging needs the secret."""
    made = [sys.executable, str(TASK / "own_splits.py"), "--to", str(tmp_path / "tasks")]
    told = subprocess.run(made, capture_output=True, text=True, check=True).stdout
    name, source = re.findall(r"stage (\S+) --tasks \S+ --from (\S+)", told)[0]
    monkeypatch.setenv("AUTORL_TASKS_PATH", str(tmp_path / "tasks"))
    root, own = Root(tmp_path / "root"), load_task(name)
    with pytest.raises(AutorlError, match="needs its source files, and secret"):
        stage_task(root, own, None)
    stage_task(root, own, Path(source))
    items = load_items(root, name, "report", own.file.splits["report"])
    ours, public = (
        {story(q)[:2] for q in qs}
        for qs in ([i.question for i in items], [r["question"] for r in rows["report/items.jsonl"]])
    )
    trained = {
        story(json.loads(line)["question"])[:2]
        for line in (root.task_store(name) / "train" / "train.jsonl").read_text().splitlines()
    }
    assert len(items) == 500 and not ours & trained
    assert len(ours & public) < 0.6 * len(ours), "the share by chance is about two fifths"
    files = [load_task(path.parent.name).file for path in TASK.parent.glob("*/task.yaml")]
    assert {pin.sha256 for file in files if not file.sources for pin in file.splits.values()} == PUBLIC_SPLITS
    assert not PUBLIC_SPLITS & {pin.sha256 for pin in own.file.splits.values()}, "within its installation it ranks"
    assert (Path(source).stat().st_mode & 0o077, (Path(source) / "secret").stat().st_mode & 0o077) == (0, 0)


def test_no_question_twice_in_a_file(rows: Rows) -> None:
    for name, items in rows.items():
        assert len({row["question"] for row in items}) == len(items), name


def test_splits_share_no_problem(rows: Rows) -> None:
    problems = {name: {story(row["question"])[:2] for row in items} for name, items in rows.items()}
    train = problems["train/train.jsonl"] | problems["train/demonstrations.jsonl"]
    feedback, report = problems["feedback/items.jsonl"], problems["report/items.jsonl"]
    assert not train & feedback
    assert not train & report
    assert not feedback & report


def test_gold_is_right(rows: Rows) -> None:
    for name in set(SIZES) - {"train/demonstrations.jsonl"}:
        for row in rows[name]:
            assert gold(row) == story(row["question"])[2], row
