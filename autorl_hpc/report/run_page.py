"""Content of a run's page: rows of words and numbers for HTML and Markdown (`shown`), and long parts as HTML (`html_parts`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autorl_hpc.records.entries import Contaminated, Contamination, Timings
from autorl_hpc.report import format as fmt
from autorl_hpc.report import run_chart
from autorl_hpc.report.axes import NAMES, axes_of
from autorl_hpc.report.format import html
from autorl_hpc.report.story_records import Change, EvidenceLine, Iteration, ReferenceMetrics, ResourcesUsed, Story
from autorl_hpc.report.summary import Point, RunSummary
from autorl_hpc.states import FailureKind, Route, SubmissionState

BY_LEDGER = (FailureKind.NO_GAIN, FailureKind.ARTIFACT_REFUSED, FailureKind.INFRASTRUCTURE)
"""Failures that the table of submissions shows already."""


class TableRow(NamedTuple):
    """One line of a table: a name, a value, and its meaning."""

    name: str
    shown: str
    says: str = ""


class SubmissionRow(NamedTuple):
    """One submission, in words."""

    point: Point
    at: str
    score: str
    between: str
    status: str


@dataclass(frozen=True)
class RunPage:
    """What HTML and Markdown show of a run, in words; computed once for both.

    Attributes:
        iterations: each with its figures; empty if they have no more to show than the table of submissions.
        rest: variables of both templates.
    """

    run: RunSummary
    submissions: Sequence[SubmissionRow]
    iterations: Sequence[tuple[Iteration, Sequence[TableRow]]]
    rest: Mapping[str, Any]


def shown(run: RunSummary) -> RunPage:
    """Return the content of one run's pages."""
    story = run.story
    recorded = is_recorded(story)
    return RunPage(
        run=run,
        submissions=[
            SubmissionRow(
                p, fmt.duration(p.elapsed_s), fmt.points(p.score), fmt.between(p.low, p.high), _status(p, run)
            )
            for p in run.trajectory
        ],
        iterations=[(one, iteration_rows(one)) for one in story.iterations] if recorded else [],
        rest={
            "run": run,
            "story": story,
            "metrics": metric_rows(story.metrics),
            "budget": budget_rows(run),
            "used": used_rows(story.resources),
            "skill": skill_rows(story),
            "mode_told": mode_told(run),
            "places": "; ".join(story.jobs + story.nodes),
            "versions": "; ".join(f"{name} {version}" for name, version in story.versions.items()),
            "recorded": recorded,
        },
    )


def _status(point: Point, run: RunSummary) -> str:
    parts = [str(point.status)]
    parts += ["selected"] if point.submission_id == run.selected else []
    parts += ["final"] if point.final else []
    parts += ["base model"] if point.is_base else []
    parts += [f"same as {point.same_as}"] if point.same_as is not None else []
    return ", ".join(parts)


def lines(parts: Iterable[str]) -> str:
    """Join parts that end with a newline, without the last newline, for use in a line of a template."""
    return "".join(parts).removesuffix("\n")


def looks_of(run: RunSummary) -> list[tuple[int | None, Contamination]]:
    """Return the looks for held-out items: each submission's (with its number), and the one at the end (None)."""
    found: list[tuple[int | None, Contamination]] = [
        (point.submission_id, point.contamination) for point in run.trajectory if point.contamination
    ]
    return found + ([(None, run.contamination_end)] if run.contamination_end else [])


