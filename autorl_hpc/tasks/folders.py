"""Files of a task folder: which are frozen and hashed, which decide a score; reading of items files with errors by line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autorl_hpc.files.checkpoint import tree_sha256, walk_files
from autorl_hpc.records.task import Recipe

CONFIG, EVALUATE = "config.yaml", "eval.py"  # A folder with these files is in rl-smith's form
DATA_FOLDER = "data/"  # Folder of an rl-smith task with its rows, most of which are held out


def is_smith(folder: Path) -> bool:
    """Return whether a folder is in rl-smith's form rather than a task of our own."""
    return not (folder / "task.yaml").exists() and (folder / CONFIG).is_file() and (folder / EVALUATE).is_file()


def code_files(folder: Path) -> list[str]:
    """Return the files that are frozen and hashed. Rows of an rl-smith folder are left out, because most are held out."""
    names = walk_files(folder)
    return [name for name in names if not name.startswith(DATA_FOLDER)] if is_smith(folder) else names


# --- files that decide a score by the task's own scorer (`scorer: task`)

OWN_SCORER = "task"  # Name of the scorer in the task's folder
EVALUATE_FILE, SCORER_SHA256 = "evaluate_file", "evaluate_sha256"
"""Recipe options: the file with `evaluate`, and the hash that `launch` fills in."""
DECIDES_NO_SCORE = frozenset({"task.yaml", "description.md"})
"""Files that can't change a score: the recipe holds the first, agents read the second. `evaluate` may read or import all others,
including the modules that make the data and the environment."""


def scorer_file(folder: Path, options: Mapping[str, str | int | float | bool]) -> Path:
    """Return the path of the file with `evaluate`."""
    return folder / str(options.get(EVALUATE_FILE, "evaluate.py"))


def scorer_sha256(folder: Path) -> str:
    """Return a hash over everything that may decide a score: all frozen files except `DECIDES_NO_SCORE`."""
    return tree_sha256(folder, [name for name in code_files(folder) if name not in DECIDES_NO_SCORE])


def with_scorer_hash(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with its own scorer's hash as an option, so that another `evaluate` gives another `recipe_hash`. Recipes
    with other scorers are returned unchanged."""
    if recipe.scorer != OWN_SCORER:
        return recipe
    return recipe.model_copy(update={"options": {**recipe.options, SCORER_SHA256: scorer_sha256(folder)}})


# --- rows of held-out items


class BadRow(ValueError):
    """A row is not an item, or the file is not UTF-8; the message names the line."""


def json_rows(data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a JSON lines file with their line numbers from 1. Raises BadRow."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise BadRow(f"line {number} is not UTF-8: it holds the byte 0x{error.object[error.start]:02x}") from None
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines(): a question may hold another line end
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadRow(f"line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise BadRow(f"line {number} is not an object")
        yield number, row


def read_items(data: bytes, *, question: bool = False, answer: bool = False) -> list[dict[str, Any]]:
    """Return the rows of an items.jsonl. `question, answer`: whether each row must have one. Raises BadRow: the first
    invalid row, or one with a missing or repeated `id`."""
    rows: list[dict[str, Any]] = []
    lines: dict[str, int] = {}
    for number, row in json_rows(data):
        own = row.get("id")
        if isinstance(own, bool) or not isinstance(own, (str, int)) or own == "":
            raise BadRow(f"line {number} has no `id` that is a text or a number")
        if str(own) in lines:
            raise BadRow(f"line {number}: the id {str(own)[:100]!r} is in line {lines[str(own)]} already")
        lines[str(own)] = number
        if question and row.get("question") in (None, "", [], {}):
            raise BadRow(f"line {number} has no `question`")
        if answer and row.get("answer") is None:
            raise BadRow(f"line {number} has no `answer`")
        rows.append(row)
    return rows
