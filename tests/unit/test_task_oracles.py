"""Every static task: perfect answers score 100, empty ones 0."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from realdata import REPO, real_data

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import Root, share
from autorl_hpc.records.task import Recipe
from autorl_hpc.stage.self_test import check_scores, perfect_answer
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.heldout import Item
from autorl_hpc.tasks.loader import PATH_VARIABLE, load_task

TESTED_ELSEWHERE = {"humaneval"}
"""Its 164 programs, with these answers too: test_humaneval_data.py."""

BUILT_IN = sorted({path.parent.name for path in share("tasks").glob("*/task.yaml")} - TESTED_ELSEWHERE)


def perfect(recipe: Recipe, item: Item) -> str:
    """What a recipe takes for right. The reference's extractions are narrower: gsm8k's reads 234 in 1,234; humaneval's strips
    the first line's indent, so a bare body is no function."""
    text = perfect_answer(recipe, item)
    if recipe.scorer == "gsm8k-opencompass":
        return text.replace(",", "")
    return f"{item.question}{text}" if recipe.scorer == "humaneval-opencompass" else text


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_task_s_own_answers(name: str, tmp_path: Path) -> None:
    task, root = load_task(name), Root(tmp_path)
    if task.file.environment is not None and not name.endswith("-mini"):
        return  # its episodes have tests of their own
    if all(recipe.judge != "none" for recipe in task.file.recipes):
        return  # a judge's answers have tests of their own
    data = real_data()
    source = None if data is None or not task.file.sources else data / name.removesuffix("-mini")
    if task.file.sources and (source is None or not source.is_dir()):
        needs.skip("data", "its source files are not here: set AUTORL_TEST_DATA")
    try:
        stage_task(root, task, source)
    except AutorlError as error:
        if task.file.sources and "is missing" in error.what:
            needs.skip("data", f"a source file is not here: {error.what}")
        raise
    checked = check_scores(root, task, perfect)
    assert len(checked) == 2 * len(task.file.recipes)
    assert all(one.right for one in checked), [str(one) for one in checked]


def own_task(folder: Path, evaluate: str) -> Path:
    """A small task folder with a scorer of its own, pinned."""
    made = folder / "own"
    made.mkdir(parents=True)
    (made / "prepare.py").write_text(
        "import json\n\n\ndef prepare(source, out):\n    for name in ('train/train', 'feedback/items', 'report/items'):\n"
        "        (out / name).parent.mkdir()\n        row = {'id': name, 'question': 'q', 'answer': '7', 'oracle': '<7>'}\n"
        "        (out / f'{name}.jsonl').write_text(json.dumps(row) + '\\n')\n"
    )
    (made / "description.md").write_text("x\n")
    (made / "evaluate.py").write_text(evaluate)
    pins = subprocess.run(
        [sys.executable, str(REPO / "bin" / "pin-task"), str(made)], capture_output=True, text=True, check=True
    ).stdout
    (made / "task.yaml").write_text(
        "name: own\ntitle: t\nsource: s\nlicence: l\n"
        + pins
        + "recipes:\n  - {name: default, version: 1, prompt: '{question}', sampling: {max_new_tokens: 4}, "
        'scorer: task, scorer_version: "1"}\n'
    )
    return made


@pytest.mark.parametrize(
    ("evaluate", "code", "words"),
    [
        ("def evaluate(q, a, r):\n    return float(a == f'<{r}>')\n", 0, "perfect answers score 100, empty ones 0"),
        ("def evaluate(q, a, r):\n    return 0.5\n", 1, "score 50, empty ones 50  <- must be 100 and 0"),
        ("def evaluate(q, a, r):\n    return a\n", 1, "evaluate returned '<7>' (str), which is not a number"),
        ("def score(q, a, r):\n    return 0.5\n", 2, "has no function evaluate"),
    ],
)
def test_check_task_tells_an_author(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    evaluate: str,
    code: int,
    words: str,
) -> None:
    folder = own_task(tmp_path, evaluate)
    monkeypatch.setenv(PATH_VARIABLE, "")
    monkeypatch.setattr(sys, "argv", ["check-task", str(folder)])
    found = runpy.run_path(str(REPO / "bin" / "check-task"))["main"]()
    said = "".join(capsys.readouterr())
    assert found == code and words in said, said
