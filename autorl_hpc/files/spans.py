"""Spans of time, pairs of seconds (from, to): joined, taken from one another, added up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[float, float]


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same moments as spans in order that don't touch; empty ones and turned ones are left out."""
    found: list[Span] = []
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return tuple(found)


def without(spans: Sequence[Span], taken: Sequence[Span]) -> tuple[Span, ...]:
    """The moments of `spans` that are not in `taken`; both joined."""
    found: list[Span] = []
    at = 0
    for begin, end in spans:
        while at < len(taken) and taken[at][1] <= begin:
            at += 1
        here, look = begin, at
        while look < len(taken) and taken[look][0] < end:
            if here < taken[look][0]:
                found.append((here, taken[look][0]))
            here = max(here, taken[look][1])
            look += 1
        if here < end:
            found.append((here, end))
    return tuple(found)


def seconds_of(spans: Iterable[Span]) -> float:
    """Their lengths together."""
    return sum(end - begin for begin, end in spans)
