"""Loads task folders: task.yaml, description.md, prepare.py; or rl-smith's form. Only the requested task's folder is read.
Also: check of the option `search`, and the hashes of what decides an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import autorl_hpc.rollouts
from autorl_hpc.errors import AutorlError, did_you_mean
from autorl_hpc.files import layout
from autorl_hpc.files.checkpoint import file_sha256, tree_sha256
from autorl_hpc.files.layout import Root, share
from autorl_hpc.files.reading import read_yaml
from autorl_hpc.files.store import changed_since
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.task import HARNESSES, Recipe, TaskFile
from autorl_hpc.rollouts.search.backends import BACKENDS
from autorl_hpc.tasks.folders import DECIDES_NO_SCORE, code_files
from autorl_hpc.tasks.smith import SmithFolder, find_smith, read_description, read_smith, smith_names

PATH_VARIABLE = "AUTORL_TASKS_PATH"
TEMPLATE_NAME = "task.template.yaml"
"""Replaces task.yaml if the hashes of the held-out items are unknown until the user has the source file."""


@dataclass(frozen=True)
class Task:
    """A loaded task folder. `smith`: set for rl-smith's form. Its file has no pins until it is staged:
    `tasks.heldout.with_pins`."""

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
        """Return a hash over the folder's frozen files."""
        return tree_sha256(self.folder, code_files(self.folder))

    def recipe(self, name: str | None) -> Recipe:
        """Return the recipe of that name. Raises AutorlError: the task has none."""
        recipe = self.file.recipe(name)
        if recipe is None:
            what = f"task {self.name} has no recipe `{name}`; it has {', '.join(r.name for r in self.file.recipes)}"
            advice = "choose one of these in the experiment's `recipe` field"
            raise AutorlError(what, where=self.folder / "task.yaml", next_step=advice)
        return recipe


def task_folders() -> list[Path]:
    """Return folders that hold task folders: those of $AUTORL_TASKS_PATH, then the built-in one."""
    return [*layout.named_by(PATH_VARIABLE), share("tasks")]


def put_first(folders: Sequence[Path]) -> None:
    """Search these folders before all others, in this process and its children. Raises AutorlError: one is not a folder."""
    layout.put_first(PATH_VARIABLE, folders, "task")


def task_names() -> list[str]:
    """Return the names of all tasks that can be found."""
    own = {path.parent.name for folder in task_folders() for path in folder.glob("*/task.yaml")}
    return sorted(own.union(*(smith_names(folder) for folder in task_folders())))


def load_task(name: str, folders: Sequence[Path] | None = None, root: Root | None = None) -> Task:
    """Load the task of that name from `folders` (default: `task_folders()`). `root`: look there too for another library's task, whose
    folder was made and staged with its data. Raises AutorlError: there is none, or its task.yaml is wrong."""
    places = task_folders() if folders is None else list(folders)
    places += [root.task_store(name)] if root is not None and folders is None else []
    for folder in places:
        path = folder / name / "task.yaml"
        if path.is_file():
            file = parse_record(TaskFile, read_yaml(path), path)
            if file.name != name:
                what = f"field `name` is {file.name}, the folder is {name}"
                raise AutorlError(what, where=path, next_step="make them equal")
            return Task(folder / name, file)
        smith = find_smith(folder, name)
        if smith is not None:
            found, file = read_smith(smith, name)
            return Task(smith, file, found)
    raise _no_task(name, places)


# fmt: off
PUBLIC_SPLITS = frozenset((
    "a3c8eb8b544605a8d5a5c479b2827ada96f70c6c7eb239029d46eb0b7856f016",  # alfworld-mini feedback
    "d5e4fdb8b21949dfac231f3dbcf8f53d39a467c5a03e8594e4c7263a60ad144f",  # alfworld-mini report
    "1bba4116a83bf5f57bedc0068b841b82999d7cd85fa126500faa44ce92181d46",  # alpacaeval-mini feedback
    "5095240174d2243ad15036a1bf9f3155c466bf0f51723e7b5da73319e8aae390",  # alpacaeval-mini report
    "8f0a51ed7394b02b52c7af0e952313178ada6563d6cf433138e548ecee8caea3",  # arithmetic feedback
    "202f45574b7f1fcdc9a49adfd611ad46ba6deda4c725e615bac7303a7adc67d6",  # arithmetic report
    "42bae938dd54a54a2daebbfa8a7d594e21f9a4e4dd441a3f66ae1b86f977115b",  # deepsearchqa-mini feedback
    "4b86af13471fce349ee06a4128e6854fb831c5861cb970feea215527738a9ab5",  # deepsearchqa-mini report
    "a7619716068d2004259b7f5548984bd9ec9bae8061a97bb4210c93114bede189",  # humaneval-mini feedback
    "0f8b1e5a40fd82f2fa4a01cf7a358a8e2ec113f82b08d78766eeb5c9aa2b1011",  # humaneval-mini report
    "1489c513a7ed088bb2c71c63468e3b859c224ccddbfbae56d16e1887f8fd7168",  # webshop-mini feedback
    "97091e6ebb5b82b2b6bcf6866794f19a7225da16e1cf5eac0b4090c02e54c520",  # webshop-mini report
))
# fmt: on
"""Hashes of held-out splits that anybody can make again with the package's public scripts, and train on. Not read from the tasks'
folders: frozen code holds its users' tasks beside these."""


