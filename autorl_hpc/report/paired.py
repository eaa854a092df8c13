"""Selected against base from outcomes per item: the gain on the report split, and the optimism gap."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any, Literal, NamedTuple

from autorl_hpc.report.run_folder import Items, Unusable, clusters_of, same_items
from autorl_hpc.report.statistics import (
    BOOTSTRAP_FROM_CLUSTERS,
    ClusterTotals,
    bca,
    bca_of_mean,
    generator,
    hull,
    paired_clusters,
    sign_flip_p,
    tango_of,
    variance_of_mean,
    vary_little,
)
from autorl_hpc.report.summary import Gain, Gap
from autorl_hpc.scoring import stats
from autorl_hpc.scoring.alpacaeval import pairs_of
from autorl_hpc.scoring.length_control import JudgedPair, influences, refits
from autorl_hpc.scoring.stats import LEVEL

# Selected against base where outcomes are graded (a share, a reward) instead of right or wrong, and items are independent.

ALIKE = 1e-9
"""Differences nearer to each other are equal but for rounding."""


class GradedResult(NamedTuple):
    """New against base on the same items, in units of outcomes."""

    difference: float
    low: float
    high: float
    p_value: float


def paired_graded(base: Sequence[float], new: Sequence[float], level: float = LEVEL) -> GradedResult:
    """Mean paired difference with its BCa bootstrap interval (10,000 resamples) and a sign-flip p value, both seeded.

    Items that all changed alike have Tango's interval of as many won or lost in part, since resamples know no spread there; where
    fewer than ten differ from the others the interval is at least as wide. ValueError unless both hold the same two or more items.
    """
    if len(base) != len(new) or len(base) < 2:
        raise ValueError(f"{len(base)} and {len(new)} outcomes are not the same two or more items")
    differences = [float(now) - float(old) for old, now in zip(base, new, strict=True)]
    seen = math.fsum(differences) / len(differences)
    p_value = sign_flip_p(differences)
    found = ClusterTotals(differences, [1] * len(differences))
    if max(differences) - min(differences) <= ALIKE:
        return GradedResult(seen, *tango_of(found, level), p_value)
    interval = bca_of_mean(sorted(differences), found.sizes, level)
    return GradedResult(seen, *(hull(interval, tango_of(found, level)) if vary_little(found) else interval), p_value)


# Length-controlled win rates in the report: the interval of one, and selected against base, by refits at a fixed penalty.
#
# Scores and differences are in units of outcomes (0 to 1), as in graded.py.

RESAMPLES = 2_000
"""Fewer than for a mean: each is a regression, and 10,000 of them for two models take seven seconds a run. What 2,000 cost is
noise in the ends of the interval: a standard deviation of about 3 % of its half width, where 10,000 would leave 1.4 %."""
REGROUPINGS = 1_000
"""Of the permutation test: each takes two regressions over both models' pairs. The least p is 0.001."""


class Judged(NamedTuple):
    """Base model and checkpoint on the items that were judged for both, with the penalties of their fits."""

    base: list[JudgedPair]
    new: list[JudgedPair]
    c_base: float
    c_new: float


def is_fitted(*items: Items) -> bool:
    """Whether all of these have length-controlled win rates that can be refitted."""
    return all(each.lc_c is not None and any("y" in facts for facts in each.facts) for each in items)


def judged_pairs(base: Items, new: Items) -> Judged:
    """The pairs of both, less the items that the judge's word can't be read on for either.

    Raises:
        Unusable: the facts are not those of judged pairs.
    """
    kept = [
        (before, after) for before, after in zip(base.facts, new.facts, strict=True) if "y" in before and "y" in after
    ]
    try:
        pairs = [pairs_of([facts[side] for facts in kept]) for side in (0, 1)]
    except ValueError as error:
        raise Unusable(str(error)) from None
    if len(kept) < 2:
        raise Unusable("fewer than two items were judged for both models")
    assert base.lc_c is not None and new.lc_c is not None
    return Judged(pairs[0], pairs[1], base.lc_c, new.lc_c)


