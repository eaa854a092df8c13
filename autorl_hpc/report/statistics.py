"""Statistics over runs: the unit is the run. Pure functions of lists of numbers; the same input gives the same output."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

from autorl_hpc.scoring.stats import LEVEL, Interval

RESAMPLES = 10_000
SEED = 20260101
"""Any fixed number: two reports over the same runs must not differ."""

BOOTSTRAP_FROM_RUNS = 5
"""Fewer values have so few distinct resamples that their quantiles say nothing."""

EXACT_PERMUTATIONS = 20_000
"""Up to this many regroupings are all tried; beyond it a seeded sample of `RESAMPLES` is."""

_TIE = 1e-9
"""Sums of the same numbers in another order differ by less than this, and count as equal."""


def bootstrap_mean(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Percentile bootstrap interval of a mean over runs (10,000 resamples, seeded); None below five runs.

    The order of the values does not matter. Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, 13.
    """
    n = len(values)
    if n < BOOTSTRAP_FROM_RUNS:
        return None
    ordered = sorted(values)
    draw = random.Random(SEED).choices
    means = sorted(math.fsum(draw(ordered, k=n)) / n for _ in range(RESAMPLES))
    tail = (1 - level) / 2
    return Interval(_quantile(means, tail), _quantile(means, 1 - tail))


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
        return abs(part / n_a - (total - part) / n_b) >= seen - _TIE

    if math.comb(n_a + n_b, n_a) <= EXACT_PERMUTATIONS:
        hits = [is_as_far(group) for group in combinations(pooled, n_a)]
        return sum(hits) / len(hits)
    draw = random.Random(SEED).sample
    found = sum(is_as_far(draw(pooled, n_a)) for _ in range(RESAMPLES))
    return (found + 1) / (RESAMPLES + 1)


def least_permutation_p(n_a: int, n_b: int) -> float:
    """The least p value that `permutation_p` can give for so many runs: 0.1 for three against three."""
    ways = math.comb(n_a + n_b, n_a)
    return (2 if n_a == n_b else 1) / ways if ways <= EXACT_PERMUTATIONS else 1 / (RESAMPLES + 1)


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


def expected_best_of(values: Sequence[float], k: int) -> float:
    """Expected best of k runs, by order statistics over all k-subsets of the n runs seen.

    ValueError unless 1 <= k <= n: nothing is extrapolated.
    """
    n = len(values)
    if not 1 <= k <= n:
        raise ValueError(f"the best of {k} can't be told from {n} runs")
    return math.fsum(math.comb(i, k - 1) * value for i, value in enumerate(sorted(values))) / math.comb(n, k)


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between order statistics (numpy's default)."""
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
