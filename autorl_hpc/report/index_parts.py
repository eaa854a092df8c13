"""What the merged page is made of, before the templates: leaderboards with their figures, tasks, rows of runs, the script."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from autorl_hpc.files.share import share
from autorl_hpc.report import plot
from autorl_hpc.report.board import Board
from autorl_hpc.report.charts.build import figures_of
from autorl_hpc.report.format import UNKNOWN
from autorl_hpc.report.measured import how_measured_of_all
from autorl_hpc.report.notes import GROUP_NOTES
from autorl_hpc.report.summary import CellSummary, Group, MergedReport, RunSummary
from autorl_hpc.states import Route

MAX_DRAWN_RUNS = 24
"""Trajectories on the merged page: one of 50 submissions takes 9 kB, and nobody looks through hundreds of them."""

MAX_DRAWN_BOARDS = 6
"""Leaderboards with figures on the page, in files too: a report of more of them is a table, not a comparison."""

MAX_PAIRS = 40
"""Pairs of agents shown for one task; 60 agents make 1,770."""


class Script(NamedTuple):
    """The page's own script, and how the Content-Security-Policy names it."""

    text: str
    csp: str


def script() -> Script:
    """templates/report/index.js."""
    text = (share("templates") / "report" / "index.js").read_text(encoding="utf-8")
    return Script(text, "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode())


def parts(merged: MergedReport, links: Mapping[int, str], *, drawn: bool = True) -> dict[str, Any]:
    """Everything that the template of the page needs; without drawings that of the Markdown."""
    of_group = {task.group: n for n, board in enumerate(merged.boards, 1) for task in board.tasks}
    plotted = [run for run in merged.runs if run.trajectory]
    return {
        "r": merged,
        "script": script(),
        "boards": [_board(merged, board, number, drawn) for number, board in enumerate(merged.boards, 1)],
        "blocks": blocks(merged, of_group),
        "rows": _rows(merged, of_group, links),
        "drawn_runs": plotted if len(plotted) <= MAX_DRAWN_RUNS else [],
        "max_drawn": MAX_DRAWN_RUNS,
        "noted": noted(merged),
    }


def _board(merged: MergedReport, board: Board, number: int, drawn: bool) -> dict[str, Any]:
    across = next((one for one in merged.across_tasks if one.conditions == board.conditions), None)
    pairs = sorted(across.comparisons, key=lambda x: (x.p_value, -abs(x.difference))) if across else []
    names = Counter(task.task for task in board.tasks)
    return {
        "board": board,
        "number": number,
        "pairs": pairs[:MAX_PAIRS],
        "more_pairs": max(0, len(pairs) - MAX_PAIRS),
        "twice": {name: count > 1 for name, count in names.items()},
        "overall": any(row.overall is not None for row in board.rows),
        "tested": sum(cell is not None and cell.p_value is not None for row in board.rows for cell in row.cells),
        "figures": figures_of(merged, board, number) if drawn and number <= MAX_DRAWN_BOARDS else (),
        "diagnosed": any(
            {*row.planned, *row.executed} - {str(Route.UNKNOWN)}
            or row.failures
            or any(s.mean is not None for s in (row.costs.tokens, row.costs.cost_usd, row.costs.gpu_hours))
            for row in board.rows
        ),
    }


def blocks(merged: MergedReport, of_group: Mapping[int, int]) -> list[dict[str, Any]]:
    """Each group with its runs (and their places in the report), and the common scale of its strips."""
    return [
        {"number": place + 1, "board": of_group.get(place, 0), **_block(group, merged.runs)}
        for place, group in enumerate(merged.groups)
    ]


def noted(merged: MergedReport) -> list[tuple[RunSummary, list[str]]]:
    """Runs with notes of their own; what holds for a whole group stands at the group."""
    found = [(run, [note for note in run.notes if not note.startswith(GROUP_NOTES)]) for run in merged.runs]
    return [(run, notes) for run, notes in found if notes]


def _block(group: Group, all_runs: Sequence[RunSummary]) -> dict[str, Any]:
    cells, runs = [], []
    shown: list[float | None] = []
    for cell in group.cells:
        of_cell = [(place, all_runs[place]) for place in cell.places]
        values = [r.improvement.difference for _, r in of_cell if r.counted and r.improvement]
        shown += [*values, cell.improvement.low, cell.improvement.high]
        cells.append({"cell": cell, "values": values, "lost": _lost(cell)})
        runs += of_cell
    pairs = sorted(group.comparisons, key=lambda x: (x.p_value, -abs(x.difference)))[:MAX_PAIRS]
    few = len(group.comparisons) <= MAX_PAIRS
    return {
        "group": group,
        "cells": cells,
        "runs": runs,
        "measured": how_measured_of_all([run for _, run in runs]),
        "span": plot.strip_span(shown),
        "comparisons": group.comparisons if few else pairs,
        "more_comparisons": len(group.comparisons) - (len(group.comparisons) if few else len(pairs)),
    }


def _lost(cell: CellSummary) -> str:
    return ", ".join(f"{count} {name}" for name, count in cell.excluded.items())


def _rows(merged: MergedReport, of_group: Mapping[int, int], links: Mapping[int, str]) -> list[dict[str, Any]]:
    """One for each run, in the order of the groups: what may be compared stands together."""
    several = len(merged.experiments) > 1
    return [
        {
            "run": (run := merged.runs[place]),
            "board": of_group.get(number, 0),
            "link": links.get(place),
            "more": " · ".join(
                part
                for part in (run.driver if run.driver != "none" else "", run.mode, run.experiment if several else "")
                if part
            ),
            "route": route_of(run),
        }
        for number, group in enumerate(merged.groups)
        for cell in group.cells
        for place in cell.places
    ]


def route_of(run: RunSummary) -> str:
    """`grpo → sft`, one word where plan and execution agree, nothing where nobody knows."""
    planned, executed = run.story.route.planned, run.story.route.executed
    if planned is Route.UNKNOWN and executed is Route.UNKNOWN:
        return ""
    return str(planned) if planned is executed else f"{_or_unknown(planned)} → {_or_unknown(executed)}"


def _or_unknown(route: Route) -> str:
    return "?" if route is Route.UNKNOWN else str(route)


def counts(found: Mapping[str, int]) -> str:
    """`sft 3, grpo 2`."""
    return ", ".join(f"{word} {count}" for word, count in found.items()) or UNKNOWN


def beside(excluded: Mapping[str, int]) -> str:
    """`2 lost, 1 cancelled`: the runs that are not counted."""
    return ", ".join(f"{count} {'lost' if why == 'infrastructure' else why}" for why, count in excluded.items())
