"""The mean of one cell over its runs: bootstrap interval, and the test of its improvement against zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from autorl_hpc.report.statistics.comparing import holm
from autorl_hpc.report.statistics.resampling import TIE, UNIT, counts, expanded_tail, quantiles
from autorl_hpc.report.statistics.signs import least_sign_flip_p, sign_flip_p
from autorl_hpc.scoring.stats import LEVEL, Interval, t_within

BOOTSTRAP_FROM_RUNS = 5
"""Fewer values have so few distinct resamples that their quantiles say nothing."""

TEST_FROM_RUNS = 3
"""As many as the t interval needs: two runs have a range and no test."""


class CellTest(NamedTuple):
    """Whether a cell's mean improvement differs from 0; all None below three runs.

    Attributes:
        p_value: one-sample t test over runs, of the same assumptions as the t interval; where all runs are equal, so that
            their spread is unknown, the sign-flip test's.
        p_holm: adjusted for the number of cells tested.
        p_sign_flip: exact test that assumes only that improvements are symmetric about 0 if there is no mean improvement.
        p_sign_flip_least: the least that so many runs can give: 0.25 for three, 0.03 for six.
    """

    p_value: float | None
    p_holm: float | None
    p_sign_flip: float | None
    p_sign_flip_least: float | None


def bootstrap_mean(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Bootstrap interval of a mean over runs (expanded percentiles, 10,000 resamples, seeded); None below five runs.

    The order of the values does not matter; see `expanded_tail` for what is expanded.
    """
    import numpy as np

    n = len(values)
    if n < BOOTSTRAP_FROM_RUNS:
        return None
    means = counts(n) @ np.rint(np.array(sorted(values)) * UNIT) / n / UNIT
    tail = expanded_tail(n, level)
    return Interval(*quantiles(means, (tail, 1 - tail)))


def t_test_p(values: Sequence[float]) -> float | None:
    """Two-sided one-sample t test of a mean of 0; None where the values are all equal, or fewer than two."""
    n = len(values)
    if n < 2 or max(values) - min(values) <= TIE:
        return None
    return max(0.0, 1 - t_within(abs(fmean(values)) * math.sqrt(n) / stdev(values), n - 1))


def leaderboard(cells: Sequence[Sequence[float]]) -> list[CellTest]:
    """The cells of one leaderboard, each by the improvements of its counted runs, tested against 0 and adjusted by Holm.

    Cells of fewer than three runs are not tested and don't count among the tests. In the order given.
    """
    tested = [number for number, values in enumerate(cells) if len(values) >= TEST_FROM_RUNS]
    flipped = {number: sign_flip_p(cells[number]) for number in tested}
    raw = {number: p if (p := t_test_p(cells[number])) is not None else flipped[number] for number in tested}
    adjusted = dict(zip(tested, holm([raw[number] for number in tested]), strict=True))
    return [
        CellTest(raw[number], adjusted[number], flipped[number], least_sign_flip_p(len(values)))
        if number in raw
        else CellTest(None, None, None, None)
        for number, values in enumerate(cells)
    ]
