"""Draw a run as SVG: score against budget used (`trajectory`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autorl_hpc.report import format as fmt
from autorl_hpc.report.format import html
from autorl_hpc.report.summary import Point, RunSummary
from autorl_hpc.states import SubmissionState

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 38, 58, 10, 26
RING = 6.5
"""Radius of the ring around the selected submission; axis labels keep clear of it."""
PLOT_RIGHT, PLOT_BOTTOM = WIDTH - RIGHT, HEIGHT - BOTTOM


def trajectory(run: RunSummary) -> str:
    """Draw feedback scores against the budget used, base model dashed, report scores at the right; an `<svg>`."""
    heights, now = _Heights(run), max([run.elapsed_s, *(point.elapsed_s for point in run.trajectory)])
    end = max(run.budget_s, now) or 1.0

    def across(at_s: float) -> float:
        return LEFT + (PLOT_RIGHT - LEFT) * at_s / end

    placed = [(point, across(point.elapsed_s)) for point in run.trajectory]
    parts = [*_grid(heights), _line("edge", PLOT_RIGHT, TOP, PLOT_RIGHT, PLOT_BOTTOM)]
    if across(run.budget_s) < PLOT_RIGHT - 1:  # returned time extends it beyond the budget
        parts.append(_line("grid", across(run.budget_s), TOP, across(run.budget_s), PLOT_BOTTOM))
    labels = {0.0: ("0", "middle"), end / 2: (fmt.duration(end / 2), "middle"), end: (fmt.duration(end), "end")}
    parts += [_text(across(at_s), HEIGHT - 9, text, anchor) for at_s, (text, anchor) in labels.items()]
    parts.append(_text((PLOT_RIGHT + WIDTH) / 2, HEIGHT - 9, "report", "middle"))
    if run.baseline_feedback is not None and run.baseline_feedback.score is not None:
        parts.append(_line("base", LEFT, y := heights.y(run.baseline_feedback.score), PLOT_RIGHT, y))
    parts.append(_best_so_far(placed, heights, across(now)))
    parts += [_mark(point, x, heights, point.submission_id == run.selected) for point, x in placed]
    parts += _report_marks(heights, run)
    if not any(point.score is not None for point in run.trajectory):
        parts.append(_text((LEFT + PLOT_RIGHT) / 2, (TOP + PLOT_BOTTOM) / 2, "no feedback score", "middle"))
    title = html(f"Score against time of {run.run_id}")
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{"".join(parts)}</svg>'


class _Heights:
    def __init__(self, run: RunSummary) -> None:
        scores = [run.baseline_feedback, run.report, run.baseline_report, *run.trajectory]
        every = [value for one in scores if one is not None for value in (one.score, one.low, one.high)]
        shown = [value for value in every if value is not None] or [0.0, 100.0]
        low, high = min(shown), max(shown)
        raw = max(high - low, 1.0) / 4
        power = 10.0 ** math.floor(math.log10(raw))
        self.step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)  # three to five ticks
        self.low = max(0.0, math.floor(low / self.step) * self.step)
        self.high = min(100.0, math.ceil(high / self.step) * self.step)
        if self.high <= self.low:
            self.low, self.high = max(0.0, self.high - self.step), self.low + self.step

    def y(self, score: float) -> float:
        return PLOT_BOTTOM - (PLOT_BOTTOM - TOP) * (score - self.low) / (self.high - self.low)


def _grid(heights: _Heights) -> list[str]:
    parts, decimals = [], 0 if heights.step >= 1 else 1
    for tick in range(math.floor((heights.high - heights.low) / heights.step + 1e-6) + 1):
        value = heights.low + tick * heights.step
        y = heights.y(value)
        parts.append(_line("grid", LEFT, y, WIDTH - 4, y))
        parts.append(_text(LEFT - RING - 2, y + 3.5, f"{value:.{decimals}f}", "end"))
    return parts


def _best_so_far(placed: Sequence[tuple[Point, float]], heights: _Heights, now: float) -> str:
    path, best = "", -math.inf
    for point, x in sorted(placed, key=lambda one: one[0].elapsed_s):
        if point.score is not None and point.score > best:
            best, y = point.score, heights.y(point.score)
            path += f"H{x:.1f}V{y:.1f}" if path else f"M{x:.1f} {y:.1f}"
    return f'<path class="best" d="{path}H{now:.1f}"/>' if path else ""


def _mark(point: Point, x: float, heights: _Heights, selected: bool) -> str:
    score = str(point.status)
    if point.score is not None:
        score = f"{fmt.points(point.score)} {fmt.between(point.low, point.high)}"
    told = html(f"submission {point.submission_id} at {fmt.duration(point.elapsed_s)}: {score}")
    title, bottom = f"<title>{told}</title>", PLOT_BOTTOM - 5
    if point.score is None and point.status is SubmissionState.ACCEPTED:
        return f'<circle class="waiting" cx="{x:.1f}" cy="{bottom}" r="3">{title}</circle>'
    if point.score is None:
        return f'<path class="refused" d="M{x - 3:.1f} {bottom - 3}l6 6m0 -6l-6 6">{title}</path>'
    at = f'cx="{x:.1f}" cy="{heights.y(point.score):.1f}"'
    drawn = f'<circle class="dot" {at} r="3.2">{title}</circle>'
    if selected:
        drawn = f'<circle class="ring" {at} r="{RING}"/>{drawn}'
    if point.low is not None and point.high is not None:
        drawn = _line("whisker thin", x, heights.y(point.low), x, heights.y(point.high)) + drawn
    return drawn


def _report_marks(heights: _Heights, run: RunSummary) -> list[str]:
    parts = []
    selected = run.report if run.selected is not None else None
    for right, one, name, kind in ((18, run.baseline_report, "base", "hollow"), (40, selected, "selected", "filled")):
        if one is None or one.score is None:
            continue
        x, y = PLOT_RIGHT + right, heights.y(one.score)
        if one.low is not None and one.high is not None:
            parts.append(_line("whisker", x, heights.y(one.low), x, heights.y(one.high)))
        told = html(f"report split, {name}: {fmt.points(one.score)} {fmt.between(one.low, one.high)}")
        parts.append(f'<path class="{kind}" d="M{x} {y - 5:.1f}l5 5l-5 5l-5 -5z"><title>{told}</title></path>')
    return parts


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html(text)}</text>'
