"""The bootstrap interval of a mean over items, or of a mean over items that come in clusters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

from autorl_hpc.report.statistics.resampling import CHUNK_CELLS, RESAMPLES, UNIT, counts, expanded_tail, quantiles
from autorl_hpc.scoring.stats import LEVEL, Interval

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NORMAL = NormalDist()


def bca_of_mean(sums: Sequence[float], sizes: Sequence[int], level: float = LEVEL) -> Interval:
    """BCa interval of sum(sums) / sum(sizes), where pairs of sum and size are what is drawn: 10,000 resamples, seeded.

    For items each size is 1. Percentiles are expanded (`expanded_tail`), so that few clusters give wide enough intervals. The
    interval of values that are all alike has no width: the caller says what it knows instead.
    Source: B. Efron, JASA 82:171-185, 1987; the acceleration is from the influences sums - mean * sizes.
    ValueError for fewer than two.
    """
    import numpy as np

    n = len(sums)
    if n < 2 or n != len(sizes):
        raise ValueError(f"{n} sums and {len(sizes)} sizes make no bootstrap")
    whole, weights = np.rint(np.asarray(sums, dtype=float) * UNIT), np.asarray(sizes, dtype=float)
    seen = float(whole.sum() / weights.sum())
    moved = [total - seen * size for total, size in zip(whole.tolist(), sizes, strict=True)]
    low, high = bca(_resampled(whole, weights), seen, moved, expanded_tail(n, level))
    return Interval(round(low / UNIT, 9), round(high / UNIT, 9))


def bca(resampled: NDArray[np.float64], seen: float, influences: Sequence[float], tail: float) -> Interval:
    """BCa interval from resampled values of a statistic.

    Args:
        resampled: of shape (resamples,).
        seen: the statistic itself.
        influences: of each thing that is drawn, up to a factor: by how much the statistic grows with its weight.
        tail: on each side, 0.025 for 95 %.
    """
    n = len(resampled)
    squares = math.fsum(u * u for u in influences)
    acceleration = math.fsum(u * u * u for u in influences) / (6 * squares**1.5) if squares > 0 else 0.0
    below = float((resampled < seen).mean() + (resampled == seen).mean() / 2)
    bias = _NORMAL.inv_cdf(min(max(below, 1 / n), 1 - 1 / n))

    def share(of: float) -> float:
        z = bias + _NORMAL.inv_cdf(of)
        shrunk = 1 - acceleration * z
        return _NORMAL.cdf(bias + z / shrunk) if shrunk > 0 else float(z > 0)

    return Interval(*quantiles(resampled, (share(tail), share(1 - tail))))


def _resampled(whole: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    n = len(whole)
    drawn, means = counts(n), []
    alike = bool((weights == weights[0]).all())
    rows = max(1, CHUNK_CELLS // n)
    for start in range(0, RESAMPLES, rows):
        part = drawn[start : start + rows].astype(float)
        means.append((part @ whole) / (n * weights[0] if alike else part @ weights))
    return np.concatenate(means)
