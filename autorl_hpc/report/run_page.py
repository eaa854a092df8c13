"""The content of a run's page, for HTML and Markdown (`shown`): a sentence (`sentence`), rows of words and numbers, code and diffs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from autorl_hpc.records.entries import Contamination
from autorl_hpc.report import format as fmt
from autorl_hpc.report.axes import NAMES
from autorl_hpc.report.run_story.failures import OUT_OF_BUDGET
from autorl_hpc.report.story_records import Iteration, Quoted, ResourcesUsed
from autorl_hpc.report.summary import Gain, Point, RunSummary
from autorl_hpc.scoring.stats import ALPHA
from autorl_hpc.states import EndedBy, FailureKind, Route, RunState

if TYPE_CHECKING:
    from markupsafe import Markup


# --- the run in one sentence: what the agent did, how it ended, what it gained, whether that is more than noise, where it failed

ROUTES = {
    Route.NONE: "no training",
    Route.COPY: "a copy of existing weights",
    Route.PREFERENCE: "preference training",
    Route.REJECTION_SAMPLING: "rejection sampling",
    Route.RL: "RL",
    Route.SFT_RL: "RL after SFT",
    Route.AVERAGING: "model averaging",
    Route.DISTILLATION: "distillation",
    Route.UNKNOWN: "a training of unknown kind",
}
"""What a route is called in a sentence; the others are abbreviations."""

MAX_ERROR_CHARS = 200
OUTCOMES = (FailureKind.NO_SUBMISSION, FailureKind.NO_GAIN, FailureKind.WORSE, FailureKind.INFRASTRUCTURE)
"""Failures that the rest of the sentence says already."""


def sentence(run: RunSummary) -> str:
    """Return the run in one sentence."""
    if run.damage:
        told = [f"The ledger is damaged, so the run does not count: {run.damage}"]
    elif run.state is RunState.QUEUED:
        told = ["Waits for its start"]
    elif run.excluded == "infrastructure":
        told = [
            f"Lost to the infrastructure after {fmt.duration(run.elapsed_s)}, not counted: {run.reason or run.fault}"
        ]
    elif run.accepted:
        told = [part for part in (_did(run), _submissions(run), _gain(run), _failure(run), _end(run)) if part]
    else:
        did = "" if run.story.route.executed in (Route.UNKNOWN, Route.NONE) else _did(run)
        told = [part for part in (_end(run), did, _submissions(run), _failure(run)) if part]
    text = "; ".join(told)
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def route_in_words(route: Route) -> str:
    """Return what a route is called: `SFT`, `rejection sampling`."""
    return ROUTES.get(route, str(route).upper())


def ending(ended_by: EndedBy, exit_code: int | None, elapsed_s: float, error: str | None = None) -> str:
    """Return how an agent ended: `exited with code 1 after 14 s: ModuleNotFoundError: No module named 'trl'`."""
    after = f"after {fmt.duration(elapsed_s)}"
    if ended_by in OUT_OF_BUDGET:
        return f"stopped {after}: {OUT_OF_BUDGET[ended_by]}"
    if ended_by is not EndedBy.AGENT_EXIT:
        return f"{ended_by} {after}"
    number = -exit_code if exit_code is not None and exit_code < 0 else (exit_code or 0) - 128
    if number in {int(one) for one in signal.Signals}:
        told = f"killed by {signal.Signals(number).name} {after}"
    else:
        told = f"exited with code {exit_code} {after}" if exit_code else f"ended by itself {after}"
    return f"{told}: {fmt.clean(error, MAX_ERROR_CHARS)}" if error and exit_code else told


def _did(run: RunSummary) -> str:
    planned, executed = run.story.route.planned, run.story.route.executed
    iterations = [one for one in run.story.iterations if run.selected is None or one.submission_id <= run.selected]
    rows = next((one.rows for one in reversed(iterations) if one.rows is not None), None)
    on = "" if rows is None else f" on {rows:,} rows"
    did = f"{route_in_words(executed)}{on}"
    if executed is Route.SFT_RL:
        seen = [route for one in iterations for route in (one.route.executed, one.route.planned)]
        rl = next((str(route).upper() for route in seen if route in (Route.GRPO, Route.PPO)), "RL")
        did = f"{rl}{on} after SFT"
    if planned not in (executed, Route.UNKNOWN, Route.NONE) and executed is not Route.UNKNOWN:
        did = f"planned {route_in_words(planned)}, executed {did}"
    return did


def _submissions(run: RunSummary) -> str:
    if not run.accepted and not run.refused:
        return "nothing submitted"
    beside = [f"{run.refused} refused"] if run.refused else []
    beside += [f"{run.failed} not scored"] if run.failed else []
    return ", ".join([f"{run.accepted or 'no'} submission{'s' * (run.accepted != 1)}", *beside])


def _gain(run: RunSummary) -> str:
    base, best = run.baseline_feedback, run.best_feedback
    if run.improvement is not None:
        return gain_in_words(run.improvement)
    if best is None or best.score is None:
        return "no score yet" if run.excluded == "unfinished" else "no score"
    over = "" if base is None or base.score is None else f", {fmt.signed(best.score - base.score)} over the base model"
    return f"best feedback score {fmt.points(best.score)}{over}"


def gain_in_words(gain: Gain) -> str:
    """Return a gain and whether it is more than noise: `+3.2 [+1.1, +5.3] over the base model, more than noise`."""
    if gain.how == "base_kept":
        return "no gain, the base model counts"
    told = f"{fmt.signed(gain.difference)} {fmt.signed_between(gain.low, gain.high)}".strip() + " over the base model"
    if gain.low is None or gain.high is None:
        return f"{told}, without an interval"
    clear = gain.p_value < ALPHA if gain.p_value is not None else gain.low > 0 or gain.high < 0
    return f"{told}, {'more' if clear else 'no more'} than noise"


def _failure(run: RunSummary) -> str:
    failure = run.story.failure
    if failure is None:
        return "no failure" if run.accepted and run.ended_by is not None and not run.exit_code else ""
    if failure.kind in OUTCOMES or (run.story.last_error is not None and not run.accepted):
        return ""
    says = "; ".join(line.says for line in failure.evidence[:1])
    return f"{failure.kind}: {says}"[:MAX_ERROR_CHARS] if says else str(failure.kind)


def _end(run: RunSummary) -> str:
    if run.ended_by is None:
        return (
            ""
            if run.state is RunState.FINISHED
            else f"{run.state} {fmt.duration(run.elapsed_s)} of {fmt.duration(run.budget_s)}"
        )
    if run.accepted and run.ended_by is EndedBy.AGENT_EXIT and not run.exit_code:
        return ""
    error = run.story.last_error
    return ending(run.ended_by, run.exit_code, run.elapsed_s, f"{error.says} ({error.where})" if error else None)


# --- rows of words and numbers


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
        words += f": planned {run.story.route.planned}, executed {run.story.route.executed} by logs alone"
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

LINE_KINDS = {"+": "add", "-": "del", "@": "hunk", "(": "hunk", "\\": "hunk"}


def diff_html(diff: str) -> Markup:
    """Return the hunks of a diff as HTML, each line marked with its kind."""
    from markupsafe import Markup

    lines = ((LINE_KINDS.get(line[:1], "same"), line) for line in diff.split("\n"))
    return Markup("".join(f'<span class="{kind}">{fmt.html(line) or " "}\n</span>' for kind, line in lines))


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
            lines.append(f"<span{mark}>{count}{fmt.html(line)}\n</span>")
        return f"{one.path}{f' at {one.revision[:8]}' if one.revision else ''}", Markup("".join(lines))
