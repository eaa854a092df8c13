"""Each submission against the base model on the same feedback items: difference, its interval, items won and lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from autorl_hpc.files.view import RunView
from autorl_hpc.records.ledger import Submission
from autorl_hpc.report import length_controlled
from autorl_hpc.report.compare import Pair
from autorl_hpc.report.items import Unusable
from autorl_hpc.report.statistics.clusters import hull, tango_of, tango_of_clusters, totals, variance_of_mean
from autorl_hpc.scoring import stats

POINTS = 100.0
MAX_PAIRED = 12
"""Scored submissions of a run whose items files are all opened. Of a run with more only the selected one, or the best before one
is selected, is compared: its items are open for the optimism gap anyway, and fifty files a run would make a report of a
thousand runs take a minute."""

MAX_IDS = 20
NO_WIDTH = 1e-9
MIN_UNITS = 3
"""Items or clusters; of two, a t interval is wider than all points there are."""


@dataclass(frozen=True)
class FeedbackGain:
    """Points on the base model; interval of the paired comparison, 95 %."""

    difference: float
    low: float | None
    high: float | None
    won_ids: tuple[str, ...] = ()
    lost_ids: tuple[str, ...] = ()
    won: int | None = None
    lost: int | None = None


def feedback_gains(
    view: RunView, selected: int | None, pair_of: Callable[[Submission], Pair]
) -> Mapping[int, FeedbackGain]:
    """By submission, for those of which the items are opened and can be used.

    Args:
        pair_of: base model and submission on the feedback items; raises Unusable.
    """
    found: dict[int, FeedbackGain] = {}
    for submission in opened(view, selected):
        try:
            gain = feedback_gain(pair_of(submission))
        except Unusable:
            continue
        if gain is not None:
            found[submission.submission_id] = gain
    return found


def opened(view: RunView, selected: int | None) -> list[Submission]:
    """The submissions whose items are compared: all, or one of more than MAX_PAIRED."""
    scored = [s for s in view.accepted() if (score := view.score_of(s)) and score.evaluation.score is not None]
    if len(scored) <= MAX_PAIRED:
        return scored
    wanted = selected
    if wanted is None:
        best = view.best()
        wanted = best.submission_id if best else None
    return [submission for submission in scored if submission.submission_id == wanted]


def feedback_gain(pair: Pair) -> FeedbackGain | None:
    """Right or wrong outcomes: Tango's interval. Graded ones, and items in clusters: a t interval of the differences, for the
    bootstrap of the selected checkpoint would take a second a run. None: length-controlled win rates, which are no mean over
    items."""
    if length_controlled.is_fitted(pair.base, pair.new):
        return None
    base, new = pair.base.outcomes, pair.new.outcomes
    binary = pair.base.binary and pair.new.binary
    low: float | None
    high: float | None
    if binary and pair.clusters is None:
        found = stats.paired(base, new)
        difference, low, high = found.difference, found.low, found.high
    else:
        difference, low, high = _t_interval(base, new, pair.clusters)
    each = list(zip(pair.base.ids, base, new, strict=True)) if binary else []
    won, lost = [name for name, b, n in each if n > b], [name for name, b, n in each if n < b]
    return FeedbackGain(
        difference=POINTS * difference,
        low=None if low is None else POINTS * low,
        high=None if high is None else POINTS * high,
        won_ids=tuple(won[:MAX_IDS]),
        lost_ids=tuple(lost[:MAX_IDS]),
        won=len(won) if binary else None,
        lost=len(lost) if binary else None,
    )


def _t_interval(
    base: Sequence[float], new: Sequence[float], clusters: Sequence[str] | None
) -> tuple[float, float | None, float | None]:
    """Mean difference and its t interval; clusters count as one observation each. No interval from fewer than three."""
    differences = [n - b for b, n in zip(base, new, strict=True)]
    mean = fmean(differences)
    of = clusters if clusters is not None else [str(i) for i in range(len(differences))]
    units = len(set(of))
    if units < MIN_UNITS:
        return mean, None, None
    found = totals(differences, of)
    half = stats.t_quantile(units - 1) * math.sqrt(variance_of_mean(differences, of))
    interval = stats.Interval(max(-1.0, mean - half), min(1.0, mean + half))
    if half > NO_WIDTH:
        return mean, *interval
    return mean, *hull(interval, tango_of(found) if clusters is None else tango_of_clusters(found))
