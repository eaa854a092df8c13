"""Items that are not independent: goals of one product, games of one task. What is drawn, and whose signs turn, is the cluster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Literal, NamedTuple

from autorl_hpc.report.statistics.bca import bca_of_mean, bca_of_means
from autorl_hpc.report.statistics.signs import sign_flip_p
from autorl_hpc.scoring.stats import LEVEL, Interval, t_quantile, tango, wilson_share

BOOTSTRAP_FROM_CLUSTERS = 5
"""Fewer have so few distinct resamples that their quantiles say nothing."""

FEW_VARY = 10
"""Where fewer clusters or items than this differ from the others, or their sizes make them count as fewer, resamples hold too little of
what there might be: the interval is then at least as wide as a score interval of all-or-nothing outcomes. docs/statistics.md has what
was measured."""

ENOUGH_TO_TELL = 3
"""Fewer clusters tell nothing of how much clusters differ: Student's quantile for two is 12.7, and for one there is none."""

Kind = Literal["bootstrap over clusters", "Wilson over clusters"]
PairedKind = Literal["bootstrap over clusters", "Tango over clusters"]


class Totals(NamedTuple):
    """Clusters in the order of their names: sum of values and number of items of each."""

    sums: list[float]
    sizes: list[int]

    @property
    def mean(self) -> float:
        """The mean over items."""
        return math.fsum(self.sums) / sum(self.sizes)


class ClusteredMean(NamedTuple):
    """The interval of a mean over items, and how it came about."""

    low: float
    high: float
    kind: Kind


class ClusteredDifference(NamedTuple):
    """New against base on the same clustered items, in units of outcomes."""

    difference: float
    low: float
    high: float
    p_value: float
    clusters: int
    kind: PairedKind


def totals(values: Sequence[float], clusters: Sequence[str]) -> Totals:
    """Values summed by cluster. ValueError unless there is one cluster name for each of at least one value."""
    if len(values) != len(clusters) or not values:
        raise ValueError(f"{len(values)} values and {len(clusters)} names of clusters")
    groups = _groups(tuple(clusters))
    return Totals([math.fsum([values[place] for place in group]) for group in groups], [len(group) for group in groups])


@lru_cache(maxsize=4)
def _groups(clusters: tuple[str, ...]) -> list[list[int]]:
    """Places of the members of each cluster, in the order of their names: the same for every model on one split."""
    members: dict[str, list[int]] = {}
    for place, cluster in enumerate(clusters):
        members.setdefault(cluster, []).append(place)
    return [members[name] for name in sorted(members)]


def clustered_interval(outcomes: Sequence[float], clusters: Sequence[str], level: float = LEVEL) -> ClusteredMean:
    """The interval of a score whose items come in clusters: BCa bootstrap over clusters.

    Where every cluster has the same mean (all solved, none solved), or there are fewer than five, resamples say nothing:
    `wilson_of_clusters` then, which is as wide as clusters can make it.
    """
    return clustered_intervals([outcomes], clusters, level)[0]


def clustered_intervals(
    several: Sequence[Sequence[float]], clusters: Sequence[str], level: float = LEVEL
) -> list[ClusteredMean]:
    """`clustered_interval` of several scores on the same items, which takes much less time than one by one."""
    every = [totals(outcomes, clusters) for outcomes in several]
    drawn = [found for found in every if not _says_nothing(found)]
    intervals = iter(bca_of_means([found.sums for found in drawn], drawn[0].sizes, level) if drawn else ())
    return [
        _by_clusters_alone(found, level) if _says_nothing(found) else _resampled(found, next(intervals), level)
        for found in every
    ]


def _says_nothing(found: Totals) -> bool:
    """Whether resamples of these clusters say nothing."""
    return len(found.sums) < BOOTSTRAP_FROM_CLUSTERS or _alike(found)


def _by_clusters_alone(found: Totals, level: float) -> ClusteredMean:
    n = len(found.sums)
    interval = wilson_of_clusters(found.mean, n, effective_number(found), level)
    return ClusteredMean(*interval, "Wilson over clusters")


def wilson_of_clusters(mean: float, n: int, effective: float, level: float = LEVEL) -> Interval:
    """Wilson's interval of n clusters that count as so many items, each as if it were solved as a whole.

    Of fewer than five, by Student's quantile (n - 1 degrees of freedom) in place of the normal one; of one or two, all that a score
    can be.

    Args:
        effective: `effective_number`: of 97 items in one cluster and three alone hardly more than one is known.
    """
    if n < ENOUGH_TO_TELL:
        return Interval(0.0, 1.0)
    return wilson_share(min(1.0, max(0.0, mean)), effective, _level_of(n, level))


def _level_of(n: int, level: float) -> float:
    """The level at which the normal quantile is the one that n clusters need."""
    if n >= BOOTSTRAP_FROM_CLUSTERS:
        return level
    return 2 * NormalDist().cdf(t_quantile(n - 1, level)) - 1


