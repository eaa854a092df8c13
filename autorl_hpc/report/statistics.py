"""Intervals and tests of a report: over items, clusters of items, runs, and tasks as strata. docs/statistics.md says what was measured.

Resampling is scipy's where it has the method, always seeded: two reports over the same runs must not differ.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import NormalDist, fmean, stdev, variance
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from autorl_hpc.report.summary import TasksCompared
from autorl_hpc.scoring.stats import LEVEL, Interval, t_outside, t_quantile, tango, wilson_share

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RESAMPLES = 10_000
SEED = 20260101
EXACT_WAYS = 20_000
"""Up to this many regroupings or sign patterns are all tried; beyond it a seeded sample of `RESAMPLES` is."""

TIE, DIGITS = 1e-9, 9  # sums of the same numbers in another order differ by less than this, and count as equal
ROUNDED, TIE_SHARE = 1e-4, 1e-3
"""Values may have been rounded to four decimals (5 and -2 of 82 items), which must not decide where the whole numbers are equal: tests,
exact or sampled, count as ties what lies no farther apart than such rounding can bring it, and at most this share of all together."""

CHUNK_CELLS = 1_000_000  # resampled cells held at once: 8 MB
SMALLEST_TAIL = 1e-12  # the expanded tail of two values is 1e-72, which is lost beside 1

Key = TypeVar("Key", bound=Hashable)


def generator() -> np.random.Generator:
    """Return a new generator of random numbers: each resampling starts with the same seed."""
    import numpy as np

    return np.random.default_rng(SEED)


def _chunks(n: int) -> list[int]:
    """Split `RESAMPLES` draws of n things each so that no more than `CHUNK_CELLS` cells are held at once."""
    rows = max(1, CHUNK_CELLS // n)
    return [min(rows, RESAMPLES - start) for start in range(0, RESAMPLES, rows)]


# --- bootstrap of a mean


def expanded_tail(n: int) -> float:
    """Return the tail at which the percentiles of a bootstrap of n values end, so that few values give wide enough intervals.

    It corrects for a resampled mean varying by (n - 1) / n of what it should, and for Student's t of n - 1 degrees of freedom.
    Source: T. Hesterberg, The American Statistician 69:371-386, 2015, "expanded percentile interval".
    """
    return NormalDist().cdf(-math.sqrt(n / (n - 1)) * t_quantile(n - 1))


def bca_of_mean(sums: Sequence[float], sizes: Sequence[int]) -> Interval:
    """Return the BCa interval of sum(sums) / sum(sizes), where pairs of sum and size are what is drawn (items have size 1).

    ValueError for fewer than two pairs. Values that are all alike give an interval without width.
    """
    return bca_of_means([sums], sizes)[0]


def bca_of_means(several: Sequence[Sequence[float]], sizes: Sequence[int]) -> list[Interval]:
    """Return `bca_of_mean` of several sums over the same things, which are drawn once."""
    import numpy as np

    n = len(sizes)
    if n < 2 or any(n != len(sums) for sums in several):
        raise ValueError(f"{[len(sums) for sums in several]} sums and {n} sizes make no bootstrap")
    weights, sums = np.asarray(sizes, dtype=float), np.asarray(several, dtype=float).T
    return bca(lambda counts: (counts @ sums).T / (counts @ weights), n)


def bca(
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]], n: int, resamples: int = RESAMPLES
) -> list[Interval]:
    """Return BCa intervals (B. Efron, JASA 82:171-185, 1987) of statistics of n things drawn with replacement.
    Percentiles are expanded, and stand alone where BCa has no value because the statistic hardly varies. `statistic`:
    from how often each thing was drawn, of shape (draws, n), to the values, of shape (statistics, draws)."""
    import numpy as np
    from scipy.stats import DegenerateDataWarning, bootstrap

    def drawn(places: NDArray[np.int64], axis: int = -1) -> Any:
        rows = places.reshape(-1, places.shape[axis])
        cells = (rows + n * np.arange(len(rows))[:, None]).ravel()
        values = np.round(statistic(np.bincount(cells, minlength=n * len(rows)).reshape(-1, n).astype(float)), DIGITS)
        return values if places.ndim > 1 else values[:, 0]

    tail = max(expanded_tail(n), SMALLEST_TAIL)
    settings: Any = _settings(n, resamples) | {"confidence_level": 1 - 2 * tail, "vectorized": True}
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", DegenerateDataWarning)
        result = bootstrap((np.arange(n),), drawn, method="BCa", **settings)
    plain = np.quantile(result.bootstrap_distribution, (tail, 1 - tail), axis=-1)
    ends = np.where(np.isnan(result.confidence_interval), plain, result.confidence_interval)
    return [Interval(round(float(low), DIGITS), round(float(high), DIGITS)) for low, high in ends.T]


def _settings(n: int, resamples: int = RESAMPLES) -> dict[str, Any]:
    return {"n_resamples": resamples, "batch": max(1, CHUNK_CELLS // n), "rng": generator()}


# --- the best of k runs, chosen on feedback and valued on report, from n runs seen

BOOTSTRAP_FROM_RUNS = 5  # fewer values have so few distinct resamples that they say nothing
LARGEST_K = 100
"""Nobody starts an agent more often to keep the best; with a thousand runs the curve would be most of the report."""

LEAST_RESAMPLES = 500  # with thousands of runs: the standard error is then within 3 %


class BestOf(NamedTuple):
    """Expected value of the best of k runs with its 95 % interval; the interval is None where so few runs don't tell one."""

    k: int
    mean: float
    low: float | None
    high: float | None