def is_recorded(story: Story) -> bool:
    """Return whether the iterations have more to show than the table of submissions."""
    return any(
        one.revision
        or (one.failure and one.failure.kind not in BY_LEDGER)
        or one.training_steps
        or one.tokens is not None
        or one.gpu_hours is not None
        or (one.route.executed, one.route.planned) != (Route.UNKNOWN, Route.UNKNOWN)
        for one in story.iterations
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


def _tokens(value: int) -> str:
    return fmt.amount("count", value)


def _usd(value: float) -> str:
    return f"{value:.2f} USD"


def _hours(value: float) -> str:
    return f"{value:.2f}"


def metric_rows(metrics: ReferenceMetrics) -> list[TableRow]:
    """Return AutoRL-Bench's metrics under its names."""
    said: dict[str, tuple[Callable[[Any], str], str]] = {
        "valid_submission_rate": (fmt.percent, "submissions that got a score"),
        "first_valid_idx": (str, "the first of them, counting from 1"),
        "first_valid_delay": (fmt.duration, "when it was submitted"),
        "time_to_first_improvement": (fmt.duration, "first feedback score above the base"),
        "time_to_best": (fmt.duration, "when the best was submitted"),
        "monotonic_ratio": (fmt.percent, "steps from score to score that go up"),
        "copy_model_count": (str, "submissions that are the base model"),
        "time_used_ratio": (fmt.percent, "of the budget and what was given back"),
        "last_submit_gap": (fmt.duration, "from the last submission to the end"),
    }
    return [_row(name, getattr(metrics, name), written, says) for name, (written, says) in said.items()]


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
        _row("GPU-hours", used.gpu_hours, _hours, fmt.gpus(used.gpus, used.gpu_model)),
        _row("GPU use", used.gpu_use, fmt.percent, "mean share of the time that kernels ran"),
        _row("CPU", used.cpu_hours, lambda hours: f"{hours:.2f} core-hours"),
        _row("memory", used.memory_peak_bytes, fmt.size, "peak"),
        _row("disk", used.disk_peak_bytes, fmt.size, "peak"),
        _row(
            "tokens in", used.tokens_in, _tokens, "; ".join(part for part in (told[used.tokens_from], cached) if part)
        ),
        _row("tokens out", used.tokens_out, _tokens),
        _row("cost", used.cost_usd, _usd, priced[used.cost_from]),
        _row("driver calls", used.driver_calls, str, ", ".join(f"{count} {words}" for count, words in beside if count)),
        _row("tool calls", used.tool_calls, str, f"{used.tool_failures} failed" if used.tool_failures else ""),
        _row("idle", used.idle_s, fmt.duration, "no core, GPU or driver at work"),
        _row("waits for scores", used.wait_s, fmt.duration, "together"),
        _row("revisions of code", used.revisions),
    ]
    return [row for row in rows if row.shown != fmt.UNKNOWN]


def skill_rows(story: Story) -> list[TableRow]:
    """Return the metrics of the reference's summarization skill."""
    skill = story.skill
    return [
        _row("without human help", skill.without_human_help, lambda alone: "yes" if alone else "no"),
        _row("recovered from", skill.recovered_from, str, "failures before the last scored submission"),
        TableRow("stage reached", skill.stage_reached, "of design, implementation, execution, evaluation"),
    ]


def iteration_rows(one: Iteration) -> list[TableRow]:
    """Return the known figures of one iteration."""
    noise = fmt.signed_between(one.improvement_low, one.improvement_high)
    items = f"{one.won} items won, {one.lost} lost" if one.won is not None else ""
    says = "; ".join(part for part in (noise, items) if part) or "no interval"
    last = (("loss", one.last_loss), ("reward", one.last_reward))
    trained = ", ".join(f"last {name} {value:.4g}" for name, value in last if value is not None)
    steps = "not logged" if trained and one.training_steps is None else one.training_steps
    rows = [
        _row("improvement on the base", one.improvement, fmt.signed, says),
        _row("best so far", one.best_so_far, fmt.points),
        _row("took", one.duration_s, fmt.duration, f"submitted at {fmt.duration(one.elapsed_s)}"),
        TableRow("route planned, executed", f"{one.route.planned}, {one.route.executed}"),
        _row("training steps", steps, str, trained),
        _row("waited for its score", one.waited_s, fmt.duration, timed(one.timings)),
        _row("tokens so far", one.tokens, _tokens, "" if one.cost_usd is None else _usd(one.cost_usd)),
        _row("GPU-hours so far", one.gpu_hours, _hours),
    ]
    return [row for row in rows if row.shown != fmt.UNKNOWN]


def timed(timings: Timings | None) -> str:
    """Return where a grader's seconds went: `in the queue 3.1 s, loading 0.5 s, ...`."""
    names = {
        "waiting_s": "in the queue",
        "load_s": "loading",
        "swap_s": "swapping",
        "generate_s": "generating",
        "score_s": "scoring",
    }
    each = ((words, getattr(timings, name, None)) for name, words in names.items())
    return ", ".join(f"{words} {value:.1f} s" for words, value in each if value is not None)


# --- long parts as HTML: submissions, looks, iterations
# Not templates, because a run of fifty submissions has thousands of cells, and a report thousands of runs. Foreign text goes
# through `html`.

