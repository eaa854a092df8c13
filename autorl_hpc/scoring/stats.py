"""The noise of one score and of one comparison: intervals, tests, and what a split is able to show. Proportions and differences
are fractions of 1, except where points are said."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist, fmean, stdev
from typing import Final, Literal, NamedTuple

LEVEL: Final = 0.95
ALPHA: Final = 0.05
VISIBLE_POWER: Final = 0.80  # A gain counts as visible if the test finds it four times in five, the usual convention
LOST_SHARE: Final = 0.10
"""Share of the base model's solved items that a better model loses; see `smallest_visible_gain`."""
INTRACLASS: Final = 0.5
"""Correlation of two items of one cluster that is assumed before anything is measured: half-way between items that are
independent and clusters that are won or lost as one."""
Z95: Final = NormalDist().inv_cdf((1 + LEVEL) / 2)
NO_SPREAD: Final = 1e-9  # Values nearer to each other are equal but for rounding


class Interval(NamedTuple):
    """A two-sided confidence interval."""

    low: float
    high: float


class PairedResult(NamedTuple):
    """New against base on the same items; `difference` and its interval are proportions, new minus base."""

    n: int
    won: int
    lost: int
    difference: float
    low: float
    high: float
    p_value: float


class MeanInterval(NamedTuple):
    """A mean over runs; `kind` says what `low` and `high` are: a t interval, the range of two, or nothing ("equal": no spread)."""

    n: int
    mean: float | None
    low: float | None
    high: float | None
    kind: Literal["t", "range", "equal", "none"]


def wilson(k: int, n: int, level: float = LEVEL) -> Interval:
    """Return Wilson's score interval for k of n (E. B. Wilson, JASA 22, 1927), without continuity correction. Within [0, 1];
    exactly 0 at k = 0 and 1 at k = n; (0, 1) with no item. ValueError unless 0 <= k <= n."""
    if not 0 <= k <= n:
        raise ValueError(f"{k} of {n} is no count of successes")
    return wilson_share(k / n, n, level) if n else Interval(0.0, 1.0)


