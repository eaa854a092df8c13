"""Scores of a run with their noise: intervals, gain over the base model, optimism gap, selection noise, smallest visible gain.

Scores are points (0 to 100), outcomes of items 0 to 1, intervals 95 %.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from autorl_hpc.files.redact import masked
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.entries import Evaluation, Submission
from autorl_hpc.records.exchange import Baseline
from autorl_hpc.report.format import clean
from autorl_hpc.report.hidden_items import IN_WORKSPACE, NOTHING, Hidden, hidden_of
from autorl_hpc.report.run_folder import Items, Unusable, shown_look
from autorl_hpc.report.statistics import (
    BOOTSTRAP_FROM_CLUSTERS,
    TIE,
    TIE_SHARE,
    ClusteredDifference,
    ClusteredMean,
    ClusterTotals,
    bca,
    bca_of_mean,
    clustered_intervals,
    generator,
    hull,
    paired_clusters,
    sign_flip_p,
    tango_of,
    variance_of_mean,
    vary_little,
    wilson_of_clusters,
)
from autorl_hpc.report.summary import BaselineSummary, Gain, Gap, ItemsInterval, Noise, Point, ScoreSummary
from autorl_hpc.scoring import stats
from autorl_hpc.scoring.alpacaeval import pairs_of
from autorl_hpc.scoring.length_control import JudgedPair, influences, refits
from autorl_hpc.scoring.stats import Z95, Interval
from autorl_hpc.states import Fault, SubmissionState

POINTS = 100.0


class ScoreInterval(NamedTuple):
    """The 95 % interval of a score in points, and its method; all None if there is none."""

    low: float | None = None
    high: float | None = None
    kind: ItemsInterval | None = None


def interval(evaluation: Evaluation, items: Items | None = None) -> ScoreInterval:
    """Return a score's interval: Wilson for right or wrong outcomes, t over graded items, normal for length-controlled win rates.

    Items in clusters: bootstrap over clusters; if the items are not available, Wilson with each cluster counted as one item.
    """
    return intervals_of([(0, evaluation, items)])[0]


def intervals_of(scores: Iterable[tuple[int, Evaluation, Items | None]]) -> dict[int, ScoreInterval]:
    """Return `interval` of several scores by submission; those on the same clustered items are resampled together."""
    found: dict[int, ScoreInterval] = {}
    together: dict[tuple[str, ...], dict[int, tuple[float, ...]]] = {}
    for number, evaluation, items in scores:
        if evaluation.score is None or evaluation.n == 0 or items is None or not items.clusters or is_fitted(items):
            found[number] = _alone(evaluation, items)
        else:  # only outcomes are held: a run may have thousands of submissions
            together.setdefault(items.clusters, {})[number] = items.outcomes
    for clusters, several in together.items():
        drawn = clustered_intervals(list(several.values()), clusters)
        for number, one in zip(several, drawn, strict=True):
            found[number] = _points(one, one.kind)
    return found


def _points(found: Interval | ClusteredMean, kind: ItemsInterval) -> ScoreInterval:
    return ScoreInterval(POINTS * found.low, POINTS * found.high, kind)


def _alone(evaluation: Evaluation, items: Items | None) -> ScoreInterval:
    if evaluation.score is None or evaluation.n == 0:
        return ScoreInterval()
    if items is not None and is_fitted(items):
        return _normal(items, evaluation.score)
    if evaluation.clusters is not None:
        wilson = wilson_of_clusters(evaluation.score / POINTS, evaluation.clusters, evaluation.clusters)
        return _points(wilson, "Wilson over clusters")
    if evaluation.correct is not None and evaluation.correct <= evaluation.n:
        return _points(stats.wilson(evaluation.correct, evaluation.n), "Wilson")
    return ScoreInterval() if items is None or not items.outcomes else _graded(items.outcomes)


def _normal(items: Items, score: float) -> ScoreInterval:
    try:
        moved = influences(pairs_of(items.facts), items.lc_c or 1.0)
    except ValueError:
        return ScoreInterval()
    half = Z95 * math.sqrt(float((moved**2).sum()))
    kind: ItemsInterval = "normal over items, length-controlled"
    return ScoreInterval(max(0.0, score - half), min(POINTS, score + half), kind) if half > 0 else ScoreInterval()


def _graded(outcomes: Sequence[float]) -> ScoreInterval:
    """Return the t interval over items; of all equal ones Wilson's for their mean; if fewer than ten differ, the hull of both."""
    mean = stats.mean_t_interval(outcomes)
    found = stats.wilson_share(min(1.0, max(0.0, mean.mean or 0.0)), len(outcomes))
    if mean.kind != "t" or mean.low is None or mean.high is None:
        return _points(found, "Wilson")
    student = Interval(max(0.0, mean.low), min(1.0, mean.high))
    few = vary_little(ClusterTotals(list(outcomes), [1] * len(outcomes)))
    return _points(hull(student, found) if few else student, "t over items")


