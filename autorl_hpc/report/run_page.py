"""The content of a run's page: its sentence, blocks of rows of words and numbers, code and diffs, for HTML and Markdown (`shown`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from autorl_hpc.records.entries import Contamination
from autorl_hpc.report import format as fmt
from autorl_hpc.report.axes import NAMES
from autorl_hpc.report.sentence import route_in_words, sentence
from autorl_hpc.report.story_records import Iteration, Quoted, ResourcesUsed
from autorl_hpc.report.summary import Point, RunSummary
from autorl_hpc.states import Route, RunState

if TYPE_CHECKING:
    from markupsafe import Markup


class TableRow(NamedTuple):
    """One line of a table: a name, a value, and its meaning."""

    name: str
    shown: str
    says: str = ""


class SubmissionRow(NamedTuple):
    """One submission and what led to it; `facts`: its known figures, `one`: None if nothing is known but its score."""

    point: Point
    one: Iteration | None
    at: str
    score: str
    between: str
    status: str
    selected: bool
    facts: list[TableRow]


def shown(run: RunSummary) -> dict[str, Any]:
    """Return what HTML and Markdown show of a run, in words: the variables of both templates."""
    story = run.story
    iterations = {one.submission_id: one for one in story.iterations}
    looks: list[tuple[int | None, Contamination]] = [
        (point.submission_id, point.contamination) for point in run.trajectory if point.contamination
    ]
    return {
        "run": run,
        "story": story,
        "sentence": sentence(run),
        "submissions": [_submission(run, point, iterations.get(point.submission_id)) for point in run.trajectory],
        "looks": looks + ([(None, run.contamination_end)] if run.contamination_end else []),
        "used": [*budget_rows(run), *used_rows(story.resources)],
        "mode_told": mode_told(run),
        "places": "; ".join(story.jobs + story.nodes),
        "versions": "; ".join(f"{name} {version}" for name, version in story.versions.items()),
        "how_found": HOW_FOUND,
        "trace": None,  # what the trace's page is called by, if there is one
        "live": run.state not in (RunState.FINISHED, RunState.DAMAGED),
        "reload_s": RELOAD_S,
        "link": _Links(story.quoted),
        "diff_html": diff_html,
    }


def _submission(run: RunSummary, point: Point, one: Iteration | None) -> SubmissionRow:
    selected = point.submission_id == run.selected
    status = [str(point.status), *(["selected"] if selected else []), *(["final"] if point.final else [])]
    status += ["base model"] if point.is_base else []
    status += [f"same as {point.same_as}"] if point.same_as is not None else []
    return SubmissionRow(
        *(point, one, fmt.duration(point.elapsed_s), fmt.points(point.score), fmt.between(point.low, point.high)),
        *(", ".join(status), selected, [] if one is None else iteration_rows(one)),
    )


def mode_told(run: RunSummary) -> str:
    """Return the mode that was asked for, and whether the executed route kept it, in words."""
    kept = run.story.mode_kept
    words = {True: "kept", False: "not kept", None: "nothing tells whether it was kept"}[kept]
    if kept is None and run.story.route.disputed is not None:
        words += ": logs and code disagree"
    return f"{run.mode}: any route" if run.mode == "free" else f"{run.mode}: {words}"


def _row(name: str, value: Any, written: Callable[[Any], str] = str, says: str = "") -> TableRow:
    return TableRow(name, fmt.UNKNOWN if value is None else written(value), says)


_tokens = partial(fmt.amount, "count")


def budget_rows(run: RunSummary) -> list[TableRow]:
    """Return each part of the budget that was limited or used."""
    more = f", {fmt.duration(run.given_back_s)} given back" if run.given_back_s else ""
    rows = [TableRow("time", fmt.duration(run.elapsed_s), f"of {fmt.duration(run.budget_s)}{more}")]
    for name, words in NAMES.items():
        used, limit = run.used.get(name), run.limits.get(name)
        if used or limit is not None:
            amount = fmt.UNKNOWN if used is None else _amount(name, used)
            rows.append(TableRow(words, amount, "no limit" if limit is None else f"of {_amount(name, limit)}"))
    if run.reprompts:
        rows.append(TableRow("starts", str(run.starts), f"{run.reprompts} after an end of its own with budget left"))
    return rows


def _amount(name: str, value: float) -> str:
    if name == "cost_usd":
        return f"{value:.2f} USD" if value >= 0.1 else f"{value:.4f} USD"
    return f"{value:.2f}" if name == "gpu_hours" else f"{value:,.0f}"


def used_rows(used: ResourcesUsed) -> list[TableRow]:
    """Return the resources that were measured."""
    cached = f"{_tokens(used.tokens_cached)} of the input from a cache" if used.tokens_cached else ""
    told = {"gateway": "counted by the gateway", "trace": "as the agent's trace says", None: ""}
    priced = {**told, "gateway": "counted by the gateway, at the experiment's prices"}
    beside = [
        (used.calls_refused, "refused by the gateway"),
        (used.calls_failed, "not answered by the driver"),
        (used.tokens_estimated, "whose tokens are estimated"),
    ]
    rows = [
        _row("GPU-hours", used.gpu_hours, "{:.2f}".format, fmt.gpus(used.gpus, used.gpu_model)),
        _row("GPU use", used.gpu_use, fmt.percent, "mean share of the time that kernels ran"),
        _row("CPU", used.cpu_hours, "{:.2f} core-hours".format),
        _row("memory", used.memory_peak_bytes, fmt.size, "peak"),
        _row("disk", used.disk_peak_bytes, fmt.size, "peak"),
        _row(
            "tokens in", used.tokens_in, _tokens, "; ".join(part for part in (told[used.tokens_from], cached) if part)
        ),
        _row("tokens out", used.tokens_out, _tokens),
        _row("cost", used.cost_usd, "{:.2f} USD".format, priced[used.cost_from]),
        _row("driver calls", used.driver_calls, str, ", ".join(f"{count} {words}" for count, words in beside if count)),
        _row("tool calls", used.tool_calls, str, f"{used.tool_failures} failed" if used.tool_failures else ""),
        _row("idle", used.idle_s, fmt.duration, "no core, GPU or driver at work"),
        _row("waits for scores", used.wait_s, fmt.duration, "together"),
        _row("revisions of code", used.revisions),
    ]
    return [row for row in rows if row.shown != fmt.UNKNOWN]


def iteration_rows(one: Iteration) -> list[TableRow]:
    """Return the known figures of one iteration."""
    noise = fmt.signed_between(one.improvement_low, one.improvement_high)
    items = f"{one.won} items won, {one.lost} lost" if one.won is not None else ""
    ways = {"planned": one.route.planned, one.route.source or "executed": one.route.executed}
    route = [f"{route_in_words(route)} ({way})" for way, route in ways.items() if route is not Route.UNKNOWN]
    last = (("loss", one.last_loss), ("reward", one.last_reward))
    trained = ", ".join(f"last {name} {value:.4g}" for name, value in last if value is not None)
    rows = [
        _row("over the base model", one.improvement, fmt.signed, "; ".join(part for part in (noise, items) if part)),
        TableRow("route", ", ".join(route) or fmt.UNKNOWN),
        _row("trained on", one.rows, "{:,} rows".format),
        _row("training steps", one.training_steps, str, trained),
        TableRow("training", trained if one.training_steps is None and trained else fmt.UNKNOWN),
        _row("took", one.duration_s, fmt.duration),
        _row("waited for its score", one.waited_s, fmt.duration),
        _row("tokens so far", one.tokens, _tokens, "" if one.cost_usd is None else f"{one.cost_usd:.2f} USD"),
        _row("GPU-hours so far", one.gpu_hours, "{:.2f}".format),
    ]
    return [row for row in rows if row.shown != fmt.UNKNOWN]


HOW_FOUND = {"ngram": "13 words in a row", "exact": "the whole text"}
RELOAD_S = 30
"""An open page of a run that goes on asks the browser to load it again after this many seconds."""


# --- code, logs and diffs, as HTML

_TOKEN = re.compile(
    r"(?P<c>#.*)|(?P<s>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')"
    r"|(?P<k>\b(?:and|as|assert|async|await|break|class|continue|def|elif|else|except|finally|for|from|if|import|in|is|lambda|not|or"
    r"|pass|raise|return|try|while|with|yield|None|True|False)\b)|(?P<n>\b\d[\w.]*)"
)
LINE_KINDS = {"+": "add", "-": "del", "@": "hunk", "(": "hunk", "\\": "hunk"}


def _painted(line: str) -> str:
    """Return a line of code as HTML: comments, strings, key words and numbers marked."""
    parts, end = [], 0
    for token in _TOKEN.finditer(line):
        parts += [fmt.html(line[end : token.start()]), f'<b class="{token.lastgroup}">{fmt.html(token[0])}</b>']
        end = token.end()
    return "".join([*parts, fmt.html(line[end:])])


def diff_html(diff: str) -> Markup:
    """Return the hunks of a diff as HTML, each line marked with its kind; a template takes three times as long for these."""
    from markupsafe import Markup

    lines = ((LINE_KINDS.get(line[:1], "same"), line) for line in diff.split("\n"))
    return Markup("".join(f'<span class="{kind}">{_painted(line) or " "}\n</span>' for kind, line in lines))


class _Links:
    """Places that evidence names as links to where they are quoted on the page, and the quotes."""

    def __init__(self, quoted: tuple[Quoted, ...]) -> None:
        self._quoted = quoted
        self._cited: dict[int, set[int]] = {}

    def __call__(self, where: str, revision: str | None = None) -> Markup:
        """Return a place as HTML; a link if it is quoted, at best from this revision."""
        from markupsafe import Markup

        path, _, line = where.rpartition(":")
        number = int(line) if path and line.isdecimal() else 0
        fits = [
            place
            for place, one in enumerate(self._quoted)
            if (one.path == where and not one.first)
            or (one.path == path and one.first and one.first <= number < one.first + one.text.count("\n") + 1)
        ]
        if not fits:
            return Markup("<code>{}</code>").format(where)
        best = next((place for place in fits if self._quoted[place].revision == revision), fits[0])
        self._cited.setdefault(best, set()).add(number)
        return Markup('<a href="#q{}{}"><code>{}</code></a>').format(best, f"-{number}" if number else "", where)

    def quotes(self) -> list[tuple[str, str, Markup]]:
        """Return anchor, title and lines of every quote that a link leads to; call it after all links."""
        return [(f"q{place}", *self._quote(place)) for place in sorted(self._cited)]

    def _quote(self, place: int) -> tuple[str, Markup]:
        from markupsafe import Markup

        one, lines = self._quoted[place], []
        for number, line in enumerate(one.text.split("\n"), one.first):
            mark = f' id="q{place}-{number}" class="cited"' if one.first and number in self._cited[place] else ""
            count = f"<i>{number}</i>" if one.first else ""
            lines.append(f"<span{mark}>{count}{_painted(line) if one.first else fmt.html(line)}\n</span>")
        return f"{one.path}{f' at {one.revision[:8]}' if one.revision else ''}", Markup("".join(lines))