def wilson_share(share: float, n: float, level: float = LEVEL) -> Interval:
    """Return Wilson's interval for a share of n, which need not be whole: an effective number of items, or graded ones."""
    if not (0 <= share <= 1 and n > 0):
        raise ValueError(f"{share} of {n} is not a share")
    z = _normal_quantile(level)
    center = (n * share + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(n * share * (1 - share) + z * z / 4)
    low = 0.0 if share == 0 else max(0.0, center - half)
    return Interval(low, 1.0 if share == 1 else min(1.0, center + half))


def mcnemar_midp(b: int, c: int) -> float:
    """Return the two-sided McNemar mid-p value for b items won and c lost (Fagerland, Lydersen, Laake, BMC Med. Res. Methodol.
    13:91, 2013); 1 for equal counts. Exact integers until the last division."""
    if b < 0 or c < 0:
        raise ValueError(f"{b} won and {c} lost are no counts")
    ways, twice_tail = 1, 0
    for i in range(min(b, c)):
        twice_tail += 2 * ways
        ways = ways * (b + c - i) // (i + 1)
    return (twice_tail + ways) / (1 << (b + c)) if b != c else 1.0


def tango(b: float, c: float, n: float, level: float = LEVEL) -> Interval:
    """Return Tango's score interval for a difference of paired proportions, (b - c) / n, by bisection to the last bit (T.
    Tango, Statistics in Medicine 17:891-908, 1998, equations 12-14). Counts need not be whole. ValueError unless b, c >= 0 and
    b + c <= n."""
    if b < 0 or c < 0 or b + c > n:
        raise ValueError(f"{b} won and {c} lost of {n} are no counts of pairs")
    if n == 0:
        return Interval(-1.0, 1.0)
    z = _normal_quantile(level)
    return Interval(-_tango_upper(c, b, n, z), _tango_upper(b, c, n, z))


def paired(base: Sequence[float], new: Sequence[float], level: float = LEVEL) -> PairedResult:
    """Compare outcomes of 0 or 1 of the same items, new against base: test and interval. ValueError for unequal lengths, no
    items, or another outcome: a missing one must be settled by the caller."""
    if len(base) != len(new) or not base:
        raise ValueError(f"a paired comparison needs the same items twice, got {len(base)} and {len(new)}")
    if not {*base, *new} <= {0, 1}:
        raise ValueError("an outcome is neither 0 nor 1")
    won, lost = sum(map(operator.gt, new, base)), sum(map(operator.lt, new, base))
    interval = tango(won, lost, len(base), level)
    return PairedResult(len(base), won, lost, (won - lost) / len(base), *interval, mcnemar_midp(won, lost))


def visible_of_clusters(sizes: Sequence[int], intraclass: float = INTRACLASS) -> int:
    """Return how many independent items show as much as clusters of these sizes: items over 1 + (m - 1) rho, rounded down; m is
    the size of an average item's cluster, rho `intraclass` (L. Kish, Survey Sampling, 1965, 5.4)."""
    items = sum(sizes)
    if items <= 0 or not 0 <= intraclass <= 1:
        raise ValueError(f"{items} items in clusters with a correlation of {intraclass}")
    average = sum(size * size for size in sizes) / items
    return max(1, math.floor(items / (1 + (average - 1) * intraclass) + 1e-9))


@cache
def smallest_visible_gain(n: int, p_base: float = 0.5) -> float | None:
    """Return the smallest true gain, in points, that McNemar's mid-p test (p < 0.05) finds with `VISIBLE_POWER`; None if none.
    Assumed: the new model loses `LOST_SHARE` of what the base model solved (`p_base` of all). Rounded up to a tenth."""
    if n < 0 or not 0 <= p_base <= 1:
        raise ValueError(f"{n} items with {p_base} solved make no split")
    lost = LOST_SHARE * p_base
    tenths_high = math.floor((1 - p_base) * 1000 + 1e-9)  # nobody gains more than is left to solve
    tenths_low = 0
    if not tenths_high or _power(n, tenths_high / 1000 + lost, lost) < VISIBLE_POWER:
        return None
    while tenths_high - tenths_low > 1:  # more wins beside the same losses are never less significant
        tenths = (tenths_low + tenths_high) // 2
        if _power(n, tenths / 1000 + lost, lost) < VISIBLE_POWER:
            tenths_low = tenths
        else:
            tenths_high = tenths
    return tenths_high / 10


def mean_t_interval(values: Sequence[float], level: float = LEVEL) -> MeanInterval:
    """Return the mean over runs with what its number allows: a t interval from three on, the range of two, else nothing. Equal
    runs have no interval: one without width would say that the next run is known. ValueError for NaN or infinite values."""
    if not all(map(math.isfinite, values)):
        raise ValueError("a value is not finite")
    n = len(values)
    mean = fmean(values) if values else None
    if mean is None or n == 1:
        return MeanInterval(n, mean, None, None, "none")
    if n == 2:
        return MeanInterval(n, mean, min(values), max(values), "range")
    if max(values) - min(values) <= NO_SPREAD:
        return MeanInterval(n, mean, None, None, "equal")
    half = t_quantile(n - 1, level) * stdev(values) / math.sqrt(n)
    return MeanInterval(n, mean, mean - half, mean + half, "t")


def standard_error(outcomes: Sequence[float], clusters: Sequence[str] | None = None) -> float | None:
    """Return the standard error of the mean of outcomes from 0 to 1; None for none. With clusters: that of a ratio of sums over
    clusters (Cochran, Sampling Techniques, 6.3). Of outcomes all alike: from Wilson's interval."""
    n = len(outcomes)
    if n == 0:
        return None
    mean = math.fsum(outcomes) / n
    sums: dict[str, list[float]] = {}
    for number, outcome in enumerate(outcomes):
        sums.setdefault(str(number) if clusters is None else clusters[number], []).append(outcome - mean)
    units = len(sums)
    squares = math.fsum(math.fsum(each) ** 2 for each in sums.values())
    if units > 1 and squares > 0:
        return math.sqrt(squares * units / (units - 1)) / n
    wilson = wilson_share(min(1.0, max(0.0, mean)), units)
    return (wilson.high - wilson.low) / (2 * _normal_quantile(LEVEL))


@cache
def expected_max_noise(n_queries: int, se: float) -> float:
    """Return the expected maximum of n independent N(0, se^2): an upper bound on what the best of n owes to luck. A bound,
    since submissions of one run resemble one another and are scored on the same items. 0 for no query or one."""
    if n_queries < 0 or not 0 <= se < math.inf:
        raise ValueError(f"{n_queries} queries with standard error {se} have no noise")
    if n_queries < 2:
        return 0.0

    from scipy.integrate import quad
    from scipy.special import ndtr

    def above(x: float) -> float:  # the probability that the maximum is above x, less that it is below -x
        return float(-math.expm1(n_queries * math.log1p(-ndtr(-x))) - ndtr(-x) ** n_queries)

    return se * float(quad(above, 0.0, 12.0, epsabs=1e-11, limit=500)[0])


@cache
def _normal_quantile(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"a level lies between 0 and 1, not at {level}")
    return NormalDist().inv_cdf((1 + level) / 2)


def _tango_upper(b: float, c: float, n: float, z: float) -> float:
    """The upper limit; by symmetry, minus that of swapped counts is the lower one."""
    if b == n:
        return 1.0

    def is_above(d: float) -> bool:
        # The constrained estimate q of p_lost is the larger root of 2n q^2 + linear q + constant.
        linear = (2 * n - b + c) * d - b - c
        constant = -c * d * (1 - d)
        root = math.sqrt(max(0.0, linear * linear - 8 * n * constant))
        q = (root - linear) / (4 * n) if linear <= 0 else -2 * constant / (root + linear)
        return (b - c - n * d) ** 2 > z * z * n * max(0.0, 2 * q + d * (1 - d))

    low, high = (b - c) / n, 1.0
    while low < (middle := (low + high) / 2) < high:  # to the last bit
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return high


def _power(n: int, won: float, lost: float) -> float:
    """Probability that the mid-p test finds new better than base, for probabilities of winning and losing."""
    import numpy as np
    from scipy.special import bdtrc, gammaln, xlog1py, xlogy

    discordant, p = np.arange(n + 1), won + lost
    ways = gammaln(n + 1) - gammaln(discordant + 1) - gammaln(n - discordant + 1)
    masses = np.exp(ways + xlogy(discordant, p) + xlog1py(n - discordant, -p))
    least = np.array([_least_wins(count) for count in range(n + 1)])
    shown = np.where(least <= discordant, bdtrc(least - 1, np.maximum(discordant, 1), won / p), 0.0)
    return float(masses @ shown)


@cache
def _least_wins(discordant: int) -> int:
    """Least number of wins among `discordant` items that is significant; more than all of them if none is."""
    import numpy as np
    from scipy.special import bdtr

    at_most = bdtr(np.arange(discordant + 1), discordant, 0.5) if discordant else np.ones(1)  # so many losses
    doubled = at_most + np.concatenate([[0.0], at_most[:-1]])  # of the mid-p test: twice the tail, the last one by half
    return discordant - int((doubled < ALPHA).sum()) + 1


def beyond_noise(difference: float, p_value: float | None, low: float | None, high: float | None) -> int:
    """Return whether a gain is more than noise: 1 for better, -1 for worse, 0 for neither.

    Its test decides (p < 0.05); where there is none, its interval, which must leave out 0; without both it is noise.
    """
    if p_value is None:
        return 0 if low is None or high is None else (low > 0) - (high < 0)
    return 0 if p_value >= ALPHA else (difference > 0) - (difference < 0)


def t_outside(t: float, df: float) -> float:
    """Probability that Student's t lies outside -t and t, to full relative precision however small."""
    from scipy.special import stdtr

    return 2 * float(stdtr(df, -t))


@cache
def t_quantile(df: int, level: float = LEVEL) -> float:
    """Two-sided quantile of Student's t."""
    from scipy.special import stdtrit

    if not 0 < level < 1:
        raise ValueError(f"a level lies between 0 and 1, not at {level}")
    return float(stdtrit(df, (1 + level) / 2))
