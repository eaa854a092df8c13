"""The rows of an rl-smith folder: read, checked, and cut into three splits by what they ask."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.tasks.item_rows import NotUtf8, utf8_lines

SALT = "autorl-hpc rl-smith split 2"
"""Another salt is another split. 1 hashed the question's exact text, so that spellings of one question fell apart."""

SHARES: dict[Literal["train", "feedback", "report"], int] = {"train": 60, "feedback": 20, "report": 20}
"""Percent of the distinct questions."""

MIN_QUESTIONS = 5
"""Fewer leave a split empty."""

MAX_DATA_BYTES = 1024 * 1024 * 1024

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The rows of data/train.jsonl.

    Raises:
        AutorlError: naming the line that is no object with a `question` and an `answer`; or the file is no UTF-8.
    """
    rows = []
    try:
        for number, line in utf8_lines(reading.read_bytes(path, max_bytes=MAX_DATA_BYTES)):
            rows.append(_row(number, line, path))
    except NotUtf8 as error:
        raise AutorlError(
            f"{path.name} is not in UTF-8: {error}", where=path, next_step="save it as UTF-8, one JSON object a line"
        ) from None
    return rows


def _row(number: int, line: str, path: Path) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise AutorlError(f"line {number} is no JSON: {error}", where=path, next_step="correct the line") from None
    if not isinstance(row, dict) or not row.get("question"):
        raise AutorlError(
            f"line {number} is no object with a field `question`", where=path, next_step="correct the line"
        )
    if row.get("answer") is None:
        raise AutorlError(
            f"line {number} has no `answer`: `evaluate` would have nothing to compare with",
            where=path,
            next_step="add it to the line, or remove the line",
        )
    return row


def split_rows(rows: Iterable[Row], name: str, where: Path) -> dict[Literal["train", "feedback", "report"], list[Row]]:
    """The rows of each split, in an order of their own: that of the file does not matter.

    Raises:
        AutorlError: there are too few.
    """
    ranked: dict[str, list[Row]] = {}
    for row in sorted(rows, key=canonical):
        ranked.setdefault(question_key(row["question"]), []).append(row)
    if len(ranked) < MIN_QUESTIONS:
        raise AutorlError(
            f"{len(ranked)} distinct questions are too few for training, feedback and report",
            where=where,
            next_step=f"at least {MIN_QUESTIONS} are needed, some hundred make a score that says something",
        )
    found: dict[Literal["train", "feedback", "report"], list[Row]] = {}
    keys, start, edge = sorted(ranked), 0, 0
    for split, percent in SHARES.items():
        edge += percent
        end = len(keys) * edge // 100
        found[split] = [row for key in keys[start:end] for row in ranked[key]]
        start = end
    for split in ("feedback", "report"):
        found[split] = _with_ids(found[split], name)
    return found


def question_key(question: Any) -> str:
    """The hash that decides a question's split. Spellings of one question share it: Unicode forms (NFKC), upper and lower
    case, and blanks make no difference, in the texts of a table either."""
    return hashlib.sha256(f"{SALT}\n{canonical(_plain(question))}".encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        # Folding can undo the normal form: once more, so that equal texts end equal.
        return " ".join(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", value).casefold()).split())
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {_plain(name): _plain(part) for name, part in value.items()}
    return value


def questions_in(data: bytes) -> Iterator[Any]:
    """What stands as `question` in any object of a JSON file, or of one with a JSON value a line; nothing for other files."""
    try:
        values = [json.loads(data)]
    except (ValueError, RecursionError):
        values = []
        for line in data.split(b"\n"):
            try:
                values.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
    waiting: list[Any] = values
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if value.get("question"):
                yield value["question"]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _with_ids(rows: list[Row], name: str) -> list[Row]:
    """Each row with an `id` of its own: the one it has where each stands once, else by its hash."""
    own = [row.get("id") for row in rows]
    usable = all(isinstance(one, (str, int)) and not isinstance(one, bool) and one != "" for one in own)
    if usable and len({str(one) for one in own}) == len(own):
        return rows
    seen: dict[str, int] = {}
    named = []
    for row in rows:
        digest = hashlib.sha256(canonical(row).encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        again = "" if seen[digest] == 1 else f"-{seen[digest]}"
        named.append({**row, "id": f"{name}-{digest}{again}"})
    return named


def canonical(row: Any) -> str:
    """In ASCII, so that no character of a question is taken for a line's end."""
    return json.dumps(row, sort_keys=True)
