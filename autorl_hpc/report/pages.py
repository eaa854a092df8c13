"""Render the report's HTML and Markdown from templates/report/, and write pages, tables and records. Foreign text is escaped."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from autorl_hpc.errors import from_os_error
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import RunDir, share
from autorl_hpc.report import format as fmt
from autorl_hpc.report import run_page, tables
from autorl_hpc.report.charts import Figure, drawn, style, trajectory, versus_figure
from autorl_hpc.report.conditions import conditions_told, unlike
from autorl_hpc.report.format import UNKNOWN, markdown
from autorl_hpc.report.run_folder import UNSEEN
from autorl_hpc.report.run_page import sentence
from autorl_hpc.report.summary import (
    BoardCell,
    Comparison,
    Gain,
    MergedReport,
    OverRuns,
    Point,
    RunSummary,
    ScoreSummary,
    TaskComparison,
)
from autorl_hpc.report.tables import GROUP_NOTES
from autorl_hpc.report.trace_page import TRACE_FOLDER, TRACE_PAGE, TraceLink, trace_data
from autorl_hpc.report.versus import Versus
from autorl_hpc.scoring.stats import ALPHA
from autorl_hpc.states import Protocol, Route

if TYPE_CHECKING:
    from jinja2 import Environment, Template

# --- names and places of a report's files

SUMMARY_NAME, COMPARE_NAME, INDEX, RUN_PAGE = "summary.json", "compare.json", "index.html", "run.html"
RUN_FILES = (SUMMARY_NAME, "run.md", RUN_PAGE, TRACE_PAGE)
BESIDE = "runs"
"""Folder beside the index for the pages of runs whose own folder can't be written."""

MAX_NAME_BYTES = 180
"""Longest run_id in the name of a folder beside the index; file systems allow 255 bytes."""


def elsewhere_of(out: Path, genesis: str, home: RunDir) -> Path:
    """Return the folder beside the index for a run whose own folder can't be written; `genesis` tells equal run_ids apart."""
    name = os.fsdecode(os.fsencode(home.run_id)[:MAX_NAME_BYTES])
    return out / BESIDE / f"{name}-{genesis[:8]}"


# --- the merged page's content

MAX_DRAWN_RUNS = 24
"""Trajectories on the merged page: one with 50 submissions takes 9 kB."""

MAX_PAIRS = 60
"""Pairs of agents on the page; 60 agents on one task make 1,770."""


Figures = Mapping[int, Sequence[tuple[Figure, tuple[str, ...]]]]
"""By leaderboard number: its figures, each with its panels as SVG elements."""


class PageScript(NamedTuple):
    """The page's script, and its hash for the Content-Security-Policy."""

    text: str
    csp: str


