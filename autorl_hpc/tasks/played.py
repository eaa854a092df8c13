"""What decides an episode beside the goals: the task folder's code, the rollouts room, and the files in the vault. Pinned in the
recipe at launch or in task.yaml, and looked at by graders before environments start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import autorl_hpc.rollouts
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.hashing import file_sha256, tree_sha256
from autorl_hpc.files.layout import Root
from autorl_hpc.records.task import Recipe
from autorl_hpc.states import Fault
from autorl_hpc.tasks.folders import code_files
from autorl_hpc.tasks.loader import Task
from autorl_hpc.tasks.own_files import DECIDES_NO_SCORE

ENVIRONMENT_SHA256, ROLLOUTS_SHA256 = "environment_sha256", "rollouts_sha256"
"""Options of a recipe, filled in by `launch`."""

NOT_PLAYED = DECIDES_NO_SCORE | {"task.template.yaml", "complete.py"}
"""What a task folder holds beside its environment and what that may read or import."""


def environment_sha256(folder: Path) -> str:
    """A hash over what may decide an episode: everything that is frozen of the folder but `NOT_PLAYED`."""
    return tree_sha256(folder, [name for name in code_files(folder) if name not in NOT_PLAYED])


def rollouts_sha256() -> str:
    """A hash over the rollouts room: scheduler, search, shop."""
    return tree_sha256(Path(autorl_hpc.rollouts.__file__).parent)


def with_environment_hash(recipe: Recipe, task: Task) -> Recipe:
    """The recipe of a task that is played with the hashes of what plays it among the options, so that another environment is
    another `recipe_hash`; others as they are."""
    if task.file.environment is None or recipe.max_steps is None:
        return recipe
    hashes = {ENVIRONMENT_SHA256: environment_sha256(task.folder), ROLLOUTS_SHA256: rollouts_sha256()}
    return recipe.model_copy(update={"options": {**recipe.options, **hashes}})


def check_played(root: Root, task: Task, options: Mapping[str, object]) -> None:
    """Compares all of it with its pins. Once before a pool starts: what workers have read stays read.

    Args:
        options: of the run's recipe.

    Raises:
        AutorlError: something was changed after staging or launch; the file is named.
    """
    for name, found in ((ENVIRONMENT_SHA256, environment_sha256), (ROLLOUTS_SHA256, lambda _: rollouts_sha256())):
        if options.get(name, wanted := found(task.folder)) != wanted:
            where = task.folder if name == ENVIRONMENT_SHA256 else Path(autorl_hpc.rollouts.__file__).parent
            raise _changed(f"the environment of task {task.name} is not the one that this run was launched with", where,
                           "put the files back as they were, or launch under another name")  # fmt: skip
    again = f"put the original back or run: autorl-hpc stage {task.name} --again"
    for name, pinned in sorted(task.file.vault_files.items()):
        path = root.task_vault(task.name) / name
        try:
            changed = file_sha256(path) != pinned
        except OSError as error:
            raise _changed(f"{name} of task {task.name} can't be read: {error.strerror}", path, again) from None
        if changed:
            raise _changed(f"{name} of task {task.name} was changed after staging", path, again)


def _changed(what: str, where: Path, next_step: str) -> AutorlError:
    return AutorlError(what, where=where, fault=Fault.CLUSTER, next_step=next_step, exit_code=Exit.FAILED)
