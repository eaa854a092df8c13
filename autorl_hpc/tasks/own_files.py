"""The files of a task folder that decide a score by its own scorer (`scorer: task`), and their hash."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autorl_hpc.files.hashing import tree_sha256, walk_files
from autorl_hpc.records.task import Recipe

OWN_SCORER = "task"
"""Name of the scorer that stands in the task's folder."""

EVALUATE_FILE, SCORER_SHA256 = "evaluate_file", "evaluate_sha256"
"""Options of a recipe: the file with `evaluate`, and the hash that `launch` fills in."""

DATA_FOLDER = "data/"
DECIDES_NO_SCORE = frozenset(
    {"task.yaml", "description.md", "prepare.py", "environment.py", "config.yaml", "download_data.py"}
)
"""What a task folder holds beside its scorer. All else may be read by `evaluate`: modules, lists of words, tables."""


def scorer_file(folder: Path, options: Mapping[str, str | int | float | bool]) -> Path:
    """The file that holds `evaluate`."""
    return folder / str(options.get(EVALUATE_FILE, "evaluate.py"))


def scorer_sha256(folder: Path) -> str:
    """A hash over what may decide a score: everything in the folder but data and what only makes or describes them."""
    names = [n for n in walk_files(folder) if n not in DECIDES_NO_SCORE and not n.startswith(DATA_FOLDER)]
    return tree_sha256(folder, names)


def with_scorer_hash(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with its scorer's hash among the options, so that another `evaluate` is another `recipe_hash`; others as
    they are."""
    if recipe.scorer != OWN_SCORER:
        return recipe
    return recipe.model_copy(update={"options": {**recipe.options, SCORER_SHA256: scorer_sha256(folder)}})
