"""Folders in rl-smith's form load unchanged; they are cut into splits and scored on what agents don't see."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.launch.expand import expand, read_spec
from autorl_hpc.launch.plan import freeze, parts
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.states import Split
from autorl_hpc.tasks.check import check_task
from autorl_hpc.tasks.heldout import verify_staged_task, with_pins
from autorl_hpc.tasks.loader import PATH_VARIABLE, Task, load_task, task_names

EVAL = '''"""Scores one answer."""

import json
import re


def evaluate(question, model_answer, reference, answer_type="number", **kwargs):
    if answer_type == "number":
        found = re.findall(r"-?\\d+", model_answer)
        return 1.0 if found and found[-1] == str(reference) else 0.0
    return float(model_answer.strip() == json.dumps(reference))
'''

DOWNLOAD = """import json
from pathlib import Path

out = Path(__file__).parent / "data" / "train.jsonl"
out.parent.mkdir(exist_ok=True)
out.write_text("".join(json.dumps({"question": f"Half of {2 * n}?", "answer": n}) + "\\n" for n in range(50)))
"""


def rows(count: int = 100) -> list[dict[str, Any]]:
    """Rows as rl-smith writes them: numbers, a table, a further field, and one question that stands twice."""
    made: list[dict[str, Any]] = [{"question": f"What is half of {2 * n}?", "answer": n} for n in range(count)]
    made.append({"question": {"grid": [[1, 2], [3, 4]]}, "answer": [[4, 3], [2, 1]], "answer_type": "table"})
    made.append({"question": "What is half of 20?", "answer": 10, "hint": "ten\u2028"})
    return made


class Folder:
    """An rl-smith folder that a test makes."""

    def __init__(self, parent: Path) -> None:
        self.path = parent / "halves"
        (self.path / "data").mkdir(parents=True)
        self.config(name="halves", eval_mode="per_sample", description="Halves of numbers.", expose_files=["eval.py"])
        (self.path / "eval.py").write_text(EVAL)
        self.rows(rows())

    def config(self, **fields: Any) -> None:
        (self.path / "config.yaml").write_text(yaml.safe_dump(fields))

    def rows(self, rows: list[dict[str, Any]]) -> None:
        (self.path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "benchmarks"))
    return Folder(tmp_path / "benchmarks")


@pytest.fixture
def root(tmp_path: Path) -> Root:
    (tmp_path / "root").mkdir()
    return Root(tmp_path / "root")


def questions(path: Path) -> set[str]:
    return {json.dumps(json.loads(line)["question"]) for line in path.read_bytes().split(b"\n") if line}


def test_it_loads_unchanged_and_is_cut_into_three(folder: Folder, root: Root) -> None:
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    assert "smith-halves" in task_names()
    task = load_task("smith-halves")
    check_task(task)
    stage_task(root, task, None)
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before

    train = questions(root.task_train("smith-halves") / "train.jsonl")
    feedback, report = (questions(root.task_vault("smith-halves") / s / "items.jsonl") for s in ("feedback", "report"))
    assert (len(train), len(feedback), len(report)) == (60, 20, 21)
    assert not train & feedback and not train & report and not feedback & report
    assert {file.name for file in root.task_train("smith-halves").iterdir()} == {"train.jsonl", "eval.py"}
    assert {stat.S_IMODE(p.stat().st_mode) & 0o077 for p in root.vault.rglob("*")} == {0}
    assert "Halves of numbers." in task.description and "eval.py" in task.description
    recipe = task.recipe(None)
    assert (recipe.prompt, recipe.sampling.max_new_tokens, recipe.sampling.temperature) == ("{question}", 2048, 0.0)


def test_changed_rows_are_staged_again_or_refused(folder: Folder, root: Root) -> None:
    stage_task(root, load_task("smith-halves"), None)
    verify_staged_task(root, with_pins(root, load_task("smith-halves")))
    folder.rows(rows(90))
    for use in (
        lambda: with_pins(root, load_task("smith-halves")),
        lambda: stage_task(root, load_task("smith-halves"), None),
    ):
        with pytest.raises(AutorlError, match="are not those that were staged") as caught:
            use()
        assert "autorl-hpc stage smith-halves --again" in (caught.value.next_step or "")
    stage_task(root, load_task("smith-halves"), None, again=True)
    verify_staged_task(root, with_pins(root, load_task("smith-halves")))


def job(root: Root) -> Path:
    path = root.path / "job.yaml"
    matrix = {"task": "smith-halves", "agent": "copycat", "base_model": "autorl/tiny"}
    path.write_text(json.dumps({"name": "exp", "matrix": matrix, "budget": {"wall_clock": "1m"}}))
    return path


def test_launch_pins_what_was_staged_and_freezes_no_rows(folder: Folder, root: Root, staged: Path) -> None:
    (root.path / "store").mkdir()
    (root.path / "store" / "models").symlink_to(staged / "store" / "models")
    with pytest.raises(AutorlError, match="not staged") as caught:
        expand(read_spec(job(root)), root, job(root))
    assert caught.value.next_step == "run: autorl-hpc stage smith-halves"
    stage_task(root, load_task("smith-halves"), None)
    (cell,) = expand(read_spec(job(root)), root, job(root))
    assert {str(split): pin.n for split, pin in cell.science.splits.items()} == {"feedback": 21, "report": 21}
    assert cell.science.splits[Split.REPORT].sha256
    assert cell.science.recipe.options["evaluate_sha256"] and cell.science.recipe.options["evaluate_file"] == "eval.py"

    experiment = ExperimentDir(root.path / "exp")
    experiment.code.mkdir(parents=True)
    code = experiment.code / freeze(experiment, parts({"tasks/smith-halves": folder.path}))
    assert sorted(p.name for p in (code / "tasks" / "smith-halves").iterdir()) == ["config.yaml", "eval.py"]
    frozen = load_task("smith-halves", [code / "tasks"])
    assert frozen.hash() == load_task("smith-halves").hash() == cell.task_hash
    assert with_pins(root, frozen).file == with_pins(root, load_task("smith-halves")).file


def load_and_stage(root: Root) -> Task:
    task = load_task("smith-halves")
    stage_task(root, task, None)
    return task


BAD_CONFIGS = [
    ({"name": "other"}, "field `name` is other: this folder is the task smith-other"),
    ({"eval_mode": "per_sample"}, "field `name` is missing"),
    ({"name": "halves", "eval_mode": "opencompass"}, "field `eval_mode` is opencompass; understood is per_sample"),
    ({"name": "halves", "eval_type": "custom_model"}, "field `eval_mode` is custom_model"),
    ({"name": "halves", "expose_files": ["data/train.jsonl"]}, "agents get training rows alone"),
    ({"name": "halves", "expose_files": ["../x"]}, "no file of this folder"),
    ({"name": "halves", "expose_files": ["none.py"]}, "no file of this folder"),
    ({"name": "halves", "expose_files": ["./data/train.jsonl"]}, "agents get training rows alone"),
    ({"name": "halves", "expose_files": ["x/../data//train.jsonl"]}, "agents get training rows alone"),
    ({"name": "halves", "expose_files": 5}, "field `expose_files`: a list of file names is expected, not 5"),
    ({"name": "halves", "expose_files": [["eval.py"]]}, "field `expose_files`: a list of file names is expected"),
    ({"name": "halves", "options": {"evaluate_timeout_s": "fast"}}, "field `options.evaluate_timeout_s`: it is 'fast'"),
    ({"name": "halves", "options": [1]}, "field `options`: a table is expected, not [1]"),
    ({"name": "halves", "prompt": "solve it"}, "does not hold {question}"),
    ({"name": "halves", "max_new_tokens": "many"}, "max_new_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), BAD_CONFIGS, ids=[words for _, words in BAD_CONFIGS])
def test_a_config_that_is_not_understood(folder: Folder, root: Root, fields: dict[str, Any], words: str) -> None:
    folder.config(**fields)
    with pytest.raises(AutorlError) as caught:
        load_and_stage(root)
    assert words in caught.value.what and caught.value.where == str(folder.path / "config.yaml")
    assert caught.value.next_step and not list(root.path.rglob("items.jsonl"))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (DOWNLOAD, None),
        ("raise SystemExit('no network here')", "failed with exit code 1: no network here"),
        ("print('nothing')", "made no data/train.jsonl: nothing"),
        (None, "train.jsonl of task smith-halves is missing"),
    ],
)
def test_rows_are_downloaded_where_there_are_none(
    folder: Folder, root: Root, script: str | None, words: str | None
) -> None:
    (folder.path / "data" / "train.jsonl").unlink()
    if script is not None:
        (folder.path / "download_data.py").write_text(script)
    said: list[str] = []
    if words is not None:
        with pytest.raises(AutorlError) as caught:
            stage_task(root, load_task("smith-halves"), None)
        assert words in caught.value.what and caught.value.next_step
        return
    stage_task(root, load_task("smith-halves"), None, say=said.append)
    assert any("download_data.py: the task's own code, with your rights" in line for line in said), said
    assert not (folder.path / "data" / "train.jsonl").exists(), "held-out rows lie outside the vault"
    assert not list(root.path.rglob(".tmp-*"))
    assert with_pins(root, load_task("smith-halves")).file.splits["report"].n == 10
