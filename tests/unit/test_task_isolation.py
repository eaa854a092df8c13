"""Loading a task reads its own folder and no other's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autorl_hpc.errors import AutorlError
from autorl_hpc.tasks.loader import PATH_VARIABLE, load_task, put_first

LOADS = """
import json, os, sys
opened = []
sys.addaudithook(lambda event, given: opened.append(os.path.abspath(os.fsdecode(given[0])))
                 if event == "open" and isinstance(given[0], (str, bytes)) else None)
from autorl_hpc.scoring.registry import scorer
from autorl_hpc.tasks.check import check_task
from autorl_hpc.tasks.loader import load_task
task = load_task(sys.argv[1])
check_task(task)
task.hash()
for recipe in task.file.recipes:
    scorer(recipe.scorer, recipe.scorer_version, task.name)
print(json.dumps([opened, [name for name in sys.modules if name.startswith("autorl_hpc.scoring.")]]))
"""


def opened(name: str) -> tuple[list[Path], list[str]]:
    """Files that are opened, and scorers' modules that are imported, when a task is loaded, checked and hashed."""
    done = subprocess.run([sys.executable, "-c", LOADS, name], capture_output=True, text=True, check=True)
    paths, modules = json.loads(done.stdout)
    return [Path(path) for path in paths], modules


@pytest.mark.parametrize("name", ["arithmetic", "gsm8k"])
def test_no_file_of_another_task_is_opened(name: str) -> None:
    folder = load_task(name).folder
    paths, modules = opened(name)
    of_tasks = {path for path in paths if path.is_relative_to(folder.parent)}
    assert folder / "task.yaml" in of_tasks
    assert all(path.is_relative_to(folder) for path in of_tasks), of_tasks
    foreign = {"alpaca", "judges", "episodes", "humaneval", "programs", "deepsearch", "own", "length_control"}
    assert not {f"autorl_hpc.scoring.{module}" for module in foreign} & set(modules)


def test_folders_given_by_tasks_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built_in = load_task("arithmetic").folder
    for name in ("one", "two"):
        (tmp_path / name / "arithmetic").mkdir(parents=True)
        for file in built_in.iterdir():
            if file.is_file():
                (tmp_path / name / "arithmetic" / file.name).write_bytes(file.read_bytes())
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "two"))
    assert load_task("arithmetic").folder.parent.name == "two"
    monkeypatch.chdir(tmp_path)
    put_first([Path("one")])
    assert load_task("arithmetic").folder == tmp_path / "one" / "arithmetic"
    with pytest.raises(AutorlError, match="names the folder that holds task folders"):
        put_first([tmp_path / "three"])
