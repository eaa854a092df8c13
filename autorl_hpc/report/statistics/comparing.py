"""One agent against another on one task: the unit is the run, and runs are exchanged between the two."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

from autorl_hpc.report.statistics.resampling import EXACT_WAYS, RESAMPLES, SEED, TIE


def permutation_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided permutation test of equal means: runs are regrouped, all ways where they are few.

    Exact: the share of regroupings at least as far apart as the one seen. Sampled: (hits + 1) / (draws + 1).
    ValueError for an empty side.
    """
    if not a or not b:
        raise ValueError("a comparison needs runs on both sides")
    pooled = sorted([*a, *b])
    total, n_a, n_b = math.fsum(pooled), len(a), len(b)
    seen = abs(fmean(a) - fmean(b))

    def is_as_far(group: Sequence[float]) -> bool:
        part = math.fsum(group)
        return abs(part / n_a - (total - part) / n_b) >= seen - TIE

    if math.comb(n_a + n_b, n_a) <= EXACT_WAYS:
        hits = [is_as_far(group) for group in combinations(pooled, n_a)]
        return sum(hits) / len(hits)
    draw = random.Random(SEED).sample
    found = sum(is_as_far(draw(pooled, n_a)) for _ in range(RESAMPLES))
    return (found + 1) / (RESAMPLES + 1)


def least_permutation_p(n_a: int, n_b: int) -> float:
    """The least p value that `permutation_p` can give for so many runs: 0.1 for three against three."""
    ways = math.comb(n_a + n_b, n_a)
    return (2 if n_a == n_b else 1) / ways if ways <= EXACT_WAYS else 1 / (RESAMPLES + 1)


def probability_of_improvement(a: Sequence[float], b: Sequence[float]) -> float:
    """Share of pairs of runs in which a beats b, ties half (Mann-Whitney's U over its maximum)."""
    if not a or not b:
        raise ValueError("a comparison needs runs on both sides")
    return sum(1.0 if x > y else 0.5 if x == y else 0.0 for x in a for y in b) / (len(a) * len(b))


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for their number (S. Holm, Scand. J. Statist. 6:65-70, 1979), in the order given."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted
