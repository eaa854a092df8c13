"""Selected against base from outcomes per item: the gain on the report split, and the optimism gap."""

from __future__ import annotations

from dataclasses import dataclass

from autorl_hpc.report.items import Items, same_items
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


def gain(pair: Pair) -> Gain:
    """New against base: mid-p and Tango's interval for right or wrong, sign flips and BCa bootstrap for graded outcomes."""
    base, new = pair.base.outcomes, pair.new.outcomes
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
        )
    from autorl_hpc.report.graded import paired_graded

    graded = paired_graded(base, new)
    return Gain(
        difference=POINTS * graded.difference,
        low=POINTS * graded.low,
        high=POINTS * graded.high,
        p_value=graded.p_value,
        n=len(base),
        how="graded_items",
    )


def optimism(feedback: Pair, report: Pair) -> Gap | None:
    """By how much the gain on the feedback split exceeds that on the report split; None for fewer than two items."""
    if min(len(feedback.base.ids), len(report.base.ids)) < 2:
        return None
    found = stats.optimism_gap(feedback.base.outcomes, feedback.new.outcomes, report.base.outcomes, report.new.outcomes)
    return Gap(gap=POINTS * found.gap, standard_error=POINTS * found.standard_error)
