"""What a run's improvement costs (time, tokens, submissions, GPU-hours): scaling curves over runs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, get_args

from autorl_hpc.report.summary import Axis, Curve, CurvePoint, RunSummary
from autorl_hpc.scoring.stats import mean_t_interval


def spent(run: RunSummary, axis: Axis) -> dict[int, float]:
    """Return what had been used at each submission, by its number; without those where it is unknown."""
    if axis == "time_s":
        return {point.submission_id: point.elapsed_s for point in run.trajectory}
    if axis == "submissions":
        return {point.submission_id: float(place) for place, point in enumerate(run.trajectory, 1)}
    found = {one.submission_id: getattr(one, axis) for one in run.story.iterations}
    return {number: float(value) for number, value in found.items() if value is not None}


def used(run: RunSummary, axis: Axis) -> float | None:
    """Return what the whole run used; None if it is unknown. Tokens: the driver's, input and output."""
    resources = run.story.resources
    if axis == "tokens":
        both = (resources.tokens_in, resources.tokens_out)
        return None if None in both else float(sum(part or 0 for part in both))
    every = {"time_s": run.elapsed_s, "submissions": float(len(run.trajectory)), "gpu_hours": resources.gpu_hours}
    return every[axis]


# --- scaling curves: best feedback score so far against a cost, mean over runs with a pointwise interval
# The agent selects by feedback scores, so these are optimistic. The report score is a run's result.

GRID = 33  # points of a curve: steps of 3 % of its length


class BestSoFar(NamedTuple):
    """The best so far of one run, by cost."""

    steps: Sequence[tuple[float, float]]  # (cost, improvement) of each scored submission, in any order
    end: float  # what the run had used when it ended


def curves(runs: Sequence[RunSummary]) -> tuple[Curve, ...]:
    """Return the four curves over counted runs. Each grid ends at the budget, or at the largest cost of a run."""
    counted, found = [run for run in runs if run.counted], []
    for axis in get_args(Axis):
        known = [one for one in (steps(run, axis) for run in counted) if one is not None]
        top = max([0.0, *(run.budget_s for run in counted if axis == "time_s"), *(one.end for one in known)])
        grid = [top * i / (GRID - 1) for i in range(GRID)]
        if axis == "submissions":
            grid = sorted({float(round(x)) for x in grid})
        points = tuple(band(known, grid)) if known and top > 0 else ()
        found.append(Curve(axis=axis, n=len(known), unknown=len(counted) - len(known), points=points))
    return tuple(found)


def steps(run: RunSummary, axis: Axis) -> BestSoFar | None:
    """Return a run's improvement as steps along `axis`; None if its cost, base score or trajectory is unknown."""
    base = run.baseline_feedback.score if run.baseline_feedback is not None else None
    places, end = spent(run, axis), used(run, axis)
    scored = [(point.submission_id, point.score) for point in run.trajectory if point.score is not None]
    if base is None or end is None or any(number not in places for number, _ in scored):
        return None
    if run.best_feedback is not None and not scored:  # imported, without its scores.json
        return None
    found = [(places[number], score - base) for number, score in scored]
    return BestSoFar(found, max([end, *(x for x, _ in found)]))


def band(runs: Sequence[BestSoFar], grid: Sequence[float]) -> list[CurvePoint]:
    """Return the mean of the runs' step curves at each cost, with the t interval of that cost alone (three runs that differ).

    A run has 0 before its first scored submission (the base model), then the best of its submissions so far. Every run counts at
    every cost, beyond its own end with its last value. Figures are rounded to six digits, since a report holds thousands.
    """
    curves = []
    for run in runs:
        ordered = sorted(run.steps)
        curves.append(([x for x, _ in ordered], [0.0, *accumulate((value for _, value in ordered), max)]))
    found = []
    for x in grid:
        mean = mean_t_interval([best[bisect_right(places, x)] for places, best in curves])
        ends = {"low": mean.low, "high": mean.high} if mean.kind == "t" else {}
        rounded = {name: round(end, 6) for name, end in ends.items() if end is not None}
        reached = sum(run.end >= x for run in runs)
        found.append(CurvePoint(x=round(x, 6), mean=round(mean.mean or 0.0, 6), n_reached=reached, **rounded))
    return found


# --- parts of a budget in words

NAMES = {
    "gpu_hours": "GPU-hours",
    "tokens": "driver tokens",
    "cost_usd": "driver cost",
    "max_submissions": "submissions",
}
