"""The files of a task folder that decide a score by its own scorer (`scorer: task`), and their hash."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autorl_hpc.files.hashing import tree_sha256
from autorl_hpc.records.task import Recipe
from autorl_hpc.tasks.folders import code_files

OWN_SCORER = "task"
"""Name of the scorer that stands in the task's folder."""

EVALUATE_FILE, SCORER_SHA256 = "evaluate_file", "evaluate_sha256"
"""Options of a recipe: the file with `evaluate`, and the hash that `launch` fills in."""

DECIDES_NO_SCORE = frozenset({"task.yaml", "description.md"})
"""What the recipe holds by itself, and what is told to agents. All else may be read or imported by `evaluate`, the modules that
make the data and the environment too."""


def scorer_file(folder: Path, options: Mapping[str, str | int | float | bool]) -> Path:
    """The file that holds `evaluate`."""
    return folder / str(options.get(EVALUATE_FILE, "evaluate.py"))


def scorer_sha256(folder: Path) -> str:
    """A hash over what may decide a score: everything that is frozen of the folder but `DECIDES_NO_SCORE`."""
    return tree_sha256(folder, [name for name in code_files(folder) if name not in DECIDES_NO_SCORE])


def with_scorer_hash(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with its scorer's hash among the options, so that another `evaluate` is another `recipe_hash`; others as
    they are."""
    if recipe.scorer != OWN_SCORER:
        return recipe
    return recipe.model_copy(update={"options": {**recipe.options, SCORER_SHA256: scorer_sha256(folder)}})
