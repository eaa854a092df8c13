"""Figures of the merged report: content (`figures_of`), drawing with matplotlib (`drawn`), files (`write_figures`); a run as SVG (`trajectory`)."""

from __future__ import annotations

import hashlib
import io
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, NamedTuple

from autorl_hpc.errors import from_os_error
from autorl_hpc.files import atomic, reading
from autorl_hpc.records import readable_json
from autorl_hpc.report import format as fmt
from autorl_hpc.report.conditions import cell_key
from autorl_hpc.report.format import html
from autorl_hpc.report.summary import Axis, Board, CellSummary, MergedReport, Point, RunSummary
from autorl_hpc.report.versus import Versus
from autorl_hpc.states import SubmissionState

# --- content of a figure, independent of drawing

MAX_SERIES = 7
"""Colours that colour-blind readers can tell apart, also on paper. Further agents are only in the tables and in summary.json."""


class Series(NamedTuple):
    """A line with its band; `low` and `high` are None where there are too few runs. `colour`: the agent's number, 0 to 6."""

    label: str
    colour: int
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


class Spot(NamedTuple):
    """A mean with its interval."""

    label: str
    mean: float
    low: float | None
    high: float | None
    colour: int
    faint: bool = False


class Panel(NamedTuple):
    """One chart: lines over an axis, or a forest of means with intervals."""

    kind: Literal["lines", "forest"]
    title: str
    rows: tuple[Any, ...]  # `Series` of lines, `Spot` of a forest
    x_label: str = ""
    y_label: str = ""
    as_steps: bool = False  # a line's value holds until the next point
    counts: bool = False  # the horizontal axis counts something, from 1


class Figure(NamedTuple):
    """One figure of one leaderboard, with a caption in sentences and a legend of labels and colours, if any; `name` is of its files."""

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    legend: tuple[tuple[str, int], ...] = ()


# --- figures of each leaderboard, from the merged report's numbers alone

AXES: dict[Axis, tuple[str, str, float]] = {
    "time_s": ("time", "budget used, hours", 3600.0),
    "tokens": ("tokens", "tokens of the driver, millions", 1e6),
    "submissions": ("submissions", "submissions", 1.0),
    "gpu_hours": ("gpu-hours", "GPU-hours of the agent", 1.0),
}
"""By axis: its word in file names, its label, and the divisor of its numbers."""

MAX_SPOTS = 40  # rows of a forest plot; more are unreadable, and the tables have all


def figures_of(merged: MergedReport, board: Board, number: int) -> tuple[Figure, ...]:
    """Return the figures of one leaderboard that have data; `number` is its place, from 1."""
    colours = {row.label: place for place, row in enumerate(board.rows[:MAX_SERIES])}
    found = [_improvement(board, colours), *_scaling(merged, board, colours), _best_of(merged, board, colours)]
    return tuple(one._replace(name=f"board{number:02d}-{one.name}") for one in found if one.panels)


def _improvement(board: Board, colours: dict[str, int]) -> Figure:
    panels = []
    for column in range(len(board.tasks)):
        spots = []
        for row in board.rows[:MAX_SPOTS]:
            cell = row.cells[column]
            if cell is not None and cell.improvement.mean is not None:
                over, colour = cell.improvement, colours.get(row.label, -1)
                faint = over.interval != "t over runs"
                spots.append(Spot(row.label, cell.improvement.mean, over.low, over.high, colour, faint))
        if spots:
            panels.append(Panel("forest", board.column(column), tuple(spots), "improvement on report, points"))
    caption = (
        "Mean improvement on the report split over counted runs with its 95 % t interval. Faint: fewer than three runs, "
        "the bar is the range of two or the interval of one run's items; or runs that are all equal, which have no interval."
    )
    return Figure("improvement", "Improvement by agent and task", caption, tuple(panels))


def _scaling(merged: MergedReport, board: Board, colours: dict[str, int]) -> Iterator[Figure]:
    caption = (
        "Improvement of the best feedback score so far on the base model's, mean over runs with a pointwise 95 % t interval "
        "(three runs and more). A run that has ended stays where it was. Feedback scores, which the agents chose by: they flatter."
    )
    for axis, (word, label, unit) in AXES.items():

        def curve(cell: CellSummary, axis: Axis = axis, unit: float = unit) -> list[tuple[float | None, ...]]:
            found = next((one.points for one in cell.scaling if one.axis == axis), ())
            return [(point.x / unit, point.mean, point.low, point.high) for point in found]

        panel = Panel("lines", "", (), label, "improvement, points", as_steps=True, counts=axis == "submissions")
        figure = Figure(f"scaling-{word}", f"Improvement over {label}", caption, ())
        yield _with_lines(figure, panel, merged, board, colours, curve)


