"""The expected best improvement of k runs, from n runs seen (pass@k of an improvement)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from autorl_hpc.report.statistics.resampling import RESAMPLES, TIE, indices
from autorl_hpc.scoring.stats import t_quantile

BOOTSTRAP_FROM_RUNS = 5
"""Fewer values have so few distinct resamples that they say nothing."""


class BestOf(NamedTuple):
    """Expected best of k runs with its 95 % interval; the interval is None where so few runs don't tell one."""

    k: int
    mean: float
    low: float | None
    high: float | None


def expected_best_of(values: Sequence[float], k: int) -> float:
    """Expected best of k runs, by order statistics over all k-subsets of the n runs seen.

    Source: the unbiased pass@k of M. Chen et al., arXiv 2107.03374, 2021, with values in place of passes.
    ValueError unless 1 <= k <= n: nothing is extrapolated.
    """
    return math.fsum(share * value for share, value in zip(_shares(len(values), k), sorted(values), strict=True))


def best_of_curve(values: Sequence[float]) -> list[BestOf]:
    """Expected best of 1, 2, ... n runs; from five runs on with a bootstrap interval over runs, for k up to 1 + sqrt(n).

    The interval is the mean +- t (n - 1 degrees of freedom) times the bootstrap's standard error (10,000 resamples, seeded), which is
    mended by sqrt(n / (n - 1)). Percentiles do far worse, since no resample exceeds the best run seen: for the best of n they
    cover in half of all cases. Even this one covers less the larger k is beside n, and beyond 1 + sqrt(n) none is given;
    docs/statistics.md has what was measured. Runs that are all equal have no interval.

    Args:
        values: of n runs, in any order.
    """
    n = len(values)
    means = [expected_best_of(values, k) for k in range(1, n + 1)]
    errors = _standard_errors(values) if n >= BOOTSTRAP_FROM_RUNS and max(values) - min(values) > TIE else []
    halves = [t_quantile(n - 1) * error for error in errors]
    return [
        BestOf(k, mean, mean - halves[k - 1], mean + halves[k - 1]) if k <= len(halves) else BestOf(k, mean, None, None)
        for k, mean in enumerate(means, 1)
    ]


def _shares(n: int, k: int) -> list[float]:
    """Of all k-subsets of n values, the share in which each is the largest, in ascending order."""
    if not 1 <= k <= n:
        raise ValueError(f"the best of {k} can't be told from {n} runs")
    return [math.comb(rank, k - 1) / math.comb(n, k) for rank in range(n)]


def _standard_errors(values: Sequence[float]) -> list[float]:
    """Of the expected best of 1, 2, ... up to 1 + sqrt(n) runs."""
    import numpy as np

    n = len(values)
    largest = min(n, 1 + math.isqrt(n))
    drawn = np.sort(np.array(sorted(values))[indices(n, RESAMPLES * n).reshape(RESAMPLES, n)], axis=1)
    estimates = drawn @ np.array([_shares(n, k) for k in range(1, largest + 1)]).T
    return [round(math.sqrt(n / (n - 1)) * float(error), 9) for error in estimates.std(axis=0)]
