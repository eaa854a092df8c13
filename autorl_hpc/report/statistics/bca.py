"""The bootstrap interval of a mean over items, or of a mean over items that come in clusters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

from autorl_hpc.report.statistics.resampling import RESAMPLES, UNIT, counts, expanded_tail, quantiles
from autorl_hpc.scoring.stats import LEVEL, Interval

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NEAR_CELLS = 1 << 18
"""Draws held at once in single precision: 1 MB stays in a processor's cache, and whole matrices take twice the time."""

TOGETHER = 50
"""Sums that are drawn together: 12 MB of resampled ones."""

_NORMAL = NormalDist()


def bca_of_mean(sums: Sequence[float], sizes: Sequence[int], level: float = LEVEL) -> Interval:
    """BCa interval of sum(sums) / sum(sizes), where pairs of sum and size are what is drawn: 10,000 resamples, seeded.

    For items each size is 1. Percentiles are expanded (`expanded_tail`), so that few clusters give wide enough intervals. The
    interval of values that are all alike has no width: the caller says what it knows instead.
    Source: B. Efron, JASA 82:171-185, 1987; the acceleration is from the influences sums - mean * sizes.
    ValueError for fewer than two.
    """
    return bca_of_means([sums], sizes, level)[0]


def bca_of_means(several: Sequence[Sequence[float]], sizes: Sequence[int], level: float = LEVEL) -> list[Interval]:
    """`bca_of_mean` of each of several sums over the same things: what takes longest, turning draws into numbers, is done once."""
    import numpy as np

    n = len(sizes)
    if n < 2 or any(n != len(sums) for sums in several):
        raise ValueError(f"{[len(sums) for sums in several]} sums and {n} sizes make no bootstrap")
    weights, tail, found = np.asarray(sizes, dtype=float), expanded_tail(n, level), []
    for start in range(0, len(several), TOGETHER):
        whole = np.rint(np.asarray(several[start : start + TOGETHER], dtype=float) * UNIT)
        for row, resampled in zip(whole, _resampled(whole, weights), strict=True):
            seen = float(row.sum() / weights.sum())
            low, high = bca(resampled, seen, (row - seen * weights).tolist(), tail)
            found.append(Interval(round(low / UNIT, 9), round(high / UNIT, 9)))
    return found


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
    """Means of all resamples, of shape (rows of `whole`, RESAMPLES)."""
    sizes: list[float] = weights.tolist()
    if min(sizes) == max(sizes):
        return _drawn_sums(whole) / (len(sizes) * sizes[0])
    return _drawn_sums(whole) / _drawn_sizes(tuple(sizes))


@lru_cache(maxsize=4)
def _drawn_sizes(sizes: tuple[float, ...]) -> NDArray[np.float64]:
    """Items in each resample: the same for every model on one split."""
    import numpy as np

    found: NDArray[np.float64] = _drawn_sums(np.array([sizes]))[0]
    return found


def _drawn_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of all resamples of each row of whole numbers, of shape (rows, RESAMPLES); exact.

    The numbers, from the least one on, are cut into pieces of so few bits that the sum of n of them stays below 2^24. Of n things
    n are drawn, so single precision holds a resample's sum of pieces exactly, in whatever order it is added up, and takes a
    third of the time.
    """
    import numpy as np

    n, bits = values.shape[1], 24 - values.shape[1].bit_length()
    least = values.min(axis=1, keepdims=True)
    pieces = _pieces((values - least).astype(np.int64), bits)
    drawn, rows = counts(n), max(1, NEAR_CELLS // n)
    columns = np.concatenate(pieces).astype(np.float32).T.copy()
    parts = [drawn[start : start + rows].astype(np.float32) @ columns for start in range(0, RESAMPLES, rows)]
    sums = np.concatenate(parts).T.reshape(len(pieces), len(values), RESAMPLES)
    found: NDArray[np.float64] = n * least + sum(2.0 ** (bits * i) * each.astype(float) for i, each in enumerate(sums))
    return found


def _pieces(values: NDArray[np.int64], bits: int) -> list[NDArray[np.int64]]:
    """Whole numbers from 0 on, cut into pieces of so many bits, the lowest first."""
    found = [values & ((1 << bits) - 1)]
    while (values := values >> bits).any():
        found.append(values & ((1 << bits) - 1))
    return found
