"""A task folder: task.yaml, description.md, prepare.py; or one in rl-smith's form. One folder is read when one task is asked
for, and no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import beside
from autorl_hpc.files.hashing import tree_sha256
from autorl_hpc.files.share import share
from autorl_hpc.files.yaml import read_yaml
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.task import Recipe, TaskFile
from autorl_hpc.tasks.folders import code_files
from autorl_hpc.tasks.smith import SmithFolder, find_smith, read_description, read_smith, smith_names

PATH_VARIABLE = "AUTORL_TASKS_PATH"
TEMPLATE_NAME = "task.template.yaml"
"""In the place of task.yaml where the hashes of the held-out items are not known before somebody has the source file."""


@dataclass(frozen=True)
class Task:
    """A loaded task folder.

    Attributes:
        smith: where it is in rl-smith's form. Its file pins nothing until it is staged: `tasks.staged.with_pins`.
    """

    folder: Path
    file: TaskFile
    smith: SmithFolder | None = None

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def description(self) -> str:
        if self.smith is not None:
            return self.smith.description
        return read_description(self.folder / "description.md")

    def hash(self) -> str:
        """Hash over the folder's files, as they are frozen."""
        return tree_sha256(self.folder, code_files(self.folder))

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
    return [*beside.named_by(PATH_VARIABLE), share("tasks")]


def put_first(folders: Sequence[Path]) -> None:
    """Looks into these folders before all others, in this process and those that it starts.

    Raises:
        AutorlError: one is no folder.
    """
    beside.put_first(PATH_VARIABLE, folders, "task")


def task_names() -> list[str]:
    """Names of all tasks that can be found."""
    own = {path.parent.name for folder in task_folders() for path in folder.glob("*/task.yaml")}
    return sorted(own.union(*(smith_names(folder) for folder in task_folders())))


def load_task(name: str, folders: Sequence[Path] | None = None) -> Task:
    """The task of that name, looked for in `folders` (default: `task_folders()`).

    Raises:
        AutorlError: there is none, or its task.yaml is wrong.
    """
    places = task_folders() if folders is None else list(folders)
    for folder in places:
        path = folder / name / "task.yaml"
        if path.is_file():
            file = parse_record(TaskFile, read_yaml(path), path)
            if file.name != name:
                raise AutorlError(
                    f"field `name` is {file.name}, the folder is {name}", where=path, next_step="make them equal"
                )
            return Task(folder / name, file)
        smith = find_smith(folder, name)
        if smith is not None:
            found, file = read_smith(smith, name)
            return Task(smith, file, found)
    raise _no_task(name, places)


def _no_task(name: str, places: Sequence[Path]) -> AutorlError:
    for place in places:
        if (place / name / TEMPLATE_NAME).is_file():
            return AutorlError(
                f"task {name} is not whole: its source file is no part of this package, nor are the hashes of what is made from it",
                where=place / name / TEMPLATE_NAME,
                next_step="get the source file that this one names, and write the whole task into a folder of yours: "
                f"python {place / name / 'complete.py'} --help; then give that folder by --tasks or ${PATH_VARIABLE}",
            )
        if (place / name).is_dir() and place != share("tasks"):
            return AutorlError(
                f"the folder of task `{name}` holds no task.yaml",
                where=place / name,
                next_step="write one: docs/adding-a-task.md; an rl-smith folder (config.yaml, eval.py, data/train.jsonl) "
                "is called smith-NAME",
            )
    from difflib import get_close_matches

    near = get_close_matches(name, task_names(), n=1)
    return AutorlError(
        f"there is no task `{name}`" + (f"; did you mean `{near[0]}`?" if near else ""),
        where=share("tasks"),
        next_step=f"choose one of: {', '.join(task_names())}; or name the folder of yours by --tasks or ${PATH_VARIABLE}",
    )
