"""Two small SVG drawings: score of one run against time (or what else it used), and a row of a forest plot. Colours come from
the page's CSS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from autorl_hpc.report import format as fmt
from autorl_hpc.report.axes import Axis, by_time
from autorl_hpc.report.summary import Point, RunSummary, ScoreSummary
from autorl_hpc.states import SubmissionState

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 38, 58, 10, 26
RING = 6.5
"""Radius of the ring around the selected submission; labels keep clear of it, also where it is at the beginning."""
LABELS_END = LEFT - RING - 2
PLOT_RIGHT = WIDTH - RIGHT
PLOT_BOTTOM = HEIGHT - BOTTOM
BASE_X, SELECTED_X = WIDTH - RIGHT + 18, WIDTH - RIGHT + 40

STRIP_WIDTH, STRIP_HEIGHT = 180, 22


def trajectory(run: RunSummary, axis: Axis | None = None) -> str:
    """Feedback score against budget used, or another axis; base model dashed; report scores at the right. An `<svg>` element."""
    scale = _Scale(run, axis or by_time(run))
    parts = [*_axes(scale), *_baseline(scale, run)]
    parts += _best_so_far(scale, run)
    for point in run.trajectory:
        if scale.axis.place(point) is not None:
            parts.append(_mark(scale, point, point.submission_id == run.selected))
    parts += _report_marks(scale, run)
    if not any(p.score is not None for p in run.trajectory):
        parts.append(_text((LEFT + PLOT_RIGHT) / 2, (TOP + PLOT_BOTTOM) / 2, "no feedback score", "middle"))
    title = f"Score against {scale.axis.name} of {run.run_id}"
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def strip(
    mean: float | None, low: float | None, high: float | None, values: Sequence[float], span: tuple[float, float]
) -> str:
    """One row of a forest plot: zero line, interval, mean, and a tick for each run. An `<svg>` element."""
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
    return f'<svg class="strip" viewBox="0 0 {STRIP_WIDTH} {STRIP_HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def strip_span(values: Sequence[float | None]) -> tuple[float, float]:
    """The common scale of a group's strips: all values, and zero, with a little room."""
    known = [0.0, *(v for v in values if v is not None)]
    low, high = min(known), max(known)
    room = 0.05 * ((high - low) or 1.0)
    return low - room, high + room


class _Scale:
    """Time (or what else is the axis) and points to places in the drawing."""

    def __init__(self, run: RunSummary, axis: Axis) -> None:
        self.axis = axis
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

    def x(self, place: float) -> float:
        return LEFT + (PLOT_RIGHT - LEFT) * place / self.axis.end

    def y(self, score: float) -> float:
        return PLOT_BOTTOM - (PLOT_BOTTOM - TOP) * (score - self.low) / (self.high - self.low)


def _ends(score: ScoreSummary | None) -> list[float]:
    return [v for v in (score.score, score.low, score.high) if v is not None] if score is not None else []


def _nice_step(span: float) -> float:
    """1, 2 or 5 times a power of ten, for three to five ticks."""
    raw = span / 4
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw)


def _axes(scale: _Scale) -> list[str]:
    parts = []
    value = scale.low
    decimals = 0 if scale.step >= 1 else 1
    while value <= scale.high + scale.step / 1e6:
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 4}" y2="{y:.1f}"/>')
        parts.append(_text(LABELS_END, y + 3.5, f"{value:.{decimals}f}", "end"))
        value += scale.step
    mark = scale.axis.mark
    budget_x = PLOT_RIGHT if mark is None else scale.x(mark)
    if budget_x < PLOT_RIGHT - 1:  # time that was given back lies beyond the budget
        parts.append(f'<line class="grid" x1="{budget_x:.1f}" y1="{TOP}" x2="{budget_x:.1f}" y2="{PLOT_BOTTOM}"/>')
    parts.append(f'<line class="edge" x1="{PLOT_RIGHT}" y1="{TOP}" x2="{PLOT_RIGHT}" y2="{PLOT_BOTTOM}"/>')
    parts.append(_text(LEFT, HEIGHT - 9, "0", "middle"))
    end, written = scale.axis.end, scale.axis.written
    if written(end / 2) not in ("", "0", written(end)):
        parts.append(_text(scale.x(end / 2), HEIGHT - 9, written(end / 2), "middle"))
    parts.append(_text(PLOT_RIGHT, HEIGHT - 9, written(end), "end"))
    parts.append(_text((PLOT_RIGHT + WIDTH) / 2, HEIGHT - 9, "report", "middle"))
    return parts


