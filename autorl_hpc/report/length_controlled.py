"""Length-controlled win rates in the report: the interval of one, and selected against base, by refits at a fixed penalty.

Scores and differences are in units of outcomes (0 to 1), as in graded.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

from autorl_hpc.report.graded import GradedResult
from autorl_hpc.report.items import Items, Unusable
from autorl_hpc.report.statistics.bca import bca
from autorl_hpc.report.statistics.resampling import counts, expanded_tail, flips
from autorl_hpc.scoring.alpaca import pairs_of
from autorl_hpc.scoring.length_control import Pair, influences, refits
from autorl_hpc.scoring.stats import LEVEL

RESAMPLES = 2_000
"""Fewer than for a mean: each is a regression, and 10,000 of them for two models take seven seconds a run. What 2,000 cost is
noise in the ends of the interval: a standard deviation of about 3 % of its half width, where 10,000 would leave 1.4 %."""
REGROUPINGS = 1_000
"""Of the permutation test: each takes two regressions over both models' pairs. The least p is 0.001."""


class Judged(NamedTuple):
    """Base model and checkpoint on the items that were judged for both, with the penalties of their fits."""

    base: list[Pair]
    new: list[Pair]
    c_base: float
    c_new: float


def is_fitted(*items: Items) -> bool:
    """Whether all of these have length-controlled win rates that can be refitted."""
    return all(each.lc_c is not None and any("y" in facts for facts in each.facts) for each in items)


def judged(base: Items, new: Items) -> Judged:
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
    base: Sequence[Pair], new: Sequence[Pair], c_base: float, c_new: float, level: float = LEVEL
) -> GradedResult:
    """Difference of two length-controlled win rates on the same items, with BCa interval and permutation test.

    The items are resampled, both models' with the same draw, and both are refitted at their own fixed penalty (2,000, seeded;
    the acceleration is from leaving out each item: B. Efron, JASA 82:171-185, 1987). Test: of each item both models' pairs are
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
    left_out = differences(np.ones((n, n)) - np.eye(n))
    low, high = bca(
        differences(counts(n, RESAMPLES)), seen, (left_out.mean() - left_out).tolist(), expanded_tail(n, level)
    )
    return GradedResult(seen, low, high, _permutation_p(base, new, c_base))


def _permutation_p(base: Sequence[Pair], new: Sequence[Pair], c: float) -> float:
    """Both sides are drawn from the pairs of both models: one side takes of each item the one, the other side the other."""
    import numpy as np

    n = len(base)
    swapped = np.unpackbits(flips(n, REGROUPINGS), axis=1, count=n).astype(float)
    swapped = np.vstack([np.zeros((1, n)), swapped])  # the first is as it was seen
    both = [*new, *base]
    one = refits(both, c, np.hstack([1 - swapped, swapped]))
    other = refits(both, c, np.hstack([swapped, 1 - swapped]))
    apart = np.abs(one - other)
    hits = int((apart[1:] >= apart[0] - 1e-9).sum())
    return (hits + 1) / (REGROUPINGS + 1)
