"""A staged task: what lies where, and its verification against manifests and pins."""

from __future__ import annotations

from dataclasses import dataclass

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import read_manifest, verify_files
from autorl_hpc.records.exchange import StoreManifest
from autorl_hpc.states import Fault
from autorl_hpc.tasks.loader import Task

ITEMS_NAME = "items.jsonl"


@dataclass(frozen=True)
class StagedTask:
    """The two manifests of a staged task."""

    store: StoreManifest
    vault: StoreManifest


def verify_staged_task(root: Root, task: Task) -> StagedTask:
    """The manifests of a staged task, after every file's hash was checked against them and against the task's pins.

    Raises:
        AutorlError: it is not staged, or something was changed.
    """
    command = f"autorl-hpc stage {task.name}"
    store = read_manifest(root.task_store(task.name), name=f"task {task.name}", stage_command=command)
    vault = read_manifest(root.task_vault(task.name), name=f"held-out data of task {task.name}", stage_command=command)
    verify_files(root.task_store(task.name), store, command)
    verify_files(root.task_vault(task.name), vault, command)
    pinned = {
        **task.file.train_files,
        **{f"{split}/{ITEMS_NAME}": pin.sha256 for split, pin in task.file.splits.items()},
    }
    staged = {file.path: file.sha256 for file in (*store.files, *vault.files)}
    for name, digest in pinned.items():
        if staged.get(name) != digest:
            raise AutorlError(
                f"{name} of task {task.name} was staged by another version of the task",
                where=root.task_store(task.name),
                fault=Fault.CLUSTER,
                next_step=f"run: {command} --again",
                exit_code=Exit.FAILED,
            )
    return StagedTask(store, vault)


def train_names(task: Task) -> list[str]:
    """Paths of the training files, below the task's store folder."""
    return sorted(task.file.train_files)


def vault_names(task: Task) -> list[str]:
    """Paths of the held-out files, below the task's vault folder: items, and what recipes need of the grader alone."""
    shots = [recipe.shots_file for recipe in task.file.recipes if recipe.shots_file]
    return sorted({*(f"{split}/{ITEMS_NAME}" for split in task.file.splits), *shots})
