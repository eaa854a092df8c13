"""The figures of each leaderboard, from the merged report's numbers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autorl_hpc.report.charts.model import (
    MAX_SERIES,
    Bar,
    Bars,
    Figure,
    Forest,
    Heat,
    HeatCell,
    LinePanel,
    Panel,
    Series,
    Spot,
)
from autorl_hpc.report.summary import Axis, Board, BoardRow, CellSummary, Curve, MergedReport, Spent

AXES: dict[Axis, tuple[str, str, float]] = {
    "time_s": ("time", "budget used, hours", 3600.0),
    "tokens": ("tokens", "tokens of the driver, millions", 1e6),
    "submissions": ("submissions", "submissions", 1.0),
    "gpu_hours": ("gpu-hours", "GPU-hours of the agent", 1.0),
}
"""Of each axis: its word in a file name, its label, and what its numbers are divided by."""

UNKNOWN = "unknown"
MAX_SPOTS = 40
"""Rows of a forest plot or a bar chart: more can't be read; the tables have them all."""

SELECTED_BY = "Feedback scores, which the agents chose by: they flatter."


def figures_of(merged: MergedReport, board: Board, number: int) -> tuple[Figure, ...]:
    """The figures of one leaderboard that have something to show; `number` is its place, from 1."""
    colours = {row.label: place for place, row in enumerate(board.rows[:MAX_SERIES])}
    found = [_improvement(board, colours), *_scaling(merged, board, colours), _best_of(merged, board, colours)]
    found += [_modes(board), _routes(board), _failures(board), _cost(board, colours)]
    prefix = f"board{number:02d}"
    return tuple(
        Figure(f"{prefix}-{one.name}", one.title, one.caption, one.panels, one.legend) for one in found if one.panels
    )


def _improvement(board: Board, colours: dict[str, int]) -> Figure:
    panels = []
    for column in range(len(board.tasks)):
        spots = []
        for row in board.rows[:MAX_SPOTS]:
            cell = row.cells[column]
            if cell is not None and cell.improvement.mean is not None:
                over = cell.improvement
                faint = over.interval != "t over runs"
                spots.append(
                    Spot(row.label, cell.improvement.mean, over.low, over.high, colours.get(row.label, -1), faint)
                )
        if spots:
            panels.append(Forest(board.column(column), tuple(spots), "improvement on report, points"))
    caption = (
        "Mean improvement on the report split over counted runs with its 95 % t interval. Faint: fewer than three runs, "
        "the bar is the range of two or the interval of one run's items; or runs that are all equal, which have no interval."
    )
    return Figure("improvement", "Improvement by agent and task", caption, tuple(panels))


def _scaling(merged: MergedReport, board: Board, colours: dict[str, int]) -> Iterator[Figure]:
    for axis, (word, label, unit) in AXES.items():
        panels = []
        for column in range(len(board.tasks)):
            found = [
                (row, curve)
                for row, cell in _cells(merged, board, column)
                if row.label in colours and (curve := _curve(cell, axis)) is not None
            ]
            series = tuple(_series(row.label, curve, unit, colours[row.label]) for row, curve in found)
            if series:
                counts = axis == "submissions"
                panels.append(
                    LinePanel(board.column(column), series, label, "improvement, points", as_steps=True, counts=counts)
                )
        legend = _legend(panels)
        caption = (
            f"Improvement of the best feedback score so far on the base model's, mean over runs with a pointwise 95 % "
            f"t interval (three runs and more). A run that has ended stays where it was. {SELECTED_BY}"
        )
        yield Figure(f"scaling-{word}", f"Improvement over {label}", caption + _more(board), tuple(panels), legend)


def _series(label: str, curve: Curve, unit: float, colour: int) -> Series:
    points = curve.points
    return Series(
        label=label,
        colour=colour,
        x=tuple(p.x / unit for p in points),
        y=tuple(p.mean for p in points),
        low=tuple(p.low for p in points),
        high=tuple(p.high for p in points),
    )


def _best_of(merged: MergedReport, board: Board, colours: dict[str, int]) -> Figure:
    panels = []
    for column in range(len(board.tasks)):
        series = []
        for row, cell in _cells(merged, board, column):
            if row.label in colours and len(cell.best_of) > 1:
                series.append(_best_series(row.label, cell, colours[row.label]))
        if series:
            panels.append(
                LinePanel(
                    board.column(column), tuple(series), "k runs", "expected best improvement, points", counts=True
                )
            )
    caption = (
        "Expected improvement on the report split of the best of k runs, by order statistics over the n runs there are "
        "(k up to n, nothing extrapolated), with a 95 % bootstrap interval over runs from five runs on."
    )
    return Figure("best-of-k", "Best of k runs (pass@k)", caption + _more(board), tuple(panels), _legend(panels))


def _best_series(label: str, cell: CellSummary, colour: int) -> Series:
    untold = [None] * (len(cell.best_of) - len(cell.best_of_intervals))
    return Series(
        label=label,
        colour=colour,
        x=tuple(float(k) for k in range(1, len(cell.best_of) + 1)),
        y=cell.best_of,
        low=(*(low for low, _ in cell.best_of_intervals), *untold),
        high=(*(high for _, high in cell.best_of_intervals), *untold),
    )