def needs_items(evaluation: Evaluation) -> bool:
    """Return whether a score's interval needs the outcomes of its items, not only their number."""
    return evaluation.score is not None and (evaluation.correct is None or evaluation.clusters is not None)


def score_summary(evaluation: Evaluation, submission_id: int | None, items: Items | None = None) -> ScoreSummary:
    """Return a score with its interval."""
    found = interval(evaluation, items)
    same = ("split", "score", "n", "truncated", "engine_hash", "fault")
    return ScoreSummary(
        **{name: getattr(evaluation, name) for name in same},
        low=found.low,
        high=found.high,
        interval=found.kind,
        clusters=len(set(items.clusters)) if items is not None and items.clusters else evaluation.clusters,
        submission_id=submission_id,
        reason=clean(evaluation.reason),
    )


def baseline_summary(baseline: Baseline, items: Items | None = None) -> BaselineSummary:
    """Return the base model's score, its interval, and the difference between its two measurements."""
    return BaselineSummary(
        **score_summary(baseline.evaluation, None, items).model_dump(),
        key=baseline.key,
        repeat_score=baseline.repeat_score,
        noise=baseline.noise(),
        repeat_changed_items=baseline.repeat_changed_items,
    )


def noise_of_queries(view: RunView, intervals: Mapping[int, ScoreInterval] | None = None) -> Noise | None:
    """Return the expected maximum of noise over the distinct checkpoints with a score; None if there is none. The
    standard error is the largest among the scores, taken from intervals, so that it is not 0 at 0 or 100 points. Both
    make the bound larger. `intervals`: by submission, for scores with items; for others each cluster counts as one
    item."""
    errors = []
    for number, score in view.scores.items():
        evaluation = score.evaluation
        if evaluation.score is None or evaluation.n == 0:
            continue
        found = (intervals or {}).get(number) or interval(evaluation)
        if found.low is not None and found.high is not None:
            errors.append((found.high - found.low) / (2 * Z95))
        else:  # an upper bound: outcomes in [0, 1] with this mean vary most if all are 0 or 1
            errors.append(math.sqrt(evaluation.score * (POINTS - evaluation.score) / evaluation.n))
    if not errors:
        return None
    worst = max(errors)
    return Noise(
        queries=len(errors), standard_error=worst, expected_maximum=worst * stats.expected_max_noise(len(errors), 1.0)
    )


def visible_gain(base: Evaluation, items: Items | None = None) -> float | None:
    """Return the smallest true gain that the split can show, in points. Clusters count as fewer independent items."""
    if base.score is None:
        return None
    n = base.n if base.clusters is None else base.clusters
    if items is not None and items.clusters is not None:
        n = stats.visible_of_clusters(list(Counter(items.clusters).values()))
    return stats.smallest_visible_gain(n, min(1.0, max(0.0, base.score / POINTS)))


def points_of(view: RunView, intervals: Mapping[int, ScoreInterval]) -> tuple[Point, ...]:
    """Return every submission in order, with its score if it has one. `intervals`: by the submission that a score was
    measured for, for scores with items."""
    hidden = hidden_of(view.contaminations)
    looks = {look.submission_id: look for look in reversed(view.contaminations)}  # the first of several
    points = []
    for number, submission in sorted(view.submissions.items()):
        score = view.score_of(submission) if submission.status == "accepted" else None
        evaluation, found, look = None, ScoreInterval(), looks.get(number)
        if score is not None:
            evaluation = score.evaluation
            found = intervals.get(score.submission_id) or interval(evaluation)
        known = view.fingerprint_of(submission) if evaluation is not None else None
        texts = ("reason", "largest_tensor", "nearest_model", "exchanged_of")
        same = ("submission_id", "elapsed_s", "final", "is_base", "same_as")
        point = Point(
            **{name: getattr(submission, name) for name in same},
            manifest_id=clean(submission.manifest_id) or "",
            status=_status(submission, evaluation),
            score=None if evaluation is None else evaluation.score,
            low=found.low,
            high=found.high,
            interval=found.kind,
            model_path=_said(submission.model_path, hidden),
            note=_said(submission.note, hidden),
            fault=submission.fault if evaluation is None else evaluation.fault,
            reason=_reason(submission, evaluation, hidden),
            fingerprint=known and known.model_copy(update={name: clean(getattr(known, name)) for name in texts}),
            contamination=None if look is None else shown_look(look, hidden),
        )
        points.append(point)
    return tuple(points)


