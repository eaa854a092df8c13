"""Staging a folder in rl-smith's form: its rows are cut into three splits, and what was made is what is pinned."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.hashing import file_sha256, walk_files
from autorl_hpc.stage.progress import Say
from autorl_hpc.tasks.loader import Task
from autorl_hpc.tasks.smith import DATA, DOWNLOAD, pinned, write_splits
from autorl_hpc.tasks.smith_rows import SHARES

MAX_SHOWN_CHARS = 500


def prepare_smith(task: Task, source: Path | None, work: Path, say: Say) -> Task:
    """Writes training rows and held-out items below `work`; the task with their pins.

    Args:
        source: a folder with train.jsonl, in the place of the task folder's own rows.

    Raises:
        AutorlError: there are no rows, too few of them, or one can't be read; download_data.py failed.
    """
    assert task.smith is not None
    data = task.folder / DATA if source is None else source / Path(DATA).name
    if source is None and not data.is_file():
        data = _downloaded(task, work / "download", say)
    if not data.is_file():
        raise AutorlError(
            f"{data.name} is missing",
            where=data,
            next_step=f"the folder given by --from holds {data.name}; without --from {DATA} or {DOWNLOAD} of the task is used",
        )
    write_splits(task.smith, data, task.name, work)
    say(
        f"{task.name}: rows of {data.name} cut into " + ", ".join(f"{name} {share} %" for name, share in SHARES.items())
    )
    return replace(task, file=pinned(task.file, file_sha256(data), work))


def _downloaded(task: Task, copy: Path, say: Say) -> Path:
    """data/train.jsonl as the task's own download_data.py makes it, in a private copy of the folder: the rows that will be
    held out then lie nowhere else."""
    script = task.folder / DOWNLOAD
    if not script.is_file():
        raise AutorlError(
            f"task {task.name} has neither {DATA} nor {DOWNLOAD}", where=task.folder, next_step="put the rows there"
        )
    say(f"{task.name}: running {script}: the task's own code, with your rights and network")
    for name in walk_files(task.folder):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(task.folder / name, copy / name)
    done = subprocess.run(
        [sys.executable, DOWNLOAD], cwd=copy, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    made = copy / DATA
    if done.returncode or not made.is_file():
        said = (done.stderr or done.stdout).strip()[-MAX_SHOWN_CHARS:]
        failed = f"failed with exit code {done.returncode}" if done.returncode else f"made no {DATA}"
        raise AutorlError(
            f"{DOWNLOAD} of task {task.name} {failed}" + (f": {said}" if said else ""),
            where=script,
            next_step=f"run it where the network is, put {DATA} into the task's folder, and stage again",
            exit_code=Exit.FAILED,
        )
    return made
