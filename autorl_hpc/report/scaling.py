"""Improvement against what it cost: the best feedback score so far over time, tokens, submissions and GPU-hours.

These are feedback scores, which the agent chose by: they flatter. What a run is worth is its report score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from autorl_hpc.report import statistics
from autorl_hpc.report.board import Axis, Curve, CurvePoint
from autorl_hpc.report.summary import RunSummary

GRID = 33
"""Points of a curve: steps of 3 % of its length, finer than a page shows."""


def curves(runs: Sequence[RunSummary]) -> tuple[Curve, ...]:
    """The four curves over counted runs. The grid of each ends at the budget, or at the most that a run spent."""
    counted = [run for run in runs if run.counted]
    return tuple(_curve(axis, counted) for axis in get_args(Axis))


def steps(run: RunSummary, axis: Axis) -> statistics.Curve | None:
    """A run's improvement as steps along `axis`; None if its cost, its base model's score or its course is unknown."""
    base = run.baseline_feedback.score if run.baseline_feedback is not None else None
    spent, end = _spent(run, axis), _end(run, axis)
    if base is None or end is None:
        return None
    scored = [point for point in run.trajectory if point.score is not None]
    if any(point.submission_id not in spent for point in scored):
        return None
    if run.best_feedback is not None and not scored:  # imported, without its scores.json
        return None
    found = [(spent[point.submission_id], point.score - base) for point in scored if point.score is not None]
    return statistics.Curve(found, max([end, *(x for x, _ in found)]))


def _spent(run: RunSummary, axis: Axis) -> dict[int, float]:
    """What had been spent at each submission, by its number."""
    if axis == "time_s":
        return {point.submission_id: point.elapsed_s for point in run.trajectory}
    if axis == "submissions":
        return {point.submission_id: float(place) for place, point in enumerate(run.trajectory, 1)}
    found = {one.submission_id: getattr(one, axis) for one in run.story.iterations}
    return {number: float(value) for number, value in found.items() if value is not None}


def _end(run: RunSummary, axis: Axis) -> float | None:
    """What the whole run spent."""
    if axis == "time_s":
        return run.elapsed_s
    if axis == "submissions":
        return float(len(run.trajectory))
    resources = run.story.resources
    return tokens_of(run) if axis == "tokens" else resources.gpu_hours


def tokens_of(run: RunSummary) -> float | None:
    """Tokens of the driver, in and out; None if either is unknown."""
    resources = run.story.resources
    if resources.tokens_in is None or resources.tokens_out is None:
        return None
    return float(resources.tokens_in + resources.tokens_out)


def _curve(axis: Axis, runs: Sequence[RunSummary]) -> Curve:
    known = [one for one in (steps(run, axis) for run in runs) if one is not None]
    top = max((run.budget_s for run in runs), default=0.0) if axis == "time_s" else 0.0
    top = max([top, *(one.end for one in known)])
    curve = Curve(axis=axis, n=len(known), unknown=len(runs) - len(known))
    if not known or top <= 0:
        return curve
    grid = [top * i / (GRID - 1) for i in range(GRID)]
    if axis == "submissions":
        grid = sorted({float(round(x)) for x in grid})
    points = tuple(
        CurvePoint(
            x=_short(one.x) or 0.0,
            mean=_short(one.mean) or 0.0,
            low=_short(one.low) if one.kind == "t" else None,
            high=_short(one.high) if one.kind == "t" else None,
            n_reached=one.running,
        )
        for one in statistics.band(known, grid)
    )
    return curve.model_copy(update={"points": points})


def _short(value: float | None) -> float | None:
    """Six digits behind the point: a drawing needs no more, and thousands of these stand in a report."""
    return None if value is None else round(value, 6)
