"""A staged task: what lies where, and its verification against manifests and pins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import reading
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import read_manifest, verify_files
from autorl_hpc.records.exchange import StoreManifest
from autorl_hpc.records.task import Recipe, SplitPin
from autorl_hpc.scoring.registry import READ_ANSWER
from autorl_hpc.states import Fault
from autorl_hpc.tasks.item_rows import BadRow, NotUtf8, read_items
from autorl_hpc.tasks.loader import Task
from autorl_hpc.tasks.smith import staged_pins

ITEMS_NAME = "items.jsonl"
MAX_ITEMS_BYTES = 1024 * 1024 * 1024
JUDGE_PROMPT, JUDGE_PROMPT_SHA256 = "judge_prompt", "judge_prompt_sha256"
"""Options of a recipe: a staged text file, and its hash."""


@dataclass(frozen=True)
class StagedTask:
    """The two manifests of a staged task."""

    store: StoreManifest
    vault: StoreManifest


def with_pins(root: Root, task: Task) -> Task:
    """The task with the pins of its splits; a folder in rl-smith's form has those of its staging.

    Raises:
        AutorlError: such a folder is not staged, or holds other rows by now.
    """
    return task if task.smith is None else replace(task, file=staged_pins(root, task.file, task.folder))


def verify_staged_task(root: Root, task: Task) -> StagedTask:
    """The manifests of a staged task, after every file's hash was checked against them and against the task's pins.

    Raises:
        AutorlError: it is not staged, something was changed, or an item can't be used.
    """
    task = with_pins(root, task)
    command = f"autorl-hpc stage {task.name}"
    store = read_manifest(root.task_store(task.name), name=f"task {task.name}", stage_command=command)
    vault = read_manifest(root.task_vault(task.name), name=f"held-out data of task {task.name}", stage_command=command)
    verify_files(root.task_store(task.name), store, command)
    verify_files(root.task_vault(task.name), vault, command)
    for folder, manifest, pins in (
        (root.task_store(task.name), store, task.file.train_files),
        (root.task_vault(task.name), vault, vault_pins(task)),
    ):
        staged = {file.path: file.sha256 for file in manifest.files}
        for name, digest in pins.items():
            if staged.get(name) != digest:
                raise AutorlError(
                    f"{name} of task {task.name} was staged by another version of the task",
                    where=folder,
                    fault=Fault.CLUSTER,
                    next_step=f"run: {command} --again",
                    exit_code=Exit.FAILED,
                )
    check_items(task, root.task_vault(task.name))
    return StagedTask(store, vault)


def check_items(task: Task, folder: Path, made_by: Path | None = None) -> None:
    """Looks at each held-out item below `folder`, before anything is queued.

    Args:
        made_by: the program to correct, where the files lie in a folder that will be gone.

    Raises:
        AutorlError: naming file and line of the first row that is no item, or whose id stood before; or another number of items
            than is pinned.
    """
    question = any(recipe.max_steps is None for recipe in task.file.recipes)
    answer = any(recipe.scorer in READ_ANSWER for recipe in task.file.recipes)
    for field, name, pin in _items_files(task):
        path = folder / name
        if not path.is_file():
            raise AutorlError(
                f"field `{field}` pins {name}, and there is no such file: is it among `vault_files`?",
                where=task.folder / "task.yaml",
                next_step=f"correct the field, and run: autorl-hpc stage {task.name} --again",
            )
        try:
            rows = read_items(reading.read_bytes(path, max_bytes=MAX_ITEMS_BYTES), question=question, answer=answer)
        except (BadRow, NotUtf8) as error:
            words = f"is not in UTF-8: {error}" if isinstance(error, NotUtf8) else str(error)
            raise AutorlError(
                f"{name} of task {task.name}: {words}",
                where=made_by or path,
                next_step="correct what makes it, pin it anew (bin/pin-task) and stage it again: each line is one JSON object "
                "with an `id` of its own",
            ) from None
        if len(rows) != pin.n:
            raise AutorlError(
                f"field `{field}.n` is {pin.n}, {name} holds {len(rows)} items",
                where=task.folder / "task.yaml",
                next_step="pin it anew: bin/pin-task prints it",
            )


def _items_files(task: Task) -> list[tuple[str, str, SplitPin]]:
    """Field of task.yaml, path below the vault's folder, and pin."""
    found = [(f"splits.{split}", f"{pin.folder or split}/{ITEMS_NAME}", pin) for split, pin in task.file.splits.items()]
    paper = task.file.paper
    return found if paper is None else [*found, ("paper", f"{paper.folder or 'paper'}/{ITEMS_NAME}", paper)]


def train_names(task: Task) -> list[str]:
    """Paths of the training files, below the task's store folder."""
    return sorted(task.file.train_files)


def vault_names(task: Task) -> list[str]:
    """Paths of the held-out files, below the task's vault folder: items, what the grader's environment needs, and worked
    examples of recipes."""
    of_recipes = [name for recipe in task.file.recipes for name in recipe_files(recipe)]
    return sorted({*vault_pins(task), *of_recipes})


def recipe_files(recipe: Recipe) -> dict[str, str]:
    """The held-out files that one recipe needs, with their hashes: its worked examples, and the prompt of its judge."""
    found = {} if recipe.shots_file is None else {recipe.shots_file: recipe.shots_sha256 or ""}
    if JUDGE_PROMPT in recipe.options:
        found[str(recipe.options[JUDGE_PROMPT])] = str(recipe.options.get(JUDGE_PROMPT_SHA256, ""))
    return found


def vault_pins(task: Task) -> dict[str, str]:
    """The hashes of the held-out files that every staging of the task has."""
    items = {f"{split}/{ITEMS_NAME}": pin.sha256 for split, pin in task.file.splits.items()}
    return {**items, **task.file.vault_files}
