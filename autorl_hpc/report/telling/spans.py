"""Stretches of budget time: attempts, and sets of intervals with their union and overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autorl_hpc.files.view import RunView


class Span(NamedTuple):
    """From `begin_s` to `end_s` of budget time."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Its length, never negative."""
        return max(0.0, self.end_s - self.begin_s)


def attempts_of(view: RunView, elapsed_s: float) -> dict[int, Span]:
    """When each attempt ran, by its number: up to the next one, the last up to `elapsed_s`."""
    begun = sorted({a.attempt: a.elapsed_s for a in view.attempts}.items())
    ends = [*(begin for _, begin in begun[1:]), elapsed_s]
    return {number: Span(begin, max(begin, end)) for (number, begin), end in zip(begun, ends, strict=False)}


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that don't touch, in order."""
    merged: list[Span] = []
    for span in sorted(s for s in spans if s.end_s > s.begin_s):
        if merged and span.begin_s <= merged[-1].end_s:
            merged[-1] = Span(merged[-1].begin_s, max(merged[-1].end_s, span.end_s))
        else:
            merged.append(span)
    return merged


def overlap_s(a: Sequence[Span], b: Sequence[Span]) -> float:
    """Seconds that lie in both of two unions."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i].end_s, b[j].end_s) - max(a[i].begin_s, b[j].begin_s))
        if a[i].end_s < b[j].end_s:
            i += 1
        else:
            j += 1
    return total
