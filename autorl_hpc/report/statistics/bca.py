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
    """Means of all resamples, of shape (RESAMPLES,)."""
    sizes: list[float] = weights.tolist()
    if min(sizes) == max(sizes):
        return _drawn_sums(whole) / (len(sizes) * sizes[0])
    return _drawn_sums(whole) / _drawn_sizes(tuple(sizes))


@lru_cache(maxsize=4)
def _drawn_sizes(sizes: tuple[float, ...]) -> NDArray[np.float64]:
    """Items in each resample: the same for every model on one split."""
    import numpy as np

    return _drawn_sums(np.array(sizes))


def _drawn_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    n = len(values)
    least = values.min()
    limbs, bits = _limbs((values - least).astype(np.int64), 24 - n.bit_length())
    drawn, rows = counts(n), max(1, NEAR_CELLS // n)
    parts = [drawn[start : start + rows].astype(np.float32) @ limbs for start in range(0, RESAMPLES, rows)]
    sums: NDArray[np.float64] = np.concatenate(parts).astype(float) @ bits
    return sums + n * least


def _limbs(values: NDArray[np.int64], bits: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Whole numbers from 0 on, cut into pieces of so many bits, of shape (n, pieces), and what each piece counts.

    Of n things n are drawn, so that a resample's sum of n pieces of 24 - log2(n) bits stays below 2^24: single precision holds it
    exactly, in whatever order it is added up, and takes a third of the time.
    """
    import numpy as np

    pieces = []
    while not pieces or values.any():
        pieces.append(values & ((1 << bits) - 1))
        values = values >> bits
    return np.array(pieces, dtype=np.float32).T.copy(), 2.0 ** (bits * np.arange(len(pieces)))