def _said(text: str | None, hidden: Hidden) -> str | None:
    return clean(masked(hidden.said(text) or "")) if text else text


def _reason(submission: Submission, evaluation: Evaluation | None, hidden: Hidden) -> str | None:
    """Return why there is no score. A refusal and a fault of the checkpoint quote the agent's file names, so they are masked."""
    if evaluation is None:
        told = _said(submission.message, hidden)
        return f"{submission.code} {told}" if submission.code and told == IN_WORKSPACE else told
    return _said(evaluation.reason, hidden if evaluation.fault is Fault.ARTIFACT else NOTHING)


def _status(submission: Submission, evaluation: Evaluation | None) -> SubmissionState:
    if submission.status == "refused":
        return SubmissionState.REFUSED
    if evaluation is None:
        return SubmissionState.ACCEPTED
    return SubmissionState.FAILED if evaluation.score is None else SubmissionState.SCORED


# --- selected against base


@dataclass(frozen=True)
class PairedItems:
    """Base model and checkpoint on the same items, in the same order. Raises Unusable: they are not the same items, or
    not in the same clusters."""

    base: Items
    new: Items

    def __post_init__(self) -> None:
        if self.base.ids != self.new.ids:
            raise Unusable("the base model and the checkpoint were not scored on the same items")
        if self.base.clusters and self.new.clusters and self.base.clusters != self.new.clusters:
            raise Unusable("the items of base model and checkpoint are not in the same clusters")

    @property
    def clusters(self) -> tuple[str, ...] | None:
        """Return what each item belongs to, where items are not independent."""
        return self.base.clusters or self.new.clusters


def gain(pair: PairedItems) -> Gain:
    """Compare new with base: mid-p and Tango's interval for right or wrong, sign flips and BCa bootstrap for graded outcomes.

    Where items come in clusters, both kinds by sign flips and bootstrap of clusters. Length-controlled win rates are refitted.
    """
    base, new = pair.base.outcomes, pair.new.outcomes
    more: dict[str, Any] = {}
    binary = pair.base.binary and pair.new.binary
    found: GradedResult | ClusteredDifference | stats.PairedResult
    if is_fitted(pair.base, pair.new):
        found = paired(*judged_pairs(pair.base, pair.new))
        more = {"how": "length_controlled_items", "interval": "bootstrap over items"}
    else:
        if pair.clusters is not None:
            found = paired_clusters(base, new, pair.clusters)
            more = {"how": "clustered_items", "clusters": found.clusters, "interval": found.kind}
        elif binary:
            found = stats.paired(base, new)
            more = {"how": "paired_items", "interval": "Tango"}
        else:
            found = paired_graded(base, new)
            more = {"how": "graded_items", "interval": "bootstrap over items"}
        if binary:
            more |= {"won": sum(map(operator.gt, new, base)), "lost": sum(map(operator.lt, new, base))}
    low, high = POINTS * found.low, POINTS * found.high
    return Gain(difference=POINTS * found.difference, low=low, high=high, p_value=found.p_value, n=len(base), **more)


def optimism(feedback: PairedItems, report: PairedItems) -> Gap | None:
    """Return by how much the gain on the feedback split exceeds that on the report split; None for fewer than two items or clusters.

    The squared standard error is the sum over splits of the variance of the mean difference: the splits share no item. No error
    where a split of clustered items has fewer than five clusters: their spread hardly tells one.
    """
    if min(len(feedback.base.ids), len(report.base.ids)) < 2:
        return None
    if is_fitted(feedback.base, feedback.new, report.base, report.new):
        return _gap(*optimism_gap(judged_pairs(feedback.base, feedback.new), judged_pairs(report.base, report.new)))
    gains, squares, known = [], [], True
    for pair in (feedback, report):
        differences = [new - old for old, new in zip(pair.base.outcomes, pair.new.outcomes, strict=True)]
        if pair.clusters is not None:
            count = len(set(pair.clusters))
            if count < 2:
                return None
            known &= count >= BOOTSTRAP_FROM_CLUSTERS
        gains.append(fmean(differences))
        squares.append(variance_of_mean(differences, pair.clusters or pair.base.ids))
    return _gap(gains[0] - gains[1], math.sqrt(sum(squares)) if known else 0.0)


def _gap(gap: float, error: float) -> Gap:
    """Return a gap in points. An error of 0 is that of a sample in which nothing varies, or too little is known: null."""
    return Gap(gap=POINTS * gap, standard_error=POINTS * error if error > 0 else None)


# --- graded outcomes (a share, a reward) of independent items


