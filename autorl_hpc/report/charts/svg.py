"""The figures as `<svg>` elements of the page; colours, dark ones too, come from its CSS (classes c0 to c6)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from autorl_hpc.report import format as fmt
from autorl_hpc.report.charts.model import Bars, Figure, Forest, Heat, LinePanel, Panel, Series, Spot, shortened_apart

WIDTH = 340
LINES_HEIGHT = 210
LEFT, RIGHT, TOP, BOTTOM = 40, 10, 10, 34
ROW = 20
"""Height of a bar, a spot, or a row of a heat map."""

LABEL_SHARE = 0.48
"""Of the width of a panel with a label a row; longer labels are cut, and stand whole in a tooltip."""

CHARACTER = 5.6
"""Width of a character at the page's 10 px, a little more than it is."""

KINDS = 7


def drawn(panel: Panel) -> str:
    """One panel as an `<svg>` element."""
    if isinstance(panel, LinePanel):
        return _lines(panel)
    if isinstance(panel, Bars):
        return _bars(panel)
    return _forest(panel) if isinstance(panel, Forest) else _heat(panel)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers within low and high."""
    step = _nice_step((high - low) or 1.0, count)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def span(values: Sequence[float | None], with_zero: bool = True) -> tuple[float, float]:
    """The ends of an axis: all values, zero, and a little room."""
    known = [v for v in values if v is not None] + ([0.0] if with_zero else [])
    low, high = min(known), max(known)
    room = 0.05 * ((high - low) or 1.0)
    return (low - room if low < 0 else low, high + room)


def tick_text(value: float) -> str:
    """`0`, `0.25`, `20k`: short, with a true minus sign."""
    size = abs(value)
    text = f"{value / 1000:g}k" if size >= 10_000 else f"{value:.4g}"
    return "0" if text == "-0" else text.replace("-", fmt.MINUS)


def _nice_step(width: float, count: int) -> float:
    raw = width / count
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))


def _lines(panel: LinePanel) -> str:
    values = [v for s in panel.series for v in (*s.y, *s.low, *s.high)]
    low, high = span(values)
    ends = [x for s in panel.series for x in s.x]
    left, right = min(ends if panel.counts else [*ends, 0.0]), max(ends)
    right = right if right > left else left + 1.0
    bottom = LINES_HEIGHT - BOTTOM

    def at_x(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - left) / (right - left)

    def at_y(y: float) -> float:
        return bottom - (bottom - TOP) * (y - low) / ((high - low) or 1.0)

    parts = [_grid_y(at_y(v), v) for v in ticks(low, high)]
    parts += [_text(at_x(v), bottom + 13, tick_text(v), "middle") for v in ticks(left, right)]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, LINES_HEIGHT - 6, panel.x_label, "middle"))
    parts.append(f'<line class="zero" x1="{LEFT}" y1="{at_y(0):.1f}" x2="{WIDTH - RIGHT}" y2="{at_y(0):.1f}"/>')
    parts += [_band(panel, s, at_x, at_y) for s in panel.series]
    parts += [_line(panel, s, at_x, at_y) for s in panel.series]
    return _svg(WIDTH, LINES_HEIGHT, f"{panel.title}: {panel.y_label} over {panel.x_label}", parts)


Place = Callable[[float], float]


def _band(panel: LinePanel, series: Series, at_x: Place, at_y: Place) -> str:
    known = [
        (x, low, high)
        for x, low, high in zip(series.x, series.low, series.high, strict=True)
        if low is not None and high is not None
    ]
    if len(known) < 2:
        return ""
    xs, lows, highs = zip(*known, strict=True)
    upper = "L".join(f"{at_x(x):.1f} {at_y(high):.1f}" for x, high in panel.corners(xs, highs))
    lower = "L".join(f"{at_x(x):.1f} {at_y(low):.1f}" for x, low in reversed(panel.corners(xs, lows)))
    return f'<path class="band c{series.colour}" d="M{upper}L{lower}Z"/>'


def _line(panel: LinePanel, series: Series, at_x: Place, at_y: Place) -> str:
    points = "L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in panel.corners(series.x, series.y))
    end_x, end_y = at_x(series.x[-1]), at_y(series.y[-1])
    return (
        f'<path class="curve c{series.colour}" d="M{points}"><title>{escape(series.label)}</title></path>'
        f'<circle class="end c{series.colour}" cx="{end_x:.1f}" cy="{end_y:.1f}" r="2.6"/>'
    )


def _forest(panel: Forest) -> str:
    low, high = span([v for s in panel.spots for v in (s.mean, s.low, s.high)])
    start = WIDTH * LABEL_SHARE
    height = TOP + ROW * len(panel.spots) + BOTTOM
    bottom = height - BOTTOM

    def at_x(x: float) -> float:
        return start + (WIDTH - RIGHT - start) * (x - low) / ((high - low) or 1.0)

    parts = []
    for v in ticks(low, high, 3):
        parts.append(f'<line class="grid" x1="{at_x(v):.1f}" y1="{TOP}" x2="{at_x(v):.1f}" y2="{bottom}"/>')
        parts.append(_text(at_x(v), bottom + 13, tick_text(v), "middle"))
    parts.append(f'<line class="zero" x1="{at_x(0):.1f}" y1="{TOP}" x2="{at_x(0):.1f}" y2="{bottom}"/>')
    names = _fitted([s.label for s in panel.spots], start - 8)
    for i, (spot, name) in enumerate(zip(panel.spots, names, strict=True)):
        parts.append(_label(name, TOP + ROW * (i + 0.5), start) + _spot(spot, TOP + ROW * (i + 0.5), at_x))
    parts.append(_text((start + WIDTH - RIGHT) / 2, height - 6, panel.x_label, "middle"))
    return _svg(WIDTH, height, panel.title, parts)


def _spot(spot: Spot, y: float, at_x: Place) -> str:
    colour = f"c{spot.colour}" if spot.colour >= 0 else "rest"
    faint = " faint" if spot.faint else ""
    interval = ""
    if spot.low is not None and spot.high is not None:
        interval = f'<line class="range {colour}{faint}" x1="{at_x(spot.low):.1f}" y1="{y}" x2="{at_x(spot.high):.1f}" y2="{y}"/>'
    told = f"{spot.label}: {fmt.signed(spot.mean)} {fmt.signed_between(spot.low, spot.high)}".strip()
    dot = f'<circle class="end {colour}{faint}" cx="{at_x(spot.mean):.1f}" cy="{y}" r="3.6"><title>{escape(told)}</title></circle>'
    return interval + dot


def _bars(panel: Bars) -> str:
    most = max((sum(bar.parts) for bar in panel.bars), default=1.0) or 1.0
    start = WIDTH * LABEL_SHARE
    height = TOP + ROW * len(panel.bars) + BOTTOM
    bottom = height - BOTTOM
    scale = (WIDTH - RIGHT - start) / most
    parts = [_text(start + v * scale, bottom + 13, tick_text(v), "middle") for v in ticks(0, most, 3)]
    names = _fitted([bar.label for bar in panel.bars], start - 8)
    for i, bar in enumerate(panel.bars):
        y, x = TOP + ROW * i, start
        parts.append(_label(names[i], y + ROW / 2, start))
        for place, (kind, part) in enumerate(zip(panel.kinds, bar.parts, strict=True)):
            if part:
                told = escape(f"{bar.label}: {kind}: {part:g}")
                parts.append(
                    f'<rect class="{kind_class(place)}" x="{x:.1f}" y="{y + 3}" width="{part * scale:.1f}" height="{ROW - 6}"><title>{told}</title></rect>'
                )
                x += part * scale
    parts.append(_text((start + WIDTH - RIGHT) / 2, height - 6, panel.x_label, "middle"))
    return _svg(WIDTH, height, panel.title, parts)


def sample(figure: Figure, place: int) -> str:
    """What stands before a label of the legend: a piece of the line, or a square."""
    if isinstance(figure.panels[0], LinePanel):
        return f'<svg viewBox="0 0 26 8" width="26" height="8" aria-hidden="true"><path class="curve c{place}" d="M0 4H26"/></svg>'
    return f'<svg viewBox="0 0 12 12" width="12" height="12" aria-hidden="true"><rect class="{kind_class(place)}" width="12" height="12"/></svg>'


def kind_class(place: int) -> str:
    """The class of the place-th kind: seven colours, then the same ones lighter."""
    return f"fill c{place % KINDS}" + (" light" if place >= KINDS else "")


def _heat(panel: Heat) -> str:
    start = WIDTH * LABEL_SHARE
    width = max(WIDTH, start + 64 * len(panel.columns) + RIGHT)
    step = (width - start - RIGHT) / len(panel.columns)
    head = 22
    most = [
        max((abs(row[c].value) for row in panel.cells if row[c] is not None), default=1.0) or 1.0  # type: ignore[union-attr]
        for c in range(len(panel.columns))
    ]
    parts = [
        _text(start + step * (c + 0.5), head - 8, name, "middle", most=step)
        for c, name in enumerate(_fitted(panel.columns, step))
    ]
    names = _fitted(panel.rows, start - 8)
    for r, (name, row) in enumerate(zip(panel.rows, panel.cells, strict=True)):
        y = head + (ROW + 4) * r
        parts.append(_label(names[r], y + ROW / 2 + 2, start))
        for c, cell in enumerate(row):
            if cell is None:
                continue
            share = 0.75 * abs(cell.value) / most[c]
            sign = "gain" if cell.value >= 0 else "loss"
            x = start + step * c
            mark = {"best": "▲", "worst": "▼"}.get(cell.mark or "", "") + ("*" if cell.mark and cell.clear else "")
            told = escape(f"{name}, {panel.columns[c]}: {fmt.signed(cell.value)} {cell.mark or ''}".strip())
            parts.append(
                f'<rect class="{sign}" x="{x + 1:.1f}" y="{y}" width="{step - 2:.1f}" height="{ROW + 2}" fill-opacity="{share:.2f}"><title>{told}</title></rect>'
            )
            parts.append(
                _text(x + step / 2, y + ROW / 2 + 5, f"{fmt.signed(cell.value)} {mark}".strip(), "middle", "value")
            )
    return _svg(width, head + (ROW + 4) * len(panel.rows) + 4, panel.title, parts)


def _grid_y(y: float, value: float) -> str:
    line = f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
    return line + _text(LEFT - 5, y + 3.5, tick_text(value), "end")


def _label(label: str, y: float, start: float) -> str:
    return _text(start - 8, y + 3.5, label, "end", most=start - 8)


def _fitted(labels: Sequence[str], width: float) -> list[str]:
    """Short enough for the width if that leaves them apart."""
    return shortened_apart(labels, max(4, int(width / CHARACTER)))


def _text(x: float, y: float, text: str, anchor: str, kind: str = "", most: float | None = None) -> str:
    """`most`: the room there is; longer text is drawn narrower."""
    name = f' class="{kind}"' if kind else ""
    if most is not None and len(text) * CHARACTER > most:
        name += f' textLength="{most:.0f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg class="plot" {size} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