def _no_task(name: str, places: Sequence[Path]) -> AutorlError:
    for place in places:
        folder = place / name
        if (folder / TEMPLATE_NAME).is_file():
            missing = "its source file is not part of this package, nor are the hashes of what is made from it"
            make = f"get the source file that this one names, and write the whole task into a folder of yours: python {folder / 'complete.py'} --help"
            advice = f"{make}; then give that folder by --tasks or ${PATH_VARIABLE}"
            return AutorlError(f"task {name} is not whole: {missing}", where=folder / TEMPLATE_NAME, next_step=advice)
        if folder.is_dir() and place != share("tasks"):
            advice = "write one: docs/adding-a-task.md; an rl-smith folder is called smith-NAME"
            return AutorlError(f"the folder of task `{name}` holds no task.yaml", where=folder, next_step=advice)
    kind = next((kind for kind in HARNESSES if name.startswith(f"{kind}-")), None)
    if kind is not None:
        advice = f"stage it first: autorl-hpc stage {kind}:NAME"
        return AutorlError(f"the task {name} of {kind} is not staged", next_step=advice)
    what = f"there is no task `{name}`{did_you_mean(name, task_names())}"
    advice = f"choose one of: {', '.join(task_names())}; or name your own folder with --tasks or ${PATH_VARIABLE}"
    return AutorlError(what, where=share("tasks"), next_step=advice)


ROOM = "autorl_hpc.rollouts.search"


def check_search_name(recipe: Recipe, code: str, where: Path) -> None:
    """Check that the option `search` names a back end of the package, unless the environment's file adds some or doesn't
    use the package's search. `code`: text of the environment's file. Raises AutorlError: there is no such back end."""
    name = str(recipe.options.get("search", ""))
    if name and name not in BACKENDS and ROOM in code and "BACKENDS" not in code:
        what = f"field `recipes.{recipe.name}.options.search`: there is no search back end `{name}`"
        known = f"choose one of: {', '.join(sorted(BACKENDS))}"
        advice = f'{known}; or add it in the environment\'s file: BACKENDS["name"] = make'
        raise AutorlError(what, where=where, next_step=advice)


# --- hashes of what decides an episode: the task's code, the rollouts package, files in the vault
# Pinned in the recipe at launch or in task.yaml; graders check them before environments start.

ENVIRONMENT_SHA256, ROLLOUTS_SHA256 = "environment_sha256", "rollouts_sha256"  # Recipe options, filled in by `launch`
NOT_PLAYED = DECIDES_NO_SCORE | {"task.template.yaml", "complete.py"}
"""Files of a task folder that can't change an episode."""


def environment_sha256(folder: Path) -> str:
    """Return a hash over everything that may decide an episode: all frozen files of the folder except `NOT_PLAYED`."""
    return tree_sha256(folder, [name for name in code_files(folder) if name not in NOT_PLAYED])


def rollouts_sha256() -> str:
    """Return a hash over the rollouts package: scheduler, search, shop."""
    return tree_sha256(Path(autorl_hpc.rollouts.__file__).parent)


def with_environment_hash(recipe: Recipe, task: Task) -> Recipe:
    """Return an interactive task's recipe with the hashes of its environment as options, so that another environment gives
    another `recipe_hash`. Other recipes are returned unchanged."""
    if task.file.environment is None or recipe.max_steps is None:
        return recipe
    hashes = {ENVIRONMENT_SHA256: environment_sha256(task.folder), ROLLOUTS_SHA256: rollouts_sha256()}
    return recipe.model_copy(update={"options": {**recipe.options, **hashes}})


def check_played(root: Root, task: Task, options: Mapping[str, object]) -> None:
    """Check the environment and vault files against their pins; called once before a pool starts, because workers don't
    reread. `options`: the run's recipe's. Raises AutorlError: a file has changed after staging or launch."""
    room = Path(autorl_hpc.rollouts.__file__).parent
    found = {
        ENVIRONMENT_SHA256: (environment_sha256(task.folder), task.folder),
        ROLLOUTS_SHA256: (rollouts_sha256(), room),
    }
    for name, (here, where) in found.items():
        if options.get(name, here) != here:
            what = f"the environment of task {task.name} is not the one that this run was launched with"
            raise changed_since(what, where, "put the files back as they were, or launch under another name")
    again = f"put the original back or run: autorl-hpc stage {task.name} --again"
    for name, pinned in sorted(task.file.vault_files.items()):
        path = root.task_vault(task.name) / name
        try:
            problem = "was changed after staging" if file_sha256(path) != pinned else None
        except OSError as error:
            problem = f"can't be read: {error.strerror}"
        if problem:
            raise changed_since(f"{name} of task {task.name} {problem}", path, again)
