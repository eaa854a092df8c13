"""DeepSearchQA's splits and loader, and how the task is completed from the official file; on made-up rows and 12 real ones."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from autorl_hpc.files.layout import Root
from autorl_hpc.rollouts.search import Dialogue, goals
from autorl_hpc.rollouts.search.backends import Document, write_corpus
from autorl_hpc.rollouts.search.matching import compare
from autorl_hpc.scoring.deepsearchqa import conversation
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.heldout import load_items, load_judge_prompt, verify_staged_task
from autorl_hpc.tasks.loader import load_task

FOLDER = Path(__file__).resolve().parents[2] / "tasks" / "deepsearchqa"


def module(folder: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"deepsearchqa_{name}_{folder.parent.name}", folder / f"{name}.py")
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    return module(FOLDER, "prepare")


# --- the loader ---

COLUMNS = ["problem", "problem_category", "answer", "answer_type"]
AWKWARD = [
    'Which film is called "Heat, again"?', "First line\nsecond line\r\nthird",
    "{braces} and \u2028 a line separator", "東京, Potosí and \u2019quotes\u2019", "  spaces around  ", "a;b\tc|d",
    "=1+1", "'single'",
]  # fmt: skip


def rows(count: int = 900) -> list[dict[str, str]]:
    return [
        {
            "problem": f"{AWKWARD[n % len(AWKWARD)]} {n}",
            "problem_category": "Other",
            "answer": f"A{n}, B{n}" if n % 3 else f'"A{n}"',
            "answer_type": "Set Answer" if n % 3 else "Single Answer",
        }
        for n in range(count)
    ]


def write_csv(path: Path, values: list[dict[str, str]], columns: list[str] = COLUMNS, **style: Any) -> None:
    with open(path, "w", encoding=style.pop("encoding", "utf-8"), newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", **style)
        writer.writeheader()
        writer.writerows(values)


def test_the_real_samples_are_read(data: Path, tmp_path: Path, prepare: ModuleType) -> None:
    text = (data / "deepsearchqa" / "sample_12.jsonl").read_text(encoding="utf-8")
    samples = [json.loads(line) for line in text.splitlines()]
    write_csv(tmp_path / "x.csv", samples)
    read = [
        prepare.item(sample["example_id"], row)
        for sample, row in zip(samples, prepare.read_rows(tmp_path / "x.csv"), strict=True)
    ]
    assert [item["question"] for item in read] == [sample["problem"] for sample in samples]
    assert {item["answer_type"] for item in read} == {"Single Answer", "Set Answer"}
    for item in read:
        assert compare(item["answer"], item["answer"], item["answer_type"]).fully_correct, "gold against itself"
        assert not compare("", item["answer"], item["answer_type"]).found
        assert len(item["id"]) == len("dsqa-000")


# --- completing the task ---


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up files in the place of the official ones."""
    folder = tmp_path_factory.mktemp("source")
    write_csv(folder / "DSQA-full.csv", rows())
    write_corpus(folder / "corpus.jsonl", [Document("A", "u:a", "text")])
    return folder


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    """A copy of the task's folder that takes the made-up file for the official one."""
    folder = tmp_path_factory.mktemp("tasks") / "deepsearchqa"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "task.template.yaml"
    official = yaml.safe_load(path.read_text())["sources"][0]["sha256"]
    made = hashlib.sha256((source / "DSQA-full.csv").read_bytes()).hexdigest()
    path.write_text(path.read_text().replace(official, made))
    return folder


def completed(shipped: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(shipped / "complete.py"), *arguments], capture_output=True, text=True, check=False
    )


def test_a_file_that_is_not_the_official_one_is_refused(source: Path, tmp_path: Path) -> None:
    done = completed(FOLDER, "--from", str(source), "--to", str(tmp_path), "--search", "bm25")
    assert done.returncode == 2 and "the official file has 25d48dcf7efa" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_completed_task_is_staged_and_its_recipes_name_what_is_searched(
    shipped: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = completed(shipped, "--from", str(source), "--to", str(tmp_path / "tasks"), "--search", "bm25")
    assert done.returncode == 0, done.stderr
    assert f"--tasks {tmp_path / 'tasks'}" in done.stdout
    monkeypatch.setenv("AUTORL_TASKS_PATH", str(tmp_path / "tasks"))
    task = load_task("deepsearchqa")
    root = Root(tmp_path / "root")
    root.path.mkdir()
    stage_task(root, task, source)
    verify_staged_task(root, task)
    feedback = load_items(root, task.name, "feedback", task.file.splits["feedback"])
    report = load_items(root, task.name, "report", task.file.splits["report"])
    assert (len(feedback), len(report)) == (200, 200) == (task.file.splits["feedback"].n, task.file.splits["report"].n)
    assert report[0].id == f"dsqa-{np.random.default_rng(42).permutation(900)[100]:03d}"
    assert set(report[0].data) == {"answer_type", "problem_category"}
    training = list(goals(root.task_train(task.name)))
    assert len(training) == 100 and training[0]["answer"]
    corpus = hashlib.sha256((source / "corpus.jsonl").read_bytes()).hexdigest()
    assert [recipe.name for recipe in task.file.recipes] == ["default", "official", "exact"]
    for recipe in task.file.recipes:
        assert recipe.options["search"] == "bm25" and recipe.options["corpus_sha256"] == corpus
        assert recipe.max_steps == Dialogue().steps == 6
    template = load_judge_prompt(root, task.name, task.recipe("default"))
    values = {
        "question": "Q?",
        "prompt_type": "T",
        "correct_answer": "{mark}",
        "response": "R",
        "mark": "0123456789abcdef",
    }
    (turn,) = conversation(template, values)
    assert (
        "\n[0123456789abcdef expected answer]\n{mark}\n[" in turn["content"]
        and '{"first expected item": true' in turn["content"]
    )
    assert (
        "judge_rule" not in task.recipe("default").options
        and task.recipe("official").options["judge_rule"] == "official"
    )
    again = completed(shipped, "--from", str(source), "--to", str(tmp_path / "tasks"), "--search", "bm25")
    assert again.returncode == 2 and "there already" in again.stderr
    assert completed(shipped, "--from", str(source), "--to", str(tmp_path / "b"), "--search", "bm25").returncode == 0
    assert load_task("deepsearchqa", [tmp_path / "b"]).hash() == task.hash(), "the same choice gives the same task"


def test_the_permutation_is_the_one_of_this_day(prepare: ModuleType) -> None:
    """Written down, so that a numpy that shuffles otherwise is noticed."""
    splits = prepare.split_numbers()
    digest = hashlib.sha256(json.dumps(splits, sort_keys=True).encode()).hexdigest()
    assert digest == "9889115824be0459e7316715a3d4d3ad9dcdb94dcc7631c80c6ae4811575d6ab"