def best_of_curve(feedback: Sequence[float], values: Sequence[float], kept: Sequence[bool] = ()) -> list[BestOf]:
    """Return the expected value of the run that is best on feedback, of 1, 2, ... n runs (at most 100), over all k-subsets.

    The best by the value itself would be the luckiest: with no true gain it gains all the same. Of runs with equal feedback each is as
    likely chosen. From five runs that differ on with an interval: mean +- t (m - 1 degrees of freedom) times the root of b^2 V +
    s^2 sum(w^2): b is the slope of values on feedback, s^2 the variance about that line, w are the runs' weights, and V is the bootstrap's
    variance of the best feedback, times n / (n - 1). A bootstrap of values would repeat the chosen run's luck. Runs that `kept` the base
    model have no luck: s^2, the sum and the degrees are over the m others, of which there must be three.
    Source of the weights: the unbiased pass@k of M. Chen et al., arXiv 2107.03374, 2021.
    """
    import numpy as np
    from scipy.stats import bootstrap

    n = len(values)
    if n == 0:
        return []
    told, seen, base = np.array(sorted(zip(feedback, values, kept or [False] * n, strict=True)), dtype=float).T
    lucky = base == 0
    m = int(lucky.sum())
    shares = np.array([_shares(n, k) for k in range(1, min(n, LARGEST_K) + 1)]).T
    tied = np.cumsum(np.diff(told, prepend=told[0]) > TIE)
    weights = np.array([np.bincount(tied, share) / np.bincount(tied) for share in shares.T]).T[tied]
    means = np.round(seen @ weights, DIGITS).tolist()
    if n < BOOTSTRAP_FROM_RUNS or m < TEST_FROM_RUNS or np.ptp(seen) <= TIE:
        return [BestOf(k, mean, None, None) for k, mean in enumerate(means, 1)]
    centred = told - told.mean()
    slope = float(centred @ seen / (centred @ centred)) if np.ptp(told) > TIE else 0.0
    rest = (seen - seen.mean() - slope * centred)[lucky]
    settings: Any = _settings(n, max(LEAST_RESAMPLES, min(RESAMPLES, 2 * CHUNK_CELLS // n)))
    errors = bootstrap(
        (told,), lambda drawn, axis: (np.sort(drawn, axis) @ shares).T, method="percentile", **settings
    ).standard_error
    squares = n / (n - 1) * (slope * errors) ** 2 + float(rest @ rest) / (m - 2) * (weights[lucky] ** 2).sum(axis=0)
    halves = np.round(t_quantile(m - 1) * np.sqrt(squares), DIGITS).tolist()
    return [BestOf(k, m, m - half, m + half) for k, (m, half) in enumerate(zip(means, halves, strict=True), 1)]


def _shares(n: int, k: int) -> list[float]:
    """Return the share of all k-subsets of n values in which each is the largest, in ascending order: C(rank, k - 1) / C(n, k)."""
    shares = [0.0] * n
    share = k / n  # of the largest; each next is (rank - k + 1) / rank of the one above
    for rank in range(n - 1, k - 2, -1):
        shares[rank] = share
        share *= (rank - k + 1) / rank if rank else 0.0
    return shares


# --- the sign-flip test: a difference and its opposite are equally likely if nothing changed


def sign_flip_p(values: Sequence[float]) -> float:
    """Return the two-sided p value of a mean of 0, by turning the signs of the values: of items, of clusters' sums, or of runs.

    Zeros are dropped. Up to 14 others all sign patterns are tried; beyond it 10,000 are drawn, p = (hits + 1) / (draws + 1).
    """
    import numpy as np

    moved = np.sort(np.asarray(values, dtype=float))
    moved = moved[np.abs(moved) > TIE]
    n, total = len(moved), moved.sum()
    tie = max(TIE, min(ROUNDED * n, TIE_SHARE * float(np.abs(moved).sum())))

    def hits(turned: NDArray[Any]) -> NDArray[np.bool_]:
        reached: NDArray[np.bool_] = np.abs(total - 2 * (turned @ moved)) >= abs(total) - tie
        return reached

    if 2**n <= EXACT_WAYS:
        return float(hits((np.arange(2**n)[:, None] >> np.arange(n)) & 1).mean())
    coins = generator()
    found = sum(int(hits(coins.integers(0, 2, (size, n), dtype=np.int8)).sum()) for size in _chunks(n))
    return (found + 1) / (RESAMPLES + 1)


# --- items that are not independent: what is drawn, and whose signs turn, is the cluster (goals of one product, games of one task)

BOOTSTRAP_FROM_CLUSTERS = 5  # fewer have so few distinct resamples that their quantiles say nothing
FEW_VARY = 10
"""Where fewer clusters or items than this differ from the others, the interval is at least as wide as a score interval of
all-or-nothing outcomes."""

ENOUGH_TO_TELL = 3  # fewer clusters tell nothing of how much clusters differ: Student's quantile for two is 12.7


class ClusterTotals(NamedTuple):
    """Clusters in the order of their names: sum of values and number of items of each."""

    sums: list[float]
    sizes: list[int]

    @property
    def mean(self) -> float:
        """Return the mean over items."""
        return math.fsum(self.sums) / sum(self.sizes)


class ClusteredMean(NamedTuple):
    """The interval of a mean over items, and how it came about."""

    low: float
    high: float
    kind: Literal["bootstrap over clusters", "Wilson over clusters"]


class ClusteredDifference(NamedTuple):
    """New against base on the same clustered items, in units of outcomes."""

    difference: float
    low: float
    high: float
    p_value: float
    clusters: int
    kind: Literal["bootstrap over clusters", "Tango over clusters"]


def totals(values: Sequence[float], clusters: Sequence[str]) -> ClusterTotals:
    """Sum values by cluster. ValueError unless there is one cluster name for each of at least one value."""
    if len(values) != len(clusters) or not values:
        raise ValueError(f"{len(values)} values and {len(clusters)} names of clusters")
    members: dict[str, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        members.setdefault(cluster, []).append(value)
    groups = [members[name] for name in sorted(members)]
    return ClusterTotals([math.fsum(group) for group in groups], [len(group) for group in groups])


def clustered_intervals(several: Sequence[Sequence[float]], clusters: Sequence[str]) -> list[ClusteredMean]:
    """Return the intervals of several scores on the same clustered items: BCa bootstrap over clusters, drawn once.
    Where resamples say nothing (all clusters of one mean, or fewer than five): `wilson_of_clusters`."""
    every = [totals(outcomes, clusters) for outcomes in several]
    drawn = [found for found in every if not _says_nothing(found)]
    intervals = iter(bca_of_means([found.sums for found in drawn], drawn[0].sizes) if drawn else ())
    result = []
    for found in every:
        share, effective = min(1.0, max(0.0, found.mean)), effective_number(found)
        if _says_nothing(found):
            wilson = wilson_of_clusters(share, len(found.sums), effective)
            result.append(ClusteredMean(*wilson, "Wilson over clusters"))
        else:
            interval = next(intervals)
            interval = hull(interval, wilson_share(share, effective)) if vary_little(found) else interval
            result.append(ClusteredMean(*interval, "bootstrap over clusters"))
    return result


def _says_nothing(found: ClusterTotals) -> bool:
    mean = found.mean
    alike = all(abs(total - mean * size) <= TIE * size for total, size in zip(found.sums, found.sizes, strict=True))
    return alike or len(found.sums) < BOOTSTRAP_FROM_CLUSTERS


def wilson_of_clusters(mean: float, n: int, effective: float) -> Interval:
    """Return Wilson's interval of n clusters, each as if it were solved as a whole, counted as `effective_number` of items.

    Of three or four, by Student's quantile (n - 1 degrees of freedom); of one or two, all that a score can be.
    """
    if n < ENOUGH_TO_TELL:
        return Interval(0.0, 1.0)
    return wilson_share(min(1.0, max(0.0, mean)), effective, _level_of(n))


def _level_of(n: int) -> float:
    """Return the level at which the normal quantile is the one that n clusters need."""
    return LEVEL if n >= BOOTSTRAP_FROM_CLUSTERS else 2 * NormalDist().cdf(t_quantile(n - 1)) - 1


def paired_clusters(base: Sequence[float], new: Sequence[float], clusters: Sequence[str]) -> ClusteredDifference:
    """Return the mean paired difference over items: BCa bootstrap over clusters, and the sign-flip test of the clusters' sums.

    Where every cluster gained alike, or there are fewer than five: Tango's interval. ValueError unless both hold the same items.
    """
    if len(base) != len(new):
        raise ValueError(f"{len(base)} and {len(new)} outcomes are not the same items")
    found = totals([now - old for old, now in zip(base, new, strict=True)], clusters)
    n, p_value = len(found.sums), sign_flip_p(found.sums)
    if _says_nothing(found):
        interval = tango_of_clusters(found) if n < BOOTSTRAP_FROM_CLUSTERS else _as_items(found)
        return ClusteredDifference(found.mean, *interval, p_value, n, "Tango over clusters")
    interval = bca_of_mean(found.sums, found.sizes)
    if vary_little(found):
        interval = hull(interval, tango_of(found))
    return ClusteredDifference(found.mean, *interval, p_value, n, "bootstrap over clusters")


def vary_little(found: ClusterTotals) -> bool:
    """Return whether fewer than FEW_VARY clusters have another mean than the most common one, or a few hold most items."""
    if effective_number(found) < FEW_VARY:
        return True
    means = Counter(round(total / size, DIGITS) for total, size in zip(found.sums, found.sizes, strict=True))
    return len(found.sums) - max(means.values()) < FEW_VARY


def tango_of(found: ClusterTotals, level: float = LEVEL) -> Interval:
    """Return Tango's interval of differences in [-1, 1], gains and losses counted as shares of items won or lost as a whole.

    Clusters count as `effective_number` of equal ones.
    """
    items, n = sum(found.sizes), effective_number(found)
    won = n * math.fsum(max(0.0, total) for total in found.sums) / items
    lost = n * math.fsum(max(0.0, -total) for total in found.sums) / items
    over = max(1.0, (won + lost) / n)
    return hull(tango(won / over, lost / over, n, level), Interval(found.mean, found.mean))


def tango_of_clusters(found: ClusterTotals) -> Interval:
    """Return `tango_of` clusters, of three or four by Student's quantile; of one or two, all that a difference can be."""
    n = len(found.sums)
    return tango_of(found, _level_of(n)) if n >= ENOUGH_TO_TELL else Interval(-1.0, 1.0)


def hull(one: Interval, other: Interval) -> Interval:
    """Return what either holds, and what lies between."""
    return Interval(min(one.low, other.low), max(one.high, other.high))


def effective_number(found: ClusterTotals) -> float:
    """Return as how many equal clusters those of unequal sizes count: sum(sizes)^2 / sum(sizes^2), which is n for equal ones."""
    return sum(found.sizes) ** 2 / sum(size * size for size in found.sizes)


def variance_of_mean(values: Sequence[float], clusters: Sequence[str]) -> float:
    """Return the variance of a mean over items in G clusters: G / (G - 1) sum((sums - mean * sizes)^2) / items^2.
    Source: the linearised variance of a ratio (W. G. Cochran, Sampling Techniques, 1977, 6.3, 9A.2), without a finite
    population. With one item a cluster it is the sample variance over n. ValueError for fewer than two clusters."""
    found = totals(values, clusters)
    n = len(found.sums)
    if n < 2:
        raise ValueError("one cluster has no variance")
    mean = found.mean
    squares = math.fsum((total - mean * size) ** 2 for total, size in zip(found.sums, found.sizes, strict=True))
    return n / (n - 1) * squares / sum(found.sizes) ** 2


def _as_items(found: ClusterTotals) -> Interval:
    """Return Tango's interval of clusters that count as n items, of which as few were won or lost as give the mean difference."""
    n = effective_number(found)
    moved = min(n, math.ceil(abs(found.mean) * n - TIE))
    won, lost = (moved, 0.0) if found.mean >= 0 else (0.0, moved)
    return hull(tango(won, lost, n), Interval(found.mean, found.mean))


# --- one agent against another on one task: the unit is the run


def regrouping_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the two-sided p value of equal means by exchanging runs: in all ways up to 10,000, else in so many seeded ones.

    What is compared is the difference over its standard error, estimated anew in each regrouping. Source: A. Janssen, Statistics &
    Probability Letters 36:9-21, 1997. ValueError for an empty side.
    """
    import numpy as np
    from scipy.stats import permutation_test

    if not a or not b:
        raise ValueError("a comparison needs runs on both sides")

    def squared(one: Any, other: Any, axis: int = -1) -> Any:
        sides = one, other
        gap = one.mean(axis) - other.mean(axis)
        error = sum(side.var(axis) / max(1, side.shape[axis] - 1) for side in sides)
        return np.where(np.abs(gap) <= TIE, 0.0, gap**2 / np.maximum(error, NO_VARIANCE))

    runs = np.sort(a), np.sort(b)
    least = squared(*runs) * (1 - TIE_SHARE)  # ties count, which rounding must not break
    settings: Any = _settings(len(a) + len(b)) | {"vectorized": True, "alternative": "greater"}
    return float(permutation_test(runs, lambda x, y, axis: (squared(x, y, axis) >= least) * 1.0, **settings).pvalue)


def probability_of_improvement(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the share of pairs of runs in which a beats b, ties half (Mann-Whitney's U over its maximum)."""
    if not a or not b:
        raise ValueError("a comparison needs runs on both sides")
    return sum(0.5 if abs(x - y) <= TIE else float(x > y) for x in a for y in b) / (len(a) * len(b))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted for their number (S. Holm, Scand. J. Statist. 6:65-70, 1979), in the order given."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        adjusted[index] = highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
    return adjusted


def holm_by(p_values: Mapping[Key, float | None]) -> dict[Key, float]:
    """Return `holm` of the p values that are known, by key."""
    known = {key: p for key, p in p_values.items() if p is not None}
    return dict(zip(known, holm(list(known.values())), strict=True))


# --- a cell's improvement against zero

TEST_FROM_RUNS = 3  # as many as the t interval needs: two runs have a range and no test
NO_VARIANCE = 1e-9
"""Squared standard errors below this are rounding errors. Sides without spread are compared by their difference alone."""


def t_test_p(values: Sequence[float]) -> float | None:
    """Return the two-sided p value of a one-sample t test of a mean of 0; None for equal values, or fewer than two."""
    n = len(values)
    if n < 2 or max(values) - min(values) <= TIE:
        return None
    return t_outside(abs(fmean(values)) * math.sqrt(n) / stdev(values), n - 1)


def against_zero(values: Sequence[float]) -> float | None:
    """Return the p value of a cell's improvements by the t test, of equal ones by sign flips; None below three runs."""
    if len(values) < TEST_FROM_RUNS:
        return None
    p_value = t_test_p(values)
    return sign_flip_p(values) if p_value is None else p_value


def satterthwaite(parts: Sequence[tuple[float, int]]) -> float:
    """Return Satterthwaite's degrees of freedom of a sum of independent means, from their variances and degrees."""
    total, squares = math.fsum(v for v, _ in parts), math.fsum(v * v / df for v, df in parts)
    return total * total / squares


def t_half(parts: Sequence[tuple[float, int]]) -> float:
    """Return half the 95 % interval of a sum of independent means, from their variances and degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(satterthwaite(parts), (1 + LEVEL) / 2)) * math.sqrt(math.fsum(v for v, _ in parts))


# --- one agent against another: one rule for pairs on a task, ranks, `--compare`, and the mean over tasks

PERMUTED_FROM_RUNS = 5  # with fewer a side permutation has no power: of three against three the least p is 0.1


class Improvements(list[float]):
    """The improvements of a cell's runs.

    Attributes:
        kept: of each run, whether it kept the base model: a zero that is known, not measured.
        noise: variance that the items alone give one run's improvement; 0 if unknown.
    """

    def __init__(self, values: Sequence[float] = (), kept: Sequence[bool] = (), noise: float = 0.0) -> None:
        super().__init__(values)
        self.kept, self.noise = tuple(kept), noise


def all_kept(side: Sequence[float]) -> bool:
    """Return whether all runs of a side kept the base model."""
    return isinstance(side, Improvements) and bool(side.kept) and all(side.kept)


def variance_of_runs(side: Sequence[float]) -> float:
    """Return the variance of a side's runs, never below what their items alone make: equal runs don't show that the next is equal."""
    return max(variance(side), side.noise if isinstance(side, Improvements) else 0.0)


class AgentTest(NamedTuple):
    """Whether the means of two cells differ, by which test, and beside it a permutation test of their runs."""

    p_value: float | None = None
    test: str | None = None
    p_permutation: float | None = None


def compared(a: Sequence[float], b: Sequence[float]) -> AgentTest:
    """Test agent a against agent b on one task: Welch's t test, or a one-sample t test against 0 if one of them kept the base model.

    None below three runs a side, if both kept it, or if a side's runs are equal otherwise and the noise of their items is unknown.
    Where such a side meets a kept base, sign flips are the test.
    """
    if min(len(a), len(b)) < TEST_FROM_RUNS:
        return AgentTest()
    strata, kept = [Stratum(a, b)], [all_kept(a), all_kept(b)]
    if all(kept):
        return AgentTest()
    parts = welch_parts(strata)
    p_value, test = (None, "Welch") if parts is None else (_outside(strata, parts), "Welch")
    if any(kept):
        which, values = ("first", b) if kept[0] else ("second", a)
        test = f"{'one-sample t' if p_value is not None else 'sign flips'} against 0: the {which} kept the base"
        p_value = sign_flip_p(values) if p_value is None else p_value
    enough = min(len(a), len(b)) >= PERMUTED_FROM_RUNS
    return AgentTest(p_value, None if p_value is None else test, regrouping_p(a, b) if enough else None)


class Stratum(NamedTuple):
    """Both sides' runs on one task, or on a part of one; `weight` is that of its difference in the sum."""

    a: Sequence[float]
    b: Sequence[float]
    weight: float = 1.0


def difference_of(strata: Sequence[Stratum]) -> float:
    """Return the weighted sum of differences of means."""
    return math.fsum(one.weight * (fmean(one.a) - fmean(one.b)) for one in strata)


def welch_parts(strata: Sequence[Stratum]) -> list[tuple[float, int]] | None:
    """Return variances and degrees of freedom of the means in `difference_of`, for Welch's t with Satterthwaite's degrees.

    Each side's variance is `variance_of_runs`. A kept base model adds none, so that against one cell it is the one-sample t test. None if
    on a single task another side has none; of several tasks such a side adds none. Source: B. L. Welch, Biometrika 34:28-35, 1947.
    """
    sides = [(one.weight, side) for one in strata for side in (one.a, one.b) if not all_kept(side)]
    every = [(weight**2 * variance_of_runs(side) / len(side), len(side) - 1) for weight, side in sides]
    parts = [(square, df) for square, df in every if square > TIE**2]
    return None if not parts or (len(strata) == 1 and len(parts) < len(every)) else parts


def _outside(strata: Sequence[Stratum], parts: Sequence[tuple[float, int]]) -> float:
    return t_outside(abs(difference_of(strata)) / math.sqrt(math.fsum(v for v, _ in parts)), satterthwaite(parts))


# --- one agent against another over several tasks: the unit stays the run, the tasks are strata of equal weight

RUNS_ON_A_TASK = 2  # one run of each agent on a task compares two runs, not two agents
DEGREES_FOR_INTERVAL = 4
"""Runs less their means: three against three on one task, or two against two on two tasks. With less, measured coverage is 80 %."""


def over_tasks(
    a: Mapping[str, Sequence[float]],
    b: Mapping[str, Sequence[float]],
    task_of: Mapping[str, str] | None = None,
) -> TasksCompared | None:
    """Compare two agents' improvements by task; None if on no task both sides have two runs. Interval and test: Welch's t of the mean
    over tasks, so that they never contradict each other; the runs of a task change only its own part. `a, b`: of each task, or of each
    part of one, the improvements of the counted runs. `task_of`: the task of each part (a mode, say), where a task has several. A
    task's difference is the mean of its parts'."""
    met = [name for name in sorted(a.keys() & b.keys()) if min(len(a[name]), len(b[name])) >= RUNS_ON_A_TASK]
    if not met:
        return None
    tasks = [task_of[name] if task_of else name for name in met]
    parts = Counter(tasks)
    strata = [Stratum(a[name], b[name], 1 / (len(parts) * parts[task])) for name, task in zip(met, tasks, strict=True)]
    difference = difference_of(strata)
    enough = sum(len(task.a) + len(task.b) - 2 for task in strata) >= DEGREES_FOR_INTERVAL
    told: dict[str, float] = {}
    if enough and (known := welch_parts(strata)) is not None:
        half = t_half(known)
        told = {"low": difference - half, "high": difference + half, "p_value": _outside(strata, known)}
    return TasksCompared(
        tasks=tuple(sorted(parts)),
        left_out=tuple(name for name in sorted({*a, *b}) if name not in met),
        difference=difference,
        **told,
        probability_of_improvement=math.fsum(one.weight * probability_of_improvement(one.a, one.b) for one in strata),
    )