class GradedResult(NamedTuple):
    """New against base on the same items, in units of outcomes (0 to 1)."""

    difference: float
    low: float
    high: float
    p_value: float


def paired_graded(base: Sequence[float], new: Sequence[float]) -> GradedResult:
    """Return the mean paired difference with its BCa bootstrap interval and a sign-flip p value, both seeded. Items
    that all changed alike have Tango's interval of as many won or lost in part, since resamples know no spread there;
    where fewer than ten differ from the others the interval is at least as wide. ValueError unless both hold the same
    two or more items."""
    if len(base) != len(new) or len(base) < 2:
        raise ValueError(f"{len(base)} and {len(new)} outcomes are not the same two or more items")
    differences = sorted(float(now) - float(old) for old, now in zip(base, new, strict=True))
    found = ClusterTotals(differences, [1] * len(differences))
    if differences[-1] - differences[0] <= TIE:
        interval = tango_of(found)
    else:
        interval = bca_of_mean(differences, found.sizes)
        interval = hull(interval, tango_of(found)) if vary_little(found) else interval
    return GradedResult(found.mean, *interval, sign_flip_p(differences))


# --- length-controlled win rates, by refits at a fixed penalty

RESAMPLES = 2_000
"""Fewer than for a mean, since each is a regression: the ends of the interval vary by 3 % of its half width."""

REGROUPINGS = 1_000
"""Of the permutation test: each takes two regressions over both models' pairs. The least p is 0.001."""


class Judged(NamedTuple):
    """Base model and checkpoint on the items that were judged for both, with the penalties of their fits."""

    base: list[JudgedPair]
    new: list[JudgedPair]
    c_base: float
    c_new: float


def is_fitted(*items: Items) -> bool:
    """Return whether all of these have length-controlled win rates that can be refitted."""
    return all(each.lc_c is not None and any("y" in facts for facts in each.facts) for each in items)


def judged_pairs(base: Items, new: Items) -> Judged:
    """Return the pairs of both, without items on which the judge's word can't be read for either. Raises Unusable: the
    facts are not those of judged pairs."""
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


def optimism_gap(feedback: Judged, report: Judged) -> tuple[float, float]:
    """Return (feedback new - feedback base) - (report new - report base) and its standard error over items, of outcomes."""
    import numpy as np

    gains, squares = [], 0.0
    for part in (feedback, report):
        counts = np.ones((1, len(part.base)))
        gains.append(float(refits(part.new, part.c_new, counts)[0] - refits(part.base, part.c_base, counts)[0]) / 100)
        moved = influences(part.new, part.c_new) - influences(part.base, part.c_base)
        squares += float((moved**2).sum()) / 1e4
    return gains[0] - gains[1], math.sqrt(squares)


def on_all_items(feedback: Items, report: Items) -> str | None:
    """Return a note with the length-controlled win rate on both splits together; None for other tasks. At the penalty
    of the report split's fit, so that no cross validation is needed."""
    if not is_fitted(feedback, report):
        return None
    import numpy as np

    pairs = [pair for items in (feedback, report) for pair in pairs_of(items.facts)]
    score = float(refits(pairs, report.lc_c or 1.0, np.ones((1, len(pairs))))[0])
    return (
        f"secondary: {score:.1f} on all {len(pairs)} items, those of the feedback split among them, whose scores were told "
        "during the run"
    )


def paired(base: Sequence[JudgedPair], new: Sequence[JudgedPair], c_base: float, c_new: float) -> GradedResult:
    """Compare two length-controlled win rates on the same items: difference, BCa interval, permutation test. Items are
    resampled, both models' with the same draw, and both are refitted at their own fixed penalty. Test: of each item
    both models' pairs are exchanged or not, and both sides are fitted at the base model's penalty. ValueError unless
    both hold the same two or more items."""
    import numpy as np

    n = len(base)
    same = n == len(new) and all(
        (a.len_1, a.difficulty) == (b.len_1, b.difficulty) for a, b in zip(base, new, strict=True)
    )
    if n < 2 or not same:
        raise ValueError(f"{n} and {len(new)} pairs are not the same two or more items")

    def differences(counts: Any) -> Any:
        return (refits(new, c_new, counts) - refits(base, c_base, counts)) / 100

    seen = float(differences(np.ones((1, n)))[0])
    if all(a.y == b.y and a.len_2 == b.len_2 for a, b in zip(base, new, strict=True)):
        return GradedResult(seen, seen, seen, 1.0)
    (interval,) = bca(lambda counts: differences(counts)[None], n, RESAMPLES)
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
    hits = int((apart[1:] >= apart[0] * (1 - TIE_SHARE)).sum())
    return (hits + 1) / (REGROUPINGS + 1)
