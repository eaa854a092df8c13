"""Held-out items as rows of a file: read, and checked before anything is queued, by file and line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

MARKS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
"""What a file begins with that was saved in another encoding."""


class NotUtf8(ValueError):
    """A file's text is in another encoding; the words go after "is not in UTF-8:"."""


class BadRow(ValueError):
    """A row that is no item; the words name the line."""


def utf8_lines(data: bytes) -> Iterator[tuple[int, str]]:
    """The lines that hold something, with their numbers from 1.

    Not by splitlines(): a question may hold a character that it takes for a line's end.

    Raises:
        NotUtf8: another encoding, or none.
    """
    for mark, name in MARKS.items():
        if data.startswith(mark):
            raise NotUtf8(f"it begins like {name}")
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise NotUtf8(f"line {number} holds the byte 0x{line[error.start]:02x}") from None


def read_items(data: bytes, *, question: bool = False, answer: bool = False) -> list[dict[str, Any]]:
    """The rows of an items.jsonl.

    Args:
        question, answer: whether each row must have one.

    Raises:
        NotUtf8, BadRow: the first row that is none, or whose `id` is missing or stood before.
    """
    rows: list[dict[str, Any]] = []
    lines: dict[str, int] = {}
    for number, line in utf8_lines(data):
        row = _row(number, line)
        own = row.get("id")
        if isinstance(own, bool) or not isinstance(own, (str, int)) or own == "":
            raise BadRow(
                f"line {number} has no `id`" if own is None else f"line {number}: `id` is no text and no number"
            )
        if str(own) in lines:
            raise BadRow(f"line {number}: the id {str(own)[:100]!r} stands in line {lines[str(own)]} already")
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
        raise BadRow(f"line {number} is no JSON: {error}") from None
    if not isinstance(row, dict):
        kind = "list" if isinstance(row, list) else "text" if isinstance(row, str) else "plain value"
        raise BadRow(f"line {number} is a {kind}, not an object with `id`, `question` and `answer`")
    return row
