"""How the improvement grows with time, tokens, submissions or GPU-hours: the mean of the runs' step curves with a band."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from autorl_hpc.scoring.stats import mean_t_interval


class Curve(NamedTuple):
    """The best so far of one run.

    Attributes:
        steps: (x, improvement) of each scored submission, in any order; x is what had been used when it was dropped.
        end: what the run had used when it ended.
    """

    steps: Sequence[tuple[float, float]]
    end: float


class BandPoint(NamedTuple):
    """The mean over all n runs at one x.

    Attributes:
        low, high: t interval over runs (three and more that differ), the range (two), None (one, or three and more that are equal); of this x alone, not of the whole curve.
        running: how many of the runs had not ended before x.
    """

    x: float
    mean: float
    low: float | None
    high: float | None
    n: int
    running: int
    kind: Literal["t", "range", "equal", "none"]


def band(curves: Sequence[Curve], grid: Sequence[float]) -> list[BandPoint]:
    """The mean of the runs' step curves at each x of `grid`, with a pointwise interval over runs.

    A run has 0 before its first scored submission (it has the base model), then the best of its submissions so far, below 0 too
    if all of them are: that is what would be selected. Beyond its own end it keeps its last value, since what it would be
    scored for stays what it is: every run counts at every x, and the mean does not move by who is left. `running` says how
    many had not ended, so that a page can fade where few had.
    ValueError for no curve, or a number that is not finite.
    """
    if not curves:
        raise ValueError("there is no curve")
    if not all(
        math.isfinite(number) for curve in curves for number in (curve.end, *(v for s in curve.steps for v in s))
    ):
        raise ValueError("a step or an end is not finite")
    bests = [_best_so_far(curve) for curve in curves]
    found = []
    for x in grid:
        mean = mean_t_interval([_at(places, best, x) for places, best in bests])
        assert mean.mean is not None
        running = sum(curve.end >= x for curve in curves)
        found.append(BandPoint(x, mean.mean, mean.low, mean.high, mean.n, running, mean.kind))
    return found


def _best_so_far(curve: Curve) -> tuple[list[float], list[float]]:
    """Places of the steps in order, and the best from each on."""
    ordered = sorted(curve.steps)
    return [x for x, _ in ordered], list(accumulate((value for _, value in ordered), max))


def _at(places: Sequence[float], best: Sequence[float], x: float) -> float:
    """A step counts from its own x on."""
    before = bisect_right(places, x)
    return best[before - 1] if before else 0.0
