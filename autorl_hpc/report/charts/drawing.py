"""One figure with matplotlib, by its object interface: no pyplot, no state, no window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autorl_hpc.report import format as fmt
from autorl_hpc.report.charts.model import MAX_SERIES, Bars, Figure, Forest, Heat, LinePanel, Panel, shortened_apart

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#56b4e9", "#b98200", "#1b1e23")
"""Okabe and Ito's, with the yellow and the orange darkened for white paper; tests/unit compares them with the page's."""

DASHES: tuple[Any, ...] = (
    "solid",
    (0, (7, 2)),
    (0, (4, 2)),
    (0, (1.5, 2)),
    (0, (7, 2, 1.5, 2)),
    (0, (10, 3)),
    (0, (3, 4)),
)
SOFT = "#5c6470"
COLUMN, LINE_HEIGHT, ROW_HEIGHT = 3.3, 2.3, 0.2
"""Inches: a panel's width with its labels, a line chart's height with its axis, a row's height."""

ABOVE, BELOW, LEFT, RIGHT = 0.28, 0.45, 0.55, 0.12
"""Inches that a title, an axis with its name, numbers at the left, and half a number at the right take.

Places are computed and not left to matplotlib's layout engines, which draw everything twice to find them."""

AXIS_NAME_BELOW, AXIS_NAME_LEFT = 0.28, 0.40
"""Inches from an axis to its name, beyond the numbers: to measure these for every axis took a fifth of the time."""

CHARACTER, LEGEND_ROW = 0.066, 0.19
"""Inches: a character of a row's label, on the wide side; a line of the legend."""

MAX_COLUMNS = 3
LABEL_CHARACTERS = 34


