"""Selected against base from outcomes per item: the gain on the report split, and the optimism gap."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from autorl_hpc.report import length_controlled
from autorl_hpc.report.graded import GradedResult, paired_graded
from autorl_hpc.report.items import Items, clusters_of, same_items
from autorl_hpc.report.statistics.clusters import BOOTSTRAP_FROM_CLUSTERS, paired_clusters, variance_of_mean
from autorl_hpc.report.summary import Gain, Gap
from autorl_hpc.scoring import stats

POINTS = 100.0


@dataclass(frozen=True)
class Pair:
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


def gain(pair: Pair) -> Gain:
    """New against base: mid-p and Tango's interval for right or wrong, sign flips and BCa bootstrap for graded outcomes.

    Where items come in clusters, both kinds by sign flips and bootstrap of clusters. Length-controlled win rates are refitted;
    see length_controlled.py.
    """
    if length_controlled.is_fitted(pair.base, pair.new):
        judged = length_controlled.paired(*length_controlled.judged(pair.base, pair.new))
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


def _clustered_gain(pair: Pair, clusters: Sequence[str]) -> Gain:
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


def optimism(feedback: Pair, report: Pair) -> Gap | None:
    """By how much the gain on the feedback split exceeds that on the report split; None for fewer than two items."""
    if min(len(feedback.base.ids), len(report.base.ids)) < 2:
        return None
    if length_controlled.is_fitted(feedback.base, feedback.new, report.base, report.new):
        gap, error = length_controlled.optimism_gap(
            length_controlled.judged(feedback.base, feedback.new), length_controlled.judged(report.base, report.new)
        )
        return _told(gap, error)
    if feedback.clusters is not None or report.clusters is not None:
        return _clustered_gap(feedback, report)
    found = stats.optimism_gap(feedback.base.outcomes, feedback.new.outcomes, report.base.outcomes, report.new.outcomes)
    return _told(found.gap, found.standard_error)


def _clustered_gap(feedback: Pair, report: Pair) -> Gap | None:
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
