"""Files of a task folder: which are frozen and hashed, which decide a score; reading of items files with errors by line."""

from __future__ import annotations

import codecs
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

MARKS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
"""Byte order marks of files saved in another encoding."""


class NotUtf8(ValueError):
    """A file is in another encoding; the message begins with "is not in UTF-8"."""


class BadRow(ValueError):
    """A row is not an item; the message names the line."""


def utf8_lines(data: bytes) -> Iterator[tuple[int, str]]:
    """Yield the non-empty lines with their numbers from 1.

    Does not use splitlines(), because a question may hold a character that it takes for a line's end.

    Raises:
        NotUtf8: the encoding is another one.
    """
    for mark, name in MARKS.items():
        if data.startswith(mark):
            raise NotUtf8(f"is not in UTF-8: it begins like {name}")
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise NotUtf8(f"is not in UTF-8: line {number} holds the byte 0x{line[error.start]:02x}") from None


def read_items(data: bytes, *, question: bool = False, answer: bool = False) -> list[dict[str, Any]]:
    """Return the rows of an items.jsonl.

    Args:
        question, answer: whether each row must have one.

    Raises:
        NotUtf8, BadRow: the first invalid row, or one with a missing or repeated `id`.
    """
    rows: list[dict[str, Any]] = []
    lines: dict[str, int] = {}
    for number, line in utf8_lines(data):
        row = _row(number, line)
        own = row.get("id")
        if isinstance(own, bool) or not isinstance(own, (str, int)) or own == "":
            raise BadRow(
                f"line {number} has no `id`" if own is None else f"line {number}: `id` is neither a text nor a number"
            )
        if str(own) in lines:
            raise BadRow(f"line {number}: the id {str(own)[:100]!r} is in line {lines[str(own)]} already")
        lines[str(own)] = number
        if question and row.get("question") in (None, "", [], {}):
            raise BadRow(f"line {number} has no `question`")
        if answer and row.get("answer") is None:
            raise BadRow(f"line {number} has no `answer`")
        rows.append(row)
    return rows


def _row(number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"line {number} is not JSON: {error}") from None
    if not isinstance(row, dict):
        kind = "list" if isinstance(row, list) else "text" if isinstance(row, str) else "plain value"
        raise BadRow(f"line {number} is a {kind}, not an object with `id`, `question` and `answer`")
    return row
