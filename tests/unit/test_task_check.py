"""What is wrong with a task folder is named by file and field before anything is queued; nothing of it is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import Root, share
from autorl_hpc.launch.expand import expand, read_spec
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.check import check_task
from autorl_hpc.tasks.loader import PATH_VARIABLE, load_task

PLAYED = "class Environment:\n    pass\n\n\nclass Dialogue:\n    pass\n"


class Folder:
    """A task folder that a test damages."""

    def __init__(self, parent: Path) -> None:
        self.path = parent / "mine"
        self.path.mkdir(parents=True)
        pin = {"n": 1, "sha256": "0" * 64}
        self.recipe: dict[str, Any] = {"name": "default", "version": 1, "prompt": "{question}"}
        self.recipe |= {"sampling": {"max_new_tokens": 4}, "scorer": "task", "scorer_version": "1"}
        self.value: dict[str, Any] = {"name": "mine", "title": "t", "source": "s", "licence": "l", "train_files": {}}
        self.value |= {"splits": {"feedback": pin, "report": pin}, "recipes": [self.recipe]}
        self.file("description.md", "x\n")
        self.file("prepare.py", "raise SystemExit('it was run')\n")
        self.file("evaluate.py", "raise SystemExit('it was run')\n\n\ndef evaluate(q, a, r, **kw):\n    return 1.0\n")

    def file(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def gone(self, name: str) -> None:
        (self.path / name).unlink()

    def played(self, text: str = PLAYED, **changes: Any) -> None:
        self.value["environment"] = "environment.py:Environment"
        self.file("environment.py", text)
        self.recipe.update({"max_steps": 3, "scorer": "episodes", **changes})

    def check(self) -> None:
        (self.path / "task.yaml").write_text(yaml.safe_dump(self.value))
        check_task(load_task("mine"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "tasks"))
    return Folder(tmp_path / "tasks")


def test_a_whole_folder_passes_and_is_not_run(folder: Folder) -> None:
    folder.check()
    folder.recipe["options"] = {"evaluate_timeout_s": 0.5, "evaluate_memory_gib": 2}
    folder.check()
    folder.played(options={"threshold": 0.5, "my_own": "x"})
    folder.check()


@pytest.mark.parametrize("name", sorted(path.parent.name for path in share("tasks").glob("*/task.yaml")))
def test_built_in_folders_pass(name: str) -> None:
    check_task(load_task(name))


Damage = Callable[[Folder], Any]


def behind_a_link(folder: Folder) -> None:
    (folder.path / "evaluate.py").rename(folder.path.parent / "e.py")
    (folder.path / "evaluate.py").symlink_to("../e.py")


WRONG: list[tuple[str, Damage, str, str]] = [
    ("title", lambda f: f.value.pop("title"), "task.yaml", "field `title`: this field is missing"),
    ("splits", lambda f: f.value.pop("splits"), "task.yaml", "field `splits`: this field is missing"),
    ("report", lambda f: f.value["splits"].pop("report"), "task.yaml", "field `splits.report`: this field is missing"),
    ("misspelt", lambda f: f.value.update(licence_=f.value.pop("licence")), "task.yaml", "did you mean `licence`?"),
    ("recipes", lambda f: f.value.update(recipes=[]), "task.yaml", "field `recipes`"),
    ("version", lambda f: f.recipe.pop("scorer_version"), "task.yaml", "field `recipes.0.scorer_version`: this field is missing"),
    ("description", lambda f: f.gone("description.md"), "description.md", "has no description.md"),
    ("description's encoding", lambda f: (f.path / "description.md").write_bytes("Gr\u00fc\u00dfe".encode("utf-16")), "description.md", "description.md is not in UTF-8"),
    ("evaluate", lambda f: f.gone("evaluate.py"), "evaluate.py", "evaluate.py is missing: recipe default of task mine"),
    ("syntax", lambda f: f.file("evaluate.py", "x = 1\ndef evaluate(:\n"), "evaluate.py:2", "evaluate.py is no Python"),
    ("function", lambda f: f.file("evaluate.py", "def score(a, b, c): ...\n"), "evaluate.py", "has no function evaluate"),
    ("async", lambda f: f.file("evaluate.py", "async def evaluate(a, b, c): ...\n"), "evaluate.py", "has no function evaluate"),
    ("arguments", lambda f: f.file("evaluate.py", "def evaluate(answer, gold): ...\n"), "evaluate.py:1", "evaluate takes 2 arguments, it is called with three"),
    ("other file", lambda f: f.recipe.update(options={"evaluate_file": "e.py"}), "e.py", "e.py is missing"),
    ("scorer", lambda f: f.recipe.update(scorer="gsm8k-mark"), "task.yaml", "field `recipes.default.scorer`: there is no scorer `gsm8k-mark`; did you mean `gsm8k-marked`?"),
    *((f"option {name} {value}", lambda f, name=name, value=value: f.recipe.update(options={name: value}), "task.yaml", f"field `recipes.default.options.{name}`: {words}")
        for name, value, words in [
            ("evaluate_timeout_s", "fast", "it is 'fast': Input should be a valid number"),
            ("evaluate_timout_s", 5, "the scorer `task` has no such option; did you mean `evaluate_timeout_s`?"),
        ]),
    ("evaluate behind a link", behind_a_link, "evaluate.py", "evaluate.py of task mine is not a file of its folder"),
    ("an episode's threshold", lambda f: f.played(options={"threshold": 1.5}), "task.yaml", "field `recipes.default.options.threshold`: it is 1.5"),
    ("answers' scorer of episodes", lambda f: f.played(scorer="gsm8k", scorer_version="4"), "task.yaml", "reads answers, and `max_steps` makes them episodes"),
    ("episodes' scorer of answers", lambda f: f.recipe.update(scorer="episodes"), "task.yaml", "the scorer `episodes` reads episodes, and without `max_steps` there are none"),
    ("prompt", lambda f: f.recipe.update(prompt="Q:"), "task.yaml", "it does not hold {question}"),
    ("shots", lambda f: f.recipe.update(shots_file="shots.json"), "task.yaml", "shots_sha256`: this field is missing"),
    ("cluster", lambda f: f.value.update(unit="cluster"), "task.yaml", "field `unit` is cluster"),
    ("steps", lambda f: f.recipe.update(max_steps=3), "task.yaml", "the task has no environment to take steps in"),
    ("episodes", lambda f: f.played(scorer="task"), "task.yaml", "episodes are scored by their rewards"),
    ("never played", lambda f: f.played(max_steps=None), "task.yaml", "no recipe has `max_steps`"),
    ("no class", lambda f: f.played(PLAYED.replace("Environment", "Enviroment")), "environment.py", "has no class Environment; did you mean `Enviroment`?"),
    ("no dialogue", lambda f: f.played("class Environment: ...\n"), "environment.py", "has no class Dialogue"),
    ("no file", lambda f: (f.played(), f.gone("environment.py")), "environment.py", "environment.py is missing: field `environment`"),
    ("bad name", lambda f: (f.played(), f.value.update(environment="environment.Environment")), "task.yaml", "environment"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "file", "words"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_what_is_wrong_is_named(folder: Folder, damage: Damage, file: str, words: str) -> None:
    damage(folder)
    with pytest.raises(AutorlError) as caught:
        folder.check()
    assert words in caught.value.what, caught.value.what
    assert (caught.value.where or "").endswith(f"/mine/{file}"), caught.value.where
    assert caught.value.next_step


def test_neither_stage_nor_launch_begins(folder: Folder, tmp_path: Path) -> None:
    (folder.path / "task.yaml").write_text(yaml.safe_dump(folder.value))
    folder.gone("evaluate.py")
    root = Root(tmp_path / "root")
    root.path.mkdir()
    with pytest.raises(AutorlError, match=r"evaluate\.py is missing"):
        stage_task(root, load_task("mine"), None)
    path = root.path / "job.yaml"
    matrix = {"task": ["mine", "arithmetic"], "agent": "copycat", "base_model": "autorl/tiny"}
    path.write_text(json.dumps({"name": "exp", "matrix": matrix, "budget": {"wall_clock": "1m"}}))
    with pytest.raises(AutorlError, match=r"field `matrix\.task`: evaluate\.py is missing") as caught:
        expand(read_spec(path), root, path)
    assert caught.value.where == str(folder.path / "evaluate.py")
    assert [p.name for p in root.path.iterdir()] == ["job.yaml"]


SEARCHING = "from autorl_hpc.rollouts.search import Dialogue, Environment\n"


def test_a_search_back_end_that_is_not_there_is_named(folder: Folder) -> None:
    folder.played(SEARCHING, options={"search": "gogle"})
    with pytest.raises(
        AutorlError, match=r"`recipes\.default\.options\.search`: .* no search back end `gogle`"
    ) as caught:
        folder.check()
    assert "bm25, online, replay" in str(caught.value.next_step)