def _modes(board: Board) -> Figure:
    several = {
        (row.agent, row.driver, row.agent_hash)
        for row in board.rows
        if sum((r.agent, r.driver, r.agent_hash) == (row.agent, row.driver, row.agent_hash) for r in board.rows) > 1
    }
    rows = sorted(
        (row for row in board.rows if (row.agent, row.driver, row.agent_hash) in several),
        key=lambda row: (row.agent, row.driver, row.agent_hash, row.mode),
    )[:MAX_SPOTS]
    if not rows:
        return Figure("modes", "", "", ())
    cells = tuple(
        tuple(
            None
            if cell is None or cell.improvement.mean is None
            else HeatCell(cell.improvement.mean, cell.mark, cell.mark_clear)
            for cell in row.cells
        )
        for row in rows
    )
    names = tuple(" · ".join([row.agent, *([row.driver] if row.driver != "none" else []), row.mode]) for row in rows)
    heat = Heat("mean improvement, points", names, tuple(map(board.column, range(len(board.tasks)))), cells)
    caption = (
        "Mean improvement on the report split by mode and task, for agents with more than one mode. Best (▲) and worst (▼) of "
        "an agent's modes on each task are marked; with an asterisk where their 95 % intervals are apart."
    )
    return Figure("modes", "Mode by task", caption, (heat,))


def _routes(board: Board) -> Figure:
    rows = board.rows[:MAX_SPOTS]
    seen = {word for row in rows for word in (*row.planned, *row.executed)}
    if not seen - {UNKNOWN}:
        return Figure("routes", "", "", ())
    planned = _stacked("planned in code", [(row.label, row.planned) for row in rows], "runs")
    executed = _stacked("executed", [(row.label, row.executed) for row in rows], "runs")
    kinds = tuple(sorted({*planned.kinds, *executed.kinds}, key=lambda kind: (kind == UNKNOWN, kind)))
    panels = (_over(planned, kinds), _over(executed, kinds))
    caption = (
        "Runs by the route that their code planned, and by the route whose trainers really ran. Unknown: nothing tells, "
        "or nothing was recorded."
    )
    return Figure("routes", "Routes: planned and executed", caption, panels, tuple((k, i) for i, k in enumerate(kinds)))


def _failures(board: Board) -> Figure:
    rows = [row for row in board.rows[:MAX_SPOTS] if row.failures]
    if not rows:
        return Figure("failures", "", "", ())
    panel = _stacked("why runs did not help", [(row.label, row.failures) for row in rows], "runs")
    caption = "Runs that did not help, by the kind of their failure; each run's page gives the lines it rests on."
    return Figure("failures", "Failures", caption, (panel,), tuple((k, i) for i, k in enumerate(panel.kinds)))


def _stacked(title: str, rows: Sequence[tuple[str, dict[str, int]]], x_label: str) -> Bars:
    kinds = tuple(sorted({kind for _, counts in rows for kind in counts}))
    bars = tuple(Bar(label, tuple(float(counts.get(kind, 0)) for kind in kinds)) for label, counts in rows)
    return Bars(title, kinds, bars, x_label)


def _over(panel: Bars, kinds: tuple[str, ...]) -> Bars:
    """The same bars over another order of kinds."""
    at = {kind: place for place, kind in enumerate(panel.kinds)}
    bars = tuple(Bar(bar.label, tuple(bar.parts[at[k]] if k in at else 0.0 for k in kinds)) for bar in panel.bars)
    return Bars(panel.title, kinds, bars, panel.x_label)


def _cost(board: Board, colours: dict[str, int]) -> Figure:
    panels: list[Panel] = []
    for title, name, unit in (
        ("tokens of the driver, millions a run", "tokens", 1e6),
        ("US dollars a run", "cost_usd", 1.0),
        ("GPU-hours a run", "gpu_hours", 1.0),
    ):
        spots = []
        for row in board.rows[:MAX_SPOTS]:
            spent: Spent = getattr(row.costs, name)
            if spent.mean is not None:
                low = None if spent.low is None else max(0.0, spent.low / unit)
                high = None if spent.high is None else spent.high / unit
                spots.append(Spot(row.label, spent.mean / unit, low, high, colours.get(row.label, -1), low is None))
        if spots:
            panels.append(Forest(title, tuple(spots), title))
    caption = "Mean over counted runs with its 95 % t interval, cut at zero; of the runs whose cost was recorded."
    return Figure("cost", "What a run costs", caption, tuple(panels))


def _cells(merged: MergedReport, board: Board, column: int) -> list[tuple[BoardRow, CellSummary]]:
    """The rows that have runs on a task, with what the group says of them."""
    cells = {(c.agent, c.driver, c.mode, c.agent_hash): c for c in merged.groups[board.tasks[column].group].cells}
    found = [(row, cells.get((row.agent, row.driver, row.mode, row.agent_hash))) for row in board.rows]
    return [(row, cell) for row, cell in found if cell is not None]


def _curve(cell: CellSummary, axis: Axis) -> Curve | None:
    return next((one for one in cell.scaling if one.axis == axis and one.points), None)


def _legend(panels: Sequence[Panel]) -> tuple[tuple[str, int], ...]:
    found = {s.label: s.colour for panel in panels if isinstance(panel, LinePanel) for s in panel.series}
    return tuple(sorted(found.items(), key=lambda one: one[1]))


def _more(board: Board) -> str:
    more = len(board.rows) - MAX_SERIES
    return (
        f" Shown are the first {MAX_SERIES} of {len(board.rows)} agents as ranked; the others are in summary.json."
        if more > 0
        else ""
    )
