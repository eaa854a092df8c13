"""Selected against base where outcomes are graded (a share, a reward) instead of right or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

from autorl_hpc.report.statistics import RESAMPLES, SEED
from autorl_hpc.scoring.stats import LEVEL

_CHUNK_CELLS = 2_000_000
"""Resampled cells held at once: 16 MB."""


class GradedResult(NamedTuple):
    """New against base on the same items, in units of outcomes."""

    difference: float
    low: float
    high: float
    p_value: float


def paired_graded(base: Sequence[float], new: Sequence[float], level: float = LEVEL) -> GradedResult:
    """Mean paired difference with its BCa bootstrap interval and a sign-flip p value (10,000 each, seeded).

    Sources: B. Efron, JASA 82:171-185, 1987 (BCa; for a mean the acceleration is the skewness over 6 sqrt(n)); the
    sign-flip test is exact under a symmetric difference, p = (hits + 1) / (draws + 1).
    ValueError unless both hold the same two or more items.
    """
    import numpy as np

    if len(base) != len(new) or len(base) < 2:
        raise ValueError(f"{len(base)} and {len(new)} outcomes are not the same two or more items")
    differences = np.asarray(new, dtype=float) - np.asarray(base, dtype=float)
    n = len(differences)
    seen = float(differences.mean())
    centered = differences - seen
    spread = float((centered**2).sum())
    if spread == 0.0:
        return GradedResult(seen, seen, seen, 1.0 if seen == 0.0 else 1 / (RESAMPLES + 1))
    rng = np.random.default_rng(SEED)
    means, hits = [], 0
    rows = max(1, _CHUNK_CELLS // n)
    for start in range(0, RESAMPLES, rows):
        size = min(rows, RESAMPLES - start)
        means.append(differences[rng.integers(0, n, size=(size, n))].mean(axis=1))
        flipped = (differences * rng.choice((-1.0, 1.0), size=(size, n))).mean(axis=1)
        hits += int((np.abs(flipped) >= abs(seen) - 1e-12).sum())
    resampled = np.sort(np.concatenate(means))
    normal = NormalDist()
    below = float((resampled < seen).mean() + (resampled == seen).mean() / 2)
    bias = normal.inv_cdf(min(max(below, 1 / RESAMPLES), 1 - 1 / RESAMPLES))
    acceleration = float((centered**3).sum()) / (6 * spread**1.5)

    def limit(tail: float) -> float:
        z = bias + normal.inv_cdf(tail)
        return float(np.quantile(resampled, normal.cdf(bias + z / (1 - acceleration * z))))

    tail = (1 - level) / 2
    return GradedResult(seen, limit(tail), limit(1 - tail), (hits + 1) / (RESAMPLES + 1))
