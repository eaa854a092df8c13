"""What a run's score is drawn against: budget time, submissions, tokens, GPU-hours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autorl_hpc.report import format as fmt
from autorl_hpc.report.summary import Point, RunSummary


@dataclass(frozen=True)
class Axis:
    """One horizontal axis.

    Attributes:
        places: where each submission stands on it, by number; one that is not in it is not drawn.
        end: where it ends.
        now: where the run stands on it.
        mark: a line across, such as the budget; None: none.
    """

    name: str
    places: Mapping[int, float]
    end: float
    now: float
    written: Callable[[float], str]
    mark: float | None = None

    def place(self, point: Point) -> float | None:
        """Where a submission stands."""
        return self.places.get(point.submission_id)


def by_time(run: RunSummary) -> Axis:
    """Budget used."""
    places = {p.submission_id: p.elapsed_s for p in run.trajectory}
    now = max([run.elapsed_s, *places.values()])
    return Axis("time", places, max(run.budget_s, now) or 1.0, now, fmt.duration, run.budget_s)


def by_submission(run: RunSummary) -> Axis:
    """Submissions in order, refused ones among them."""
    places = {p.submission_id: float(i) for i, p in enumerate(run.trajectory, 1)}
    count = float(max(len(places), 1))
    return Axis("submissions", places, count, count, lambda value: f"{value:.0f}" if value == int(value) else "")


def by_tokens(run: RunSummary) -> Axis | None:
    """The driver's tokens, in and out; None: no trace tells them."""
    places = {i.submission_id: float(i.tokens) for i in run.story.iterations if i.tokens is not None}
    used = run.story.resources
    total = float((used.tokens_in or 0) + (used.tokens_out or 0))
    end = max([total, *places.values()])
    return Axis("tokens", places, end, end, _count) if places and end > 0 else None


def by_gpu_hours(run: RunSummary) -> Axis | None:
    """GPU-hours that the agent had; None: no GPU was seen."""
    places = {i.submission_id: i.gpu_hours for i in run.story.iterations if i.gpu_hours is not None}
    end = max([run.story.resources.gpu_hours or 0.0, *places.values()])
    return Axis("GPU-hours", places, end, end, lambda value: f"{value:.3g} h") if places and end > 0 else None


def axes_of(run: RunSummary) -> list[Axis]:
    """Those that something is known of."""
    every = [by_time(run), by_submission(run), by_tokens(run), by_gpu_hours(run)]
    return [axis for axis in every if axis is not None]


def _count(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"