BAD = (SubmissionState.REFUSED, SubmissionState.FAILED)
HOW_FOUND = {"ngram": "13 words in a row", "exact": "the whole text"}
LINE_KINDS = {"+": "add", "-": "del", "@": "hunk", "(": "hunk"}


def html_parts(shown: RunPage) -> dict[str, Any]:
    """Return all variables of run.html.j2."""
    from markupsafe import Markup

    run = shown.run
    return {
        **shown.rest,
        "plots": [(name, Markup(drawing)) for name, drawing in run_chart.trajectories(run, axes_of(run))],
        "submissions": Markup(lines(_submissions(shown))),
        "looks": Markup(lines(_look(number, look) for number, look in looks_of(run))),
        "iterations": Markup(lines(_iterations(shown))),
        "rows": lambda rows: Markup(rows_html(rows)),
        "evidence": lambda lines: Markup(evidence(lines)),
    }


def rows_html(rows: Iterable[TableRow]) -> str:
    """Return rows as a description list."""
    told = "".join(
        f"<div><dt>{html(row.name)}</dt><dd>{html(row.shown)}"
        f"{f' <small>{html(row.says)}</small>' if row.says else ''}</dd></div>\n"
        for row in rows
    )
    return f'<dl class="facts tight">\n{told}</dl>'


def evidence(lines: Iterable[EvidenceLine]) -> str:
    """Return the evidence of a finding as a list."""
    told = "".join(f"<li><code>{html(line.where)}</code> {html(line.says)}</li>\n" for line in lines)
    return f'<ul class="evidence">\n{told}</ul>\n' if told else ""


def _submissions(shown: RunPage) -> Iterable[str]:
    run = shown.run
    for point, at, score, between, status in shown.submissions:
        reason = ""
        if point.reason:
            reason = f' <span class="warn">{html(point.fault or "")}: {html(point.reason)}</span>'
        yield (
            f'<tr>\n<td class="n" data-name="no.">{point.submission_id}</td>\n'
            f'<td data-name="manifest">{html(point.manifest_id)}</td>\n'
            f'<td class="n" data-name="at">{at}</td>\n'
            f'<td class="n" data-name="feedback"><span>{score} <small>{between}</small></span></td>\n'
            f'<td data-name="status"><span>{status}</span></td>\n'
            f'<td data-name="weights"{_empty(point.fingerprint)}><span>{_weights(point, run)}</span></td>\n'
            f'<td data-name="path"{_empty(point.model_path)}>{html(point.model_path or fmt.UNKNOWN)}</td>\n'
            f'<td data-name="note or reason"{_empty(point.note or point.reason)}>'
            f"<span>{html(point.note or '')}{reason}</span></td>\n</tr>\n"
        )


def _empty(value: object) -> str:
    return "" if value else ' class="empty"'


def _weights(point: Point, run: RunSummary) -> str:
    """Return what a checkpoint's fingerprint says about its origin."""
    found = point.fingerprint
    if found is None:
        return fmt.UNKNOWN
    flags = f'<span class="warn">{", ".join(found.flags)}</span> ' if found.flags else ""
    if found.reason:
        return f'{flags}<small class="warn">not known: {html(found.reason)}</small>'
    near = ""
    if found.nearest_model and found.nearest_model != run.base_model:
        near = f"{fmt.delta(found.nearest_delta)} from {html(found.nearest_model)}; "
    parent = "the base" if found.parent is None else f"submission {found.parent} ({fmt.delta(found.parent_delta)})"
    alike = ""
    if "degenerate_outputs" in found.flags:
        shares = fmt.percent(found.commonest_output_share), fmt.percent(found.base_output_share)
        alike = f"; {shares[0]} of the answers are one (base {shares[1]})"
    return f"{flags}{fmt.delta(found.relative_delta)} <small>{near}from {parent}{alike}</small>"