def script(name: str = "index.js") -> PageScript:
    """Read a script of templates/report/."""
    text = (share("templates") / "report" / name).read_text(encoding="utf-8")
    return PageScript(text, "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode())


def parts(merged: MergedReport, links: Mapping[int, str], figures: Figures) -> dict[str, Any]:
    """Return all variables of the page's template."""
    of_group = {task.group: n for n, board in enumerate(merged.boards, 1) for task in board.tasks}
    plotted = [run for run in merged.runs if run.trajectory]
    # notes that hold for all runs under the same conditions are shown with these
    own_notes = [(run, [note for note in run.notes if not note.startswith(GROUP_NOTES)]) for run in merged.runs]
    pairs = _pairs(merged)
    return {
        "r": merged,
        "script": script(),
        "answers": answers(merged),
        "columns": _columns(merged),
        "conditions": _conditions(merged),
        "rows": _agents(merged),
        "pairs": pairs[:MAX_PAIRS],
        "more_pairs": max(0, len(pairs) - MAX_PAIRS),
        "figures": [(number, one, panels) for number, each in sorted(figures.items()) for one, panels in each],
        "runs": _runs(merged, of_group, links),
        "measured": how_measured_of_all(merged.runs),
        "drawn_runs": plotted if len(plotted) <= MAX_DRAWN_RUNS else [],
        "noted": [(run, notes) for run, notes in own_notes if notes],
    }


# --- one table for all agents: a column for each task with its recipe and splits, a number for each set of conditions


def _columns(merged: MergedReport) -> dict[tuple[str, str], str]:
    """Return the names of all leaderboards' columns by task and pins; the name has the pins if the task has several columns."""
    found = sorted({(task.task, task.pins()) for board in merged.boards for task in board.tasks})
    count = Counter(task for task, _ in found)
    return {(task, pins): task if count[task] == 1 else f"{task} {pins}" for task, pins in found}


def _agents(merged: MergedReport) -> list[dict[str, Any]]:
    """Return the rows of all leaderboards, with the number of their conditions and a cell for each of `_columns`."""
    columns, rows = _columns(merged), []
    for number, board in enumerate(merged.boards, 1):
        places = {(task.task, task.pins()): place for place, task in enumerate(board.tasks)}
        for row in board.rows:
            cells = [row.cells[places[key]] if key in places else None for key in columns]
            rows.append({"row": row, "number": number, "cells": cells})
    return rows


def _conditions(merged: MergedReport) -> list[tuple[int, str]]:
    """Return each set of conditions in words: the first whole, of the others what differs from the first."""
    told: list[tuple[int, str]] = []
    for number, board in enumerate(merged.boards, 1):
        if number == 1:
            words = conditions_told(board.conditions)
        else:
            differ = unlike(merged.boards[0].conditions, board.conditions)
            words = f"as 1, but {'; '.join(f'{name}: {its} (1: {mine})' for name, mine, its in differ)}"
        if board.conditions.protocol is Protocol.PAPER:
            words += ". Paper protocol: the scores of one split were told during the run, the maximum kept"
        if not board.ranks:
            words += (
                f". Not ranked: {'imported, unproven; no test either' if board.conditions.imported else 'no sandbox'}"
            )
        if board.ambiguous_tasks:
            words += f". Not in the mean over tasks, for several recipes or splits: {', '.join(board.ambiguous_tasks)}"
        told.append((number, words))
    return told


def _pairs(merged: MergedReport) -> list[tuple[int, str, Comparison | TaskComparison]]:
    """Return all pairs of agents with the number of their conditions and the task; those over tasks first, then by p."""
    columns, found = _columns(merged), list[tuple[int, str, Comparison | TaskComparison]]()
    for number, board in enumerate(merged.boards, 1):
        for across in merged.across_tasks:
            if across.conditions == board.conditions:
                found += [(number, f"{len(one.tasks)} tasks", one) for one in across.comparisons]
        for task in board.tasks:
            found += [(number, columns[task.task, task.pins()], one) for one in merged.groups[task.group].comparisons]
    return sorted(found, key=lambda one: (not isinstance(one[2], TaskComparison), _least_p(one[2])))


def _least_p(one: Comparison | TaskComparison) -> tuple[float, float]:
    return 2.0 if one.p_value is None else one.p_value, -abs(one.difference)


MOST_WITHOUT_INTERVAL = 2  # runs


def answers(merged: MergedReport) -> list[str]:
    """Return in a sentence for each column of the leaderboards: which agent gained most, by how much, and is it more than noise."""
    told = []
    for number, board in enumerate(merged.boards, 1):
        where = f" (conditions {number})" if len(merged.boards) > 1 else ""
        for place, task in enumerate(board.tasks):
            cells = [(row.label, row.cells[place]) for row in board.rows]
            found = [
                (cell.improvement.mean, label, cell)
                for label, cell in cells
                if cell and cell.improvement.mean is not None
            ]
            if found:
                found.sort(key=lambda one: -one[0])
                pairs = merged.groups[task.group].comparisons
                told.append(f"{board.column(place)}{where}: {_best(found, pairs)}")
    return told


def _best(found: Sequence[tuple[float, str, BoardCell]], pairs: Sequence[Comparison]) -> str:
    mean, label, cell = found[0]
    if mean <= 0:
        return (
            "no agent gained." if mean == 0 else f"no agent gained; the best, {label}, is at {fmt.signed(mean)} points."
        )
    over = cell.improvement
    spread = fmt.over_between(over.interval, over.low, over.high)
    runs = f" in {over.n} runs" if over.n > MOST_WITHOUT_INTERVAL else ""
    said = f"{label} gained most, {fmt.signed(mean)} points over the base model{' ' * bool(spread)}{spread}{runs}"
    if cell.p_holm is not None:
        said += (
            f"; {'more than noise' if cell.p_holm < ALPHA else 'not told from no gain'} (p {fmt.p_value(cell.p_holm)})"
        )
    elif cell.p_value is None:
        said += "; three runs are needed to tell a gain from noise over runs"
    if len(found) > 1:
        second = found[1][1]
        pair = next((one for one in pairs if {one.a, one.b} == {label, second}), None)
        p = pair.p_holm if pair is not None else None
        by = f"{fmt.points(mean - found[1][0])} points ahead of {second}"
        said += f"; {by}" + (
            "" if p is None else f", {'told apart' if p < ALPHA else 'not told apart'} (p {fmt.p_value(p)})"
        )
    return said + (f". No rank: {cell.unranked}." if cell.unranked else ".")


def _runs(merged: MergedReport, of_group: Mapping[int, int], links: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return one row per run, ordered by group, so that comparable runs are next to each other; `text`: what only a search reads."""
    several, found = len(merged.experiments) > 1, []
    for number, group in enumerate(merged.groups):
        for place in (place for cell in group.cells for place in cell.places):
            run = merged.runs[place]
            more = [run.driver if run.driver != "none" else "", run.mode, run.experiment if several else ""]
            failure = str(run.story.failure.kind) if run.story.failure is not None else ""
            text = " ".join([run.run_id, run.base_model, sentence(run), failure, run.reason or "", *run.notes])
            row = {"run": run, "board": of_group.get(number, 0), "link": links.get(place), "route": route_of(run)}
            found.append({**row, "more": " · ".join(filter(None, more)), "text": text})
    return found


def route_of(run: RunSummary) -> str:
    """Return `grpo → sft` (planned, executed), one word if both agree, empty if both are unknown."""
    planned, executed = run.story.route.planned, run.story.route.executed
    if planned is Route.UNKNOWN and executed is Route.UNKNOWN:
        return ""
    words = ["?" if route is Route.UNKNOWN else str(route) for route in (planned, executed)]
    return words[0] if planned is executed else " → ".join(words)


def counts(found: Mapping[str, int]) -> str:
    """Return counts in words: `sft 3, grpo 2`."""
    return ", ".join(f"{word} {count}" for word, count in found.items()) or UNKNOWN


def beside(excluded: Mapping[str, int]) -> str:
    """Return the number of runs that are not counted, by reason: `2 lost, 1 cancelled`."""
    return ", ".join(f"{count} {'lost' if why == 'infrastructure' else why}" for why, count in excluded.items())


TESTS = {
    "paired_items": "McNemar's mid-p test",
    "clustered_items": "sign-flip test of clusters",
    "graded_items": "sign-flip test of items",
    "length_controlled_items": "permutation of items between the models",
}


def how_measured(run: RunSummary) -> str:
    """Return one sentence on the run's 95 % intervals and its test, which depend on its items; "" if nothing was measured."""
    score, gain = run.report or run.baseline_report or run.best_feedback or run.baseline_feedback, run.improvement
    parts = []
    if score is not None and score.interval is not None:
        clusters = "" if score.clusters is None else f" in {score.clusters} clusters"
        parts.append(f"scores: {score.interval}, {score.n} items{clusters}")
    if gain is not None and gain.interval is not None:
        parts.append(f"improvement: {gain.interval}, p by {TESTS[gain.how]}")
    return "; ".join(parts)


def how_measured_of_all(runs: Sequence[RunSummary]) -> list[str]:
    """Return the distinct sentences of several runs without those that another one begins with."""
    said = sorted({how_measured(run) for run in runs} - {""})
    return [one for one in said if not any(other != one and other.startswith(one) for other in said)]


NUMBERS = {
    "points": fmt.points,
    "signed": fmt.signed,
    "p_value": fmt.p_value,
    "duration": fmt.duration,
    "short": fmt.short_hash,
    "two": "{:.2f}".format,
    "delta": fmt.delta,
    "size": fmt.size,
    "percent": fmt.percent,
    "figure": fmt.figure,
}


PLAIN_CELL = re.compile(r"[\w .,;:%+\[\]\N{EN DASH}\N{MINUS SIGN}-]*")
"""Text that is not escaped inside a cell of a Markdown table."""


def index_html(merged: MergedReport, links: dict[int, str], figures: Figures | None = None) -> str:
    """Render the merged report as one page that loads nothing from elsewhere. `links`: address of a run's own page, by
    place in `runs`. `figures`: by leaderboard number; None: no figures."""
    return _template("html", "index.html.j2").render(**parts(merged, links, figures or {}))


def index_md(merged: MergedReport) -> str:
    """Render the merged report as Markdown."""
    return _template("md", "index.md.j2").render(**parts(merged, {}, {}))


def run_html(run: RunSummary, shown: Mapping[str, Any] | None = None) -> str:
    """Render one run as a page. `shown`: its content, if already computed."""
    return _template("html", "run.html.j2").render(shown or run_page.shown(run), script=script("run.js"))


def trace_files(run: RunSummary, link: TraceLink, data: Mapping[str, str], one_file: bool) -> dict[str, bytes]:
    """Render the page of a run's trace, with its data in it or in scripts beside it. Return the files by name."""
    from markupsafe import Markup

    held = {name: Markup(text) for name, text in data.items()} if one_file else {}
    page = _template("html", "trace.html.j2").render(run=run, link=link, data=held, script=script("trace.js"))
    beside = {} if one_file else data
    scripts = {f"{TRACE_FOLDER}/{name}.js": f'trace("{name}", {text});\n'.encode() for name, text in beside.items()}
    return {TRACE_PAGE: page.encode(), **scripts}


def run_md(run: RunSummary, shown: Mapping[str, Any] | None = None) -> str:
    """Render one run as Markdown. `shown`: its content, if already computed."""
    return _template("md", "run.md.j2").render(shown or run_page.shown(run))


def outcome(run: RunSummary) -> str:
    """Return the outcome of a run in a few words."""
    if run.excluded == "infrastructure":
        return f"lost: {run.fault or 'cluster'}"
    if run.excluded == "unfinished":
        return str(run.state)
    if run.excluded is not None:
        return run.excluded
    if run.flags:
        return f"{run.state}, {', '.join(run.flags)}"
    if run.improvement is not None and run.improvement.how == "base_kept":
        return f"base kept: {run.fault or 'agent'}"
    return f"{run.state}, {run.fault}" if run.fault else str(run.state)


def _score(score: ScoreSummary | Point | None) -> str:
    return fmt.UNKNOWN if score is None else f"{fmt.points(score.score)} {fmt.between(score.low, score.high)}".strip()


def gain_in_words(gain: Gain | None) -> str:
    """Return a gain with its interval: `+3.2 [+1.1, +5.3]`."""
    if gain is None:
        return fmt.UNKNOWN
    return f"{fmt.signed(gain.difference)} {fmt.signed_between(gain.low, gain.high)}".strip()


def _over(over: OverRuns) -> str:
    return f"{fmt.signed(over.mean)} {fmt.over_between(over.interval, over.low, over.high)}".strip()


@cache
def _template(kind: str, name: str) -> Template:
    return _environment(kind).get_template(name)


@cache
def _environment(kind: str) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    html = kind == "html"
    environment = Environment(
        loader=FileSystemLoader(share("templates") / "report"),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=None if html else lambda value: value if isinstance(value, Markup) else markdown(value),
    )
    for name, number in NUMBERS.items():
        environment.filters[name] = number if html else _plain(number)
    environment.filters["cell"] = lambda text: Markup(text) if PLAIN_CELL.fullmatch(text) else text
    plain = (fmt.between, fmt.signed_between, fmt.amount, fmt.decides)
    words = (outcome, conditions_told, how_measured, counts, beside, fmt.gpus, fmt.over_between)
    environment.globals.update(
        **{function.__name__: _plain(function) for function in plain},
        **{function.__name__: function for function in words},
        sentence=sentence,
        score=_plain(_score),
        gain=_plain(gain_in_words),
        over=_plain(_over),
        unseen=UNSEEN,
        trajectory=lambda run: Markup(trajectory(run)),
    )
    return environment


def _plain(number: Any) -> Any:
    """Wrap a number format: nothing is escaped but `<`, which would start a tag."""
    from markupsafe import Markup

    return lambda *args: Markup(number(*args).replace("<", "&lt;"))


# --- writing: the same tree gives the same bytes
# Files are written whole but without fsync, since a report can be made again.

NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)
"""The run's folder belongs to somebody else or is read-only: its pages go beside the index."""


def run_summary(run: RunSummary) -> bytes:
    """Return the bytes of one run's summary.json."""
    return run.model_dump_json(indent=2).encode() + b"\n"


def merged_summary(merged: MergedReport) -> bytes:
    """Return the bytes of the merged summary.json, every run in short."""
    return merged.short().model_dump_json(indent=1).encode() + b"\n"


def write_versus(versus: Versus, out: Path) -> None:
    """Write a comparison beside the index. Raises AutorlError: the folder can't be written."""
    figure = versus_figure(versus)
    with style():
        drawings = [drawn(figure, panel).element for panel in figure.panels]
    page = _template("html", "versus.html.j2").render(v=versus, figure=figure, drawings=drawings, script=script())
    try:
        files = {
            COMPARE_NAME: versus.model_dump_json(indent=2).encode() + b"\n",
            "compare.md": _template("md", "versus.md.j2").render(v=versus).encode(),
            "compare.html": page.encode(),
        }
        _put_files(out, files)
    except OSError as error:
        raise from_os_error(error, "writing the comparison", error.filename or out) from error


class Writing(NamedTuple):
    """How the pages of runs are written."""

    one_file: bool = False  # the trace's page holds its data itself
    whole: bool = False  # all pages go below the index, so that its folder can be copied alone
    light: bool = False  # without traces


USUAL = Writing()


def write_run(run: RunSummary, home: RunDir, out: Path, how: Writing = USUAL) -> Path:
    """Write one run's pages; return their folder: the run's own, or one beside the index for a whole site, and if the
    run's own is not writable. Raises AutorlError: neither can be written."""
    trace = None if how.light else trace_data(run, home)
    shown = run_page.shown(run) | {"trace": trace and trace[0]}
    files = {
        SUMMARY_NAME: run_summary(run),
        "run.md": run_md(run, shown).encode(),
        **(trace_files(run, *trace, how.one_file) if trace else {}),
        RUN_PAGE: run_html(run, shown).encode(),
    }
    try:
        if run.imported is None and not how.whole:
            try:
                return _put_files(home.report, files)
            except OSError as error:
                if error.errno not in NOT_OURS:
                    raise
        return _put_files(elsewhere_of(out, run.genesis, home), files)
    except OSError as error:
        raise from_os_error(error, "writing the report", error.filename or out) from error


def write_merged(
    merged: MergedReport,
    folders: Sequence[Path],
    out: Path,
    reload_s: int | None = None,
    figures: Figures | None = None,
) -> Path:
    """Write the merged report; return the path of index.html. `folders`: of the pages of each run. `reload_s`: the
    index asks the browser to reload it after this many seconds. `figures`: see `index_html`. Raises AutorlError: the
    folder can't be written."""
    pages = (os.fsencode(os.path.relpath(folder / RUN_PAGE, out)) for folder in folders)  # names may be invalid UTF-8
    links = {place: quote(page) for place, page in enumerate(pages)}
    try:
        page = index_html(merged, links, figures)
        if reload_s is not None:
            page = page.replace("<head>", f'<head>\n<meta http-equiv="refresh" content="{reload_s:d}">', 1)
        files = {
            "summary.csv": tables.as_csv(merged).encode(),
            "leaderboard.csv": tables.leaderboard_csv(merged).encode(),
            "summary.md": index_md(merged).encode(),
            INDEX: page.encode(),
            SUMMARY_NAME: merged_summary(merged),
        }
        _put_files(out, files)
    except OSError as error:
        raise from_os_error(error, "writing the report", error.filename or out) from error
    return out / INDEX


def _put_files(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*(folder / TRACE_FOLDER).glob("*.js"), *folder.glob(TRACE_PAGE)):
        if str(path.relative_to(folder)) not in files:  # of a longer trace: it may hold what must no longer be shown
            path.unlink(missing_ok=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if not reading.says(folder / name, (data,)):
            atomic.write_bytes(folder / name, data, durable=False)
    return folder
