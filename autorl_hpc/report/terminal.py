"""The merged report as a table for a terminal of 120 columns; narrower ones get fewer columns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autorl_hpc.files.heads import heads_of
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.records.evidence import RunHead
from autorl_hpc.report import format as fmt
from autorl_hpc.report.pages import outcome
from autorl_hpc.report.sites import sites_of
from autorl_hpc.report.summary import MergedReport, RunSummary, ScoreSummary

if TYPE_CHECKING:
    from rich.console import Console

Justify = Literal["left", "right"]

MAX_ROWS = 200
"""More rows than anybody reads in a terminal; a thousand take rich a second."""

WIDE = 110
"""Below this many columns, mode, base, best feedback and its luck, gap, submissions and budget are left to the page."""


def print_summary(merged: MergedReport, console: Console, where: Path) -> None:
    """Prints the runs, the means over runs, what was left out, and where the report lies.

    Args:
        where: the path of index.html.
    """
    from rich.table import Table
    from rich.text import Text

    wide = console.width >= WIDE
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name, justify in _columns(wide):
        table.add_column(name, justify=justify, no_wrap=name not in ("agent", "outcome"), overflow="fold")
    for run in merged.runs[:MAX_ROWS]:
        table.add_row(*(Text(cell) for cell in _row(run, wide)))
    console.print(table)
    if len(merged.runs) > MAX_ROWS:
        console.print(Text(f"and {len(merged.runs) - MAX_ROWS:,} more runs: in index.html and summary.csv"))
    if not wide:
        for line in _base_lines(merged):
            console.print(Text(line))
    for line in _cell_lines(merged):
        console.print(Text(line))
    for note in merged.notes:
        console.print(Text(note, style="yellow"))
    for left in merged.left_out:
        console.print(Text(f"left out: {left.what}: {left.why}", style="yellow"))
    for line in head_lines(merged):
        console.print(Text(line, style="dim"))
    console.print(Text(_legend(wide)))
    console.print(Text(f"report: {os.fsencode(where).decode('utf-8', 'backslashreplace')}"), soft_wrap=True)


def head_lines(merged: MergedReport) -> list[str]:
    """The head of each experiment whose chains are whole, as `verify` gives it for all of its runs."""
    found: dict[Path, list[RunHead]] = {}
    for run, folder in zip(merged.runs, merged.run_folders, strict=True):
        if run.damage is None and run.imported is None and _in_utf8(folder):
            head = RunHead(run_id=Path(folder).name, entries=run.ledger_entries, head=run.ledger_head)
            found.setdefault(Path(folder).parent, []).append(head)
    names = {root: f"{name}/" for root, name in sites_of(experiment / "run" for experiment in found).items()}
    return [
        f"head of {names.get(path.parent, '')}{path.name}: {heads_of(ExperimentDir(path), heads).head} ({len(heads)} runs)"
        for path, heads in sorted(found.items())
    ]


def _in_utf8(path: str) -> bool:
    """Whether a path can be told in a record."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _legend(wide: bool) -> str:
    """What the columns mean, of those that are shown."""
    if wide:
        told = (
            "base and report: report split. luck: expected maximum of noise over the checkpoints scored. gap: gain on feedback less "
            "gain on report."
        )
    else:
        told = "report: score of the selected checkpoint on the report split."
    return f"Points; intervals are 95 %, of items. {told}"


def _columns(wide: bool) -> list[tuple[str, Justify]]:
    names: list[tuple[str, Justify]] = [("task", "left"), ("agent", "left")]
    if wide:
        names += [("mode", "left"), ("seed", "right"), ("base", "right"), ("best fb", "right"), ("luck", "right")]
    else:
        names += [("seed", "right")]
    names += [("report", "right"), ("improvement", "right"), ("p", "right")]
    if wide:
        names += [("gap", "right"), ("subs", "right"), ("used", "right")]
    return [*names, ("outcome", "left")]


def _row(run: RunSummary, wide: bool) -> list[str]:
    gain = run.improvement
    shown = f"{fmt.signed(gain.difference)} {fmt.signed_between(gain.low, gain.high)}".strip() if gain else fmt.UNKNOWN
    cells = [run.task, run.agent if run.driver == "none" else f"{run.agent} {run.driver}"]
    cells += (
        [run.mode, str(run.seed), _score(run.baseline_report), _score(run.best_feedback), _luck(run)]
        if wide
        else [str(run.seed)]
    )
    kept = run.report if run.selected is not None else None  # the base model's own score is no checkpoint's
    cells += [_score(kept), shown, fmt.p_value(gain.p_value if gain else None)]
    if wide:
        cells += [
            fmt.signed(run.gap.gap) if run.gap else fmt.UNKNOWN,
            _submissions(run),
            f"{100 * run.elapsed_s / run.budget_s:.0f} %",
        ]
    return [*cells, outcome(run)]


def _score(score: ScoreSummary | None) -> str:
    return fmt.points(score.score if score else None)


def _luck(run: RunSummary) -> str:
    """What the best feedback score may owe to noise."""
    return fmt.UNKNOWN if run.noise is None else f"≤{fmt.points(run.noise.expected_maximum)}"


def _submissions(run: RunSummary) -> str:
    """Accepted, with what went wrong after a plus: `4`, `4+1r`, `4+2r+1f`."""
    text = str(run.accepted)
    text += f"+{run.refused}r" if run.refused else ""
    return text + (f"+{run.failed}f" if run.failed else "")


def _base_lines(merged: MergedReport) -> list[str]:
    """The base models' scores, which a narrow table has no column for."""
    found = {
        (run.task, run.base_model): _score(run.baseline_report)
        for run in merged.runs
        if run.baseline_report is not None
    }
    return [f"base model {model} on {task}: {score}" for (task, model), score in sorted(found.items())]


def _cell_lines(merged: MergedReport) -> list[str]:
    lines = []
    for group in merged.groups:
        for cell in group.cells:
            over = cell.improvement
            if over.mean is None or over.n < 2:
                continue
            name = " ".join(
                [group.comparable.task, cell.agent, *([cell.driver] if cell.driver != "none" else []), cell.mode]
            )
            lost = "".join(f", {count} {why}" for why, count in cell.excluded.items())
            interval = f" {fmt.signed_between(over.low, over.high)} ({over.interval})"
            lines.append(f"{name}: {fmt.signed(over.mean)}{interval}, {over.n} runs{lost}")
    return ["", *lines, ""] if lines else [""]