def interval_points(items: Items, score: float) -> tuple[float | None, float | None]:
    """The 95 % interval of one score in points: normal, its error from the items' influences; nothing where it has none."""
    try:
        moved = influences(pairs_of(items.facts), items.lc_c or 1.0)
    except ValueError:
        return None, None
    half = NormalDist().inv_cdf((1 + LEVEL) / 2) * math.sqrt(float((moved**2).sum()))
    return (max(0.0, score - half), min(100.0, score + half)) if half > 0 else (None, None)


def optimism_gap(feedback: Judged, report: Judged) -> tuple[float, float]:
    """(feedback new - feedback base) - (report new - report base), with its standard error over items."""
    import numpy as np

    gains, squares = [], 0.0
    for part in (feedback, report):
        counts = np.ones((1, len(part.base)))
        gains.append(float(refits(part.new, part.c_new, counts)[0] - refits(part.base, part.c_base, counts)[0]) / 100)
        moved = influences(part.new, part.c_new) - influences(part.base, part.c_base)
        squares += float((moved**2).sum()) / 1e4
    return gains[0] - gains[1], math.sqrt(squares)


def on_all_items(feedback: Items, report: Items) -> str | None:
    """A note with the length-controlled win rate on both splits together; None for other tasks.

    At the penalty of the report split's fit, so that no cross validation is needed.
    """
    if not is_fitted(feedback, report):
        return None
    import numpy as np

    pairs = [pair for items in (feedback, report) for pair in pairs_of(items.facts)]
    score = float(refits(pairs, report.lc_c or 1.0, np.ones((1, len(pairs))))[0])
    return (
        f"secondary: {score:.1f} on all {len(pairs)} items, those of the feedback split among them, whose scores were told "
        "during the run"
    )


def paired(
    base: Sequence[JudgedPair], new: Sequence[JudgedPair], c_base: float, c_new: float, level: float = LEVEL
) -> GradedResult:
    """Difference of two length-controlled win rates on the same items, with BCa interval and permutation test.

    The items are resampled, both models' with the same draw, and both are refitted at their own fixed penalty (2,000, seeded;
    the acceleration is from leaving out each item). Test: of each item both models' pairs are
    exchanged or not (1,000, seeded), p = (hits + 1) / (draws + 1); both sides are then fitted at the base model's penalty.
    ValueError unless both hold the same two or more items.
    """
    import numpy as np

    n = len(base)
    if (
        n != len(new)
        or n < 2
        or any((a.len_1, a.difficulty) != (b.len_1, b.difficulty) for a, b in zip(base, new, strict=False))
    ):
        raise ValueError(f"{n} and {len(new)} pairs are not the same two or more items")

    def differences(counts: Any) -> Any:
        return (refits(new, c_new, counts) - refits(base, c_base, counts)) / 100

    seen = float(differences(np.ones((1, n)))[0])
    if all(a.y == b.y and a.len_2 == b.len_2 for a, b in zip(base, new, strict=True)):
        return GradedResult(seen, seen, seen, 1.0)
    (interval,) = bca(lambda counts: differences(counts)[None], n, level, RESAMPLES)
    return GradedResult(seen, *interval, _permutation_p(base, new, c_base))


def _permutation_p(base: Sequence[JudgedPair], new: Sequence[JudgedPair], c: float) -> float:
    """Both sides are drawn from the pairs of both models: one side takes of each item the one, the other side the other."""
    import numpy as np

    n = len(base)
    swapped = generator().integers(0, 2, (REGROUPINGS, n)).astype(float)
    swapped = np.vstack([np.zeros((1, n)), swapped])  # the first is as it was seen
    both = [*new, *base]
    one = refits(both, c, np.hstack([1 - swapped, swapped]))
    other = refits(both, c, np.hstack([swapped, 1 - swapped]))
    apart = np.abs(one - other)
    hits = int((apart[1:] >= apart[0] - 1e-9).sum())
    return (hits + 1) / (REGROUPINGS + 1)


POINTS = 100.0


@dataclass(frozen=True)
class PairedItems:
    """Base model and checkpoint on the same items.

    Raises:
        Unusable: they are not the same items.
    """

    base: Items
    new: Items

    def __post_init__(self) -> None:
        same_items(self.base, self.new)
        clusters_of(self.base, self.new)

    @property
    def clusters(self) -> tuple[str, ...] | None:
        """What each item belongs to, where items are not independent."""
        return clusters_of(self.base, self.new)


