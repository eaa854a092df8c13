"""A task folder: task.yaml, description.md, prepare.py. One folder is read when one task is asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.hashing import tree_sha256
from autorl_hpc.files.share import share
from autorl_hpc.files.yaml import read_yaml
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.task import Recipe, TaskFile

PATH_VARIABLE = "AUTORL_TASKS_PATH"


@dataclass(frozen=True)
class Task:
    """A loaded task folder."""

    folder: Path
    file: TaskFile

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def description(self) -> str:
        return (self.folder / "description.md").read_text(encoding="utf-8")

    def hash(self) -> str:
        """Hash over the folder's files."""
        return tree_sha256(self.folder)

    def recipe(self, name: str | None) -> Recipe:
        """The recipe of that name.

        Raises:
            AutorlError: the task has none of that name.
        """
        recipe = self.file.recipe(name)
        if recipe is None:
            known = ", ".join(r.name for r in self.file.recipes)
            raise AutorlError(
                f"task {self.name} has no recipe `{name}`; it has {known}",
                where=self.folder / "task.yaml",
                next_step="choose one of these in the experiment's `recipe` field",
            )
        return recipe


def task_folders() -> list[Path]:
    """Folders that hold task folders: those of $AUTORL_TASKS_PATH, then the built-in one."""
    extra = [Path(part).absolute() for part in os.environ.get(PATH_VARIABLE, "").split(os.pathsep) if part]
    return [*extra, share("tasks")]


def task_names() -> list[str]:
    """Names of all tasks that can be found."""
    return sorted({path.parent.name for folder in task_folders() for path in folder.glob("*/task.yaml")})


def load_task(name: str, folders: Sequence[Path] | None = None) -> Task:
    """The task of that name, looked for in `folders` (default: `task_folders()`).

    Raises:
        AutorlError: there is none, or its task.yaml is wrong.
    """
    for folder in task_folders() if folders is None else folders:
        path = folder / name / "task.yaml"
        if path.is_file():
            file = parse_record(TaskFile, read_yaml(path), path)
            if file.name != name:
                raise AutorlError(
                    f"field `name` is {file.name}, the folder is {name}", where=path, next_step="make them equal"
                )
            return Task(folder / name, file)
    from difflib import get_close_matches

    near = get_close_matches(name, task_names(), n=1)
    raise AutorlError(
        f"there is no task `{name}`" + (f"; did you mean `{near[0]}`?" if near else ""),
        where=share("tasks"),
        next_step=f"choose one of: {', '.join(task_names())}",
    )
