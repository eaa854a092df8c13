"""A run of AutoRL-Bench as a RunSummary: shown with what it lacks, in no group with runs of ours, never ranked.

Its scores are those of one split that was told to the agent without limit, the maximum kept; they lay where the agent could
write. Recipe, engine and items are unknown, so there is no interval. The reference writes 0.0 for an evaluation that failed;
its newer versions add the error, older ones don't.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

from autorl_hpc import __version__
from autorl_hpc.files.masking import masked
from autorl_hpc.report.reference import ReferenceRun, number
from autorl_hpc.report.summary import BaselineSummary, Excluded, Gain, Point, RunSummary, ScoreSummary
from autorl_hpc.report.text import clean
from autorl_hpc.states import Protocol, RunState, Split, SubmissionState

SOURCE = "AutoRL-Bench"
UNKNOWN = "unknown"
UNPROVEN = (
    "imported from AutoRL-Bench: scores and times lay where the agent could write them; recipe and engine are unknown: "
    "shown, and never ranked"
)
ONE_SPLIT = "one split, told without limit, maximum kept; items are unknown, so there is no interval"
ZERO_BASE = "the base model's score is 0.0, which the reference also writes for an evaluation that failed: the improvement is not counted"
NAME_CHARS = 120


def imported_summary(run: ReferenceRun) -> RunSummary:
    """The summary of a run of the reference."""
    points = _points(run)
    scored = [point for point in points if point.score is not None]
    best = max(scored, key=lambda point: point.score or 0.0) if scored else None
    baseline = _baseline(run)
    told = best.score if best is not None else _best_of_row(run)
    elapsed_s, budget_s = _times(run, points)
    gain, excluded = _gain(run, baseline, told, points)
    state = RunState.FINISHED if _over(run) else RunState.INTERRUPTED
    score = None if told is None else ScoreSummary(split=Split.REPORT, score=told, submission_id=_id(best))
    base = None if baseline is None else BaselineSummary(split=Split.REPORT, score=baseline, key=UNKNOWN)
    return RunSummary(
        tool_version=__version__,
        run_id=_text(f"{run.task}-{run.name}"),
        experiment=SOURCE,
        imported=SOURCE,
        task=_text(run.task),
        agent=_text(run.agent),
        agent_hash=UNKNOWN,
        driver=_text(run.row.get("driver_model")),
        base_model=_text(run.base_model),
        base_model_content_hash=UNKNOWN,
        mode=UNKNOWN,
        seed=0,
        protocol=Protocol.PAPER,
        state=state,
        budget_s=budget_s,
        elapsed_s=elapsed_s,
        attempts=1,
        accepted=len(points) or int(number(run.row.get("submissions")) or 0),
        failed=sum(point.status is SubmissionState.FAILED for point in points),
        baseline_feedback=base,
        best_feedback=score,
        selected=_id(best),
        selected_by="best_feedback" if best is not None else None,
        report=score,
        baseline_report=base,
        improvement=gain,
        counted=excluded is None,
        excluded=excluded,
        ranked=False,
        trajectory=points,
        recipe_hash=UNKNOWN,
        engine_hash=None,
        split_hashes={},
        code_hash=UNKNOWN,
        task_hash=UNKNOWN,
        genesis=run.genesis,
        ledger_head=UNKNOWN,
        ledger_entries=0,
        network="open",
        sandbox="none",
        notes=tuple(_notes(run, points, baseline)),
    )


def _text(value: str | None) -> str:
    return clean(value, NAME_CHARS) or UNKNOWN


def _id(point: Point | None) -> int | None:
    return None if point is None else point.submission_id


def _over(run: ReferenceRun) -> bool:
    return bool(run.row) or number(run.meta.get("end_time")) is not None


def _points(run: ReferenceRun) -> tuple[Point, ...]:
    began = _began(run)
    return tuple(_point(place, entry, began) for place, entry in enumerate(run.scores or (), 1))


def _point(place: int, entry: Any, began: dt.datetime | None) -> Point:
    """One entry of scores.json. Its own number is not used: two submissions at once could get the same."""
    fields = entry if isinstance(entry, dict) else {}
    score, problem = number(fields.get("score")), fields.get("error")
    if not isinstance(entry, dict):
        problem = "this entry is damaged"
    elif score is None or not 0 <= score <= 100:
        problem = problem or "its score is no number from 0 to 100"
    failed = problem is not None and problem != ""
    path = fields.get("model_path")
    return Point(
        submission_id=place,
        manifest_id="",
        elapsed_s=_dropped_s(fields, began),
        status=SubmissionState.FAILED if failed else SubmissionState.SCORED,
        score=None if failed else score,
        model_path=clean(masked(path)) if isinstance(path, str) else None,
        reason=clean(masked(str(problem)[:2000])) if failed else None,
    )


def _dropped_s(fields: dict[str, Any], began: dt.datetime | None) -> float:
    """Seconds from the start to a submission. The reference writes the time of its answer, and how long that took."""
    answered = _local_time(fields.get("timestamp"))
    if answered is None or began is None:
        return 0.0
    took_s = number(fields.get("elapsed_seconds")) or 0.0
    return max(0.0, (answered - began).total_seconds() - max(0.0, took_s))


def _began(run: ReferenceRun) -> dt.datetime | None:
    """The start by the machine's own clock and zone, as the timestamps are: it stands in the workspace's name."""
    try:
        return dt.datetime.strptime(run.name[:15], "%Y%m%dT%H%M%S")
    except ValueError:
        return _local_time(run.row.get("timestamp"))


def _local_time(value: Any) -> dt.datetime | None:
    try:
        return dt.datetime.fromisoformat(value).replace(tzinfo=None)
    except (TypeError, ValueError):
        return None


def _times(run: ReferenceRun, points: tuple[Point, ...]) -> tuple[float, float]:
    """Elapsed seconds and budget; where the budget is unknown, what was used."""
    start, end = number(run.meta.get("start_time")), number(run.meta.get("end_time"))
    used = end - start if start is not None and end is not None else number(run.row.get("duration_s"))
    elapsed_s = max(used or 0.0, 0.0) or max((point.elapsed_s for point in points), default=0.0)
    budget_s = number(run.meta.get("timeout_s"))
    return elapsed_s, budget_s if budget_s is not None and budget_s > 0 else max(elapsed_s, 1.0)


def _baseline(run: ReferenceRun) -> float | None:
    """The base model's score as the first entry that has one tells it, else as the row does."""
    told = [entry.get("baseline_score") for entry in run.scores or () if isinstance(entry, dict)]
    found = next((score for value in (*told, run.row.get("baseline")) if (score := number(value)) is not None), None)
    return found if found is not None and 0 <= found <= 100 else None