def draw(figure: Figure) -> Drawing:
    """The figure with its panels side by side, three to a row, and one legend."""
    from matplotlib.figure import Figure as Drawing

    columns = min(MAX_COLUMNS, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    height, width = max(_height(panel) for panel in figure.panels), max(_width(panel) for panel in figure.panels)
    foot = 0.05 + LEGEND_ROW * -(-len(figure.legend) // _legend_columns(width * columns))
    whole_width, whole_height = width * columns, height * rows + (foot if figure.legend else 0.0)
    picture = Drawing(figsize=(whole_width, whole_height))
    for place, panel in enumerate(figure.panels):
        across, down = place % columns, place // columns
        left = _left(panel)
        box = (
            (width * across + left) / whole_width,
            (whole_height - height * (down + 1) + BELOW) / whole_height,
            (width - left - RIGHT) / whole_width,
            (height - ABOVE - BELOW) / whole_height,
        )
        axis = picture.add_axes(box)
        _panel(axis, panel, bare=across > 0)
        axis.xaxis.set_label_coords(0.5, -AXIS_NAME_BELOW / (height - ABOVE - BELOW))
        axis.yaxis.set_label_coords(-AXIS_NAME_LEFT / (width - left - RIGHT), 0.5)
    _legend(picture, figure, _legend_columns(whole_width))
    return picture


def _legend_columns(width: float) -> int:
    return max(1, int(width / COLUMN))


def _height(panel: Panel) -> float:
    if isinstance(panel, LinePanel):
        return LINE_HEIGHT
    return ABOVE + BELOW + ROW_HEIGHT * max(2, len(_row_labels(panel)))


def _row_labels(panel: Panel) -> list[str]:
    if isinstance(panel, LinePanel):
        return []
    labels = panel.rows if isinstance(panel, Heat) else panel.spots if isinstance(panel, Forest) else panel.bars
    return shortened_apart([one if isinstance(one, str) else one.label for one in labels], LABEL_CHARACTERS)


def _left(panel: Panel) -> float:
    return max([LEFT, *(0.15 + CHARACTER * len(label) for label in _row_labels(panel))])


def _width(panel: Panel) -> float:
    inside = (
        0.95 * len(panel.columns)
        if isinstance(panel, Heat)
        else COLUMN - 1.1
        if not isinstance(panel, LinePanel)
        else 0.0
    )
    return max(COLUMN, _left(panel) + inside + RIGHT)


def _panel(axis: Any, panel: Panel, bare: bool) -> None:
    axis.set_title(panel.title, loc="left")
    if isinstance(panel, LinePanel):
        _lines(axis, panel, bare)
    elif isinstance(panel, Bars):
        _bars(axis, panel)
    elif isinstance(panel, Forest):
        _forest(axis, panel)
    else:
        _heat(axis, panel)


def _lines(axis: Any, panel: LinePanel, bare: bool) -> None:
    axis.axhline(0, color=SOFT, linewidth=0.6)
    for series in panel.series:
        colour = COLOURS[series.colour % MAX_SERIES]
        known = [
            (x, low, high)
            for x, low, high in zip(series.x, series.low, series.high, strict=True)
            if low is not None and high is not None
        ]
        if len(known) > 1:
            xs, lows, highs = zip(*known, strict=True)
            around = [*panel.corners(xs, highs), *reversed(panel.corners(xs, lows))]
            axis.fill(*zip(*around, strict=True), color=colour, alpha=0.1, linewidth=0)
        line = zip(*panel.corners(series.x, series.y), strict=True)
        axis.plot(*line, color=colour, linewidth=1.2, linestyle=DASHES[series.colour % MAX_SERIES])
        axis.plot(series.x[-1:], series.y[-1:], color=colour, marker="o", markersize=3)
    axis.set_xlabel(panel.x_label)
    if not bare:
        axis.set_ylabel(panel.y_label)
    axis.grid(axis="y", color="#dfe2e6", linewidth=0.5)
    if panel.counts:
        from matplotlib.ticker import MaxNLocator

        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def _forest(axis: Any, panel: Forest) -> None:
    axis.axvline(0, color=SOFT, linewidth=0.6)
    for place, spot in enumerate(panel.spots):
        colour = COLOURS[spot.colour] if spot.colour >= 0 else SOFT
        alpha = 0.45 if spot.faint else 1.0
        if spot.low is not None and spot.high is not None:
            axis.plot([spot.low, spot.high], [place, place], color=colour, linewidth=1.4, alpha=alpha)
        axis.plot([spot.mean], [place], color=colour, marker="o", markersize=4, alpha=alpha)
    _labels(axis, panel)
    axis.set_xlabel(panel.x_label)
    axis.grid(axis="x", color="#dfe2e6", linewidth=0.5)


def _bars(axis: Any, panel: Bars) -> None:
    left = [0.0] * len(panel.bars)
    for kind in range(len(panel.kinds)):
        parts = [bar.parts[kind] for bar in panel.bars]
        axis.barh(range(len(parts)), parts, left=left, height=0.7, **_fill(kind))
        left = [a + b for a, b in zip(left, parts, strict=True)]
    _labels(axis, panel)
    axis.set_xlabel(panel.x_label)


def _fill(kind: int) -> dict[str, Any]:
    """Colour of a kind: seven, then the same ones lighter and hatched."""
    more = {} if kind < MAX_SERIES else {"alpha": 0.45, "hatch": "///"}
    return {"color": COLOURS[kind % MAX_SERIES], "linewidth": 0, **more}


def _heat(axis: Any, panel: Heat) -> None:
    for c in range(len(panel.columns)):
        column = [row[c] for row in panel.cells]
        most = max((abs(cell.value) for cell in column if cell is not None), default=1.0) or 1.0
        for r, cell in enumerate(column):
            if cell is None:
                continue
            colour = COLOURS[0] if cell.value >= 0 else COLOURS[1]
            axis.barh([r], [0.96], left=[c - 0.48], height=0.92, color=colour, alpha=0.75 * abs(cell.value) / most)
            mark = {"best": " best", "worst": " worst"}.get(cell.mark or "", "") + ("*" if cell.clear else "")
            axis.text(c, r, f"{fmt.signed(cell.value)}{mark}", ha="center", va="center", fontsize=7)
    axis.set_xticks(range(len(panel.columns)), panel.columns)
    axis.set_xlim(-0.5, len(panel.columns) - 0.5)
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    _labels(axis, panel)


def _labels(axis: Any, panel: Panel) -> None:
    """Rows from above to below, as in the table."""
    labels = _row_labels(panel)
    axis.set_yticks(range(len(labels)), labels)
    axis.set_ylim(len(labels) - 0.4, -0.6)


def _legend(picture: Any, figure: Figure, columns: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if not figure.legend:
        return
    lines = isinstance(figure.panels[0], LinePanel)
    handles = [
        Line2D([], [], color=COLOURS[place % MAX_SERIES], linestyle=DASHES[place % MAX_SERIES], label=_told(label))
        if lines
        else Patch(label=_told(label), **_fill(place))
        for label, place in figure.legend
    ]
    picture.legend(handles=handles, loc="lower center", ncols=columns, frameon=False, borderaxespad=0.3)


def _told(label: str) -> str:
    """matplotlib leaves out what begins with an underscore."""
    return f" {label}" if label.startswith("_") else label
