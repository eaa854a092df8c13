"""The mean of one cell over its runs: bootstrap interval, and the test of its improvement against zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autorl_hpc.report.statistics.resampling import RESAMPLES, counts, expanded_tail, quantile
from autorl_hpc.scoring.stats import LEVEL, Interval

BOOTSTRAP_FROM_RUNS = 5
"""Fewer values have so few distinct resamples that their quantiles say nothing."""


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


def leaderboard(cells: Sequence[Sequence[float]]) -> list[CellTest]:
    """The cells of one leaderboard, each by the improvements of its counted runs, tested against 0 and adjusted by Holm.

    Cells of fewer than three runs are not tested and don't count among the tests. In the order given.
    """
    raise NotImplementedError


def bootstrap_mean(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Bootstrap interval of a mean over runs (expanded percentiles, 10,000 resamples, seeded); None below five runs.

    The order of the values does not matter; see `expanded_tail` for what is expanded.
    """
    import numpy as np

    n = len(values)
    if n < BOOTSTRAP_FROM_RUNS:
        return None
    means = np.sort(counts(n, RESAMPLES) @ np.array(sorted(values)) / n).tolist()
    tail = expanded_tail(n, level)
    return Interval(quantile(means, tail), quantile(means, 1 - tail))