def _best_of_row(run: ReferenceRun) -> float | None:
    """The best score of a run whose scores.json is not here. The row says 0 where there is none."""
    if run.scores is not None or not number(run.row.get("submissions")):
        return None
    found = number(run.row.get("best_score"))
    return found if found is not None and 0 < found <= 100 else None


def _gain(
    run: ReferenceRun, baseline: float | None, told: float | None, points: tuple[Point, ...]
) -> tuple[Gain | None, Excluded | None]:
    """The improvement, and why it does not count."""
    if not _over(run):
        return None, "unfinished"
    if any("scores.json" in trouble for trouble in run.troubles):
        return None, "damaged"
    if not baseline:
        return None if baseline is None or told is None else Gain(difference=told, how="scores_only"), "incomplete"
    if told is not None:
        return Gain(difference=told - baseline, how="scores_only"), None
    if run.scores is None and number(run.row.get("submissions")):
        return None, "incomplete"
    return Gain(difference=0.0, how="base_kept"), None


def _notes(run: ReferenceRun, points: tuple[Point, ...], baseline: float | None) -> list[str]:
    notes = [UNPROVEN, ONE_SPLIT, *(f"left out: {trouble}" for trouble in run.troubles)]
    if baseline == 0:
        notes.append(ZERO_BASE)
    if baseline is None:
        notes.append("the base model's score is unknown: there is no improvement")
    zeros = sum(point.score == 0 for point in points)
    if zeros:
        notes.append(
            f"{zeros} of {len(points)} submissions have the score 0.0 and no error: it may stand for an evaluation that failed"
        )
    return notes
