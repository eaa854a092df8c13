"""AutoRL-Bench's metrics by its names (its core/metrics.py), over budget seconds and the ledger in place of wall clocks
and the agent's own files. docs/statistics.md writes down each formula and where it departs from the reference's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autorl_hpc.report.story import ReferenceMetrics
from autorl_hpc.report.summary import Point
from autorl_hpc.states import Fault, SubmissionState

INFRASTRUCTURE = (Fault.CLUSTER, Fault.GRADER)


def reference_metrics(
    points: Sequence[Point],
    *,
    base_score: float | None,
    elapsed_s: float,
    allowed_s: float,
    ended: bool,
    refused_unrecorded: int = 0,
) -> ReferenceMetrics:
    """The metrics of one run.

    Args:
        points: every submission that the ledger keeps, in order.
        base_score: the base model's feedback score in points; None: not known, so nothing is an improvement.
        elapsed_s, allowed_s: budget used, and budget with what was given back, in seconds.
        ended: the agent's part is over. Before, how the run ends is unknown.
        refused_unrecorded: refusals beyond those that the ledger keeps one by one.
    """
    valid = [p for p in points if p.score is not None]
    best = max(valid, key=lambda p: p.score or 0.0, default=None)
    better = next((p for p in valid if base_score is not None and p.score is not None and p.score > base_score), None)
    return ReferenceMetrics(
        valid_submission_rate=_valid_rate(points, refused_unrecorded),
        first_valid_idx=next((i for i, p in enumerate(points, 1) if p.score is not None), None),
        first_valid_delay=valid[0].elapsed_s if valid else None,
        time_to_first_improvement=better.elapsed_s if better else None,
        time_to_best=best.elapsed_s if best else None,
        monotonic_ratio=_monotonic_ratio([p.score for p in valid if p.score is not None]),
        copy_model_count=_copies(points),
        time_used_ratio=elapsed_s / allowed_s if ended and allowed_s > 0 else None,
        last_submit_gap=max(0.0, elapsed_s - points[-1].elapsed_s) if ended and points else None,
    )


def _valid_rate(points: Sequence[Point], refused_unrecorded: int) -> float | None:
    """Scored ones of those that were decided on their own merits: not what waits, not what the infrastructure lost."""
    decided = [
        p for p in points if p.status is not SubmissionState.ACCEPTED and (p.score is not None or not _lost_by_us(p))
    ]
    count = len(decided) + refused_unrecorded
    return sum(p.score is not None for p in decided) / count if count else None


def _lost_by_us(point: Point) -> bool:
    return point.fault in INFRASTRUCTURE


def _monotonic_ratio(scores: Sequence[float]) -> float | None:
    """Of the steps from one score to the next, the share that goes up."""
    if len(scores) < 2:
        return None
    return sum(after > before for before, after in pairwise(scores)) / (len(scores) - 1)


def _copies(points: Sequence[Point]) -> int:
    """Submissions that are the base model: by content, or by a fingerprint that finds nothing trained in them."""
    copies = {
        p.submission_id for p in points if p.is_base or (p.fingerprint and "untrained_copy" in p.fingerprint.flags)
    }
    return sum(p.submission_id in copies or p.same_as in copies for p in points)
