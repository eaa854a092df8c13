"""Loops of shell scripts over words that are known: their bodies are followed once for each word."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_TURNS = 8
"""Of one loop; a loop over seeds shows its route in the first."""

_OPENS = re.compile(r"(?:^|[;&|]\s*|\s)do(?=\s|$)")
_CLOSES = re.compile(r"(?:^|[;&|]\s*|\s)done(?=[\s;&|<>)]|$)")
_HEAD = re.compile(r"^\s*for\s+([A-Za-z_]\w*)\s+in\s")


def head(line: str) -> tuple[str, str] | None:
    """The variable and the words of a loop that begins on a line; None: none does."""
    match = _HEAD.match(line)
    return (match[1], line[match.end() :].split(";", 1)[0].split(" #", 1)[0]) if match is not None else None


def body(lines: Sequence[tuple[int, str]], at: int) -> tuple[list[tuple[int, str]], int] | None:
    """The lines between a loop's own `do` and `done`, and where the script goes on; None: it doesn't end.

    `lines[at]` is the loop's head. What stands behind `done` on its line is not followed.
    """
    depth = 0
    found: list[tuple[int, str]] = []
    for place in range(at, len(lines)):
        number, text = lines[place]
        line = text.split(" #", 1)[0]
        marks = sorted(
            [(m.start(), m.end(), 1) for m in _OPENS.finditer(line)]
            + [(m.start(), m.end(), -1) for m in _CLOSES.finditer(line)]
        )
        begin = 0
        for start, end, step in marks:
            depth += step
            if depth == 1 and step == 1:
                begin = end
            if depth == 0:
                found.append((number, line[begin:start]))
                return found, place + 1
        if depth > 0:
            found.append((number, line[begin:]))
    return None
