"""What a task folder is, by its files alone, and which of them are frozen with an experiment."""

from __future__ import annotations

from pathlib import Path

from autorl_hpc.files.hashing import walk_files

CONFIG, EVALUATE = "config.yaml", "eval.py"
"""What makes a folder one of rl-smith's form."""

DATA_FOLDER = "data/"
"""Of such a folder: the rows, most of which are held out."""


def is_smith(folder: Path) -> bool:
    """Whether a folder is in rl-smith's form, and not a task of our own."""
    return not (folder / "task.yaml").exists() and (folder / CONFIG).is_file() and (folder / EVALUATE).is_file()


def code_files(folder: Path) -> list[str]:
    """Files of a task folder that are frozen and hashed. Rows of an rl-smith folder stay out: most of them are held out."""
    names = walk_files(folder)
    return [name for name in names if not name.startswith(DATA_FOLDER)] if is_smith(folder) else names