def _best_of(merged: MergedReport, board: Board, colours: dict[str, int]) -> Figure:
    def curve(cell: CellSummary) -> list[tuple[float | None, ...]]:
        known = dict(enumerate(cell.best_of_intervals, 1))
        points = [(float(k), mean, *known.get(k, (None, None))) for k, mean in enumerate(cell.best_of, 1)]
        return points if len(points) > 1 else []

    caption = (
        "Expected improvement on the report split of the run that is best on feedback, of k of the n runs there are (k up to n, "
        "nothing extrapolated), with a 95 % interval over runs from five runs on; it does not hold where rare runs gain far more than the rest."
    )
    panel = Panel("lines", "", (), "k runs", "improvement of the chosen run, points", counts=True)
    return _with_lines(
        Figure("best-of-k", "Best of k runs (pass@k)", caption, ()), panel, merged, board, colours, curve
    )


def _with_lines(
    figure: Figure,
    panel: Panel,
    merged: MergedReport,
    board: Board,
    colours: dict[str, int],
    curve: Callable[[CellSummary], list[Any]],
) -> Figure:
    panels, legend = [], {}
    for column, task in enumerate(board.tasks):
        cells = {cell_key(cell): cell for cell in merged.groups[task.group].cells}
        lines = []
        for row in board.rows[:MAX_SERIES]:
            cell = cells.get(cell_key(row))
            if cell is not None and (points := curve(cell)):
                lines.append(Series(row.label, colours[row.label], *zip(*points, strict=True)))
                legend[row.label] = colours[row.label]
        if lines:
            panels.append(panel._replace(title=board.column(column), rows=tuple(lines)))
    more = f" Shown are the first {MAX_SERIES} of {len(board.rows)} agents as ranked; the others are in summary.json."
    return figure._replace(
        panels=tuple(panels),
        legend=tuple(sorted(legend.items(), key=lambda one: one[1])),
        caption=figure.caption + (more if len(board.rows) > MAX_SERIES else ""),
    )


def versus_figure(versus: Versus) -> Figure:
    """Return the figure of a comparison: both sides' means by task, and their difference over tasks."""
    panels = []
    for one in versus.tasks[:MAX_SPOTS]:
        spots = [
            Spot(f"{name}: {side.name}", over.mean, over.low, over.high, place, over.interval != "t over runs")
            for place, (name, side, over) in enumerate((("A", versus.a, one.a), ("B", versus.b, one.b)))
            if over.mean is not None
        ]
        title = f"{one.task}{' · ' * bool(one.what)}{one.what}"
        panels += [Panel("forest", title, tuple(spots), "improvement on report, points")] if spots else []
    for all_tasks in versus.over_tasks:
        spot = Spot("A less B", all_tasks.difference, all_tasks.low, all_tasks.high, MAX_SERIES - 1)
        panels.append(Panel("forest", f"over {len(all_tasks.tasks)} tasks", (spot,), "difference, points"))
    caption = "Mean improvement with its 95 % t interval; faint: fewer than three runs, or runs that are all equal."
    return Figure("compare", "A and B", caption, tuple(panels))


# --- drawing with matplotlib's object interface: no pyplot, no global state, no window

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#56b4e9", "#b98200", "#1b1e23")
"""Okabe and Ito's colours; yellow and orange are darker, for white paper."""

INK, SOFT, GRID = COLOURS[6], "#5c6470", "#dfe2e6"
ON_PAGE = {**{colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)}, SOFT: "var(--soft)", GRID: "var(--line)"}
"""The page's CSS variables, which have other values in dark mode; a test compares the light values with these."""

DASHES: tuple[Any, ...] = ("-", (0, (7, 2)), (0, (4, 2)), (0, (1.5, 2)), (0, (7, 2, 1.5, 2)), (0, (10, 3)), (0, (3, 4)))
WIDTH, LINES_HEIGHT, ROW_HEIGHT, LEGEND_HEIGHT = 4.4, 2.4, 0.22, 0.19  # inches
LABEL_CHARACTERS = 34


class Drawn(NamedTuple):
    """A panel's two files, and the SVG element for the page."""

    png: bytes
    svg: bytes
    element: str