def _look(number: int | None, look: Contamination) -> str:
    """Return a table row for one look for held-out items."""
    ended = "" if not look.reason else f" <small>{html(look.reason)}</small>"
    if not look.complete:
        ended = f' <small class="warn">cut short{f": {html(look.reason)}" if look.reason else ""}</small>'
    skipped = f" <small>{look.files_skipped} skipped</small>" if look.files_skipped else ""
    found = "".join(_found(one) for one in look.found) or fmt.UNKNOWN
    more = f" <small>and {look.found_unlisted} more files</small>" if look.found_unlisted else ""
    return (
        f'<tr>\n<td class="head">{"the end" if number is None else f"submission {number}"}{ended}</td>\n'
        f"{_items(look, 'feedback')}{_items(look, 'report')}"
        f'<td class="n" data-name="files"><span>{look.files_scanned}{skipped}</span></td>\n'
        f'<td class="n" data-name="scanned">{fmt.size(look.bytes_scanned)}</td>\n'
        f'<td class="n" data-name="unchanged">{fmt.size(look.bytes_unchanged)}</td>\n'
        f'<td class="n" data-name="skipped">{fmt.size(look.bytes_skipped)}</td>\n'
        f'<td data-name="found in"{_empty(look.found)}>'
        f"<span>{found}{more}</span></td>\n</tr>\n"
    )


def _items(look: Contamination, split: Any) -> str:
    told = fmt.UNKNOWN
    if split in look.of or split in look.items:
        warned = ' class="warn"' if look.items.get(split) else ""
        told = f"<span{warned}>{look.items.get(split, 0)}</span> <small>of {look.of.get(split, 0)}</small>"
    return f'<td class="n" data-name="{split}"><span>{told}</span></td>\n'


def _found(one: Contaminated) -> str:
    which = html(", ".join(map(str, one.first_items)))
    return f"{html(one.file)} <small>{one.items} of {one.split}, {HOW_FOUND[one.how]}: {which}</small>"


def _iterations(shown: RunPage) -> Iterable[str]:
    between = {each.point.submission_id: each.between for each in shown.submissions}
    for one, facts in shown.iterations:
        yield _iteration(one, facts, between[one.submission_id], one.submission_id == shown.run.selected)


def _iteration(one: Iteration, facts: Sequence[TableRow], between: str, selected: bool) -> str:
    """Return the section of one iteration."""
    badge = " bad" if one.status in BAD else " good" if selected else ""
    score = "" if one.score is None else f" {fmt.points(one.score)} <small>{between}</small>"
    failure = ""
    if one.failure:
        failure = f'<p class="warn">{one.failure.kind}</p>\n{evidence(one.failure.evidence)}\n'
    return (
        f'<section class="iteration">\n<h3>Submission {one.submission_id} '
        f'<span class="badge{badge}">{one.status!s}{", selected" if selected else ""}</span>{score}</h3>\n'
        f"{failure}{rows_html(facts)}\n{_settings(one)}"
        f"{_changes(one)}{_diff(one)}</section>\n"
    )


def _settings(one: Iteration) -> str:
    told = "".join(
        f"<li>{html(setting.name)} <b>{html(setting.value)}</b> <small>{html(setting.where)}</small></li>\n"
        for setting in one.settings
    )
    return f'<ul class="settings">\n{told}</ul>\n' if told else ""


def _changes(one: Iteration) -> str:
    if not one.changes:
        return '<p class="soft"><small>The code is as it was.</small></p>\n' if one.revision else ""
    more = f"<li><small>and {one.more_changes} more files</small></li>\n" if one.more_changes else ""
    return f'<ul class="files">\n{"".join(map(_change, one.changes))}{more}</ul>\n'


def _change(change: Change) -> str:
    told = f"<small>{'link' if change.what == 'link' else 'changed, kept by hash'}</small>"
    if change.what not in ("binary", "link"):
        what = f" <small>{change.what}</small>" if change.what != "changed" else ""
        told = f'<span class="plus">+{change.added}</span> <span class="minus">{fmt.MINUS}{change.removed}</span>{what}'
    return f"<li><b>{html(change.path)}</b> {told}</li>\n"


def _diff(one: Iteration) -> str:
    return f'<pre class="diff" tabindex="0"><code>{diff_html(one.diff)}</code></pre>\n' if one.diff else ""


def diff_html(diff: str) -> str:
    """Return the lines of a diff, each marked with its kind."""
    lines = []
    for line in diff.split("\n"):
        kind = "file" if line.startswith(("--- ", "+++ ")) else LINE_KINDS.get(line[:1], "same")
        lines.append(f'<span class="{kind}">{html(line) or " "}\n</span>')
    return "".join(lines)
