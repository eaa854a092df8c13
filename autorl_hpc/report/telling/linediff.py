"""Lines of two texts that differ, by Myers' greedy algorithm (An O(ND) Difference Algorithm, 1986), with a bound.

difflib's time is quadratic in a text that somebody made for it; here the edits that are looked for are bounded, and two
texts that differ by more are shown as one replaced by the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_EDITS = 150
"""Lines removed and added that are told apart one by one; the time grows with their square: at most some 10 ms."""

CONTEXT_LINES = 2


class Edit(NamedTuple):
    """One line: kept (` `), removed (`-`) or added (`+`); `a` and `b` are line numbers from 1 in the old and new text."""

    sign: str
    line: str
    a: int
    b: int


def edits(old: Sequence[str], new: Sequence[str]) -> list[Edit]:
    """Every line of both texts, in order. Where more than MAX_EDITS lines differ, all between the first and the last
    difference is removed and added."""
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    middle = _signs(old[head : len(old) - tail], new[head : len(new) - tail])
    signs = " " * head + middle + " " * tail
    found, a, b = [], 0, 0
    for sign in signs:
        line = new[b] if sign == "+" else old[a]
        a, b = a + (sign != "+"), b + (sign != "-")
        found.append(Edit(sign, line, a, b))
    return found


def _signs(old: Sequence[str], new: Sequence[str]) -> str:
    """The edits' signs alone."""
    n, m = len(old), len(new)
    replaced = "-" * n + "+" * m
    if not n or not m or abs(n - m) > MAX_EDITS:
        return replaced
    furthest = {1: 0}  # by diagonal, how far in `old` the best path has come
    trace: list[dict[int, int]] = []
    for d in range(min(n + m, MAX_EDITS) + 1):
        trace.append(dict(furthest))
        for k in range(-d, d + 1, 2):
            down = k == -d or (k != d and furthest.get(k - 1, -1) < furthest.get(k + 1, -1))
            x = furthest.get(k + 1, 0) if down else furthest.get(k - 1, 0) + 1
            y = x - k
            while x < n and y < m and old[x] == new[y]:
                x, y = x + 1, y + 1
            furthest[k] = x
            if x >= n and y >= m:
                return _path(trace, n, m)
    return replaced


def _path(trace: Sequence[dict[int, int]], n: int, m: int) -> str:
    """Back from the end through the states that each number of edits began with."""
    signs: list[str] = []
    x, y = n, m
    for d in range(len(trace) - 1, -1, -1):
        before, k = trace[d], x - y
        down = k == -d or (k != d and before.get(k - 1, -1) < before.get(k + 1, -1))
        prev_x = before.get(k + 1, 0) if down else before.get(k - 1, 0)
        prev_y = prev_x - (k + 1 if down else k - 1)
        if d == 0:
            prev_x, prev_y = 0, 0
        start_x, start_y = (prev_x, prev_y + 1) if down else (prev_x + 1, prev_y)
        same = x - (start_x if d else 0)
        signs += " " * same
        if d:
            signs.append("+" if down else "-")
        x, y = prev_x, prev_y
    return "".join(reversed(signs))


def hunks(found: Sequence[Edit]) -> list[str]:
    """Lines of a unified diff: each change with CONTEXT_LINES lines around it, under a `@@` line."""
    changed = [i for i, edit in enumerate(found) if edit.sign != " "]
    lines: list[str] = []
    at = 0
    while at < len(changed):
        first = last = changed[at]
        while at < len(changed) and changed[at] <= last + 2 * CONTEXT_LINES + 1:
            last = changed[at]
            at += 1
        part = found[max(0, first - CONTEXT_LINES) : last + CONTEXT_LINES + 1]
        old, new = sum(e.sign != "+" for e in part), sum(e.sign != "-" for e in part)
        a, b = part[0].a - (part[0].sign != "+") + (old > 0), part[0].b - (part[0].sign != "-") + (new > 0)
        lines.append(f"@@ -{a},{old} +{b},{new} @@")
        lines += [edit.sign + edit.line for edit in part]
    return lines