def drawn(figure: Figure, panel: Panel) -> Drawn:
    """Draw a panel above its legend. Call it inside `style`."""
    from matplotlib.figure import Figure as Drawing
    from matplotlib.lines import Line2D

    rows = LINES_HEIGHT if panel.kind == "lines" else 1.0 + ROW_HEIGHT * max(2, len(panel.rows))
    picture = Drawing(figsize=(WIDTH, rows + LEGEND_HEIGHT * -(-len(figure.legend) // 2)), layout="constrained")
    axis = picture.add_subplot()
    axis.set_title(panel.title, loc="left")
    axis.set_xlabel(panel.x_label)
    (_lines if panel.kind == "lines" else _forest)(axis, panel)
    handles = []
    for text, place in figure.legend:
        label = f" {text}" if text.startswith("_") else text  # matplotlib drops labels with a leading underscore
        line = {"color": COLOURS[place % MAX_SERIES], "linestyle": DASHES[place % MAX_SERIES]}
        handles.append(Line2D([], [], label=label[:LABEL_CHARACTERS], **line))
    if handles:
        picture.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, borderaxespad=0.1)
    png, svg = io.BytesIO(), io.BytesIO()
    picture.savefig(png, format="png", metadata={"Software": None}, pil_kwargs={"compress_level": 2})
    picture.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = svg.getvalue().decode()  # on the page: in its colours, without ids that other drawings have too
    box, content = re.search(r'viewBox="([^"]+)"', text), text[text.index("<defs>") : text.rindex("</svg>")]
    content = re.sub(r' id="[a-z0-9.]+_\d+"|<style.*?</style>', "", content, flags=re.DOTALL)
    for colour, name in ON_PAGE.items():
        content = content.replace(colour, name)
    about = f'viewBox="{box[1] if box else ""}" role="img" aria-label="{html(f"{figure.title}: {panel.title}")}"'
    return Drawn(png.getvalue(), svg.getvalue(), f'<svg class="chart" {about}>{content}</svg>')


def _lines(axis: Any, panel: Panel) -> None:
    axis.axhline(0, color=SOFT, linewidth=0.6)
    step, style = ("post", "steps-post") if panel.as_steps else (None, "default")
    for series in panel.rows:
        colour, dash = COLOURS[series.colour % MAX_SERIES], DASHES[series.colour % MAX_SERIES]
        points = list(zip(series.x, series.y, series.low, series.high, strict=True))
        band = [(x, low, high) for x, _, low, high in points if low is not None and high is not None]
        if len(band) > 1:
            axis.fill_between(*zip(*band, strict=True), step=step, color=colour, alpha=0.1, linewidth=0)
        axis.plot(series.x, series.y, color=colour, linewidth=1.2, linestyle=dash, drawstyle=style)
        axis.plot(series.x[-1:], series.y[-1:], color=colour, marker="o", markersize=3)
    axis.set_ylabel(panel.y_label)
    axis.grid(axis="y", color=GRID, linewidth=0.5)
    if panel.counts:
        axis.locator_params(axis="x", integer=True, nbins=6)


def _forest(axis: Any, panel: Panel) -> None:
    axis.axvline(0, color=SOFT, linewidth=0.6)
    for place, spot in enumerate(panel.rows):
        colour = COLOURS[spot.colour] if spot.colour >= 0 else SOFT
        alpha = 0.45 if spot.faint else 1.0
        if spot.low is not None and spot.high is not None:
            axis.plot([spot.low, spot.high], [place, place], color=colour, linewidth=1.4, alpha=alpha)
        axis.plot([spot.mean], [place], color=colour, marker="o", markersize=4, alpha=alpha)
    axis.grid(axis="x", color=GRID, linewidth=0.5)
    axis.set_yticks(range(len(panel.rows)), [fill(spot.label, LABEL_CHARACTERS) for spot in panel.rows])
    axis.set_ylim(len(panel.rows) - 0.4, -0.6)  # from top to bottom, as in the table


# --- files: PNG and SVG of every panel; the same numbers give the same bytes with one version of matplotlib

FOLDER = "figures"
INDEX = "index.json"
MAX_PANELS = 120  # about 0.1 s of CPU each, so figures take at most some seconds


def write_figures(merged: MergedReport, out: Path) -> dict[int, list[tuple[Figure, tuple[str, ...]]]]:
    """Draw the figures into figures/ of `out`, remove outdated ones. Figures are of as many whole leaderboards as
    `MAX_PANELS` allows, but of at least one. Returns by leaderboard number: each figure with its panels as SVG
    elements. Raises AutorlError: the folder can't be written."""
    folder, panels = out / FOLDER, 0
    files: dict[str, bytes] = {}
    index: dict[str, Any] = {}
    found: dict[int, list[tuple[Figure, tuple[str, ...]]]] = {}
    with style() as version:
        for number, board in enumerate(merged.boards, 1):
            figures = figures_of(merged, board, number)
            panels += sum(len(figure.panels) for figure in figures)
            if number > 1 and panels > MAX_PANELS:
                break
            for figure in figures:
                made = [drawn(figure, panel) for panel in figure.panels]
                for place, one in enumerate(made, 1):
                    name = f"{figure.name}-{place}"
                    files |= {f"{name}.png": one.png, f"{name}.svg": one.svg}
                    sums = {"png": hashlib.sha256(one.png).hexdigest(), "svg": hashlib.sha256(one.svg).hexdigest()}
                    title = f"{figure.title}: {figure.panels[place - 1].title}"
                    index[name] = {"title": title, "caption": figure.caption, **sums}
                found.setdefault(number, []).append((figure, tuple(one.element for one in made)))
    files[INDEX] = readable_json({"matplotlib": version, "figures": index})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            if not reading.says(folder / name, (data,)):
                atomic.write_bytes(folder / name, data, durable=False)
        for path in folder.glob("board[0-9][0-9]-*.*"):
            if path.name not in files:
                path.unlink()
    except OSError as error:
        raise from_os_error(error, "writing the figures", error.filename or folder) from error
    return found


@contextmanager
def style() -> Iterator[str]:
    """Set up matplotlib with defaults, ignoring the user's matplotlibrc; yield its version. Its configuration and font
    cache go to a temporary folder unless MPLCONFIGDIR is set, because a home may be full or read-only."""
    with tempfile.TemporaryDirectory(prefix="autorl-mpl-") as spare:
        if "MPLCONFIGDIR" not in os.environ:
            os.environ["MPLCONFIGDIR"] = spare
        try:
            import matplotlib as mpl

            logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # it logs its font search
            with mpl.rc_context():
                mpl.rcdefaults()
                settings: Any = mpl.rcParams
                settings.update(_SETTINGS)
                yield str(mpl.__version__)
        finally:
            if os.environ.get("MPLCONFIGDIR") == spare:
                del os.environ["MPLCONFIGDIR"]


_SETTINGS: dict[str, Any] = {
    "backend": "agg",
    "svg.hashsalt": "autorl-hpc",
    "svg.fonttype": "none",  # text stays text: small, searchable, in the document's font
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "axes.facecolor": "none",  # the page's background shows through
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "text.parse_math": False,  # an agent's name may contain dollar signs
    "text.usetex": False,
    "figure.dpi": 150,
}


# --- one run as SVG without matplotlib: score against budget used

PLOT_WIDTH, PLOT_HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 38, 58, 10, 26
RING = 6.5
"""Radius of the ring around the selected submission; axis labels keep clear of it."""
PLOT_RIGHT, PLOT_BOTTOM = PLOT_WIDTH - RIGHT, PLOT_HEIGHT - BOTTOM


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
    parts += [_text(across(at_s), PLOT_HEIGHT - 9, text, anchor) for at_s, (text, anchor) in labels.items()]
    parts.append(_text((PLOT_RIGHT + PLOT_WIDTH) / 2, PLOT_HEIGHT - 9, "report", "middle"))
    if run.baseline_feedback is not None and run.baseline_feedback.score is not None:
        parts.append(_line("base", LEFT, y := heights.y(run.baseline_feedback.score), PLOT_RIGHT, y))
    parts.append(_best_so_far(placed, heights, across(now)))
    parts += [_mark(point, x, heights, point.submission_id == run.selected) for point, x in placed]
    parts += _report_marks(heights, run)
    if not any(point.score is not None for point in run.trajectory):
        parts.append(_text((LEFT + PLOT_RIGHT) / 2, (TOP + PLOT_BOTTOM) / 2, "no feedback score", "middle"))
    title = html(f"Score against time of {run.run_id}")
    return f'<svg class="plot" viewBox="0 0 {PLOT_WIDTH} {PLOT_HEIGHT}" role="img" aria-label="{title}">{"".join(parts)}</svg>'


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
        parts.append(_line("grid", LEFT, y, PLOT_WIDTH - 4, y))
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