def _resampled(found: Totals, interval: Interval, level: float) -> ClusteredMean:
    if vary_little(found):
        interval = hull(interval, wilson_share(min(1.0, max(0.0, found.mean)), effective_number(found), level))
    return ClusteredMean(*interval, "bootstrap over clusters")


def paired_clusters(
    base: Sequence[float], new: Sequence[float], clusters: Sequence[str], level: float = LEVEL
) -> ClusteredDifference:
    """Mean paired difference over items: BCa bootstrap over clusters, and the sign-flip test of the clusters' sums.

    Where every cluster gained alike, or there are fewer than five, Tango's interval with clusters counted as items, unequal ones as
    `effective_number` of them; of few clusters as `tango_of_clusters` says.
    ValueError unless both hold the same items.
    """
    if len(base) != len(new):
        raise ValueError(f"{len(base)} and {len(new)} outcomes are not the same items")
    found = totals([now - old for old, now in zip(base, new, strict=True)], clusters)
    n, p_value = len(found.sums), sign_flip_p(found.sums)
    if _says_nothing(found):
        interval = tango_of_clusters(found, level) if n < BOOTSTRAP_FROM_CLUSTERS else _as_items(found, level)
        return ClusteredDifference(found.mean, *interval, p_value, n, "Tango over clusters")
    interval = bca_of_mean(found.sums, found.sizes, level)
    if vary_little(found):
        interval = hull(interval, tango_of(found, level))
    return ClusteredDifference(found.mean, *interval, p_value, n, "bootstrap over clusters")


def vary_little(found: Totals) -> bool:
    """Whether fewer than FEW_VARY clusters have another mean than the most common one, or a few hold most items."""
    if effective_number(found) < FEW_VARY:
        return True
    means = Counter(round(total / size, 9) for total, size in zip(found.sums, found.sizes, strict=True))
    return len(found.sums) - max(means.values()) < FEW_VARY


def tango_of(found: Totals, level: float = LEVEL) -> Interval:
    """Tango's interval of differences in [-1, 1], gains and losses counted as shares of items that are won or lost as a whole.

    Clusters count as `effective_number` of equal ones.
    """
    items, n = sum(found.sizes), effective_number(found)
    won = n * math.fsum(max(0.0, total) for total in found.sums) / items
    lost = n * math.fsum(max(0.0, -total) for total in found.sums) / items
    over = max(1.0, (won + lost) / n)
    return hull(tango(won / over, lost / over, n, level), Interval(found.mean, found.mean))


def tango_of_clusters(found: Totals, level: float = LEVEL) -> Interval:
    """`tango_of` clusters, of fewer than five by Student's quantile in place of the normal one; of one or two, all that a difference
    can be."""
    n = len(found.sums)
    return tango_of(found, _level_of(n, level)) if n >= ENOUGH_TO_TELL else Interval(-1.0, 1.0)


def hull(one: Interval, other: Interval) -> Interval:
    """What either holds, and what lies between."""
    return Interval(min(one.low, other.low), max(one.high, other.high))


def effective_number(found: Totals) -> float:
    """As how many equal clusters those of unequal sizes count: sum(sizes)^2 / sum(sizes^2), which is n where they are equal."""
    return sum(found.sizes) ** 2 / sum(size * size for size in found.sizes)


def variance_of_mean(values: Sequence[float], clusters: Sequence[str]) -> float:
    """Of a mean over items in G clusters: G / (G - 1) times the sum of squared influences (sums - mean * sizes) / items.

    Source: the linearised variance of a ratio (W. G. Cochran, Sampling Techniques, 1977, 6.3, 9A.2), without a finite population.
    With one item a cluster it is the sample variance over n. ValueError for fewer than two clusters.
    """
    found = totals(values, clusters)
    n = len(found.sums)
    if n < 2:
        raise ValueError("one cluster has no variance")
    mean = found.mean
    squares = math.fsum((total - mean * size) ** 2 for total, size in zip(found.sums, found.sizes, strict=True))
    return n / (n - 1) * squares / sum(found.sizes) ** 2


def design_effect(values: Sequence[float], clusters: Sequence[str]) -> float:
    """By how much the variance of the mean exceeds that of as many independent items; at least 1, and 1 where nothing varies."""
    n = len(values)
    mean = math.fsum(values) / n
    independent = math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n if n > 1 else 0.0
    return max(1.0, variance_of_mean(values, clusters) / independent) if independent > 0 else 1.0


def _alike(found: Totals) -> bool:
    mean = found.mean
    return all(abs(total - mean * size) <= 1e-9 * size for total, size in zip(found.sums, found.sizes, strict=True))


def _as_items(found: Totals, level: float) -> Interval:
    """Tango's interval around a mean difference of clusters that count as n items, of which as few were won or lost as give it."""
    n = effective_number(found)
    moved = min(n, math.ceil(abs(found.mean) * n - 1e-9))
    low, high = tango(moved, 0, n, level) if found.mean >= 0 else tango(0, moved, n, level)
    return Interval(min(low, found.mean), max(high, found.mean))
