"""The expected best improvement of k runs, from n runs seen (pass@k of an improvement)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from autorl_hpc.report.statistics.resampling import CHUNK_CELLS, RESAMPLES, TIE, indices
from autorl_hpc.scoring.stats import t_quantile

BOOTSTRAP_FROM_RUNS = 5
"""Fewer values have so few distinct resamples that they say nothing."""

LARGEST_K = 100
"""Nobody starts an agent more often to keep the best; with a thousand runs the curve would be most of the report."""

LEAST_RESAMPLES = 500
"""Where there are thousands of runs: a standard error is within 3 % with 500 resamples, and within 0.7 % with 10,000."""

_BEST = 6
"""First word of a stream."""


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
    """Expected best of 1, 2, ... n runs (at most 100); from five runs on with a bootstrap interval over runs, for k up to 1 + sqrt(n).

    The interval is the mean +- t (n - 1 degrees of freedom) times the bootstrap's standard error (10,000 resamples, fewer for more than 200 runs, seeded), which is
    mended by sqrt(n / (n - 1)). Percentiles do far worse, since no resample exceeds the best run seen: for the best of n they
    cover in half of all cases. Even this one covers less the larger k is beside n, and beyond 1 + sqrt(n) none is given;
    docs/statistics.md has what was measured. Runs that are all equal have no interval.

    Args:
        values: of n runs, in any order.
    """
    n = len(values)
    means = [expected_best_of(values, k) for k in range(1, min(n, LARGEST_K) + 1)]
    errors = _standard_errors(values) if n >= BOOTSTRAP_FROM_RUNS and max(values) - min(values) > TIE else []
    halves = [t_quantile(n - 1) * error for error in errors]
    return [
        BestOf(k, mean, mean - halves[k - 1], mean + halves[k - 1]) if k <= len(halves) else BestOf(k, mean, None, None)
        for k, mean in enumerate(means, 1)
    ]


def _shares(n: int, k: int) -> list[float]:
    """Of all k-subsets of n values, the share in which each is the largest, in ascending order: C(rank, k - 1) / C(n, k)."""
    if not 1 <= k <= n:
        raise ValueError(f"the best of {k} can't be told from {n} runs")
    shares = [0.0] * n
    share = k / n  # of the largest; each next is (rank - k + 1) / rank of the one above
    for rank in range(n - 1, k - 2, -1):
        shares[rank] = share
        share *= (rank - k + 1) / rank if rank else 0.0
    return shares


def _standard_errors(values: Sequence[float]) -> list[float]:
    """Of the expected best of 1, 2, ... up to 1 + sqrt(n) runs."""
    import numpy as np

    n = len(values)
    ordered = np.array(sorted(values))
    shares = np.array([_shares(n, k) for k in range(1, min(n, LARGEST_K, 1 + math.isqrt(n)) + 1)]).T
    resamples = max(LEAST_RESAMPLES, min(RESAMPLES, CHUNK_CELLS // n))
    rows, estimates = max(1, CHUNK_CELLS // n), []
    for start in range(0, resamples, rows):
        size = min(rows, resamples - start)
        drawn = ordered[indices(n, size * n, _BEST, start).reshape(size, n)]
        drawn.sort(axis=1)
        estimates.append(drawn @ shares)
    errors = np.concatenate(estimates).std(axis=0)
    return [round(math.sqrt(n / (n - 1)) * float(error), 9) for error in errors]
