"""Axes of a report's charts (time, submissions, tokens, GPU-hours), scaling curves over runs, budget limits in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from autorl_hpc.files.run_view import RunView
from autorl_hpc.report import format as fmt
from autorl_hpc.report import statistics
from autorl_hpc.report.summary import Axis, Curve, CurvePoint, Point, RunSummary


@dataclass(frozen=True)
class ScaledAxis:
    """One horizontal axis of a run's chart.

    Attributes:
        places: position by submission number; a submission without one is not drawn.
        end: the end of the axis.
        now: the run's present position.
        mark: position of a line across, such as the budget; None for no line.
    """

    name: str
    places: Mapping[int, float]
    end: float
    now: float
    written: Callable[[float], str]
    mark: float | None = None

    def place(self, point: Point) -> float | None:
        """Return a submission's position, or None."""
        return self.places.get(point.submission_id)


def by_time(run: RunSummary) -> ScaledAxis:
    """Return the axis of budget time used, in seconds."""
    places = {p.submission_id: p.elapsed_s for p in run.trajectory}
    now = max([run.elapsed_s, *places.values()])
    return ScaledAxis("time", places, max(run.budget_s, now) or 1.0, now, fmt.duration, run.budget_s)


def by_submission(run: RunSummary) -> ScaledAxis:
    """Return the axis of submissions in order, including refused ones."""
    places = {p.submission_id: float(i) for i, p in enumerate(run.trajectory, 1)}
    count = float(max(len(places), 1))
    return ScaledAxis("submissions", places, count, count, lambda value: f"{value:.0f}" if value == int(value) else "")


def by_tokens(run: RunSummary) -> ScaledAxis | None:
    """Return the axis of the driver's tokens (input and output); None if no trace has them."""
    places = {i.submission_id: float(i.tokens) for i in run.story.iterations if i.tokens is not None}
    used = run.story.resources
    total = float((used.tokens_in or 0) + (used.tokens_out or 0))
    end = max([total, *places.values()])
    return ScaledAxis("tokens", places, end, end, _count) if places and end > 0 else None


def by_gpu_hours(run: RunSummary) -> ScaledAxis | None:
    """Return the axis of the agent's GPU-hours; None if no GPU was seen."""
    places = {i.submission_id: i.gpu_hours for i in run.story.iterations if i.gpu_hours is not None}
    end = max([run.story.resources.gpu_hours or 0.0, *places.values()])
    return ScaledAxis("GPU-hours", places, end, end, lambda value: f"{value:.3g} h") if places and end > 0 else None


def axes_of(run: RunSummary) -> list[ScaledAxis]:
    """Return the axes that have data."""
    every = [by_time(run), by_submission(run), by_tokens(run), by_gpu_hours(run)]
    return [axis for axis in every if axis is not None]


def _count(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


# --- scaling curves: best feedback score so far against a cost
# The agent selects by feedback scores, so these are optimistic. The report score is a run's result.

GRID = 33
"""Points of a curve: steps of 3 % of its length."""


def curves(runs: Sequence[RunSummary]) -> tuple[Curve, ...]:
    """Return the four curves over counted runs. Each grid ends at the budget, or at the largest cost of a run."""
    counted = [run for run in runs if run.counted]
    return tuple(_curve(axis, counted) for axis in get_args(Axis))


def steps(run: RunSummary, axis: Axis) -> statistics.BestSoFar | None:
    """Return a run's improvement as steps along `axis`; None if its cost, base score or trajectory is unknown."""
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
    return statistics.BestSoFar(found, max([end, *(x for x, _ in found)]))


def _spent(run: RunSummary, axis: Axis) -> dict[int, float]:
    """Return the cost at each submission, by its number."""
    if axis == "time_s":
        return {point.submission_id: point.elapsed_s for point in run.trajectory}
    if axis == "submissions":
        return {point.submission_id: float(place) for place, point in enumerate(run.trajectory, 1)}
    found = {one.submission_id: getattr(one, axis) for one in run.story.iterations}
    return {number: float(value) for number, value in found.items() if value is not None}


def _end(run: RunSummary, axis: Axis) -> float | None:
    """Return the cost of the whole run."""
    if axis == "time_s":
        return run.elapsed_s
    if axis == "submissions":
        return float(len(run.trajectory))
    resources = run.story.resources
    return tokens_of(run) if axis == "tokens" else resources.gpu_hours


def tokens_of(run: RunSummary) -> float | None:
    """Return the driver's tokens, input plus output; None if either is unknown."""
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
            x=_six_digits(one.x) or 0.0,
            mean=_six_digits(one.mean) or 0.0,
            low=_six_digits(one.low) if one.kind == "t" else None,
            high=_six_digits(one.high) if one.kind == "t" else None,
            n_reached=one.running,
        )
        for one in statistics.band(known, grid)
    )
    return curve.model_copy(update={"points": points})


def _six_digits(value: float | None) -> float | None:
    """Round to six decimals: enough for a drawing, and a report holds thousands of these."""
    return None if value is None else round(value, 6)


# --- use of the budget by part

NAMES = {
    "gpu_hours": "GPU-hours",
    "tokens": "driver tokens",
    "cost_usd": "driver cost",
    "max_submissions": "submissions",
}

_LIMITS = {
    "gpu_hours": "GPU-hours",
    "tokens": "tokens",
    "cost_usd": "USD",
    "max_submissions": "submissions",
    "memory_gib": "GiB of memory",
    "disk_gib": "GiB of disk",
    "processes": "processes",
}


def limits_told(limits: Mapping[str, float]) -> str:
    """Return a budget's limits besides time: `24 GPU-hours, 20 M tokens, 60 USD`; empty if there are none."""
    told = [f"{_short_amount(name, limits[name])} {words}" for name, words in _LIMITS.items() if name in limits]
    return ", ".join(told)


def _short_amount(name: str, value: float) -> str:
    return fmt.amount("count", value).replace(".0 ", " ") if name == "tokens" else f"{value:,.10g}"


def used_of(view: RunView) -> dict[str, float]:
    """Return how much of each limit besides time was used, by the budget's field names; empty before the seal."""
    sealed = view.sealed
    if sealed is None:
        return {}
    found: dict[str, float] = {"max_submissions": float(len(view.contents()))}
    if sealed.gpu_hours is not None:
        found["gpu_hours"] = sealed.gpu_hours
    if sealed.driver is not None:
        found["tokens"] = float(sealed.driver.tokens)
        if sealed.driver.cost_usd is not None:
            found["cost_usd"] = sealed.driver.cost_usd
    return found