def _baseline(scale: _Scale, run: RunSummary) -> list[str]:
    base = run.baseline_feedback
    if base is None or base.score is None:
        return []
    y = scale.y(base.score)
    return [f'<line class="base" x1="{LEFT}" y1="{y:.1f}" x2="{PLOT_RIGHT}" y2="{y:.1f}"/>']


def _best_so_far(scale: _Scale, run: RunSummary) -> list[str]:
    """A step line of the highest feedback score so far, up to where the run stands or ended."""
    path, best = "", -math.inf
    for point in sorted(run.trajectory, key=lambda p: p.elapsed_s):
        place = scale.axis.place(point)
        if point.score is None or point.score <= best or place is None:
            continue
        best = point.score
        x, y = scale.x(place), scale.y(best)
        path += f"H{x:.1f}V{y:.1f}" if path else f"M{x:.1f} {y:.1f}"
    return [f'<path class="best" d="{path}H{scale.x(scale.axis.now):.1f}"/>'] if path else []


def _mark(scale: _Scale, point: Point, selected: bool) -> str:
    x = scale.x(scale.axis.place(point) or 0.0)
    title = f"<title>{escape(_told(point))}</title>"
    if point.score is None:
        bottom = PLOT_BOTTOM - 5
        kind = "waiting" if point.status is SubmissionState.ACCEPTED else "refused"
        cross = f"M{x - 3:.1f} {bottom - 3}l6 6m0 -6l-6 6"
        circle = f'<circle class="waiting" cx="{x:.1f}" cy="{bottom}" r="3">{title}</circle>'
        return circle if kind == "waiting" else f'<path class="refused" d="{cross}">{title}</path>'
    y = scale.y(point.score)
    whisker = ""
    if point.low is not None and point.high is not None:
        whisker = f'<line class="whisker thin" x1="{x:.1f}" y1="{scale.y(point.low):.1f}" x2="{x:.1f}" y2="{scale.y(point.high):.1f}"/>'
    ring = f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="{RING}"/>' if selected else ""
    return f'{whisker}{ring}<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.2">{title}</circle>'


def _told(point: Point) -> str:
    score = (
        f"{fmt.points(point.score)} {fmt.between(point.low, point.high)}"
        if point.score is not None
        else str(point.status)
    )
    return f"submission {point.submission_id} at {fmt.duration(point.elapsed_s)}: {score}"


def _report_marks(scale: _Scale, run: RunSummary) -> list[str]:
    parts = []
    for x, score, name, kind in (
        (BASE_X, run.baseline_report, "base", "hollow"),
        (SELECTED_X, run.report, "selected", "filled"),
    ):
        if score is None or score.score is None or (kind == "filled" and run.selected is None):
            continue
        y = scale.y(score.score)
        if score.low is not None and score.high is not None:
            parts.append(
                f'<line class="whisker" x1="{x}" y1="{scale.y(score.low):.1f}" x2="{x}" y2="{scale.y(score.high):.1f}"/>'
            )
        told = f"report split, {name}: {fmt.points(score.score)} {fmt.between(score.low, score.high)}"
        parts.append(f'<path class="{kind}" d="M{x} {y - 5:.1f}l5 5l-5 5l-5 -5z"><title>{escape(told)}</title></path>')
    return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
