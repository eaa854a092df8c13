"""The content of a run's page, as rows of words and numbers for HTML and Markdown (`shown`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from autorl_hpc.records.entries import Contamination, Timings
from autorl_hpc.report import format as fmt
from autorl_hpc.report.axes import NAMES
from autorl_hpc.report.story_records import Iteration, ReferenceMetrics, ResourcesUsed, Story
from autorl_hpc.report.summary import Point, RunSummary
from autorl_hpc.states import FailureKind, Route

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


class IterationRow(NamedTuple):
    """One iteration with its figures, the noise of its score, and whether its submission was selected."""

    one: Iteration
    facts: Sequence[TableRow]
    between: str
    selected: bool


def shown(run: RunSummary) -> dict[str, Any]:
    """Return what HTML and Markdown show of a run, in words: the variables of both templates."""
    story, recorded = run.story, is_recorded(run.story)
    submissions = [
        SubmissionRow(p, fmt.duration(p.elapsed_s), fmt.points(p.score), fmt.between(p.low, p.high), _status(p, run))
        for p in run.trajectory
    ]
    between = {each.point.submission_id: each.between for each in submissions}
    looks: list[tuple[int | None, Contamination]] = [
        (point.submission_id, point.contamination) for point in run.trajectory if point.contamination
    ]
    return {
        "run": run,
        "story": story,
        "submissions": submissions,
        "iterations": [
            IterationRow(one, iteration_rows(one), between[one.submission_id], one.submission_id == run.selected)
            for one in (story.iterations if recorded else ())
        ],
        "looks": looks + ([(None, run.contamination_end)] if run.contamination_end else []),
        "metrics": metric_rows(story.metrics),
        "budget": budget_rows(run),
        "used": used_rows(story.resources),
        "skill": skill_rows(story),
        "mode_told": mode_told(run),
        "places": "; ".join(story.jobs + story.nodes),
        "versions": "; ".join(f"{name} {version}" for name, version in story.versions.items()),
        "recorded": recorded,
        "how_found": HOW_FOUND,
        "diff_html": diff_html,
        "code_block": code_block,
        "trace": None,
    }


def _status(point: Point, run: RunSummary) -> str:
    parts = [str(point.status)]
    parts += ["selected"] if point.submission_id == run.selected else []
    parts += ["final"] if point.final else []
    parts += ["base model"] if point.is_base else []
    parts += [f"same as {point.same_as}"] if point.same_as is not None else []
    return ", ".join(parts)


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


_tokens = partial(fmt.amount, "count")


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
        "rollbacks": (str, "submissions that go back to an earlier one"),
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
        _row("tokens so far", one.tokens, _tokens, "" if one.cost_usd is None else f"{one.cost_usd:.2f} USD"),
        _row("GPU-hours so far", one.gpu_hours, "{:.2f}".format),
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


HOW_FOUND = {"ngram": "13 words in a row", "exact": "the whole text"}
LINE_KINDS = {"+": "add", "-": "del", "@": "hunk", "(": "hunk"}
BLOCK_LINES = 40
"""Of a diff in Markdown; the page and summary.json have more lines."""


def diff_html(diff: str) -> str:
    """Return the lines of a diff, each marked with its kind; a template takes three times as long for these."""
    lines = []
    for line in diff.split("\n"):
        kind = "file" if line.startswith(("--- ", "+++ ")) else LINE_KINDS.get(line[:1], "same")
        lines.append(f'<span class="{kind}">{fmt.html(line) or " "}\n</span>')
    from markupsafe import Markup

    return Markup("".join(lines))


def code_block(diff: str) -> list[str]:
    """Return the beginning of a diff for an indented code block, which no line of it can end."""
    lines = diff.split("\n")
    more = len(lines) - BLOCK_LINES
    return [*lines[:BLOCK_LINES], f"({more} more lines)"] if more > 0 else lines
