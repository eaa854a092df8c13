"""Draw SVGs of a run: score against time or another cost (`trajectory`), and a row of a forest plot (`strip`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autorl_hpc.report import format as fmt
from autorl_hpc.report.axes import ScaledAxis, by_time
from autorl_hpc.report.format import html
from autorl_hpc.report.summary import Point, RunSummary, ScoreSummary
from autorl_hpc.states import SubmissionState

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 38, 58, 10, 26
RING = 6.5
"""Radius of the ring around the selected submission; axis labels keep clear of it."""
LABELS_END = LEFT - RING - 2
PLOT_RIGHT = WIDTH - RIGHT
PLOT_BOTTOM = HEIGHT - BOTTOM
BASE_X, SELECTED_X = WIDTH - RIGHT + 18, WIDTH - RIGHT + 40

STRIP_WIDTH, STRIP_HEIGHT = 180, 22


def trajectory(run: RunSummary, axis: ScaledAxis | None = None) -> str:
    """Draw feedback scores against an axis (default: budget used), base model dashed, report scores at the right; an `<svg>`."""
    return trajectories(run, [axis or by_time(run)])[0][1]


def trajectories(run: RunSummary, axes: Sequence[ScaledAxis]) -> list[tuple[str, str]]:
    """Return the name and drawing of each axis. Heights are shared and computed once."""
    heights = _Heights(run)
    grid, report, base = _grid(heights), _report_marks(heights, run), _baseline(heights, run)
    marks = [_Mark(heights, point, point.submission_id == run.selected) for point in run.trajectory]
    return [(axis.name, _drawing(run, axis, grid, base, marks, report)) for axis in axes]


def _drawing(run: RunSummary, axis: ScaledAxis, grid: str, base: str, marks: Sequence[_Mark], report: str) -> str:
    places = axis.places
    placed = [(mark, _x(axis, place)) for mark in marks if (place := places.get(mark.number)) is not None]
    parts = [grid, *_across(axis), base, _best_so_far(placed, _x(axis, axis.now))]
    parts += [mark.at(x) for mark, x in placed]
    parts.append(report)
    if not any(mark.score is not None for mark in marks):
        parts.append(_text((LEFT + PLOT_RIGHT) / 2, (TOP + PLOT_BOTTOM) / 2, "no feedback score", "middle"))
    title = html(f"Score against {axis.name} of {run.run_id}")
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{"".join(parts)}</svg>'


def strip(
    mean: float | None, low: float | None, high: float | None, values: Sequence[float], span: tuple[float, float]
) -> str:
    """Draw one row of a forest plot: zero line, interval, mean, and a tick for each run. An `<svg>` element."""
    left, right = span
    width = (right - left) or 1.0

    def x(value: float) -> float:
        return 4 + (STRIP_WIDTH - 8) * (min(max(value, left), right) - left) / width

    middle = STRIP_HEIGHT / 2
    parts = [f'<line class="zero" x1="{x(0):.1f}" y1="1" x2="{x(0):.1f}" y2="{STRIP_HEIGHT - 1}"/>']
    parts += [
        f'<line class="run" x1="{x(v):.1f}" y1="{middle - 6}" x2="{x(v):.1f}" y2="{middle + 6}"/>' for v in values
    ]
    if low is not None and high is not None:
        parts.append(f'<line class="whisker" x1="{x(low):.1f}" y1="{middle}" x2="{x(high):.1f}" y2="{middle}"/>')
    if mean is not None:
        parts.append(f'<circle class="dot" cx="{x(mean):.1f}" cy="{middle}" r="4"/>')
    label = f"{fmt.signed(mean)} {fmt.signed_between(low, high)}".strip()
    return f'<svg class="strip" viewBox="0 0 {STRIP_WIDTH} {STRIP_HEIGHT}" role="img" aria-label="{html(label)}">{"".join(parts)}</svg>'


def strip_span(values: Sequence[float | None]) -> tuple[float, float]:
    """Return the common scale of a group's strips: all values and zero, with a margin."""
    known = [0.0, *(v for v in values if v is not None)]
    low, high = min(known), max(known)
    room = 0.05 * ((high - low) or 1.0)
    return low - room, high + room


def _x(axis: ScaledAxis, place: float) -> float:
    return LEFT + (PLOT_RIGHT - LEFT) * place / axis.end


class _Heights:
    """Convert points to heights, on one scale for everything drawn of a run."""

    def __init__(self, run: RunSummary) -> None:
        shown: list[float] = []
        for score in (run.baseline_feedback, run.report, run.baseline_report):
            shown += _ends(score)
        for point in run.trajectory:
            shown += [v for v in (point.score, point.low, point.high) if v is not None]
        low, high = (min(shown), max(shown)) if shown else (0.0, 100.0)
        self.step = _nice_step(max(high - low, 1.0))
        self.low = max(0.0, math.floor(low / self.step) * self.step)
        self.high = min(100.0, math.ceil(high / self.step) * self.step)
        if self.high <= self.low:
            self.low, self.high = max(0.0, self.high - self.step), self.low + self.step

    def y(self, score: float) -> float:
        return PLOT_BOTTOM - (PLOT_BOTTOM - TOP) * (score - self.low) / (self.high - self.low)


def _ends(score: ScoreSummary | None) -> list[float]:
    return [v for v in (score.score, score.low, score.high) if v is not None] if score is not None else []


def _nice_step(span: float) -> float:
    """Return 1, 2 or 5 times a power of ten that gives three to five ticks."""
    raw = span / 4
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw)


