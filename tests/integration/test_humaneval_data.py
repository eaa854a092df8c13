"""HumanEval with the official file: every right solution passes, every empty one fails, and a damaged file is refused."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import needs
import pytest
from helpers import PATIENCE_S

from autorl_hpc.files.layout import Root
from autorl_hpc.scoring.outcome import Context
from autorl_hpc.scoring.registry import scorer
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.heldout import Item, load_items, verify_staged_task
from autorl_hpc.tasks.loader import Task, load_task

NAME = "HumanEval.jsonl.gz"


@pytest.fixture
def humaneval() -> Task:
    return load_task("humaneval")


@pytest.fixture
def official(data: Path, tmp_path: Path) -> Path:
    """A copy of the official file that may be damaged."""
    if not (data / "humaneval" / NAME).is_file():
        needs.skip("data", f"the real data hold no humaneval/{NAME}")
    folder = tmp_path / "humaneval"
    folder.mkdir()
    shutil.copyfile(data / "humaneval" / NAME, folder / NAME)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root(tmp_path / "root")
    made.path.mkdir()
    return made


def problems(root: Root, task: Task, official: Path) -> list[Item]:
    """All 164, those of the training file too, as items."""
    stage_task(root, task, official)
    lines = (root.task_train(task.name) / "train.jsonl").read_bytes().split(b"\n")
    rows = [json.loads(line) for line in lines if line]
    trained = [
        Item(row["task_id"], row["question"], row["answer"], {"test": row["test"], "entry_point": row["entry_point"]})
        for row in rows
    ]
    return trained + [
        item for split in ("feedback", "report") for item in load_items(root, task.name, split, task.file.splits[split])
    ]


DRESSES: list[Callable[[Item], str]] = [
    lambda item: f"Sure!\n```python\n{item.question}{item.answer}```\nDone.",
    lambda item: item.answer.lstrip(),
    lambda item: f"```\n{item.answer}\n```",
    lambda item: item.question + item.answer,
]


def test_every_right_solution_passes_in_any_dress_and_every_empty_one_fails(
    root: Root, humaneval: Task, official: Path
) -> None:
    items = problems(root, humaneval, official)
    assert [item.id for item in items] == [f"HumanEval/{number}" for number in range(164)]
    assert (humaneval.file.splits["feedback"].n, humaneval.file.splits["report"].n) == (41, 82)
    train = [json.loads(line) for line in (root.task_train("humaneval") / "train.jsonl").read_text().splitlines()]
    assert len(train) == 41
    assert {frozenset(row) for row in train} == {frozenset(("task_id", "question", "answer", "entry_point", "test"))}
    verify_staged_task(root, humaneval)
    recipe = humaneval.recipe(None)
    made = scorer(recipe.scorer, recipe.scorer_version)
    answers = [[item.answer] for item in items]
    began = time.monotonic()
    oracle = made.score(items, answers, Context(workers=2))
    took = time.monotonic() - began
    failed = {item.id: o.facts["reason"] for item, o in zip(items, oracle, strict=True) if o.value != 1.0}
    assert not failed
    assert made.metrics(items, oracle) == {"pass@1": 100.0}
    assert took < PATIENCE_S, f"{took:.1f} s at a load of {os.getloadavg()[0]:.1f}"
    null = made.score(items, [[""]] * len(items), Context(workers=2))
    assert [o.value for o in null] == [0.0] * 164
    dressed = [DRESSES[number % len(DRESSES)](item) for number, item in enumerate(items)]
    outcomes = made.score(items, [[text] for text in dressed], Context(workers=2))
    assert not [item.id for item, outcome in zip(items, outcomes, strict=True) if outcome.value != 1.0]
