"""The mean of one cell over its runs: bootstrap interval, and the test of its improvement against zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from autorl_hpc.report.statistics.resampling import TIE, UNIT, counts, expanded_tail, quantiles
from autorl_hpc.report.statistics.signs import least_sign_flip_p, sign_flip_p
from autorl_hpc.scoring.stats import LEVEL, Interval, t_outside

BOOTSTRAP_FROM_RUNS = 5
"""Fewer values have so few distinct resamples that their quantiles say nothing."""

TEST_FROM_RUNS = 3
"""As many as the t interval needs: two runs have a range and no test."""


class CellTest(NamedTuple):
    """Whether a cell's mean improvement differs from 0; all None below three runs.

    Attributes:
        p_value: one-sample t test over runs, of the same assumptions as the t interval; where all runs are equal, so that
            their spread is unknown, the sign-flip test's.
        p_sign_flip: exact test that assumes only that improvements are symmetric about 0 if there is no mean improvement.
        p_sign_flip_least: the least that so many runs can give: 0.25 for three, 0.03 for six.
    """

    p_value: float | None
    p_sign_flip: float | None
    p_sign_flip_least: float | None


def bootstrap_mean(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Bootstrap interval of a mean over runs (expanded percentiles, 10,000 resamples, seeded); None below five runs, or equal ones.

    The order of the values does not matter; see `expanded_tail` for what is expanded.
    """
    import numpy as np

    n = len(values)
    if n < BOOTSTRAP_FROM_RUNS or max(values) - min(values) <= TIE:
        return None
    means = counts(n) @ np.rint(np.array(sorted(values)) * UNIT) / n / UNIT
    tail = expanded_tail(n, level)
    return Interval(*quantiles(means, (tail, 1 - tail)))


def t_test_p(values: Sequence[float]) -> float | None:
    """Two-sided one-sample t test of a mean of 0; None where the values are all equal, or fewer than two."""
    n = len(values)
    if n < 2 or max(values) - min(values) <= TIE:
        return None
    return t_outside(abs(fmean(values)) * math.sqrt(n) / stdev(values), n - 1)


def against_zero(values: Sequence[float]) -> CellTest:
    """A cell, by the improvements of its counted runs, tested against 0; not tested below three runs.

    Nothing is adjusted here: for how many cells is known where the leaderboard is (report/leaderboard.py).
    """
    if len(values) < TEST_FROM_RUNS:
        return CellTest(None, None, None)
    flipped = sign_flip_p(values)
    p_value = t_test_p(values)
    return CellTest(flipped if p_value is None else p_value, flipped, least_sign_flip_p(len(values)))
