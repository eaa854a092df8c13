"""The bootstrap interval of a mean over items, or of a mean over items that come in clusters."""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, combinations
from statistics import NormalDist, fmean, stdev, variance
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from autorl_hpc.scoring.stats import LEVEL, Interval, mean_t_interval, t_outside, t_quantile, tango, wilson_share

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RESAMPLES = 10_000
SEED = 20260101
"""Any fixed number: two reports over the same runs must not differ."""

EXACT_WAYS = 20_000
"""Up to this many regroupings or sign patterns are all tried; beyond it a seeded sample of `RESAMPLES` is."""

TIE, DIGITS = 1e-9, 9
"""Sums of the same numbers in another order differ by less than this, and count as equal."""

CHUNK_CELLS = 1_000_000
"""Resampled cells held at once: 8 MB."""

TOGETHER = 50
"""Means that are drawn together: 4 MB of resampled ones."""

SMALLEST_TAIL = 1e-12
"""The expanded tail of two values is 1e-72, which is lost beside 1."""


def generator() -> np.random.Generator:
    """Return a new generator of random numbers: each resampling starts with the same seed."""
    import numpy as np

    return np.random.default_rng(SEED)


def chunks(n: int) -> list[int]:
    """Split `RESAMPLES` draws of n things each so that no more than `CHUNK_CELLS` cells are held at once."""
    rows = max(1, CHUNK_CELLS // n)
    return [min(rows, RESAMPLES - start) for start in range(0, RESAMPLES, rows)]


def expanded_tail(n: int, level: float = LEVEL) -> float:
    """The tail at which the percentiles of a bootstrap of n values end, so that few values give wide enough intervals.

    A resampled mean varies by (n - 1) / n of what it should, and its percentiles are a normal's where Student's are due. Both
    are mended by the tail of the normal distribution beyond sqrt(n / (n - 1)) t, with t of n - 1 degrees of freedom.
    Source: T. Hesterberg, The American Statistician 69:371-386, 2015, "expanded percentile interval".
    """
    return NormalDist().cdf(-math.sqrt(n / (n - 1)) * t_quantile(n - 1, level))


def bca_of_mean(sums: Sequence[float], sizes: Sequence[int], level: float = LEVEL) -> Interval:
    """BCa interval of sum(sums) / sum(sizes), where pairs of sum and size are what is drawn; see `bca`.

    For items each size is 1. The interval of values that are all alike has no width: the caller says what it knows instead.
    ValueError for fewer than two.
    """
    return bca_of_means([sums], sizes, level)[0]


def bca_of_means(several: Sequence[Sequence[float]], sizes: Sequence[int], level: float = LEVEL) -> list[Interval]:
    """`bca_of_mean` of each of several sums over the same things: what takes longest, drawing, is done once."""
    import numpy as np

    n = len(sizes)
    if n < 2 or any(n != len(sums) for sums in several):
        raise ValueError(f"{[len(sums) for sums in several]} sums and {n} sizes make no bootstrap")
    weights, found = np.asarray(sizes, dtype=float), []
    for start in range(0, len(several), TOGETHER):
        sums = np.asarray(several[start : start + TOGETHER], dtype=float).T
        found += bca(lambda counts, sums=sums: (counts @ sums).T / (counts @ weights), n, level)  # type: ignore[misc]
    return found


def bca(
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    n: int,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> list[Interval]:
    """BCa intervals (B. Efron, JASA 82:171-185, 1987) of statistics of n things drawn with replacement; scipy's, seeded.

    Percentiles are expanded (`expanded_tail`), so that few things give wide enough intervals. Values nearer than `TIE` count as
    equal, so that rounding decides no bias. Where BCa has no value, since the statistic hardly varies, percentiles stand for it.

    Args:
        statistic: from how often each thing was drawn, of shape (draws, n), to the values, of shape (statistics, draws).
    """
    import numpy as np
    from scipy.stats import DegenerateDataWarning, bootstrap

    def drawn(places: NDArray[np.int64], axis: int = -1) -> Any:
        rows = places.reshape(-1, places.shape[axis])
        cells = (rows + n * np.arange(len(rows))[:, None]).ravel()
        values = np.round(statistic(np.bincount(cells, minlength=n * len(rows)).reshape(-1, n).astype(float)), DIGITS)
        return values if places.ndim > 1 else values[:, 0]

    tail = max(expanded_tail(n, level), SMALLEST_TAIL)
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", DegenerateDataWarning)
        result = bootstrap(
            (np.arange(n),),
            drawn,
            vectorized=True,
            method="BCa",
            n_resamples=resamples,
            batch=max(1, CHUNK_CELLS // n),
            confidence_level=1 - 2 * tail,
            rng=generator(),
        )
    plain = np.quantile(result.bootstrap_distribution, (tail, 1 - tail), axis=-1)
    ends = np.where(np.isnan(result.confidence_interval), plain, result.confidence_interval)
    return [Interval(round(float(low), DIGITS), round(float(high), DIGITS)) for low, high in ends.T]


# The expected best improvement of k runs, from n runs seen (pass@k of an improvement).

BOOTSTRAP_FROM_RUNS = 5
"""Fewer values have so few distinct resamples that they say nothing."""

LARGEST_K = 100
"""Nobody starts an agent more often to keep the best; with a thousand runs the curve would be most of the report."""

LEAST_RESAMPLES = 500
"""Where there are thousands of runs: a standard error is within 3 % with 500 resamples, and within 0.7 % with 10,000."""


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
    from scipy.stats import bootstrap

    n = len(values)
    shares = np.array([_shares(n, k) for k in range(1, min(n, LARGEST_K, 1 + math.isqrt(n)) + 1)]).T
    errors = bootstrap(
        (sorted(values),),
        lambda drawn, axis: (np.sort(drawn, axis) @ shares).T,
        method="percentile",
        n_resamples=max(LEAST_RESAMPLES, min(RESAMPLES, 2 * CHUNK_CELLS // n)),
        batch=max(1, CHUNK_CELLS // n),
        rng=generator(),
    ).standard_error
    return [round(math.sqrt(n / (n - 1)) * float(error), DIGITS) for error in errors]


# The sign-flip test: a difference and its opposite are equally likely if nothing changed.


def sign_flip_p(values: Sequence[float]) -> float:
    """Two-sided p value of a mean of 0, by turning the signs of the values: of items, of clusters' sums, or of runs.

    Zeros change nothing and are dropped. Up to 14 others all sign patterns are tried (p = hits / 2^n); beyond it 10,000 are
    drawn, p = (hits + 1) / (draws + 1). Exact under differences that are symmetric about 0 if nothing changed. Sums nearer than
    `TIE` count as equal. No value but 0: p = 1.
    """
    import numpy as np

    moved = np.sort(np.asarray(values, dtype=float))
    moved = moved[np.abs(moved) > TIE]
    n, total = len(moved), moved.sum()

    def hits(turned: NDArray[Any]) -> NDArray[np.bool_]:
        reached: NDArray[np.bool_] = np.abs(total - 2 * (turned @ moved)) >= abs(total) - TIE
        return reached

    if 2**n <= EXACT_WAYS:
        return float(hits((np.arange(2**n)[:, None] >> np.arange(n)) & 1).mean())
    coins = generator()
    found = sum(int(hits(coins.integers(0, 2, (size, n), dtype=np.int8)).sum()) for size in chunks(n))
    return (found + 1) / (RESAMPLES + 1)


def least_sign_flip_p(n: int) -> float:
    """The least p value that `sign_flip_p` can give for n values: 0.25 for three, 0.03 for six."""
    return 2 / 2**n if n > 0 and 2**n <= EXACT_WAYS else 1.0 if n == 0 else 1 / (RESAMPLES + 1)


# Items that are not independent: goals of one product, games of one task. What is drawn, and whose signs turn, is the cluster.

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


class ClusterTotals(NamedTuple):
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


def totals(values: Sequence[float], clusters: Sequence[str]) -> ClusterTotals:
    """Values summed by cluster. ValueError unless there is one cluster name for each of at least one value."""
    if len(values) != len(clusters) or not values:
        raise ValueError(f"{len(values)} values and {len(clusters)} names of clusters")
    groups = _groups(tuple(clusters))
    return ClusterTotals(
        [math.fsum([values[place] for place in group]) for group in groups], [len(group) for group in groups]
    )


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
        _by_clusters_alone(found, level)
        if _says_nothing(found)
        else _resampled_cluster_mean(found, next(intervals), level)
        for found in every
    ]


def _says_nothing(found: ClusterTotals) -> bool:
    """Whether resamples of these clusters say nothing."""
    return len(found.sums) < BOOTSTRAP_FROM_CLUSTERS or _alike(found)


def _by_clusters_alone(found: ClusterTotals, level: float) -> ClusteredMean:
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


def _resampled_cluster_mean(found: ClusterTotals, interval: Interval, level: float) -> ClusteredMean:
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


def vary_little(found: ClusterTotals) -> bool:
    """Whether fewer than FEW_VARY clusters have another mean than the most common one, or a few hold most items."""
    if effective_number(found) < FEW_VARY:
        return True
    means = Counter(round(total / size, 9) for total, size in zip(found.sums, found.sizes, strict=True))
    return len(found.sums) - max(means.values()) < FEW_VARY


def tango_of(found: ClusterTotals, level: float = LEVEL) -> Interval:
    """Tango's interval of differences in [-1, 1], gains and losses counted as shares of items that are won or lost as a whole.

    Clusters count as `effective_number` of equal ones.
    """
    items, n = sum(found.sizes), effective_number(found)
    won = n * math.fsum(max(0.0, total) for total in found.sums) / items
    lost = n * math.fsum(max(0.0, -total) for total in found.sums) / items
    over = max(1.0, (won + lost) / n)
    return hull(tango(won / over, lost / over, n, level), Interval(found.mean, found.mean))


def tango_of_clusters(found: ClusterTotals, level: float = LEVEL) -> Interval:
    """`tango_of` clusters, of fewer than five by Student's quantile in place of the normal one; of one or two, all that a difference
    can be."""
    n = len(found.sums)
    return tango_of(found, _level_of(n, level)) if n >= ENOUGH_TO_TELL else Interval(-1.0, 1.0)


def hull(one: Interval, other: Interval) -> Interval:
    """What either holds, and what lies between."""
    return Interval(min(one.low, other.low), max(one.high, other.high))


def effective_number(found: ClusterTotals) -> float:
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


def _alike(found: ClusterTotals) -> bool:
    mean = found.mean
    return all(abs(total - mean * size) <= 1e-9 * size for total, size in zip(found.sums, found.sizes, strict=True))


def _as_items(found: ClusterTotals, level: float) -> Interval:
    """Tango's interval around a mean difference of clusters that count as n items, of which as few were won or lost as give it."""
    n = effective_number(found)
    moved = min(n, math.ceil(abs(found.mean) * n - 1e-9))
    low, high = tango(moved, 0, n, level) if found.mean >= 0 else tango(0, moved, n, level)
    return Interval(min(low, found.mean), max(high, found.mean))


# Permutation tests: runs change sides within their task. All ways where they are few, else a seeded sample.
#
# What is compared is studentised: the difference over its standard error, which is estimated anew in each regrouping. A regrouped
# task on which the sides lie far apart has a large spread within them; the bare difference would take that spread for chance, and
# find nothing wherever the effects differ by task.
# Source: A. Janssen, Statistics & Probability Letters 36:9-21, 1997; E. Chung and J. P. Romano, Annals of Statistics 41:484-507, 2013.

NO_SPREAD = 1e-9
"""Squared standard errors below it are rounding: sides without spread are told apart by their difference alone."""


class Stratum(NamedTuple):
    """Both sides' runs on one task, or on a part of one; `weight` is that of its difference in the sum."""

    a: Sequence[float]
    b: Sequence[float]
    weight: float = 1.0

    @property
    def ways(self) -> int:
        """In how many ways the runs can be divided between the two sides."""
        return math.comb(len(self.a) + len(self.b), len(self.a))


def regrouping_p(strata: Sequence[Stratum]) -> float:
    """Two-sided p value of a weighted sum over tasks of differences of means that is 0, by its studentised value.

    Exact if runs of both sides are drawn alike on every task; asymptotically so if only that sum is 0. With as many runs on both
    sides of a single task the order of regroupings is that of the bare difference. Exact: the share of regroupings at least as far
    apart as the one seen. Sampled: (hits + 1) / (draws + 1).
    ValueError for no task, or an empty side.
    """
    import numpy as np

    if not strata or not all(task.a and task.b for task in strata):
        raise ValueError("a comparison needs runs on both sides")
    seen = float(_squared(sum(_measured(np.array([[*task.a, *task.b]]), task) for task in strata))[0])
    pooled = [np.sort([*task.a, *task.b]) for task in strata]
    if math.prod(task.ways for task in strata) <= EXACT_WAYS:
        sums = np.zeros((2, 1))
        for runs, task in zip(pooled, strata, strict=True):
            of_task = _measured(runs[_regroupings(len(runs), len(task.a))], task)
            sums = (sums[:, :, None] + of_task[:, None, :]).reshape(2, -1)
        return float((_squared(sums) >= seen * (1 - TIE)).mean())
    order, drawn = generator(), np.zeros((2, RESAMPLES))
    for runs, task in zip(pooled, strata, strict=True):
        mixed = (order.permuted(np.tile(runs, (size, 1)), axis=1) for size in chunks(len(runs)))
        drawn += np.concatenate([_measured(each, task) for each in mixed], axis=1)
    return (int((_squared(drawn) >= seen * (1 - TIE)).sum()) + 1) / (RESAMPLES + 1)


def least_regrouping_p(sizes: Sequence[tuple[int, int]]) -> float:
    """The least p value that `regrouping_p` can give for runs of so many on both sides of each task."""
    ways = math.prod(math.comb(n_a + n_b, n_a) for n_a, n_b in sizes)
    both = 2 if all(n_a == n_b for n_a, n_b in sizes) else 1
    return both / ways if ways <= EXACT_WAYS else 1 / (RESAMPLES + 1)


def _measured(runs: NDArray[np.float64], task: Stratum) -> NDArray[np.float64]:
    """Weighted difference of means and its squared standard error, of shape (2, ways), from runs of shape (ways, n): a's first.

    A side of one run knows no spread and adds none.
    """
    import numpy as np

    sides = runs[:, : len(task.a)], runs[:, len(task.a) :]
    gap = sides[0].mean(axis=1) - sides[1].mean(axis=1)
    error = sum(side.var(axis=1) / max(1, side.shape[1] - 1) for side in sides)
    return np.stack([task.weight * gap, task.weight**2 * error])


def _squared(sums: Any) -> Any:
    """The square of a difference over its error, of shape (ways,), from both, of shape (2, ways); 0 where there is no difference."""
    import numpy as np

    return np.where(np.abs(sums[0]) <= TIE, 0.0, sums[0] ** 2 / np.maximum(sums[1], NO_SPREAD))


@lru_cache(maxsize=16)
def _regroupings(n: int, k: int) -> NDArray[np.int64]:
    """Every way to divide n places into the first k and the others, of shape (ways, n)."""
    import numpy as np

    return np.array([[*first, *sorted({*range(n)} - {*first})] for first in combinations(range(n), k)])


# One agent against another on one task: the unit is the run, and runs are exchanged between the two.


def permutation_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided permutation test of equal means, studentised: runs are regrouped, all ways where they are few.

    Exact: the share of regroupings at least as far apart as the one seen. Sampled: (hits + 1) / (draws + 1).
    ValueError for an empty side.
    """
    return regrouping_p([Stratum(a, b)])


def least_permutation_p(n_a: int, n_b: int) -> float:
    """The least p value that `permutation_p` can give for so many runs: 0.1 for three against three."""
    return least_regrouping_p([(n_a, n_b)])


def probability_of_improvement(a: Sequence[float], b: Sequence[float]) -> float:
    """Share of pairs of runs in which a beats b, ties half (Mann-Whitney's U over its maximum)."""
    if not a or not b:
        raise ValueError("a comparison needs runs on both sides")
    return sum(0.5 if abs(x - y) <= TIE else float(x > y) for x in a for y in b) / (len(a) * len(b))


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for their number (S. Holm, Scand. J. Statist. 6:65-70, 1979), in the order given."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


# The mean of one cell over its runs: bootstrap interval, and the test of its improvement against zero.

TEST_FROM_RUNS = 3
"""As many as the t interval needs: two runs have a range and no test."""


class CellTest(NamedTuple):
    """Whether a cell's mean improvement differs from 0; all None below three runs.

    Attributes:
        p_value: one-sample t test over runs, of the same assumptions as the t interval; where all runs are equal, so that
            their spread is unknown, the sign-flip test's.
        p_sign_flip: exact test that assumes only that improvements are symmetric about 0 if there is no mean improvement.
        p_sign_flip_least: the least that so many runs can give: 0.25 for three, 0.03 for six.
    """

    p_value: float | None
    p_sign_flip: float | None
    p_sign_flip_least: float | None


def bootstrap_mean(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Bootstrap interval of a mean over runs (expanded percentiles, 10,000 resamples, seeded); None below five runs, or equal ones.

    The order of the values does not matter; see `expanded_tail` for what is expanded.
    """
    n = len(values)
    if n < BOOTSTRAP_FROM_RUNS or max(values) - min(values) <= TIE:
        return None
    import numpy as np
    from scipy.stats import bootstrap

    tail = expanded_tail(n, level)
    means = bootstrap(
        (sorted(values),),
        np.mean,
        method="percentile",
        n_resamples=RESAMPLES,
        batch=max(1, CHUNK_CELLS // n),
        confidence_level=1 - 2 * tail,
        rng=generator(),
    )
    return Interval(*map(float, means.confidence_interval))


def t_test_p(values: Sequence[float]) -> float | None:
    """Two-sided one-sample t test of a mean of 0; None where the values are all equal, or fewer than two."""
    n = len(values)
    if n < 2 or max(values) - min(values) <= TIE:
        return None
    return t_outside(abs(fmean(values)) * math.sqrt(n) / stdev(values), n - 1)


def against_zero(values: Sequence[float]) -> CellTest:
    """A cell, by the improvements of its counted runs, tested against 0; not tested below three runs.

    Nothing is adjusted here: for how many cells is known where the leaderboard is (report/leaderboard.py).
    """
    if len(values) < TEST_FROM_RUNS:
        return CellTest(None, None, None)
    flipped = sign_flip_p(values)
    p_value = t_test_p(values)
    return CellTest(flipped if p_value is None else p_value, flipped, least_sign_flip_p(len(values)))


# One agent against another over several tasks: the unit stays the run, the tasks are strata of equal weight.

RUNS_TO_COMPARE = 2
"""One run of each agent on a task compares two runs, not two agents."""

DEGREES_FOR_INTERVAL = 4
"""Runs less their means: three against three on one task, or two against two on two tasks. With less, measured coverage is 80 %."""


class OverTasks(NamedTuple):
    """a against b over the tasks that both have runs on; intervals are 95 %, in the values' own unit.

    Attributes:
        tasks: those that are compared, sorted.
        left_out: tasks, or parts of tasks, where one side has fewer than two runs.
        difference: mean over tasks of (mean of a - mean of b); each task weighs the same.
        low, high: stratified bootstrap over runs; None for too few runs.
        p_value: stratified permutation of runs within each task, studentised.
        p_least: the least p that so many runs can give.
        probability_of_improvement: that a run of a beats one of b on the same task (Mann-Whitney), averaged over tasks.
        probability_low, probability_high: its stratified bootstrap interval; None for too few runs.
    """

    tasks: tuple[str, ...]
    left_out: tuple[str, ...]
    difference: float
    low: float | None
    high: float | None
    p_value: float
    p_least: float
    probability_of_improvement: float
    probability_low: float | None
    probability_high: float | None


def tasks_met(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]) -> list[str]:
    """Tasks on which both sides have two runs, sorted."""
    return [name for name in sorted(a.keys() & b.keys()) if min(len(a[name]), len(b[name])) >= RUNS_TO_COMPARE]


def over_tasks(
    a: Mapping[str, Sequence[float]],
    b: Mapping[str, Sequence[float]],
    task_of: Mapping[str, str] | None = None,
) -> OverTasks | None:
    """Improvements of two agents by task, compared under conditions that are equal within each task.

    Interval: runs are drawn with replacement within each task and side, as R. Agarwal et al. do (NeurIPS 2021), the deviation of
    each mean from what was seen times sqrt(n / (n - 1)) (J. N. K. Rao and C. F. J. Wu, JASA 83:231-241, 1988), and percentiles
    taken where Student's t has its tails, with Satterthwaite's degrees of freedom: few runs would give too narrow an interval
    otherwise. Where on some task all runs of one side beat all of the other, resamples know no variation there: the interval of
    the probability is then at least Wilson's for as many independent pairs of runs. Test: the studentised difference, runs changing
    sides within their task, all ways where they are few, else 10,000 drawn. Interval and test are both of the mean difference, so
    that they agree where the effects differ by task.

    Args:
        a, b: of each task, or of each part of one, the improvements of the counted runs, in any order.
        task_of: the task of each part (a mode, say), where a task has several. Runs are drawn and exchanged within their part; a
            task's difference is the mean of its parts', so that each task weighs the same however many parts it has.

    Returns:
        None if on no task both sides have two runs.
    """
    met = tasks_met(a, b)
    if not met:
        return None
    parts = Counter(task_of[name] if task_of else name for name in met)
    weights = [1 / (len(parts) * parts[task_of[name] if task_of else name]) for name in met]
    strata = [Stratum(sorted(a[name]), sorted(b[name]), weight) for name, weight in zip(met, weights, strict=True)]
    difference = math.fsum(one.weight * (fmean(one.a) - fmean(one.b)) for one in strata)
    chance = math.fsum(one.weight * probability_of_improvement(one.a, one.b) for one in strata)
    interval, of_chance = _intervals(strata, difference, chance) or ((None, None), (None, None))
    return OverTasks(
        tasks=tuple(sorted(parts)),
        left_out=tuple(name for name in sorted({*a, *b}) if name not in met),
        difference=difference,
        low=interval[0],
        high=interval[1],
        p_value=regrouping_p(strata),
        p_least=least_regrouping_p([(len(task.a), len(task.b)) for task in strata]),
        probability_of_improvement=chance,
        probability_low=of_chance[0],
        probability_high=of_chance[1],
    )


def _intervals(strata: Sequence[Stratum], difference: float, chance: float) -> tuple[Interval, Interval] | None:
    """Of the difference and of the probability of improvement, from the same resamples; None where no side has any spread."""
    if all(max(side) - min(side) <= TIE for one in strata for side in (one.a, one.b)):
        return None
    if sum(len(task.a) + len(task.b) - 2 for task in strata) < DEGREES_FOR_INTERVAL:
        return None
    import numpy as np

    draws = generator()
    seen, drawn = np.array([[difference], [chance]]), sum(_resampled_task(task, draws) for task in strata)
    tail = NormalDist().cdf(-t_quantile(_degrees(strata), LEVEL))
    (low, least), (high, most) = np.quantile(seen + drawn, (tail, 1 - tail), axis=1).tolist()
    if any(probability_of_improvement(task.a, task.b) in (0.0, 1.0) for task in strata):
        wilson = wilson_share(chance, sum(min(len(task.a), len(task.b)) for task in strata))
        least, most = min(least, wilson.low), max(most, wilson.high)
    of_chance = Interval(round(max(0.0, least), DIGITS), round(min(1.0, most), DIGITS))
    return Interval(round(low, DIGITS), round(high, DIGITS)), of_chance


def _resampled_task(task: Stratum, draws: np.random.Generator) -> NDArray[np.float64]:
    """Weighted deviations of a task's difference and probability from what was seen, of shape (2, RESAMPLES)."""
    import numpy as np

    a, b = np.array(task.a), np.array(task.b)
    of_a, of_b = (draws.multinomial(n := len(side), np.full(n, 1 / n), RESAMPLES) for side in (a, b))
    grown_a, grown_b = (math.sqrt(len(side) / (len(side) - 1)) for side in (a, b))
    gains = grown_a * (of_a @ (a - a.mean())) / len(a) - grown_b * (of_b @ (b - b.mean())) / len(b)
    apart = a[:, None] - b
    beaten = np.where(np.abs(apart) <= TIE, 0.5, apart > 0)
    chances = ((of_a @ beaten) * of_b).sum(axis=1) / (len(a) * len(b)) - beaten.mean()
    return task.weight * np.stack([gains, math.sqrt(grown_a * grown_b) * chances])


def _degrees(strata: Sequence[Stratum]) -> int:
    """Satterthwaite's degrees of freedom of the difference, rounded down; at least those of the smallest side."""
    parts = [
        (task.weight**2 * variance(side) / len(side), len(side) - 1) for task in strata for side in (task.a, task.b)
    ]
    total, squares = math.fsum(v for v, _ in parts), math.fsum(v * v / df for v, df in parts)
    return max(1, math.floor(total * total / squares + 1e-9))


# How the improvement grows with time, tokens, submissions or GPU-hours: the mean of the runs' step curves with a band.


class BestSoFar(NamedTuple):
    """The best so far of one run.

    Attributes:
        steps: (x, improvement) of each scored submission, in any order; x is what had been used when it was dropped.
        end: what the run had used when it ended.
    """

    steps: Sequence[tuple[float, float]]
    end: float


class BandPoint(NamedTuple):
    """The mean over all n runs at one x.

    Attributes:
        low, high: t interval over runs (three and more that differ), the range (two), None (one, or three and more that are equal); of this x alone, not of the whole curve.
        running: how many of the runs had not ended before x.
    """

    x: float
    mean: float
    low: float | None
    high: float | None
    n: int
    running: int
    kind: Literal["t", "range", "equal", "none"]


def band(curves: Sequence[BestSoFar], grid: Sequence[float]) -> list[BandPoint]:
    """The mean of the runs' step curves at each x of `grid`, with a pointwise interval over runs.

    A run has 0 before its first scored submission (it has the base model), then the best of its submissions so far, below 0 too
    if all of them are: that is what would be selected. Beyond its own end it keeps its last value, since what it would be
    scored for stays what it is: every run counts at every x, and the mean does not move by who is left. `running` says how
    many had not ended, so that a page can fade where few had.
    ValueError for no curve, or a number that is not finite.
    """
    if not curves:
        raise ValueError("there is no curve")
    if not all(
        math.isfinite(number) for curve in curves for number in (curve.end, *(v for s in curve.steps for v in s))
    ):
        raise ValueError("a step or an end is not finite")
    bests = [_best_so_far(curve) for curve in curves]
    found = []
    for x in grid:
        mean = mean_t_interval([_at(places, best, x) for places, best in bests])
        assert mean.mean is not None
        running = sum(curve.end >= x for curve in curves)
        found.append(BandPoint(x, mean.mean, mean.low, mean.high, mean.n, running, mean.kind))
    return found


def _best_so_far(curve: BestSoFar) -> tuple[list[float], list[float]]:
    """Places of the steps in order, and the best from each on."""
    ordered = sorted(curve.steps)
    return [x for x, _ in ordered], list(accumulate((value for _, value in ordered), max))


def _at(places: Sequence[float], best: Sequence[float], x: float) -> float:
    """A step counts from its own x on."""
    before = bisect_right(places, x)
    return best[before - 1] if before else 0.0