def gain(pair: PairedItems) -> Gain:
    """New against base: mid-p and Tango's interval for right or wrong, sign flips and BCa bootstrap for graded outcomes.

    Where items come in clusters, both kinds by sign flips and bootstrap of clusters. Length-controlled win rates are refitted;
    see length_controlled.py.
    """
    if is_fitted(pair.base, pair.new):
        judged = paired(*judged_pairs(pair.base, pair.new))
        return _graded_gain(judged, len(pair.base.ids), "length_controlled_items")
    base, new = pair.base.outcomes, pair.new.outcomes
    if pair.clusters is not None:
        return _clustered_gain(pair, pair.clusters)
    if pair.base.binary and pair.new.binary:
        found = stats.paired(base, new)
        return Gain(
            difference=POINTS * found.difference,
            low=POINTS * found.low,
            high=POINTS * found.high,
            p_value=found.p_value,
            won=found.won,
            lost=found.lost,
            n=found.n,
            how="paired_items",
            interval="Tango",
        )
    return _graded_gain(paired_graded(base, new), len(base), "graded_items")


def _clustered_gain(pair: PairedItems, clusters: Sequence[str]) -> Gain:
    base, new = pair.base.outcomes, pair.new.outcomes
    found = paired_clusters(base, new, clusters)
    binary = pair.base.binary and pair.new.binary
    return Gain(
        difference=POINTS * found.difference,
        low=POINTS * found.low,
        high=POINTS * found.high,
        p_value=found.p_value,
        won=sum(map(operator.gt, new, base)) if binary else None,
        lost=sum(map(operator.lt, new, base)) if binary else None,
        n=len(base),
        clusters=found.clusters,
        how="clustered_items",
        interval=found.kind,
    )


def _graded_gain(found: GradedResult, n: int, how: Literal["graded_items", "length_controlled_items"]) -> Gain:
    return Gain(
        difference=POINTS * found.difference,
        low=POINTS * found.low,
        high=POINTS * found.high,
        p_value=found.p_value,
        n=n,
        how=how,
        interval="bootstrap over items",
    )


def optimism(feedback: PairedItems, report: PairedItems) -> Gap | None:
    """By how much the gain on the feedback split exceeds that on the report split; None for fewer than two items."""
    if min(len(feedback.base.ids), len(report.base.ids)) < 2:
        return None
    if is_fitted(feedback.base, feedback.new, report.base, report.new):
        gap, error = optimism_gap(judged_pairs(feedback.base, feedback.new), judged_pairs(report.base, report.new))
        return _told(gap, error)
    if feedback.clusters is not None or report.clusters is not None:
        return _clustered_gap(feedback, report)
    found = stats.optimism_gap(feedback.base.outcomes, feedback.new.outcomes, report.base.outcomes, report.new.outcomes)
    return _told(found.gap, found.standard_error)


def _clustered_gap(feedback: PairedItems, report: PairedItems) -> Gap | None:
    """As `stats.optimism_gap`, the squared errors being those of means over clusters; None where a split is one cluster.

    No error where a split has fewer than five: their spread hardly tells one, and 1.96 of it would hold far too little.
    """
    gains, squares, fewest = [], [], math.inf
    for pair in (feedback, report):
        differences = [new - old for old, new in zip(pair.base.outcomes, pair.new.outcomes, strict=True)]
        clusters = pair.clusters or pair.base.ids
        fewest = min(fewest, len(set(clusters)))
        if fewest < 2:
            return None
        gains.append(fmean(differences))
        squares.append(variance_of_mean(differences, clusters))
    return _told(gains[0] - gains[1], math.sqrt(sum(squares)) if fewest >= BOOTSTRAP_FROM_CLUSTERS else 0.0)


def _told(gap: float, error: float) -> Gap:
    """In points. An error of nothing is that of a sample in which nothing varies, or too little is known: none is told."""
    return Gap(gap=POINTS * gap, standard_error=POINTS * error if error > 0 else None)
