"""Turn evaluations into the report's scores: intervals, selection noise, smallest visible gain, and the run's trajectory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from autorl_hpc.files.redact import masked
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.entries import Contamination, Evaluation, Submission
from autorl_hpc.records.exchange import Baseline
from autorl_hpc.report import paired
from autorl_hpc.report.format import clean
from autorl_hpc.report.hidden_items import IN_WORKSPACE, NOTHING, Hidden, hidden_of
from autorl_hpc.report.run_folder import Items, fingerprint_of, shown_look
from autorl_hpc.report.statistics import (
    ClusterTotals,
    clustered_interval,
    clustered_intervals,
    hull,
    vary_little,
    wilson_of_clusters,
)
from autorl_hpc.report.summary import BaselineSummary, Gain, ItemsInterval, Noise, Point, RunSummary, ScoreSummary
from autorl_hpc.scoring import stats
from autorl_hpc.states import Fault, SubmissionState

POINTS = 100.0
Z95 = 1.959963984540054


class ScoreInterval(NamedTuple):
    """The 95 % interval of a score in points, and its method; all None if there is none."""

    low: float | None = None
    high: float | None = None
    kind: ItemsInterval | None = None


def interval(evaluation: Evaluation, items: Items | None = None) -> ScoreInterval:
    """Return a score's interval: Wilson for right or wrong outcomes, t over graded items, normal for length-controlled win rates.

    Items in clusters: bootstrap over clusters; if the items are not available, Wilson with each cluster counted as one item.
    """
    if evaluation.score is None or evaluation.n == 0:
        return ScoreInterval()
    if items is not None and paired.is_fitted(items):
        return _made(*paired.interval_points(items, evaluation.score), "normal over items, length-controlled")
    if items is not None and items.clusters is not None:
        found = clustered_interval(items.outcomes, items.clusters)
        return _made(POINTS * found.low, POINTS * found.high, found.kind)
    if evaluation.clusters is not None:
        low, high = wilson_of_clusters(evaluation.score / POINTS, evaluation.clusters, evaluation.clusters)
        return _made(POINTS * low, POINTS * high, "Wilson over clusters")
    if evaluation.correct is not None and evaluation.correct <= evaluation.n:
        return _made(*_wilson_points(evaluation.correct, evaluation.n), "Wilson")
    return ScoreInterval() if items is None or not items.outcomes else _graded(items.outcomes)


def _graded(outcomes: Sequence[float]) -> ScoreInterval:
    """Return the t interval over items. If all are equal: Wilson's for their mean, the widest for outcomes in [0, 1]; if fewer
    than ten differ from the others, the hull of both."""
    mean = stats.mean_t_interval(outcomes)
    assert mean.mean is not None
    wilson = stats.wilson_share(min(1.0, max(0.0, mean.mean)), len(outcomes))
    if mean.kind != "t" or mean.low is None or mean.high is None:
        return _made(POINTS * wilson.low, POINTS * wilson.high, "Wilson")
    found = stats.Interval(max(0.0, mean.low), min(1.0, mean.high))
    if vary_little(ClusterTotals(list(outcomes), [1] * len(outcomes))):
        found = hull(found, wilson)
    return _made(POINTS * found.low, POINTS * found.high, "t over items")


def intervals_of(scores: Iterable[tuple[int, Evaluation, Items | None]]) -> dict[int, ScoreInterval]:
    """Return `interval` of several scores by submission; those on the same clustered items are resampled together.

    Only outcomes are held, so that a run with thousands of submissions fits into memory.
    """
    found: dict[int, ScoreInterval] = {}
    together: dict[tuple[str, ...], list[tuple[int, tuple[float, ...]]]] = {}
    for number, evaluation, items in scores:
        if items is None or items.clusters is None or evaluation.n == 0 or paired.is_fitted(items):
            found[number] = interval(evaluation, items)
        else:
            together.setdefault(items.clusters, []).append((number, items.outcomes))
    for clusters, several in together.items():
        drawn = clustered_intervals([outcomes for _, outcomes in several], clusters)
        for (number, _), one in zip(several, drawn, strict=True):
            found[number] = _made(POINTS * one.low, POINTS * one.high, one.kind)
    return found


def _made(low: float | None, high: float | None, kind: ItemsInterval) -> ScoreInterval:
    return ScoreInterval() if low is None or high is None else ScoreInterval(low, high, kind)


def needs_items(evaluation: Evaluation) -> bool:
    """Return whether a score's interval needs the outcomes of its items, not only their number."""
    return evaluation.score is not None and (evaluation.correct is None or evaluation.clusters is not None)


@lru_cache(maxsize=10_000)
def _wilson_points(correct: int, n: int) -> tuple[float, float]:
    """Cached, because a report has the same counts again and again."""
    low, high = stats.wilson(correct, n)
    return POINTS * low, POINTS * high


def score_summary(evaluation: Evaluation, submission_id: int | None, items: Items | None = None) -> ScoreSummary:
    """Return a score with its interval."""
    found = interval(evaluation, items)
    return ScoreSummary(
        split=evaluation.split,
        score=evaluation.score,
        low=found.low,
        high=found.high,
        interval=found.kind,
        n=evaluation.n,
        clusters=len(set(items.clusters)) if items is not None and items.clusters else evaluation.clusters,
        truncated=evaluation.truncated,
        submission_id=submission_id,
        engine_hash=evaluation.engine_hash,
        fault=evaluation.fault,
        reason=clean(evaluation.reason),
    )


