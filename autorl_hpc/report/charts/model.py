"""What a figure shows, apart from how it is drawn: the page and the files draw the same one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MAX_SERIES = 7
"""Colours that stay apart for colour-blind readers, on paper too; further agents are in the tables and in summary.json."""


@dataclass(frozen=True)
class Series:
    """A line with its band; `low` and `high` are None where the runs are too few for one.

    Attributes:
        colour: its agent's number in this leaderboard, 0 to 6: the same in every figure.
    """

    label: str
    colour: int
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True)
class LinePanel:
    """Lines over one axis.

    Attributes:
        as_steps: a value holds until the next place, where it jumps; else straight lines join them.
        counts: the axis counts something, from 1.
    """

    title: str
    series: tuple[Series, ...]
    x_label: str
    y_label: str
    as_steps: bool = False
    counts: bool = False

    def corners(self, x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
        """Where straight pieces meet that draw values `y` at places `x`."""
        places = list(zip(x, y, strict=True))
        if not self.as_steps:
            return places
        found = places[:1]
        for (_, before), (at, value) in itertools.pairwise(places):
            if value != before:  # what stays level needs no corner
                found += [(at, before), (at, value)]
        return found + [place for place in places[-1:] if place != found[-1]]


@dataclass(frozen=True)
class Bar:
    """A label and its parts, in the order of the panel's kinds."""

    label: str
    parts: tuple[float, ...]


@dataclass(frozen=True)
class Bars:
    """Stacked bars."""

    title: str
    kinds: tuple[str, ...]
    bars: tuple[Bar, ...]
    x_label: str


@dataclass(frozen=True)
class Spot:
    """A mean with its interval."""

    label: str
    mean: float
    low: float | None
    high: float | None
    colour: int
    faint: bool = False


@dataclass(frozen=True)
class Forest:
    """Means with intervals, one a line."""

    title: str
    spots: tuple[Spot, ...]
    x_label: str


@dataclass(frozen=True)
class HeatCell:
    """A value; `mark` is a word of the best and the worst, `clear` whether their intervals are apart."""

    value: float
    mark: Literal["best", "worst"] | None = None
    clear: bool = False


@dataclass(frozen=True)
class Heat:
    """Values by row and column; None where there is no run."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[HeatCell | None, ...], ...]


Panel = LinePanel | Bars | Forest | Heat


@dataclass(frozen=True)
class Figure:
    """One figure of one leaderboard.

    Attributes:
        name: of its files, without what they end in.
        caption: what is to be seen and what isn't, in whole sentences.
        legend: labels of the colours, where it has any.
    """

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    legend: tuple[tuple[str, int], ...] = ()


def shortened_apart(labels: Sequence[str], most: int) -> list[str]:
    """Each at most `most` characters, where that leaves those apart that are; else as long as it takes.

    First what all begin with is dropped, whole words of it: that tells nobody from anybody.
    """
    distinct = set(labels)
    if max(map(len, labels), default=0) > most and len(distinct) > 1:
        begin = _common_words(sorted(distinct))
        labels = [f"…{label[begin:]}" if begin else label for label in labels]
    for room in range(most, max(map(len, labels), default=0) + 1):
        short = [shortened(label, room) for label in labels]
        if len(set(short)) == len(distinct):
            return short
    return list(labels)


def _common_words(labels: Sequence[str]) -> int:
    """How many characters all begin with, up to the end of a word; `labels` in order."""
    first, last = labels[0], labels[-1]
    same = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return max((first.rfind(end, 0, same) + 1 for end in " /"), default=0)


def shortened(label: str, most: int) -> str:
    """At most so many characters, cut in the middle: an agent's name is told by its beginning, its mode by the end."""
    if len(label) <= most:
        return label
    tail = (most - 1) // 2
    return f"{label[: most - 1 - tail]}…{label[len(label) - tail :]}"
