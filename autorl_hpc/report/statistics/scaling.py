"""How the improvement grows with time, tokens, submissions or GPU-hours: the mean of the runs' step curves with a band."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple


class Curve(NamedTuple):
    """The best so far of one run.

    Attributes:
        steps: (x, improvement) of each scored submission, in any order; x is what had been used when it was dropped.
        end: what the run had used when it ended; never below its last step.
    """

    steps: Sequence[tuple[float, float]]
    end: float


class BandPoint(NamedTuple):
    """The mean over all runs at one x.

    Attributes:
        low, high: t interval over runs (three and more), the range (two), None (one); of this x alone, not of the whole curve.
        running: how many of the n runs had not ended before x.
    """

    x: float
    mean: float
    low: float | None
    high: float | None
    n: int
    running: int
    kind: Literal["t", "range", "none"]


def band(curves: Sequence[Curve], grid: Sequence[float]) -> list[BandPoint]:
    """The mean of the runs' step curves at each x of `grid`, with a pointwise interval over runs.

    A run has 0 before its first scored submission (it has the base model), then the best of its submissions so far, below 0 too
    if all of them are: that is what would be selected. Beyond its own end it keeps its last value, since what it would be
    scored for stays what it is: every run counts at every x, and the mean does not change by who is left. `running` says how
    many had not ended, so that a page can fade where few had.
    ValueError for no curve, or a number that is not finite.
    """
    raise NotImplementedError