def baseline_summary(baseline: Baseline, items: Items | None = None) -> BaselineSummary:
    """Return the base model's score, its interval, and the difference between its two measurements."""
    plain = score_summary(baseline.evaluation, None, items)
    return BaselineSummary(
        **plain.model_dump(),
        key=baseline.key,
        repeat_score=baseline.repeat_score,
        noise=baseline.noise(),
        repeat_changed_items=baseline.repeat_changed_items,
    )


def noise_of_queries(view: RunView, intervals: Mapping[int, ScoreInterval] | None = None) -> Noise | None:
    """Return the expected maximum of noise over the distinct checkpoints with a score; None if there is none.

    The standard error is the largest among the scores. It is taken from intervals, so it is not 0 at 0 or 100 points. Both
    choices make the bound larger.

    Args:
        intervals: by submission, for scores with items; for others each cluster counts as one item.
    """
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
    return Noise(queries=len(errors), standard_error=worst, expected_maximum=worst * _standard_maximum(len(errors)))


@cache
def _standard_maximum(queries: int) -> float:
    """Return the expected maximum of noise with standard error 1. Cached: it depends on the number of queries alone."""
    return stats.expected_max_noise(queries, 1.0)


def visible_gain(base: Evaluation, items: Items | None = None) -> float | None:
    """Return the smallest true gain that the split can show, in points. Clusters count as fewer independent items."""
    if base.score is None:
        return None
    n = base.n
    if items is not None and items.clusters is not None:
        n = stats.visible_of_clusters(list(Counter(items.clusters).values()))
    elif base.clusters is not None:
        n = base.clusters
    return _visible_gain(n, base.score)


@cache
def _visible_gain(n: int, base_score: float) -> float | None:
    return stats.smallest_visible_gain(n, min(1.0, max(0.0, base_score / POINTS)))


def points_of(view: RunView, intervals: Mapping[int, ScoreInterval] | None = None) -> tuple[Point, ...]:
    """Return every submission in order, with its score if it has one.

    Args:
        intervals: by the submission that a score was measured for, for scores with items.
    """
    hidden = hidden_of(view.contaminations)
    looks = {look.submission_id: look for look in reversed(view.contaminations)}  # the first of several
    return tuple(
        _point(view, submission, intervals or {}, looks.get(submission.submission_id), hidden)
        for _, submission in sorted(view.submissions.items())
    )


def _point(
    view: RunView,
    submission: Submission,
    intervals: Mapping[int, ScoreInterval],
    look: Contamination | None,
    hidden: Hidden,
) -> Point:
    score = view.score_of(submission) if submission.status == "accepted" else None
    evaluation = None if score is None else score.evaluation
    found = ScoreInterval() if score is None else intervals.get(score.submission_id) or interval(score.evaluation)
    fault = submission.fault if evaluation is None else evaluation.fault
    return Point(
        submission_id=submission.submission_id,
        manifest_id=clean(submission.manifest_id) or "",
        elapsed_s=submission.elapsed_s,
        status=_status(submission, evaluation),
        score=None if evaluation is None else evaluation.score,
        low=found.low,
        high=found.high,
        interval=found.kind,
        model_path=_said(submission.model_path, hidden),
        note=_said(submission.note, hidden),
        final=submission.final,
        is_base=submission.is_base,
        same_as=submission.same_as,
        fault=fault,
        reason=_reason(submission, evaluation, hidden),
        fingerprint=fingerprint_of(view, submission) if evaluation is not None else None,
        contamination=None if look is None else shown_look(look, hidden),
    )


def _said(text: str | None, hidden: Hidden) -> str | None:
    """Return a message of the agent, cleaned and masked."""
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


# --- method of a run's intervals and p values, in words: it depends on the run's items, so every page names it

TESTS = {
    "paired_items": "McNemar's mid-p test",
    "clustered_items": "sign-flip test of clusters",
    "graded_items": "sign-flip test of items",
    "length_controlled_items": "permutation of items between the models",
}


def how_measured(run: RunSummary) -> str:
    """Return one sentence on the run's 95 % intervals and its test; "" if nothing was measured."""
    kept = run.report or run.baseline_report or run.best_feedback or run.baseline_feedback
    parts = [_of_score(kept), _of_gain(run.improvement)]
    return "; ".join(part for part in parts if part)


def how_measured_of_all(runs: Sequence[RunSummary]) -> list[str]:
    """Return the distinct sentences of several runs without those that another one begins with."""
    said = sorted({how_measured(run) for run in runs} - {""})
    return [one for one in said if not any(other != one and other.startswith(one) for other in said)]


def _of_score(score: ScoreSummary | None) -> str:
    if score is None or score.interval is None:
        return ""
    items = f"{score.n} items" if score.clusters is None else f"{score.n} items in {score.clusters} clusters"
    return f"scores: {score.interval}, {items}"


def _of_gain(gain: Gain | None) -> str:
    if gain is None or gain.interval is None:
        return ""
    return f"improvement: {gain.interval}, p by {TESTS[gain.how]}"
