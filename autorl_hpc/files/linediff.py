"""The difference of two texts by lines, in bounded work: texts are an agent's, and difflib takes cubic time on bad ones.

Myers, "An O(ND) difference algorithm and its variations" (1986), greedy and forward, given up beyond so many steps: then what
lies between the equal beginnings and ends counts as replaced. No clock decides, so the same texts give the same answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

CONTEXT_LINES = 3
MAX_EDITS = 1000
"""Edits between two texts that are looked for one by one. Memory grows with its square: 4 MB here."""

Equal = tuple[int, int, int]
"""First line in the old text, in the new text, number of lines."""


@dataclass
class Work:
    """Steps that may still be made. One for all files of a comparison."""

    steps: int = 2_000_000
    given_up: int = field(default=0)


def equal_blocks(old: Sequence[str], new: Sequence[str], work: Work) -> list[Equal]:
    """Runs of equal lines in order, the last one empty at the ends of both texts."""
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    middle = _snakes(old[start : len(old) - end], new[start : len(new) - end], work)
    blocks = [(0, 0, start), *((a + start, b + start, n) for a, b, n in middle), (len(old) - end, len(new) - end, end)]
    return [*(block for block in blocks if block[2]), (len(old), len(new), 0)]


def _snakes(old: Sequence[str], new: Sequence[str], work: Work) -> list[Equal]:
    """The equal runs of a shortest edit script; none if it takes too many steps to find."""
    if not old or not new:
        return []
    most = min(len(old) + len(new), MAX_EDITS)
    reach = array("i", bytes(4 * (2 * most + 3)))  # by diagonal, which may be negative: the farthest old line
    trace: list[array[int]] = []
    for edits in range(most + 1):
        trace.append(reach[most + 1 - edits - 1 : most + 1 + edits + 2])
        for diagonal in range(-edits, edits + 1, 2):
            at = most + 1 + diagonal
            down = diagonal == -edits or (diagonal != edits and reach[at - 1] < reach[at + 1])
            x = begun = reach[at + 1] if down else reach[at - 1] + 1
            y = x - diagonal
            while x < len(old) and y < len(new) and old[x] == new[y]:
                x, y = x + 1, y + 1
            reach[at] = x
            work.steps -= 1 + x - begun
            if x >= len(old) and y >= len(new):
                return _walk_back(trace, len(old), len(new))
        if work.steps <= 0:
            break
    work.given_up += 1
    return []


def _walk_back(trace: list[array[int]], x: int, y: int) -> list[Equal]:
    found: list[Equal] = []
    for edits in range(len(trace) - 1, -1, -1):
        reach, diagonal = trace[edits], x - y
        at = edits + 1 + diagonal
        down = diagonal == -edits or (diagonal != edits and reach[at - 1] < reach[at + 1])
        before = diagonal + 1 if down else diagonal - 1
        from_x = reach[at + 1] if down else reach[at - 1]
        after_x = from_x if down else from_x + 1  # where the edit leads: equal lines follow
        if x > after_x:
            found.append((after_x, after_x - diagonal, x - after_x))
        x, y = from_x, from_x - before
    return found[::-1]


@dataclass(frozen=True)
class LineDiff:
    """`text`: the hunks of a unified diff, without the lines that name the files."""

    added: int
    removed: int
    text: str


def line_diff(old: str, new: str, work: Work) -> LineDiff:
    """The difference of two texts. A last line without an end is told as diff does."""
    before, after = _lines(old), _lines(new)
    blocks = equal_blocks(before, after, work)
    same = sum(block[2] for block in blocks)
    text = "".join(_hunk(before, after, group) for group in _groups(blocks))
    return LineDiff(len(after) - same, len(before) - same, text)


def _lines(text: str) -> list[str]:
    """By line feeds alone: str.splitlines parts lines at signs that no editor and no git takes for an end."""
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


Change = tuple[int, int, int, int]
"""Old lines from, to; new lines from, to."""


def _groups(blocks: list[Equal]) -> Iterator[list[Change]]:
    """Changes with fewer than two contexts of equal lines between them stand in one hunk."""
    group: list[Change] = []
    a = b = 0
    for at_a, at_b, count in blocks:
        if at_a > a or at_b > b:
            if group and a - group[-1][1] > 2 * CONTEXT_LINES:
                yield group
                group = []
            group.append((a, at_a, b, at_b))
        a, b = at_a + count, at_b + count
    if group:
        yield group


def _hunk(before: Sequence[str], after: Sequence[str], group: list[Change]) -> str:
    first, last = group[0], group[-1]
    lead = min(CONTEXT_LINES, first[0], first[2])
    a, b = first[0] - lead, first[2] - lead
    end_a, end_b = min(len(before), last[1] + CONTEXT_LINES), min(len(after), last[3] + CONTEXT_LINES)
    lines, at = [f"@@ -{_range(a, end_a)} +{_range(b, end_b)} @@\n"], a
    for from_a, to_a, from_b, to_b in group:
        lines += [_line(" ", text) for text in before[at:from_a]]
        lines += [_line("-", text) for text in before[from_a:to_a]]
        lines += [_line("+", text) for text in after[from_b:to_b]]
        at = to_a
    lines += [_line(" ", text) for text in before[at:end_a]]
    return "".join(lines)


def _range(first: int, end: int) -> str:
    count = end - first
    return f"{first + (count > 0)}" if count == 1 else f"{first + (count > 0)},{count}"


def _line(sign: str, text: str) -> str:
    return sign + text if text.endswith("\n") else f"{sign}{text}\n\\ No newline at end of file\n"