def _grid(heights: _Heights) -> str:
    parts = []
    value = heights.low
    decimals = 0 if heights.step >= 1 else 1
    while value <= heights.high + heights.step / 1e6:
        y = heights.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 4}" y2="{y:.1f}"/>')
        parts.append(_text(LABELS_END, y + 3.5, f"{value:.{decimals}f}", "end"))
        value += heights.step
    return "".join(parts)


def _across(axis: ScaledAxis) -> list[str]:
    """Draw the axis, with a line at the budget if it has one."""
    parts = []
    budget_x = PLOT_RIGHT if axis.mark is None else _x(axis, axis.mark)
    if budget_x < PLOT_RIGHT - 1:  # time that was given back extends the axis beyond the budget
        parts.append(f'<line class="grid" x1="{budget_x:.1f}" y1="{TOP}" x2="{budget_x:.1f}" y2="{PLOT_BOTTOM}"/>')
    parts.append(f'<line class="edge" x1="{PLOT_RIGHT}" y1="{TOP}" x2="{PLOT_RIGHT}" y2="{PLOT_BOTTOM}"/>')
    parts.append(_text(LEFT, HEIGHT - 9, "0", "middle"))
    end, written = axis.end, axis.written
    if written(end / 2) not in ("", "0", written(end)):
        parts.append(_text(_x(axis, end / 2), HEIGHT - 9, written(end / 2), "middle"))
    parts.append(_text(PLOT_RIGHT, HEIGHT - 9, written(end), "end"))
    parts.append(_text((PLOT_RIGHT + WIDTH) / 2, HEIGHT - 9, "report", "middle"))
    return parts


def _baseline(heights: _Heights, run: RunSummary) -> str:
    base = run.baseline_feedback
    if base is None or base.score is None:
        return ""
    y = heights.y(base.score)
    return f'<line class="base" x1="{LEFT}" y1="{y:.1f}" x2="{PLOT_RIGHT}" y2="{y:.1f}"/>'


def _best_so_far(placed: Sequence[tuple[_Mark, float]], now: float) -> str:
    """Draw a step line of the highest feedback score so far, up to the run's present or end."""
    path, best = "", -math.inf
    for mark, x in sorted(placed, key=lambda one: one[0].elapsed_s):
        if mark.score is None or mark.score <= best:
            continue
        best = mark.score
        path += f"H{x:.1f}V{mark.y}" if path else f"M{x:.1f} {mark.y}"
    return f'<path class="best" d="{path}H{now:.1f}"/>' if path else ""


class _Mark:
    """The drawing of one submission; only its horizontal position is filled in later."""

    def __init__(self, heights: _Heights, point: Point, selected: bool) -> None:
        self.number, self.score, self.elapsed_s = point.submission_id, point.score, point.elapsed_s
        self.waiting = point.status is SubmissionState.ACCEPTED
        self.title = f"<title>{html(_told(point))}</title>"
        self.selected = selected
        self.y = "" if point.score is None else f"{heights.y(point.score):.1f}"
        self.ends: tuple[str, str] | None = None
        if point.low is not None and point.high is not None:
            self.ends = f"{heights.y(point.low):.1f}", f"{heights.y(point.high):.1f}"

    def at(self, across: float) -> str:
        """Return the drawing centred at this horizontal position."""
        x = f"{across:.1f}"
        if self.score is None:
            return self._without_score(across, x)
        drawn = f'<circle class="dot" cx="{x}" cy="{self.y}" r="3.2">{self.title}</circle>'
        if self.selected:
            drawn = f'<circle class="ring" cx="{x}" cy="{self.y}" r="{RING}"/>{drawn}'
        if self.ends is not None:
            low, high = self.ends
            drawn = f'<line class="whisker thin" x1="{x}" y1="{low}" x2="{x}" y2="{high}"/>{drawn}'
        return drawn

    def _without_score(self, across: float, x: str) -> str:
        bottom = PLOT_BOTTOM - 5
        if self.waiting:
            return f'<circle class="waiting" cx="{x}" cy="{bottom}" r="3">{self.title}</circle>'
        return f'<path class="refused" d="M{across - 3:.1f} {bottom - 3}l6 6m0 -6l-6 6">{self.title}</path>'


def _told(point: Point) -> str:
    score = (
        f"{fmt.points(point.score)} {fmt.between(point.low, point.high)}"
        if point.score is not None
        else str(point.status)
    )
    return f"submission {point.submission_id} at {fmt.duration(point.elapsed_s)}: {score}"


def _report_marks(heights: _Heights, run: RunSummary) -> str:
    parts = []
    for x, score, name, kind in (
        (BASE_X, run.baseline_report, "base", "hollow"),
        (SELECTED_X, run.report, "selected", "filled"),
    ):
        if score is None or score.score is None or (kind == "filled" and run.selected is None):
            continue
        y = heights.y(score.score)
        if score.low is not None and score.high is not None:
            parts.append(
                f'<line class="whisker" x1="{x}" y1="{heights.y(score.low):.1f}" x2="{x}" y2="{heights.y(score.high):.1f}"/>'
            )
        told = f"report split, {name}: {fmt.points(score.score)} {fmt.between(score.low, score.high)}"
        parts.append(f'<path class="{kind}" d="M{x} {y - 5:.1f}l5 5l-5 5l-5 -5z"><title>{html(told)}</title></path>')
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html(text)}</text>'
