"""One evaluation as a line of the report: the score with its interval, and what noise may do to it."""

from __future__ import annotations

import math
from functools import cache, lru_cache

from autorl_hpc.files.view import RunView
from autorl_hpc.records.exchange import Baseline
from autorl_hpc.records.ledger import Evaluation, Submission
from autorl_hpc.report import length_controlled
from autorl_hpc.report.evidence import contamination_of, fingerprint_of
from autorl_hpc.report.items import Items
from autorl_hpc.report.summary import BaselineSummary, Noise, Point, ScoreSummary
from autorl_hpc.report.text import clean
from autorl_hpc.scoring import stats
from autorl_hpc.states import SubmissionState

POINTS = 100.0
Z95 = 1.959963984540054


def interval(evaluation: Evaluation, items: Items | None = None) -> tuple[float | None, float | None]:
    """The 95 % interval of a score in points: Wilson's for right or wrong outcomes, a t interval over graded items, a normal one
    for length-controlled win rates."""
    if evaluation.score is None or evaluation.n == 0:
        return None, None
    if evaluation.correct is not None and evaluation.correct <= evaluation.n:
        return _wilson_points(evaluation.correct, evaluation.n)
    if items is None or len(items.outcomes) < 3:
        return None, None
    if length_controlled.is_fitted(items):
        return length_controlled.interval_points(items, evaluation.score)
    found = stats.mean_t_interval(items.outcomes)
    if found.low is None or found.high is None:
        return None, None
    return max(0.0, POINTS * found.low), min(POINTS, POINTS * found.high)


@lru_cache(maxsize=10_000)
def _wilson_points(correct: int, n: int) -> tuple[float, float]:
    """A report has the same counts over and over."""
    low, high = stats.wilson(correct, n)
    return POINTS * low, POINTS * high


def score_summary(evaluation: Evaluation, submission_id: int | None, items: Items | None = None) -> ScoreSummary:
    """A score with its interval."""
    low, high = interval(evaluation, items)
    return ScoreSummary(
        split=evaluation.split,
        score=evaluation.score,
        low=low,
        high=high,
        n=evaluation.n,
        truncated=evaluation.truncated,
        submission_id=submission_id,
        engine_hash=evaluation.engine_hash,
        fault=evaluation.fault,
        reason=clean(evaluation.reason),
    )


def baseline_summary(baseline: Baseline, items: Items | None = None) -> BaselineSummary:
    """The base model's score, its interval, and the difference of its two measurements."""
    plain = score_summary(baseline.evaluation, None, items)
    return BaselineSummary(
        **plain.model_dump(),
        key=baseline.key,
        repeat_score=baseline.repeat_score,
        noise=baseline.noise(),
        repeat_changed_items=baseline.repeat_changed_items,
    )


def noise_of_queries(view: RunView) -> Noise | None:
    """Expected maximum of noise over the distinct checkpoints that got a score; None before the first.

    The standard error is that of one score, taken from Wilson's interval so that it is not 0 at 0 or 100 points, the
    largest among the scores: both make the bound larger, none smaller.
    """
    errors = []
    for score in view.scores.values():
        evaluation = score.evaluation
        if evaluation.score is None or evaluation.n == 0:
            continue
        p = evaluation.score / POINTS
        if evaluation.correct is not None and evaluation.correct <= evaluation.n:
            low, high = _wilson_points(evaluation.correct, evaluation.n)
            errors.append((high - low) / POINTS / (2 * Z95))
        else:  # outcomes in [0, 1] with this mean vary the most when they are 0 or 1
            errors.append(math.sqrt(p * (1 - p) / evaluation.n))
    if not errors:
        return None
    worst = POINTS * max(errors)
    return Noise(queries=len(errors), standard_error=worst, expected_maximum=worst * _standard_maximum(len(errors)))


@cache
def _standard_maximum(queries: int) -> float:
    """Expected maximum of noise with a standard error of 1: the same for every run with as many queries."""
    return stats.expected_max_noise(queries, 1.0)


@cache
def visible_gain(n: int, base_score: float) -> float | None:
    """Smallest true gain that n items show beside a base model of this score, in points."""
    return stats.smallest_visible_gain(n, min(1.0, max(0.0, base_score / POINTS)))


def points_of(view: RunView) -> tuple[Point, ...]:
    """Every submission in order, with its score if it has one."""
    return tuple(_point(view, submission) for _, submission in sorted(view.submissions.items()))


def _point(view: RunView, submission: Submission) -> Point:
    score = view.score_of(submission) if submission.status == "accepted" else None
    evaluation = None if score is None else score.evaluation
    low, high = (None, None) if evaluation is None else interval(evaluation)
    fault = submission.fault if evaluation is None else evaluation.fault
    reason = submission.message if evaluation is None else evaluation.reason
    return Point(
        submission_id=submission.submission_id,
        manifest_id=clean(submission.manifest_id) or "",
        elapsed_s=submission.elapsed_s,
        status=_status(submission, evaluation),
        score=None if evaluation is None else evaluation.score,
        low=low,
        high=high,
        model_path=clean(submission.model_path),
        note=clean(submission.note),
        final=submission.final,
        is_base=submission.is_base,
        same_as=submission.same_as,
        fault=fault,
        reason=clean(reason),
        fingerprint=fingerprint_of(view, submission) if evaluation is not None else None,
        contamination=contamination_of(view, submission.submission_id),
    )


def _status(submission: Submission, evaluation: Evaluation | None) -> SubmissionState:
    if submission.status == "refused":
        return SubmissionState.REFUSED
    if evaluation is None:
        return SubmissionState.ACCEPTED
    return SubmissionState.FAILED if evaluation.score is None else SubmissionState.SCORED
